"""What torch's distributed checkpoint is not trusted with: errors of its writers, and pickles."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from launcher.checkpoint_io import WRITERS, ShardWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # how torch loses an error of its writers
)


class FullDisk(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("file", range(WRITERS))
def test_an_error_of_any_writing_thread_fails_the_save_in_the_words_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    """torch drops what three of the four threads ran into; a checkpoint without their tensors would look complete."""
    create = FileSystem.create_stream

    @contextmanager
    def fill(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with create(self, path, mode) as stream:
            yield FullDisk() if f"__0_{file}." in str(path) else stream

    monkeypatch.setattr(FileSystem, "create_stream", fill)
    state = {f"weight {number}": torch.ones(100) for number in range(2 * WRITERS)}
    with pytest.raises(CheckpointException) as failure:
        dcp.save(state, storage_writer=ShardWriter(tmp_path, 1), no_dist=True)
    (error, _) = failure.value.failures[0]
    assert isinstance(error, OSError) and str(error) == "[Errno 28] No space left on device"


def test_every_writer_writes_a_file_where_the_disk_takes_it(tmp_path: Path) -> None:
    state = {f"weight {number}": torch.ones(100) for number in range(2 * WRITERS)}
    dcp.save(state, storage_writer=ShardWriter(tmp_path, 1), no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == WRITERS
    assert len(FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == 2 * WRITERS
