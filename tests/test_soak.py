"""The plan of a soak and what it concludes; two real rounds run in tests/faults."""

from __future__ import annotations

from pathlib import Path

from launcher.faults import parse_faults
from launcher.soak import CODES, SAVE_STAGES, STEPS, draw_round, summary
from launcher.status import Status
from launcher.trial import NEVER, Trial


def test_a_round_follows_from_its_seed_and_place_alone() -> None:
    assert draw_round(7, 1, 10) == draw_round(7, 1, 10)
    assert any(draw_round(number, 1, 0) != draw_round(number, 2, 0) for number in range(10))


def test_every_round_plans_one_fault_that_can_strike() -> None:
    rounds = [draw_round(number, seed=3, start_step=5) for number in range(300)]
    assert {drawn.kind for drawn in rounds} == set(CODES)
    for drawn in rounds:
        (fault,) = parse_faults(drawn.fault)
        assert fault.rank is not None and fault.rank < drawn.targets + drawn.drafters
        if fault.phase in ("save", *SAVE_STAGES):
            assert fault.rank >= drawn.targets and fault.step is not None
            assert fault.step % 2 == 0 and 5 < fault.step <= 5 + STEPS, "saves come at even steps"
        if fault.kind == "nan":
            assert fault.rank >= drawn.targets, "only drafters read features"
        if fault.kind == "header":
            assert fault.rank < drawn.targets, "only targets write headers"


def _trial(**changes: object) -> Trial:
    values: dict[str, object] = {
        "code": 75,
        "run_dir": Path(),
        "seconds": 3.0,
        "console": "",
        "logs": "injected fault: kill",
        "status": Status(state="failed", code=75),
        "left": (),
        "metrics": ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}),
        "checkpoint_problems": (),
    }
    return Trial(**(values | changes))  # type: ignore[arg-type]


def test_a_trial_knows_what_must_hold() -> None:
    assert _trial().broken() == [] and _trial().struck
    assert "did not end in time" in _trial(code=NEVER).broken()
    assert _trial(code=1).broken() == ["exit code 1, but the status says 75"]
    assert _trial(left=("pid 7 python",)).broken() == ["left behind: pid 7 python"]
    twice = ({"step": 1, "loss": 2.0}, {"step": 1, "loss": 2.0})
    assert "counted twice" in _trial(metrics=twice).broken()[0]
    assert "x is missing" in _trial(checkpoint_problems=("x is missing",)).broken()[0]


def test_the_summary_names_the_rounds_that_broke_something() -> None:
    report = {"number": 4, "fault": "kill@init:0", "struck": True, "code": 75, "seconds": 8.0, "broken": []}
    bad = report | {"number": 5, "code": 1, "broken": ["did not end in time"]}
    lines = summary([report, bad], seed=3).splitlines()
    assert lines[0].startswith("soak: 2 rounds, seed 3: 2 faults struck; ended: 1 with 1, 1 with 75;")
    assert lines[0].endswith("1 invariants broken")
    assert lines[1] == "  round 5 kill@init:0: did not end in time"
    assert summary([], seed=3).startswith("soak: 0 rounds")
