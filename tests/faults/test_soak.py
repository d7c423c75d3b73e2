"""Ten rounds of the soak: faults in every phase, more kinds than the other files start."""

from __future__ import annotations

import pytest

from launcher.soak_rounds import draw_round
from tests.faults.conftest import Soaked
from tests.faults.harness import Soak

# Among its rounds: SIGSTOP and a held GIL, SIGTERM in a turn, Ctrl-C in a step, a hang in a save, a segfault in a step,
# a spoiled checkpoint and a spoiled compile cache.
SEED, ROUNDS = 10130679, 10


def test_the_seed_still_draws_what_other_files_leave_to_it() -> None:
    rounds = [draw_round(number, SEED, 0) for number in range(ROUNDS)]
    faults = {(drawn.kind, drawn.fault.partition("@")[2].partition(":")[0]) for drawn in rounds}
    wanted = {("stop", "init"), ("gil", "init"), ("hang", "save-rename"), ("segv", "step"), ("shard", "save")}
    assert wanted | {("cache", "start"), ("SIGTERM", "turn"), ("SIGINT", "step")} <= faults


@pytest.mark.parametrize("rounds", [Soak(SEED, range(5)), Soak(SEED, range(5, ROUNDS))], ids=str)
def test_no_invariant_breaks(soaked: Soaked, rounds: Soak) -> None:
    reports = soaked(rounds)
    assert [report["number"] for report in reports] == list(rounds.numbers)
    assert [report["broken"] for report in reports] == [[]] * len(rounds.numbers), reports
    assert all(report["struck"] for report in reports)
    told = {report["kind"]: report["reason"] for report in reports}
    for kind, words in {"stop": "SIGSTOP", "gil": "keeps the GIL", "segv": "in native code"}.items():
        assert words in told.get(kind, words)
