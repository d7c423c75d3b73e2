"""Where a start begins and ends, from the checkpoint that it finds and the rows that there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher import resume as module
from launcher.config import validate
from launcher.rank import agree_schedule
from launcher.resume import resume
from launcher.topology import Split, build_topology
from launcher.trial import Trial, run_trial
from tests.test_preflight import saved


class Rank(SimpleNamespace):
    """The first drafter as `resume` sees it, alone: what is waited for it has said itself."""

    def __init__(self, run_dir: Path, drafters: int, **train: Any) -> None:
        told: dict[str, Any] = {"rows/0": {"rows": 10, "content": "c"}}
        super().__init__(
            config=validate({"runtime": {"run_dir": run_dir}, "train": train, "target": {"model": "random:tiny"}}),
            topology=build_topology(Split(1, drafters)),
            leads_drafters=True,
            control=SimpleNamespace(set=told.__setitem__),
            wait_for=lambda key, what, timeout: told[key],
            lifecycle=SimpleNamespace(step=0),
            journal=SimpleNamespace(announce=print),
        )


@pytest.mark.parametrize(
    ("drafters", "train", "done", "end", "span"),
    [
        (1, {"epochs": 3}, None, (0, 30), (0, 30)),
        (1, {"epochs": 3}, (15, 15), (15, 30), (0, 30)),
        (3, {"epochs": 3}, (15, 15), (15, 20), (-10, 10)),
        (1, {"epochs": 3, "accumulation": 5}, (15, 15), (15, 18), (-12, 6)),
        (1, {"epochs": 3}, (5, 15), (5, 20), (10, 30)),
        (1, {"epochs": 3, "draws_per_row": 4}, (15, 15), (15, 30), (0, 30)),
        (3, {"epochs": 1}, (15, 15), (15, 15), (-10, 5)),
        (3, {"max_steps": 40}, (15, 15), (15, 40), (0, 40)),
    ],
)
def test_a_start_ends_where_the_epochs_do(
    drafters: int,
    train: dict[str, Any],
    done: tuple[int, int] | None,
    end: tuple[int, int],
    span: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, built, loaded = Rank(tmp_path, drafters, **train), [], []
    monkeypatch.setattr(module, "open_checkpoints", lambda rank: None)
    monkeypatch.setattr(module, "load", lambda rank, path, step, checkpoints: loaded.append(path))
    folder = saved(tmp_path, done[0], rank.config, done[1]) if done else None
    _, _, schedule = resume(cast(Any, rank), lambda *numbers: cast(Any, built.append(numbers)))
    assert built == [span] and loaded == [folder] * bool(done)
    assert (schedule.start_step, schedule.last_step) == end
    assert agree_schedule(cast(Any, rank)) == schedule, "the targets work by the same one"


FLAGS = ["--preset=tiny", "--device=cpu", "--data.row_length=64", "--train.anchors=4", "--train.max_steps=none"]
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def start(folder: Path, drafters: int, epochs: float) -> Trial:
    split = ["--topology.targets=1", f"--topology.drafters={drafters}"]
    flags = [*FLAGS, *split, f"--train.epochs={epochs}", "--data.max_chats=8", "--eval.prompts=1"]
    trial = run_trial(flags, folder / "run", ENVIRONMENT | {"XDG_CACHE_HOME": str(folder)}, limit=200)
    assert trial.code == 0 and trial.broken() == [], trial.console
    return trial


@pytest.mark.slow
def test_a_run_of_epochs_goes_on_with_more_drafters_to_its_end(tmp_path: Path) -> None:
    half = start(tmp_path, 1, 1.0)
    rows = half.status.step or 0
    whole = start(tmp_path, 3, 2.0)
    last = rows + -(-rows // 3)
    assert "resumed from" in whole.console and whole.status.step == last == whole.metrics[-1]["step"]
    assert str(whole.status.last_checkpoint).endswith(f"step-{last}")
    assert f"after {last} steps" in whole.console, "acceptance is measured at the end"
    again = start(tmp_path, 2, 2.0)
    assert again.status.step == last and [entry for entry in again.metrics if "loss" in entry][-1]["step"] == last
    assert f"after {last} steps" in again.console, "nothing is left to train; the last start may have been lost here"
