"""Ten rounds of the soak: faults in every phase, more kinds than the other files start."""

from __future__ import annotations

import pytest

from launcher.soak import draw_round
from tests.faults.conftest import Soaked
from tests.faults.harness import Soak

# Among its rounds: SIGSTOP and a held GIL, SIGTERM in a turn, a hang in a save, a segfault in a step.
SEED, ROUNDS = 5552, 10


def test_the_seed_still_draws_what_other_files_leave_to_it() -> None:
    faults = {draw_round(number, SEED, 0).fault.partition(":")[0] for number in range(ROUNDS)}
    assert {"stop@init", "gil@init", "slow=3@turn", "hang@save-rename", "segv@step"} <= faults


@pytest.mark.parametrize("rounds", [Soak(SEED, range(5)), Soak(SEED, range(5, ROUNDS))], ids=str)
def test_no_invariant_breaks(soaked: Soaked, rounds: Soak) -> None:
    reports = soaked(rounds)
    assert [report["number"] for report in reports] == list(rounds.numbers)
    assert [report["broken"] for report in reports] == [[]] * len(rounds.numbers), reports
    assert all(report["struck"] for report in reports)
    told = {report["kind"]: report["reason"] for report in reports}
    for kind, words in {"stop": "SIGSTOP", "gil": "keeps the GIL", "segv": "in native code"}.items():
        assert words in told.get(kind, words)
