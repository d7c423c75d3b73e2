"""The plan of a soak, its end before time and what it concludes; its real rounds run in tests/faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher import soak
from launcher.faults import parse_faults
from launcher.soak import summary
from launcher.soak_rounds import CODES, SAVE_STAGES, STEPS, Round, broken_by, draw_round, seconds_left
from launcher.status import Status
from launcher.trial import NEVER, ROOT, SIGNAL_GAP, Trial
from tests.rank_processes import wait_for


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
        if fault.kind == "shard":
            assert fault.rank == drawn.targets, "the first drafter publishes"
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


def test_a_fault_leaves_a_run_the_time_to_its_deadline_and_little_more() -> None:
    left = {
        f"{kind}@{phase}": seconds_left(Round(0, kind, f"{kind}@{phase}:1", 1, 1, False), 20.0)
        for kind, phase in [("kill", "step:3"), ("gil", "init"), ("hang", "turn"), ("hang", "save-rename:2")]
    }
    assert left == {"kill@step:3": 30, "gil@init": 45, "hang@turn": 50, "hang@save-rename:2": 70}


def _broken(kind: str, spoiled: str | None = None, **changes: Any) -> list[str]:
    fault = {"cache": "cache@start:0", "shard": "shard@save:2:1"}.get(kind, f"{kind}@init:0")
    return broken_by(Round(0, kind, fault, 1, 1, False), _trial(**changes), spoiled)


def test_a_checkpoint_may_be_damaged_only_as_long_as_nothing_could_notice() -> None:
    finished: dict[str, Any] = {"code": 0, "status": Status(state="finished", code=0, last_checkpoint="run/step-6")}
    damaged: dict[str, Any] = {"checkpoint_problems": ("__0_0.distcp has 5 bytes",)}
    assert _broken("shard", **finished, **damaged) == []
    assert _broken("nan", **finished, **damaged) == ["checkpoint run/step-6: __0_0.distcp has 5 bytes"]
    lost: dict[str, Any] = {"status": Status(state="failed", code=75, rank=0, last_checkpoint="run/step-6")}
    assert _broken("kill", "run/step-6", **lost, **damaged) == [], "it was lost before it loaded one"
    assert len(_broken("kill", "run/step-4", **lost, **damaged)) == 1
    assert _broken("nan", "run/step-6", **finished) == ["nothing was said of run/step-6, which is damaged"]
    assert _broken("nan", "run/step-6", **finished, console="skipped checkpoint run/step-6: ...") == []


def test_a_spoiled_compile_cache_is_told_once_and_no_other_is() -> None:
    finished: dict[str, Any] = {"code": 0, "status": Status(state="finished", code=0)}
    told = "compile cache run/x is not used, compiling anew in a private one: it is damaged\n"
    assert _broken("cache", **finished, console=told) == []
    assert _broken("cache", **finished) == ["0 warnings of a compile cache that is not used"]
    assert _broken("cache", **finished, console=told * 3) == ["3 warnings of a compile cache that is not used"]
    assert _broken("nan", **finished, console=told) == ["1 warnings of a compile cache that is not used"]


def test_the_summary_names_the_rounds_that_broke_something() -> None:
    report = {"number": 4, "fault": "kill@init:0", "struck": True, "code": 75, "seconds": 8.0, "broken": []}
    bad = report | {"number": 5, "code": 1, "broken": ["did not end in time"]}
    lines = summary([report, bad], seed=3).splitlines()
    assert lines[0].startswith("soak: 2 rounds, seed 3: 2 faults struck; ended: 1 with 1, 1 with 75;")
    assert lines[0].endswith("1 invariants broken")
    assert lines[1] == "  round 5 kill@init:0: did not end in time"
    assert summary([], seed=3).startswith("soak: 0 rounds")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, as they were."""
    kept = {number: signal.getsignal(number) for number in soak.STOP_CODES}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_lets_the_round_end_and_sums_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = soak.first_signal()

    def play_round(*_: object) -> tuple[Trial, list[str]]:
        os.kill(os.getpid(), signal.SIGTERM)
        while not noted:  # the main thread takes it in
            time.sleep(0.01)
        return _trial(run_dir=tmp_path), []

    monkeypatch.setattr(soak, "play_round", play_round)
    monkeypatch.setattr(soak, "first_signal", lambda: noted)
    assert soak.main(["--rounds", "8", "--folder", str(tmp_path)]) == 143
    assert "soak: 1 rounds" in capsys.readouterr().out
    assert len((tmp_path / "soak.jsonl").read_text().splitlines()) == 1


def test_the_second_signal_leaves_at_once_and_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "launcher/main.py", "soak", "--rounds=2", f"--folder={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "run-0" / "run" / "attempts" / "1")
    of_round = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and "begins no more rounds" in process.stderr.readline()
    process.send_signal(signal.SIGINT)  # the same wish, as GNU timeout sends it
    time.sleep(SIGNAL_GAP)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert of_round and psutil.wait_procs(of_round, timeout=10)[1] == []
