"""Several draws of anchors per fetched row: which micro-batches they are, and that a stopped run goes on exactly."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.config import validate
from launcher.run_record import read_run
from launcher.schedule import Schedule
from launcher.topology import Split, build_topology
from launcher.training import Training
from launcher.trial import Trial, run_trial
from tests.training import make_batch

FLAGS = [
    "--preset=tiny",
    "--device=cpu",
    "--topology.targets=1",
    "--topology.drafters=2",
    "--data.row_length=64",
    "--train.anchors=4",
    "--train.accumulation=2",
    "--train.draws_per_row=3",
    "--checkpoint.every=0",
]
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class Recorder:
    """Stands in for the receiver, the step and the meter of one drafter."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.micro_batches: list[tuple[int, bool]] = []

    def take(self, index: int, timeout: float) -> Any:
        self.taken.append(index)
        return make_batch(index)

    def accumulate(self, batch: Any, last: bool) -> None:
        self.micro_batches.append((batch.index, last))

    def paces(self) -> list[Any]:
        return []

    def prefetch(self, indices: list[int]) -> None:
        assert not set(indices) & set(self.taken)

    def update(self, step: int) -> int:
        return step

    def end_step(self, rows: list[Any]) -> None:
        """Nothing is timed."""

    def waiting(self) -> Any:
        return pytest.MonkeyPatch.context()


def train(draws: int, drafter: int, steps: int = 2) -> Recorder:
    """What one of two drafters does in the first steps, two rows each."""
    config = validate({"train": {"draws_per_row": draws, "accumulation": 2}, "target": {"model": "random:tiny"}})
    training, recorder = Training.__new__(Training), Recorder()
    training.rank = cast(Any, SimpleNamespace(role=SimpleNamespace(index=drafter)))
    training.config, training.schedule = config, Schedule(build_topology(Split(1, 2)), 2, steps)
    training.receiver = training.step = training.meter = cast(Any, recorder)
    training.pending, training.dtype = deque(), make_batch(0).features.dtype
    training._settle = lambda leave: None  # type: ignore[method-assign]
    for step in range(steps):
        training._train(step, timeout=60.0)
    return recorder


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_a_row_is_fetched_once_and_serves_its_draws(draws: int) -> None:
    found = [train(draws, drafter) for drafter in (0, 1)]
    assert [recorder.taken for recorder in found] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for recorder in found:
        indices = [index for index, _ in recorder.micro_batches]
        assert indices == [row * draws + draw for row in recorder.taken for draw in range(draws)]
        assert [last for _, last in recorder.micro_batches] == ([False] * (2 * draws - 1) + [True]) * 2
    every = sorted(index for recorder in found for index, _ in recorder.micro_batches)
    assert every == list(range(8 * draws)), "the anchors of a micro-batch depend on its index, so none may repeat"


def start(folder: Path, steps: int, cache: Path) -> Trial:
    trial = run_trial(
        [*FLAGS, f"--max-steps={steps}", f"--compile.cache_dir={cache}", "--train.schedule=constant"],
        folder / "run",
        ENVIRONMENT | {"XDG_CACHE_HOME": str(cache)},
        limit=200,
    )
    assert trial.code == 0, trial.console
    return trial


@pytest.mark.slow
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", 4, tmp_path / "cache")
    start(tmp_path / "parts", 2, tmp_path / "cache")
    parts = start(tmp_path / "parts", 4, tmp_path / "cache")
    assert "resumed from" in parts.console and "the bottleneck (drafters waited" in whole.console
    assert read_run(tmp_path / "whole" / "run").bottleneck in whole.console.splitlines()
    losses = [[(entry["step"], entry["loss"], entry["grad_norm"]) for entry in run.metrics] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    # 2 drafters x 2 rows x 3 draws x 4 anchors, fewer where a row has fewer.
    assert all(40 < entry["blocks"] <= 48 for entry in whole.metrics)
    assert {"data_wait", "target_wait", "rows_ready", "target_row_seconds"} <= whole.metrics[0].keys()
