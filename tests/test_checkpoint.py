"""Checkpoints of real FSDP2 modules on real gloo ranks: killed, resharded, failing and asynchronous saves."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from launcher.checkpoint_folder import checkpoints_of, find_checkpoint, newest_published, published, read_extra
from launcher.checkpoint_io import merge_values, split_state
from launcher.errors import UserError
from launcher.manifest import problems_of
from launcher.save_failure import SaveFailed
from tests.rank_pool import run_ranks
from tests.sharded_trainer import Trainer, load, make_checkpointer, save


@pytest.mark.parametrize(("savers", "loaders"), [(2, (3,)), (3, (1, 2))])
def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path, savers: int, loaders: tuple[int, ...]) -> None:
    saved = run_ranks(savers, save, tmp_path, 5)[0]
    found = find_checkpoint(tmp_path, "auto")
    assert found.path == checkpoints_of(tmp_path) / "step-5" and found.notices == []
    for count in loaders:
        for numbers, extra, betas in run_ranks(count, load, tmp_path, found.path):
            assert numbers == pytest.approx(saved, rel=1e-6)
            assert extra == {"micro_batch": 50}
            assert betas == (0.9, 0.95)


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """`train` draws its rows from step 0 each time: a save and two steps equal a load and the same two steps."""
    uninterrupted = run_ranks(2, save, tmp_path, 3, 6)[0]
    path = checkpoints_of(tmp_path) / "step-3"
    resumed, _, _ = run_ranks(2, load, tmp_path, path, 2)[0]
    assert resumed == uninterrupted


@pytest.mark.parametrize(
    ("stage", "rank", "expected"),
    [("shard", 1, 2), ("manifest", 0, 2), ("rename", 0, 2), ("pointer", 0, 4)],
)
def test_a_kill_at_any_stage_leaves_a_good_checkpoint(tmp_path: Path, stage: str, rank: int, expected: int) -> None:
    results = run_ranks(2, save, tmp_path, 2, 4, fault=f"kill@save-{stage}:4:{rank}")
    assert results[rank] == -9
    newest = newest_published(tmp_path)
    assert newest is not None and problems_of(newest) == []
    found = find_checkpoint(tmp_path, "auto")
    assert found.path is not None and found.path.name == f"step-{expected}"
    leftover = [notice for notice in found.notices if "interrupted save" in notice]
    assert bool(leftover) == (stage != "pointer")
    assert not list(checkpoints_of(tmp_path).glob("*.tmp"))
    assert read_extra(found.path) == {"micro_batch": expected * 10}


def test_another_model_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    run_ranks(2, partial(save, width=9), tmp_path, 5)
    for error in run_ranks(2, load, tmp_path, checkpoints_of(tmp_path) / "step-5"):
        assert isinstance(error, UserError) and "wants [7, 5]" in str(error)


def _failing_saves(run_dir: Path, *steps: int, required: bool = False) -> tuple[list[str], str, list[int]]:
    trainer, checkpointer = Trainer(), make_checkpointer(run_dir, max_failed_saves=2)
    trainer.train(1)
    try:
        for step in steps:
            checkpointer.save(step, trainer.state(), {}, required)
    except SaveFailed as error:
        return [path.name for path in published(run_dir)], str(error), sorted(error.ranks_at_fault)
    return [], "no error", []


def test_one_ranks_full_disk_is_raised_on_all_after_the_limit(tmp_path: Path) -> None:
    fault = "diskfull@save-shard:2:2;diskfull@save-shard:3:2"
    results = run_ranks(3, _failing_saves, tmp_path, 1, 2, 3, fault=fault)
    folder = checkpoints_of(tmp_path)
    for names, message, at_fault in results:
        assert names == ["step-1"] and at_fault == [2], "the others leave the report to that rank"
        assert message.startswith(f"checkpoint.max_failed_saves=2 is reached: saving {folder / 'step-3'} failed while")
        assert "(rank 2: OSError: [Errno 28] No space left on device" in message
        assert message.endswith(f"-> make room for {folder}; the checkpoints there are whole")
    assert not list(checkpoints_of(tmp_path).glob("*.tmp"))


def test_the_last_save_of_a_start_says_so_when_it_fails(tmp_path: Path) -> None:
    """With another error than a full disk's."""
    save_required = partial(_failing_saves, required=True)
    (_, message, _), _ = run_ranks(2, save_required, tmp_path, 1, 2, fault="raise@save-shard:2:1")
    assert message.startswith("the last checkpoint of this start is missing: saving ") and "injected error" in message
    assert message.endswith(
        f"-> see rank_1.log in {tmp_path / 'logs'}; the checkpoints in {checkpoints_of(tmp_path)} are whole"
    )


def _one_failed_save(run_dir: Path) -> list[str]:
    trainer, checkpointer = Trainer(), make_checkpointer(run_dir, max_failed_saves=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, trainer.state(), {})
    return [path.name for path in published(run_dir)]


def test_training_goes_on_after_a_failed_save(tmp_path: Path) -> None:
    fault = "diskfull@save-shard:2:0;diskfull@save-manifest:4:0"
    assert run_ranks(2, _one_failed_save, tmp_path, fault=fault) == [["step-3", "step-1"]] * 2


def _background(run_dir: Path) -> tuple[list[float], list[float], float]:
    trainer, checkpointer = Trainer(), make_checkpointer(run_dir, asynchronous=True)
    trainer.train(1)
    at_save = trainer.numbers()
    checkpointer.save(1, trainer.state(), {"micro_batch": 10})
    trainer.train(3)
    checkpointer.wait()
    return at_save, trainer.numbers(), len(published(run_dir))


def test_a_background_save_keeps_the_numbers_of_its_step(tmp_path: Path) -> None:
    at_save, later, count = run_ranks(2, _background, tmp_path)[0]
    assert count == 1 and later != at_save
    loaded, extra, _ = run_ranks(2, load, tmp_path, checkpoints_of(tmp_path) / "step-1")[0]
    assert loaded == at_save and extra == {"micro_batch": 10}


def _background_error(run_dir: Path) -> str:
    trainer, checkpointer = Trainer(), make_checkpointer(run_dir, asynchronous=True, max_failed_saves=1)
    checkpointer.save(1, trainer.state(), {})
    try:
        for _ in range(2000):
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
