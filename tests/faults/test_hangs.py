"""Ranks that stop making progress: the one at fault is named, its stacks are kept, and nobody waits for torchrun.

SIGSTOP and a held GIL are among the rounds of test_soak.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

HANGS = [
    (
        Scenario("hang in step", (Start("hang@step:2:1", ("--runtime.step_timeout=8",)),)),
        ("1 drafter 0 step", "longer than 8 s", "runtime.step_timeout"),
    ),
    (
        Scenario("hang in turn", (Start("hang@turn:1", ("--compile.turn_timeout=5",)),)),
        ("1 drafter 0 turn", "longer than 5 s", "compile.turn_timeout"),
    ),
]


@pytest.mark.parametrize(("scenario", "words"), HANGS, ids=lambda value: str(value))
def test_a_rank_that_hangs_is_named(results: Results, scenario: Scenario, words: tuple[str, ...]) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, words)
    assert "in _strike" in result.logs, "the stack of the hang is in the rank's log"
