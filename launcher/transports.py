"""How the bytes of a row get from one rank to another: NCCL between GPUs, gloo on the host.

NCCL refuses two ranks on one GPU, and gloo's send and receive break on CUDA tensors; ranks that share a GPU map each
other's memory (ipc_transport.py) or, where that is forbidden, go through pinned host buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

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


def _nothing() -> None:
    """Nothing is on its way from a buffer."""


def _always() -> bool:
    """Where only waiting tells."""
    return True


@dataclass(frozen=True)
class Departure:
    """A row on its way out: `finish` waits for its end, once, and holds nobody up after `gone`, which is polled."""

    finish: Callable[[], object] = _nothing
    gone: Callable[[], bool] = _always


class Transport(ABC):
    """Moves one buffer between two ranks. The defaults are those of a transport that moves any memory by messages."""

    @property
    @abstractmethod
    def way(self) -> str:
        """How rows go, for reports."""

    def memory(self) -> AbstractContextManager[None]:
        """Around the allocation of what is sent from here."""
        return nullcontext()

    def place(self, buffer: torch.Tensor, rank: int) -> dict[str, Any]:
        """What the header of a computed row tells `rank` about where the row lies."""
        return {}

    @abstractmethod
    def send(self, buffer: torch.Tensor, rank: int) -> Departure:
        """Start to send a row that `rank` has asked for."""

    @abstractmethod
    def receive(
        self,
        buffer: torch.Tensor,
        rank: int,
        after: torch.cuda.Event | None,
        checksum: Checksum,
        header: dict[str, Any],
    ) -> Arrival:
        """Start to receive a row from `rank` into a buffer that is free after `after`."""

    def closable(self) -> bool:
        """Whether nobody reads the memory that rows were sent from any more."""
        return True

    def close(self) -> None:  # noqa: B027
        """Let go of what other processes share; nothing is on its way."""


class NcclTransport(Transport):
    """Device to device on a side stream, so that copies and checksums hide behind compute."""

    way = "NCCL"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._stream = group, torch.cuda.Stream(device)

    def send(self, buffer: torch.Tensor, rank: int) -> Departure:
        with torch.cuda.stream(self._stream):  # the row is computed: RowSender has seen its event
            work = dist.isend(buffer, rank, group=self._group)
        assert work is not None
        return Departure(work.wait)  # orders streams, does not hold the host up

    def receive(
        self,
        buffer: torch.Tensor,
        rank: int,
        after: torch.cuda.Event | None,
        checksum: Checksum,
        header: dict[str, Any],
    ) -> Arrival:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work = dist.irecv(buffer, rank, group=self._group)
            assert work is not None
            work.wait()
            return OnDevice.behind(checksum(buffer))


@dataclass(frozen=True)
class OnDevice:
    """A row, and behind it its checksum on the host; asked for a step after it was sent, so nothing waits for it."""

    value: torch.Tensor
    here: torch.cuda.Event

    @classmethod
    def behind(cls, checksum: torch.Tensor) -> OnDevice:
        """The row that the current stream is done with when it has this checksum."""
        value = torch.empty((), dtype=torch.int64, pin_memory=True)
        value.copy_(checksum, non_blocking=True)
        here = torch.cuda.Event(blocking=True)
        here.record()
        return cls(value, here)

    def ready(self) -> bool:
        return self.here.query()

    def wait(self) -> None:
        """Sleep until it is here."""
        self.here.synchronize()

    def finish(self) -> int:
        torch.cuda.current_stream().wait_event(self.here)
        return int(self.value)


class GlooTransport(Transport):
    """Through the host: CPU ranks, and GPUs that several ranks share (there by pinned staging buffers)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self._group, self._staged, self._timeout = group, device.type == "cuda", timedelta(seconds=timeout)

    @property
    def way(self) -> str:
        return "gloo through pinned host memory" if self._staged else "gloo"

    def send(self, buffer: torch.Tensor, rank: int) -> Departure:
        host = self._host(buffer)
        if self._staged:
            host.copy_(buffer)
        work = dist.isend(host, rank, group=self._group)
        assert work is not None
        return Departure(lambda: (work.wait(self._timeout), host))  # the closure keeps the host buffer alive

    def receive(
        self,
        buffer: torch.Tensor,
        rank: int,
        after: torch.cuda.Event | None,
        checksum: Checksum,
        header: dict[str, Any],
    ) -> Arrival:
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
