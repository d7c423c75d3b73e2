"""Tests that look at the same run of the launcher go to one worker, whichever file they are in."""

from __future__ import annotations

import pytest

from tests.conftest import places_of_one_worker, worker_scope
from tests.faults.conftest import runs_of
from tests.faults.harness import Scenario, Soak

KILL, HANG = Scenario("kill", ()), Scenario("hang", ())


def split_runs(looks: list[tuple[str, Scenario | Soak]]) -> list[str]:
    """Tests that look at the run of another one and may go to another worker, which would play it too.

    Args:
        looks: node ids and runs, a pair for every run that a test looks at.
    """
    places, first = places_of_one_worker({test for test, _ in looks}), dict[Scenario | Soak, str]()
    pairs = [(test, first.setdefault(run, test)) for test, run in looks]
    return [test for test, other in pairs if worker_scope(test, places) != worker_scope(other, places)]


def test_no_two_workers_play_one_run(request: pytest.FixtureRequest) -> None:
    """Of all tests that were collected. If it fails: give tests of one run the same parameters, in one file."""
    assert split_runs([(item.nodeid, run) for item in request.session.items for run in runs_of(item)]) == []


def test_only_files_whose_tests_have_parameters_in_common_are_kept_together() -> None:
    shared, apart, plain = (f"tests/faults/test_{name}.py" for name in ("shared", "apart", "plain"))
    tests = [f"{shared}::test_a[kill]", f"{shared}::test_b[kill]", f"{shared}::test_c[hang]"]
    tests += [f"{apart}::test_a[kill]", f"{apart}::test_b[hang]", f"{plain}::test_a", f"{plain}::test_b"]
    elsewhere = ["tests/test_x.py::test_a[1]", "tests/test_x.py::test_b[1]"]
    gpu = "tests/gpu/test_y.py::test_a"
    places = places_of_one_worker([*tests, *elsewhere, gpu])
    scopes = [worker_scope(test, places) for test in (*tests, *elsewhere, gpu)]
    assert scopes == [shared] * 3 + tests[3:] + elsewhere + ["tests/gpu/"]


def test_a_run_that_two_workers_would_play_is_found() -> None:
    one, other = "tests/faults/test_one.py::test_{}[{}]", "tests/faults/test_other.py::test_{}[{}]"
    same: list[tuple[str, Scenario | Soak]] = [(one.format("a", "kill"), KILL), (one.format("b", "kill"), KILL)]
    assert split_runs([*same, (one.format("c", "x"), HANG)]) == []
    both: list[tuple[str, Scenario | Soak]] = [(one.format("a", "kill-hang"), run) for run in (KILL, HANG)]
    assert split_runs(both) == []
    for late in ((one.format("b", "kill"), KILL), (other.format("a", "kill-hang"), HANG)):
        assert split_runs([*both, late]) == [late[0]]
