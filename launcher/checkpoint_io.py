"""What goes between a training state and torch's distributed checkpoint (DCP): tensors to DCP, the rest to JSON.

DCP pickles whatever is not a tensor, and unpickles it without restraint. Here only tensors reach it, and its own
`.metadata` file, a pickle too, is read by an unpickler that knows no class but DCP's records.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from launcher import faults
from launcher.errors import UserError
from launcher.manifest import problems_of

METADATA = ".metadata"
SEPARATOR = "/"
WRITERS = 4
# Modules and names that `.metadata` of torch 2.11 to 2.13 is made of.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


def split_state(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A nested state as flat tensors and flat JSON values, both keyed by path.

    Raises:
        TypeError: a leaf is neither a tensor nor JSON.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for path, leaf in _leaves(state):
        key = SEPARATOR.join(path)
        if isinstance(leaf, torch.Tensor):
            tensors[key] = leaf
        elif _is_json(leaf):
            values[key] = leaf
        else:
            raise TypeError(f"checkpoint: {key} is a {type(leaf).__name__}; only tensors and JSON values can be saved")
    return tensors, values


def merge_values(state: dict[str, Any], values: dict[str, Any]) -> None:
    """Put saved JSON values back into a nested state, in place; tuples stay tuples."""
    for path, leaf in list(_leaves(state)):
        key = SEPARATOR.join(path)
        if not isinstance(leaf, torch.Tensor) and key in values:
            place: Any = state
            for part in path[:-1]:
                place = place[int(part)] if isinstance(place, list) else place[part]
            value = tuple(values[key]) if isinstance(leaf, tuple) else values[key]
            place[int(path[-1]) if isinstance(place, list) else path[-1]] = value


def differences(wanted: dict[str, torch.Tensor], folder: Path, among: set[str] | None = None) -> list[str]:
    """How the tensors of a checkpoint (those `among` some keys) differ from what the model wants."""
    entries = RecordReader(folder).read_metadata().state_dict_metadata
    entries = {key: entry for key, entry in entries.items() if among is None or key in among}
    saved = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    shapes = {key: tuple(tensor.shape) for key, tensor in wanted.items()}
    return (
        [f"{key} is missing in the checkpoint" for key in sorted(shapes.keys() - saved.keys())]
        + [f"{key} is not part of this model" for key in sorted(saved.keys() - shapes.keys())]
        + [
            f"{key} has shape {list(saved[key])}, this model wants {list(shapes[key])}"
            for key in sorted(saved.keys() & shapes.keys())
            if saved[key] != shapes[key]
        ]
    )


def load_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Load the drafter's weights alone, whole, in place, in one process; the folder is verified first.

    Raises:
        UserError: the checkpoint is damaged, or its weights are not these.
    """
    if problems := problems_of(folder):
        raise UserError(f"checkpoint {folder} cannot be used: {'; '.join(problems)}", "give another one")
    tensors, _ = split_state({"model": weights})
    own = {key for key in RecordReader(folder).read_metadata().state_dict_metadata if key.startswith("model/")}
    if problems := differences(tensors, folder, own):
        raise UserError(
            f"checkpoint {folder} does not fit its config.toml: {'; '.join(problems[:5])}", "mend that file"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        dcp.load(tensors, storage_reader=RecordReader(folder), no_dist=True)


class ShardWriter(FileSystemWriter):
    """DCP's writer, with a place for injected faults after this rank's shard is written.

    A rank writes a few files at a time, of about the same size, because each costs a core: copied here, hashed later.
    They are not yet on disk at the end; `manifest.seal_files` sees to that.
    """

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=WRITERS)
        self._step = step
        self._disk = _WatchedDisk()
        self.fs: FileSystem = self._disk

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shard.

        Raises:
            OSError: the disk does not take it, in whichever thread that was seen.
        """
        try:
            written = super().write_data(plan, planner)
        finally:
            self._disk.complain()
        faults.trip("save-shard", self._step)
        return written


class _WatchedDisk(FileSystem):
    """DCP's files, with the errors of all its writers: it drops those of every thread but one, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:  # raised for all threads by `complain`
            self._errors.append(error)
            raise

    def complain(self) -> None:
        """Raise what the disk said, rather than torch's serializer, which only missed bytes after that."""
        if not self._errors:
            return
        seen = [error for first in self._errors for error in _chain(first)]
        raise next((error for error in seen if isinstance(error, OSError)), self._errors[0]) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came up under."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class RecordReader(FileSystemReader):
    """DCP's reader, which reads `.metadata` without trusting it and takes tensors only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            UserError: it names something that is no record of DCP, or is no pickle.
        """
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _RecordUnpickler(file).load()
            for key, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{key} is not a tensor; only tensors are loaded")
        except OSError:
            raise
        except Exception as error:  # unpickling what another hand wrote may raise anything
            raise UserError(
                f"{path} is not what a save writes, so nothing of it is loaded: {error}",
                f"if you did not change it, trust nothing in that folder; move {path.parent} away to go on from an"
                " older checkpoint, or start anew with --resume none",
            ) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # so early releases of Python 3.11 write a member of an enum
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which does not belong in a checkpoint")


def _member(kind: Any, name: str) -> Any:
    """A member of an enum by name: all of `getattr` that a checkpoint may use."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{METADATA} takes {name} of {kind!r}, which does not belong in a checkpoint")
    return kind[name]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _leaves(entry, (*path, str(key)))
    elif isinstance(value, list) and not _is_json(value):
        for index, entry in enumerate(value):
            yield from _leaves(entry, (*path, str(index)))
    else:
        yield path, value


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
