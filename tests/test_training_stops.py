"""A stop is agreed by all drafters, wherever in the loop it comes: nobody leaves alone, the last step is saved."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.acceptance import Acceptance
from launcher.config import validate
from launcher.config_sections import RuntimeConfig
from launcher.errors import ExitCode, StopRequested
from launcher.lifecycle import Lifecycle
from launcher.rank_state import Stop
from launcher.run_record import BOTTLENECK
from launcher.schedule import Schedule
from launcher.topology import Role, Split, build_topology
from launcher.training import Training
from tests.gates import watch_recompiles
from tests.rank_processes import FileControl

LAST = 6


class Loop:
    """The loop of one drafter with everything but its phases, waits and decisions taken out."""

    def __init__(self, folder: Path, stop_in: str, better_at: int | None = None) -> None:
        self.stop_in, self.better_at, self.said = stop_in, better_at, []
        self.control = FileControl(folder / "control")
        role = Role(1, "drafter", 0, 0, 1)
        self.life = Lifecycle(cast(Any, self.control), role, [role], folder, folder / "rank.log", RuntimeConfig())
        rank = SimpleNamespace(
            lifecycle=self.life,
            control=self.control,
            journal=SimpleNamespace(announce=self.said.append),
            leads_drafters=True,
            attempt_dir=folder,
        )
        self.training = Training.__new__(Training)
        self.training.rank = cast(Any, rank)
        self.training.config = validate(
            {"eval": {"every": 2, "prompts": 1}, "checkpoint": {"every": 2}, "target": {"model": "random:tiny"}}
        )
        self.training.schedule = Schedule(build_topology(Split(1, 1)), 1, LAST)
        self.training.checkpointer = self.training.receiver = self.training.calibration = cast(Any, self)
        self.training.evaluator = cast(Any, self)
        self.training.recompiles = watch_recompiles("error")
        self.training.metrics = self.training.meter = self.training.balance = self.training.step = cast(Any, self)
        self.training.acceptance, self.training.started = {}, 0.0
        self.training._settle = lambda leave: None  # type: ignore[method-assign]
        self.training._train = lambda step, timeout: self._come_to("step")  # type: ignore[method-assign]
        self.training._vote_stop = lambda: int(self.life.stop_code or 0)  # type: ignore[method-assign]
        self.training._save = self.save  # type: ignore[method-assign]
        self.saves: list[tuple[int, bool]] = []

    def _come_to(self, place: str) -> None:
        """Where the stop comes in; it also shows in a wait of that place, as the ones for a pending save do."""
        if place == self.stop_in and self.life.step >= 2:
            self.life._state.stop = Stop(ExitCode.TERMINATED, "SIGTERM", 0.0)
        looks = iter([False, False, True])
        self.life.wait_until(lambda: next(looks), f"what {place} waits for", 10.0)

    def save(self, done: int, required: bool) -> None:
        self.saves.append((done, required))

    def measure(self, *_: object, required: bool) -> Acceptance:
        self._come_to("evaluation")
        return Acceptance(1.5, 2, 3, 1)

    def rate(self, step: int, score: float) -> None:
        self._come_to("rate")

    def drain(self, timeout: float) -> None:
        self._come_to("drain")

    def verdict(self) -> str | None:
        return "the targets were the bottleneck" if self.life.step else None

    def better_split(self, steps_left: int) -> Split | None:
        return Split(2, 6) if LAST - steps_left == self.better_at else None

    def __getattr__(self, name: str) -> Any:
        assert name in {"poll", "write", "skip", "close"}, name
        return lambda *arguments: None


@pytest.mark.parametrize("place", ["step", "evaluation", "rate"])
def test_a_stop_at_any_place_of_the_loop_ends_it_after_a_step_and_a_save(tmp_path: Path, place: str) -> None:
    loop = Loop(tmp_path, place)
    with pytest.raises(StopRequested) as stopped:
        loop.training.run()
    ended = 3
    assert stopped.value.code == 143 and loop.control.get("ended") == ended
    assert loop.saves == [(2, False), (ended, True)]
    assert loop.said[-1] == (tmp_path / BOTTLENECK).read_text().strip() == "the targets were the bottleneck"


def test_a_stop_that_came_while_the_run_was_loaded_ends_it_before_the_first_row(tmp_path: Path) -> None:
    """The targets have left by then: a drafter that asked them for a row would wait until its grace is over."""
    loop = Loop(tmp_path, "step")
    loop.life._state.stop = Stop(ExitCode.TERMINATED, "SIGTERM", 0.0)
    with pytest.raises(StopRequested):
        loop.training.run()
    assert loop.control.get("ended") == 0 and loop.saves == [] and loop.training.acceptance == {}
    assert loop.said == [] and not (tmp_path / BOTTLENECK).exists(), "nothing was counted"


def test_a_stop_while_a_better_split_is_prepared_lets_that_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "drain", better_at=3)
    assert "going on as 2t+6d" in loop.training.run()
    assert loop.control.get("ended") == 3 and loop.saves == [(2, False), (3, True)]


def test_the_bottleneck_is_named_at_the_end_and_a_full_disk_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert re.search(r"^trained to step 6 in .*, 0 recompiles; ", Loop(tmp_path, "nowhere").training.run())
    assert (tmp_path / BOTTLENECK).read_text() == "the targets were the bottleneck\n"

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("launcher.run_record.write_whole", full)
    (other := tmp_path / "other").mkdir()
    assert "trained to step 6" in Loop(other, "nowhere").training.run()
    lost = f"the report will not name the bottleneck: {other / BOTTLENECK}: No space left on device"
    assert [line for line in caplog.messages if "bottleneck" in line] == [lost]


def test_a_wait_that_a_stop_could_end_on_some_ranks_only_is_a_mistake(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "nowhere")
    with loop.life.agreed_stops(), pytest.raises(AssertionError, match="on some ranks only"):
        loop.rate(1, 1.0)
    loop.rate(1, 1.0)
