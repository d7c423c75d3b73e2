"""Memory that another process of the host maps; on a GPU by what torch's own multiprocessing uses for tensors.

torch.multiprocessing passes on a storage's eight words and counts who maps it; the counts lie in a small file in
/dev/shm that goes when both sides have let go (drafters first). Its event is left out: what is exported is complete.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from launcher.transports import Arrival, Checksum, OnDevice

_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)True")


Words = list[Any]
"""What another process needs to map a buffer; JSON."""


def pair_key(source: int, drafter: int) -> str:
    """Where the control store has what two ranks agree on."""
    return f"ipc/{source}/{drafter}"


class Landing(Arrival, Protocol):
    """A copy on its way on the device."""

    def wait(self) -> None:
        """Sleep until it has run; from any thread."""
        ...


class SharedMemory(Protocol):
    """What this transport needs of a device. `export` and `open` raise RuntimeError where the system forbids them."""

    def exportable(self) -> AbstractContextManager[None]: ...
    def hold(self, data: bytes) -> torch.Tensor: ...
    def export(self, buffer: torch.Tensor) -> Words: ...
    def open(self, words: Words) -> torch.Tensor: ...
    def read(self, mapped: torch.Tensor) -> bytes: ...
    def copy(
        self, buffer: torch.Tensor, mapped: torch.Tensor, after: torch.cuda.Event | None, checksum: Checksum
    ) -> Landing: ...
    def settle(self) -> None: ...
    def collect(self) -> None: ...


@contextmanager
def outside_expandable_segments() -> Iterator[None]:
    """Another process gets at expandable segments only by the system call pidfd_getfd, which containers forbid.

    The allocator hands out no block of theirs meanwhile (`get_free_block` in CUDACachingAllocator.cpp). Settings that
    are left out go back to their defaults, so all of them are said again.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if not _EXPANDABLE.search(settings):
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings
    change(_EXPANDABLE.sub(r"\1False", settings))
    try:
        yield
    finally:
        change(settings)


class CudaMemory:
    """One rank's GPU. Every rank calls its own by one index, whichever it is: a mapping of another one works alike."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._used = device, torch.cuda.Stream(device), False

    def exportable(self) -> AbstractContextManager[None]:
        return outside_expandable_segments()

    def hold(self, data: bytes) -> torch.Tensor:
        """The bytes in memory of the GPU, complete."""
        buffer = torch.tensor(list(data), dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return buffer

    def export(self, buffer: torch.Tensor) -> Words:
        """Words for one process that opens them once: torch counts each export as one mapping."""
        words = buffer.untyped_storage()._share_cuda_()
        return [{"bytes": base64.b64encode(word).decode()} if isinstance(word, bytes) else word for word in words]

    def open(self, words: Words) -> torch.Tensor:
        """A flat uint8 tensor over another process's buffer; it stays mapped while the tensor lives."""
        parts = [base64.b64decode(word["bytes"]) if isinstance(word, dict) else word for word in words]
        _, handle, size, offset, counter, counter_offset, event, _ = parts
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device.index, handle, size, offset, counter, counter_offset, event, False
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def read(self, mapped: torch.Tensor) -> bytes:
        """The bytes there, without waiting for the work queued on this rank's own stream."""
        with torch.cuda.stream(self._stream):
            return bytes(mapped.cpu().tolist())

    def copy(
        self, buffer: torch.Tensor, mapped: torch.Tensor, after: torch.cuda.Event | None, checksum: Checksum
    ) -> OnDevice:
        """Queue the copy behind `after`, on a side stream."""
        if after is not None:
            self._stream.wait_event(after)
        elif not self._used:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which zeroed all new buffers
        self._used = True
        with torch.cuda.stream(self._stream):
            buffer.copy_(mapped, non_blocking=True)
            return OnDevice.behind(checksum(buffer))

    def settle(self) -> None:
        """Wait until all copies have run."""
        self._stream.synchronize()

    def collect(self) -> None:
        """Let torch see which exports nobody maps any more; it keeps them until it looks."""
        torch.cuda.ipc_collect()
