"""Checkpoints of real FSDP2 modules on real gloo ranks: killed, spoiled, resharded, failing and asynchronous saves."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launcher.checkpoint import Checkpointer, SaveFailed
from launcher.checkpoint_folder import (
    checkpoints_of,
    find_checkpoint,
    newest_published,
    published,
    read_extra,
    to_remove,
)
from launcher.checkpoint_io import RecordReader, merge_values, split_state
from launcher.config_sections import CheckpointConfig
from launcher.errors import UserError
from launcher.manifest import problems_of, read_manifest
from tests.rank_pool import run_ranks


def _wait(ready: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Trainer:
    """A small sharded model and its optimizer. 7 rows do not divide by 2 or 3."""

    def __init__(self, width: int = 7) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.95))

    def train(self, steps: int) -> None:
        for step in range(steps):
            # The same rows on every rank: the result does not depend on how many there are.
            rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def numbers(self) -> list[float]:
        tensors, _ = split_state(self.state())
        return [
            float(tensor.full_tensor().double().sum() if hasattr(tensor, "full_tensor") else tensor.double().sum())
            for _, tensor in sorted(tensors.items())
        ]


def _checkpointer(run_dir: Path, **options: Any) -> Checkpointer:
    config = CheckpointConfig(**{"asynchronous": False} | options)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Checkpointer(run_dir, config, group, _wait, 30.0)


def _save(run_dir: Path, *steps: int, train: int = 2, width: int = 7, **options: Any) -> list[float]:
    trainer, checkpointer = Trainer(width), _checkpointer(run_dir, **options)
    for step in steps:
        trainer.train(train)
        checkpointer.save(step, trainer.state(), {"micro_batch": step * 10}, required=True)
    return trainer.numbers()


def _load(run_dir: Path, path: Path, more_steps: int = 0) -> tuple[list[float], dict[str, Any], Any]:
    trainer, checkpointer = Trainer(), _checkpointer(run_dir)
    state = trainer.state()
    extra = checkpointer.load(path, state)
    trainer.restore(state)
    trainer.train(more_steps)
    return trainer.numbers(), extra, trainer.optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize(("savers", "loaders"), [(2, (3,)), (3, (1, 2))])
def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path, savers: int, loaders: tuple[int, ...]) -> None:
    saved = run_ranks(savers, _save, tmp_path, 5)[0]
    found = find_checkpoint(tmp_path, "auto")
    assert found.path == checkpoints_of(tmp_path) / "step-5" and found.notices == []
    for count in loaders:
        for numbers, extra, betas in run_ranks(count, _load, tmp_path, found.path):
            assert numbers == pytest.approx(saved, rel=1e-6)
            assert extra == {"micro_batch": 50}
            assert betas == (0.9, 0.95)


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """`train` draws its rows from step 0 each time: a save and two steps equal a load and the same two steps."""
    uninterrupted = run_ranks(2, _save, tmp_path, 3, 6)[0]
    path = checkpoints_of(tmp_path) / "step-3"
    resumed, _, _ = run_ranks(2, _load, tmp_path, path, 2)[0]
    assert resumed == uninterrupted


@pytest.mark.parametrize(
    ("stage", "rank", "expected"),
    [("shard", 1, 2), ("manifest", 0, 2), ("rename", 0, 2), ("pointer", 0, 4)],
)
def test_a_kill_at_any_stage_leaves_a_good_checkpoint(tmp_path: Path, stage: str, rank: int, expected: int) -> None:
    results = run_ranks(2, _save, tmp_path, 2, 4, fault=f"kill@save-{stage}:4:{rank}")
    assert results[rank] == -9
    newest = newest_published(tmp_path)
    assert newest is not None and problems_of(newest) == []
    found = find_checkpoint(tmp_path, "auto")
    assert found.path is not None and found.path.name == f"step-{expected}"
    leftover = [notice for notice in found.notices if "interrupted save" in notice]
    assert bool(leftover) == (stage != "pointer")
    assert not list(checkpoints_of(tmp_path).glob("*.tmp"))
    assert read_extra(found.path) == {"micro_batch": expected * 10}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


SPOIL: dict[str, Callable[[Path], Any]] = {
    "flipped byte": lambda folder: _flip(_shard(folder)),
    "truncated": lambda folder: _shard(folder).open("r+b").truncate(100),
    "missing shard": lambda folder: _shard(folder).unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "changed manifest": lambda folder: _flip(folder / "manifest.json"),
    "spoiled extra": lambda folder: _flip(folder / "extra.json"),
    "spoiled metadata": lambda folder: _flip(folder / ".metadata"),
    "strange file": lambda folder: (folder / "__9_0.distcp").touch(),
}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    run_ranks(2, _save, run_dir, 2, 4)
    return run_dir


def _copy(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to, dirs_exist_ok=True)
    return to


@pytest.mark.parametrize("how", list(SPOIL))
def test_a_spoiled_checkpoint_is_skipped_with_a_reason(saved_run: Path, tmp_path: Path, how: str) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    newest, older = published(run_dir)
    SPOIL[how](newest)
    found = find_checkpoint(run_dir, "auto")
    assert found.path == older
    assert any("skipped" in notice and "step-4" in notice for notice in found.notices)
    with pytest.raises(UserError, match="cannot be used"):
        find_checkpoint(run_dir, str(newest))
    SPOIL[how](older)
    with pytest.raises(UserError, match="no usable checkpoint") as refusal:
        find_checkpoint(run_dir, "auto")
    assert refusal.value.code == 78 and "--resume none" in str(refusal.value)


def test_a_dangling_pointer_is_noticed_and_does_no_harm(saved_run: Path, tmp_path: Path) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    (checkpoints_of(run_dir) / "latest").write_text("step-99\n")
    assert newest_published(run_dir) == checkpoints_of(run_dir) / "step-4"
    found = find_checkpoint(run_dir, "auto")
    assert found.path == checkpoints_of(run_dir) / "step-4"
    assert any("step-99, which does not exist" in notice for notice in found.notices)


def test_resume_none_sets_old_checkpoints_aside(saved_run: Path, tmp_path: Path) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    found = find_checkpoint(run_dir, "none")
    assert found.path is None and published(run_dir) == []
    assert (run_dir / "checkpoints.old-1" / "step-4").is_dir()
    assert find_checkpoint(tmp_path / "new", "auto").path is None


def test_going_back_sets_the_abandoned_future_aside(saved_run: Path, tmp_path: Path) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    found = find_checkpoint(run_dir, str(checkpoints_of(run_dir) / "step-2"))
    assert found.path is not None and found.path.name == "step-2"
    assert [path.name for path in published(run_dir)] == ["step-2"]


def test_files_are_private(saved_run: Path) -> None:
    folder = published(saved_run)[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_no_pickle_but_records_is_loaded(saved_run: Path, tmp_path: Path) -> None:
    folder = published(_copy(saved_run, tmp_path / "run"))[0]
    assert RecordReader(folder).read_metadata().state_dict_metadata
    (folder / ".metadata").write_bytes(pickle.dumps({"f": print}))
    with pytest.raises(pickle.UnpicklingError, match="builtins.print"):
        RecordReader(folder).read_metadata()


def test_another_model_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    run_ranks(2, partial(_save, width=9), tmp_path, 5)
    for error in run_ranks(2, _load, tmp_path, checkpoints_of(tmp_path) / "step-5"):
        assert isinstance(error, UserError) and "wants [7, 5]" in str(error)


def _failing_saves(run_dir: Path) -> tuple[list[str], str, list[int]]:
    trainer, checkpointer = Trainer(), _checkpointer(run_dir, max_failed_saves=2)
    trainer.train(1)
    checkpointer.save(1, trainer.state(), {})
    checkpointer.save(2, trainer.state(), {})
    try:
        checkpointer.save(3, trainer.state(), {})
    except SaveFailed as error:
        return [path.name for path in published(run_dir)], str(error), sorted(error.ranks_at_fault)
    return [], "no error", []


def test_one_ranks_full_disk_is_raised_on_all_after_the_limit(tmp_path: Path) -> None:
    results = run_ranks(3, _failing_saves, tmp_path, fault="diskfull@save-shard:2:2;diskfull@save-shard:3:2")
    for names, message, at_fault in results:
        assert names == ["step-1"] and at_fault == [2], "the others leave the report to that rank"
        assert "rank 2: OSError: [Errno 28] No space left" in message
    assert not list(checkpoints_of(tmp_path).glob("*.tmp"))


def _one_failed_save(run_dir: Path) -> list[str]:
    trainer, checkpointer = Trainer(), _checkpointer(run_dir, max_failed_saves=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, trainer.state(), {})
    return [path.name for path in published(run_dir)]


def test_training_goes_on_after_a_failed_save(tmp_path: Path) -> None:
    fault = "diskfull@save-shard:2:0;diskfull@save-manifest:4:0"
    assert run_ranks(2, _one_failed_save, tmp_path, fault=fault) == [["step-3", "step-1"]] * 2


def _background(run_dir: Path) -> tuple[list[float], list[float], float]:
    trainer, checkpointer = Trainer(), _checkpointer(run_dir, asynchronous=True)
    trainer.train(1)
    at_save = trainer.numbers()
    checkpointer.save(1, trainer.state(), {"micro_batch": 10})
    trainer.train(3)
    checkpointer.wait()
    return at_save, trainer.numbers(), len(published(run_dir))


def test_a_background_save_keeps_the_numbers_of_its_step(tmp_path: Path) -> None:
    at_save, later, count = run_ranks(2, _background, tmp_path)[0]
    assert count == 1 and later != at_save
    loaded, extra, _ = run_ranks(2, _load, tmp_path, checkpoints_of(tmp_path) / "step-1")[0]
    assert loaded == at_save and extra == {"micro_batch": 10}


def _background_error(run_dir: Path) -> str:
    trainer, checkpointer = Trainer(), _checkpointer(run_dir, asynchronous=True, max_failed_saves=1)
    checkpointer.save(1, trainer.state(), {})
    try:
        for _ in range(200):
            checkpointer.poll()
            time.sleep(0.02)
    except SaveFailed as error:
        return str(error)
    return "silent"


def test_an_error_in_the_background_shows_at_a_later_step(tmp_path: Path) -> None:
    for message in run_ranks(2, _background_error, tmp_path, fault="diskfull@save-rename:1:0"):
        assert "rank 0: OSError" in message and "publishing" in message


def test_split_and_merge_keep_what_is_not_a_tensor() -> None:
    state = {"groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}], "model": {"a.b": torch.ones(2)}}
    tensors, values = split_state(state)
    assert list(tensors) == ["model/a.b"]
    other = {"groups": [{"lr": 9.0, "betas": (0.0, 0.0), "params": []}], "model": {"a.b": torch.zeros(2)}}
    merge_values(other, {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})
    assert other["groups"] == state["groups"]
    with pytest.raises(TypeError, match="groups is a set"):
        split_state({"groups": {1, 2}})


def _keep_one(run_dir: Path, best: int) -> list[str]:
    checkpointer = Checkpointer(run_dir, CheckpointConfig(keep=1, asynchronous=False), None, _wait, 30.0)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, {"weight": torch.full((3,), float(step))}, {})
        checkpointer.rate(step, 9.0 if step == best else 1.0)
    return [path.name for path in published(run_dir)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    assert _keep_one(tmp_path, best=2) == ["step-4", "step-2"]
    assert all(problems_of(folder) == [] for folder in published(tmp_path))


def _rate_together(run_dir: Path) -> list[float | None]:
    """Every rank rates, many times, as the training loop does after an evaluation."""
    checkpointer = Checkpointer(run_dir, CheckpointConfig(asynchronous=False), dist.group.WORLD, _wait, 60.0)
    checkpointer.save(1, {"weight": torch.ones(3)}, {}, required=True)
    for score in range(50):
        checkpointer.rate(1, float(score))
    dist.barrier()
    return [read_manifest(folder)["score"] for folder in published(run_dir)]


def test_all_ranks_may_rate_a_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(3, _rate_together, tmp_path) == [[49.0]] * 3


def test_what_retention_removes() -> None:
    scores = dict.fromkeys([1, 2, 3, 4, 5])
    assert to_remove(scores, {1, 2, 3, 4, 5}, keep=2) == [1, 2, 3]
    assert to_remove(scores, {2, 3}, keep=2) == [1], "what is not verified does not count as kept"
    assert to_remove(scores, {5}, keep=2) == [], "too few good ones: nothing goes"
    assert to_remove(scores | {1: 3.0, 2: 2.0}, {3, 4, 5}, keep=2) == [2, 3], "the best stays"
