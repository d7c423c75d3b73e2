"""The folder of checkpoints: what is spoiled is skipped, what is private, what is kept and what is removed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from launcher import manifest
from launcher.checkpoint import Checkpointer
from launcher.checkpoint_folder import checkpoints_of, find_checkpoint, newest_published, published, to_remove
from launcher.checkpoint_io import RecordReader
from launcher.config import CheckpointConfig
from launcher.errors import UserError
from launcher.manifest import problems_of, read_manifest
from tests.rank_pool import run_ranks
from tests.sharded_trainer import save, wait


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


NOISE = bytes(range(256))
SPOIL: dict[str, Callable[[Path], Any]] = {
    "flipped byte": lambda folder: _flip(_shard(folder)),
    "truncated": lambda folder: _shard(folder).open("r+b").truncate(100),
    "missing shard": lambda folder: _shard(folder).unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "changed manifest": lambda folder: _flip(folder / "manifest.json"),
    "manifest that is no table": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest of noise": lambda folder: (folder / "manifest.json").write_bytes(NOISE),
    "spoiled extra": lambda folder: _flip(folder / "extra.json"),
    "spoiled metadata": lambda folder: _flip(folder / ".metadata"),
    "strange file": lambda folder: (folder / "__9_0.distcp").touch(),
}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    run_ranks(2, save, run_dir, 2, 4)
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
    assert found.path == older == newest_published(run_dir), "status.json and the box name the one that is good"
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


@pytest.mark.parametrize("content", [NOISE, b"", b"../../elsewhere", b"step-" + b"9" * 300])
def test_a_damaged_pointer_is_mended(saved_run: Path, tmp_path: Path, content: bytes) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    pointer, newest = checkpoints_of(run_dir) / "latest", checkpoints_of(run_dir) / "step-4"
    pointer.write_bytes(content)
    assert newest_published(run_dir) == newest
    assert find_checkpoint(run_dir, "auto").path == newest and pointer.read_text() == "step-4\n"
    assert find_checkpoint(run_dir, "auto").notices == []


def test_a_pointer_that_cannot_be_moved_costs_a_notice(saved_run: Path, tmp_path: Path) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    pointer = checkpoints_of(run_dir) / "latest"
    pointer.unlink()
    pointer.mkdir()
    found = find_checkpoint(run_dir, "auto")
    assert found.path is not None and "could not be moved to step-4: Is a directory" in found.notices[-1]


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
    assert (checkpoints_of(run_dir) / "latest").read_text() == "step-2\n"


def test_going_on_from_another_folder_sets_this_ones_aside(saved_run: Path, tmp_path: Path) -> None:
    run_dir, other = _copy(saved_run, tmp_path / "run"), _copy(saved_run, tmp_path / "other")
    found = find_checkpoint(run_dir, str(checkpoints_of(other) / "step-2"))
    assert found.path == checkpoints_of(other) / "step-2" and published(run_dir) == []
    assert (run_dir / "checkpoints.old-1" / "step-4").is_dir() and len(published(other)) == 2
    again = find_checkpoint(run_dir, str(run_dir / "checkpoints.old-1" / "step-4"))
    assert again.path is not None, "what was set aside as a whole can be gone on from where it is"


def test_a_checkpoint_set_aside_is_renamed_before_its_run_goes_on_from_it(saved_run: Path, tmp_path: Path) -> None:
    run_dir = _copy(saved_run, tmp_path / "run")
    root = checkpoints_of(run_dir)
    find_checkpoint(run_dir, str(root / "step-2"))
    with pytest.raises(UserError, match=r"step-4\.old-1 is not named step-N.*-> rename it to step-4 "):
        find_checkpoint(run_dir, str(root / "step-4.old-1"))
    shutil.copytree(root / "step-4.old-1", root / "step-4")
    with pytest.raises(UserError, match=r"-> move step-4 away, rename it to step-4 "):
        find_checkpoint(run_dir, str(root / "step-4.old-1"))
    shutil.rmtree(root / "step-4")
    (root / "step-4.old-1").rename(root / "step-4")
    assert find_checkpoint(run_dir, str(root / "step-4")).path == root / "step-4"


def test_files_are_private(saved_run: Path) -> None:
    folder = published(saved_run)[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_no_pickle_but_records_is_loaded(saved_run: Path, tmp_path: Path) -> None:
    folder = published(_copy(saved_run, tmp_path / "run"))[0]
    assert RecordReader(folder).read_metadata().state_dict_metadata
    for written in (pickle.dumps({"f": print}), pickle.dumps({}), b"\x80"):
        (folder / ".metadata").write_bytes(written)
        with pytest.raises(UserError, match=r"step-4/\.metadata is not what.*-> .*move \S*step-4 away") as refusal:
            RecordReader(folder).read_metadata()
        assert refusal.value.code == 78 and ("builtins.print" in str(refusal.value)) == (b"print" in written)


@dataclass
class ByName:
    """Pickled as early releases of Python 3.11 pickle a member of an enum, and as anyone may pickle anything."""

    of: Any
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_members_of_enums_are_loaded_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    member = ByName(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=member)))
    assert RecordReader(tmp_path).read_metadata().planner_data is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    (tmp_path / ".metadata").write_bytes(pickle.dumps(ByName(Metadata, "__init__")))
    with pytest.raises(UserError, match="takes __init__ of"):
        RecordReader(tmp_path).read_metadata()


def _keep_one(run_dir: Path, best: int) -> list[str]:
    checkpointer = Checkpointer(run_dir, CheckpointConfig(keep=1, asynchronous=False), None, wait, 30.0)
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
    checkpointer = Checkpointer(run_dir, CheckpointConfig(asynchronous=False), dist.group.WORLD, wait, 60.0)
    checkpointer.save(1, {"weight": torch.ones(3)}, {}, required=True)
    for score in range(50):
        checkpointer.rate(1, float(score))
    dist.barrier()
    return [read_manifest(folder)["score"] for folder in published(run_dir)]


def test_all_ranks_may_rate_a_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(3, _rate_together, tmp_path) == [[49.0]] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_score_that_the_disk_does_not_take_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(asynchronous=False), None, wait, 30.0)
    checkpointer.save(1, {"weight": torch.ones(3)}, {}, required=True)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(manifest, "write_durably", lambda *_: (_ for _ in ()).throw(full))
    checkpointer.rate(1, 2.0)
    (warning,) = [message for message in caplog.messages if "how good" in message]
    (folder,) = published(tmp_path)
    assert str(folder) in warning and "No space left" in warning and problems_of(folder) == []


def test_what_retention_removes() -> None:
    scores = dict.fromkeys([1, 2, 3, 4, 5])
    assert to_remove(scores, {1, 2, 3, 4, 5}, keep=2) == [1, 2, 3]
    assert to_remove(scores, {2, 3}, keep=2) == [1], "what is not verified does not count as kept"
    assert to_remove(scores, {5}, keep=2) == [], "too few good ones: nothing goes"
    assert to_remove(scores | {1: 3.0, 2: 2.0}, {3, 4, 5}, keep=2) == [2, 3], "the best stays"
