"""How the bytes of a row get from one rank to another: NCCL between GPUs, gloo on the host.

NCCL refuses two ranks on one GPU, and gloo's send and receive break on CUDA tensors; ranks that share a GPU therefore
go through pinned host buffers. CUDA IPC would save those copies, but not with expandable segments on every torch that
runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

Checksum = Callable[[torch.Tensor], torch.Tensor]
"""From a row's buffer to a scalar on its device; queued, not waited for."""


class Arrival(Protocol):
    """A row on its way in."""

    def ready(self) -> bool:
        """Whether it is here; polled by the host. True also where only `finish` can tell."""
        ...

    def finish(self) -> int:
        """Make the row usable on the current stream; returns its checksum."""
        ...


class Transport(Protocol):
    """Moves one buffer between two ranks; `send` returns a function that waits for the end."""

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], object]: ...
    def receive(
        self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None, checksum: Checksum
    ) -> Arrival: ...


def make_transport(backend: str, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Transport:
    return NcclTransport(group, device) if backend == "nccl" else GlooTransport(group, device, timeout)


class NcclTransport:
    """Device to device on a side stream, so that copies and checksums hide behind compute."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._stream = group, torch.cuda.Stream(device)

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], object]:
        with torch.cuda.stream(self._stream):  # the row is computed: RowSender has seen its event
            work = dist.isend(buffer, rank, group=self._group)
        assert work is not None
        return work.wait  # orders streams, does not hold the host up

    def receive(self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None, checksum: Checksum) -> Arrival:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work = dist.irecv(buffer, rank, group=self._group)
            assert work is not None
            work.wait()
            value = torch.empty((), dtype=torch.int64, pin_memory=True)
            value.copy_(checksum(buffer), non_blocking=True)
            here = torch.cuda.Event()
            here.record()
        return _OnDevice(value, here)


@dataclass(frozen=True)
class _OnDevice:
    """A row, and behind it its checksum on the host; asked for a step after it was sent, so nothing waits for it."""

    value: torch.Tensor
    here: torch.cuda.Event

    def ready(self) -> bool:
        return self.here.query()

    def finish(self) -> int:
        torch.cuda.current_stream().wait_event(self.here)
        return int(self.value)


class GlooTransport:
    """Through the host: CPU ranks, and GPUs that several ranks share (there by pinned staging buffers)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self._group, self._staged, self._timeout = group, device.type == "cuda", timedelta(seconds=timeout)

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], object]:
        host = self._host(buffer)
        if self._staged:
            host.copy_(buffer)
        work = dist.isend(host, rank, group=self._group)
        assert work is not None
        return lambda: (work.wait(self._timeout), host)  # the closure keeps the host buffer alive

    def receive(self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None, checksum: Checksum) -> Arrival:
        host = self._host(buffer)
        work = dist.irecv(host, rank, group=self._group)
        assert work is not None
        return _OnHost(work, host, buffer, self._timeout, checksum)

    def _host(self, buffer: torch.Tensor) -> torch.Tensor:
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True) if self._staged else buffer


@dataclass(frozen=True)
class _OnHost:
    """A row in host memory, which may be the row's own buffer."""

    work: dist.Work
    host: torch.Tensor
    buffer: torch.Tensor
    timeout: timedelta
    checksum: Checksum

    def ready(self) -> bool:
        return True  # gloo's work knows its end only by waiting

    def finish(self) -> int:
        self.work.wait(self.timeout)
        if self.host is not self.buffer:
            self.buffer.copy_(self.host, non_blocking=True)
        return int(self.checksum(self.host))
