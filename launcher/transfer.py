"""Feature rows from a target to a drafter: a ready message, an answer, then one message of bytes.

A row is one flat byte buffer (features, ids, document numbers, positions, loss mask), so one NCCL or gloo message
moves it and the target writes its features straight into what is sent. Nothing is posted before both sides are there:
a pre-posted NCCL receive would spin on the drafter's SMs until the sender comes.

    target:  compute row m -> set ready/m ............. see go/m -> send
    drafter: buffer free and ready/m seen -> check the header -> set go/m -> receive
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from launcher.control import Control
from launcher.errors import LauncherError
from launcher.lifecycle import Lifecycle
from models.draft_step import RowBatch


class HeaderMismatch(LauncherError):
    """A row arrived that is not the one expected; nothing of it is trained on."""


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of a row of S tokens with `width` = K*H features per token."""

    row_length: int
    width: int
    dtype: torch.dtype

    @property
    def feature_bytes(self) -> int:
        return self.row_length * self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.feature_bytes + 13 * self.row_length

    def buffer(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def features(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [S, K*H] on the features of a buffer."""
        return buffer[: self.feature_bytes].view(self.dtype).view(self.row_length, self.width)

    def ints(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [3, S] int32 on ids, document numbers and positions."""
        end = self.feature_bytes + 12 * self.row_length
        return buffer[self.feature_bytes : end].view(torch.int32).view(3, self.row_length)

    def loss_mask(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [S] uint8."""
        return buffer[self.feature_bytes + 12 * self.row_length :]

    def batch(self, index: int, buffer: torch.Tensor) -> RowBatch:
        """The micro-batch that a filled buffer holds; features stay views, the small parts are copies."""
        ids, doc, positions = self.ints(buffer)
        return RowBatch(
            index=index,
            features=self.features(buffer),
            ids=ids.long(),
            loss_mask=self.loss_mask(buffer).bool(),
            doc=doc.clone(),
            positions=positions.long(),
        )

    def header(self, index: int, ids: Any) -> dict[str, Any]:
        """What both sides must agree on; `ids` is the row's int32 numpy array."""
        return {
            "index": index,
            "row_length": self.row_length,
            "width": self.width,
            "dtype": str(self.dtype),
            "ids": zlib.crc32(ids.tobytes()),
        }

    def check(self, header: dict[str, Any], index: int, source: int) -> None:
        """Refuse a row of another index or shape.

        Raises:
            HeaderMismatch: names both sides' values.
        """
        expected = {"index": index, "row_length": self.row_length, "width": self.width, "dtype": str(self.dtype)}
        wrong = [
            f"{key} is {header.get(key)!r}, expected {value!r}"
            for key, value in expected.items()
            if header.get(key) != value
        ]
        if wrong:
            raise HeaderMismatch(f"row {index} from rank {source}: {'; '.join(wrong)}")


class Transport(Protocol):
    """Moves one buffer between two ranks; both calls return a function that waits for the end."""

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], object]: ...
    def receive(self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None) -> Callable[[], object]: ...


class NcclTransport:
    """Device to device on a side stream, so that copies hide behind compute. `wait` orders streams, not the host."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._stream = group, torch.cuda.Stream(device)

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], object]:
        with torch.cuda.stream(self._stream):  # the row is computed: RowSender has seen its event
            work = dist.isend(buffer, rank, group=self._group)
        assert work is not None
        return work.wait

    def receive(self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None) -> Callable[[], object]:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work = dist.irecv(buffer, rank, group=self._group)
        assert work is not None
        return work.wait


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

    def receive(self, buffer: torch.Tensor, rank: int, after: torch.cuda.Event | None) -> Callable[[], object]:
        host = self._host(buffer)
        work = dist.irecv(host, rank, group=self._group)
        assert work is not None

        def finish() -> None:
            work.wait(self._timeout)
            if self._staged:
                buffer.copy_(host, non_blocking=True)

        return finish

    def _host(self, buffer: torch.Tensor) -> torch.Tensor:
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True) if self._staged else buffer


def make_transport(backend: str, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Transport:
    return NcclTransport(group, device) if backend == "nccl" else GlooTransport(group, device, timeout)


def _now() -> torch.cuda.Event:
    """The end of all work queued on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def _nothing() -> None:
    """Nothing is on its way from this buffer."""


@dataclass
class _Offer:
    index: int
    rank: int
    buffer: torch.Tensor
    header: dict[str, Any]
    computed: torch.cuda.Event | None
    announced: bool = False


class RowSender:
    """The target's side: up to `slots` rows computed ahead, sent as their drafters ask for them."""

    def __init__(
        self,
        layout: RowLayout,
        slots: int,
        device: torch.device,
        transport: Transport,
        control: Control,
        lifecycle: Lifecycle,
    ) -> None:
        self._transport, self._control, self._lifecycle, self._device = transport, control, lifecycle, device
        # Free buffers, each with the wait for its last send.
        self._free: deque[tuple[torch.Tensor, Callable[[], object]]] = deque(
            (layout.buffer(device), _nothing) for _ in range(slots)
        )
        self._offers: list[_Offer] = []

    def slot(self, ended: Callable[[], bool], timeout: float) -> torch.Tensor | None:
        """A buffer to fill; waits while all are on their way. None once `ended()` says that the run stops."""
        self._lifecycle.wait_until(lambda: self._pump() or ended(), self._awaited("a free buffer"), timeout)
        if ended():
            return None
        buffer, sent = self._free.popleft()
        sent()
        return buffer

    def offer(self, index: int, rank: int, buffer: torch.Tensor, header: dict[str, Any]) -> None:
        """Put a filled buffer up for the drafter at `rank`."""
        computed = _now() if self._device.type == "cuda" else None
        self._offers.append(_Offer(index, rank, buffer, header, computed))
        self._pump()

    def drain(self, ended: Callable[[], bool], timeout: float) -> None:
        """Wait until every offered row is gone, or the run stops."""
        what = self._awaited("the last rows to be taken")
        self._lifecycle.wait_until(lambda: (self._pump() and not self._offers) or ended(), what, timeout)
        for _ in range(len(self._free)):
            buffer, sent = self._free.popleft()
            sent()  # once only: a gloo send that has been waited for blocks a second wait
            self._free.append((buffer, _nothing))

    def _pump(self) -> bool:
        """Announce what is computed, send what is asked for; True when a buffer is free."""
        for offer in list(self._offers):
            if not offer.announced and (offer.computed is None or offer.computed.query()):
                self._control.set(f"ready/{offer.index}", offer.header)
                offer.announced = True
            if offer.announced and self._control.has(f"go/{offer.index}"):
                self._free.append((offer.buffer, self._transport.send(offer.buffer, offer.rank)))
                self._offers.remove(offer)
                self._control.delete(f"ready/{offer.index}")
                self._control.delete(f"go/{offer.index}")
        return bool(self._free)

    def _awaited(self, what: str) -> str:
        pending = ", ".join(f"row {offer.index} to rank {offer.rank}" for offer in self._offers)
        return f"{what} ({pending})" if pending else what


@dataclass
class _Slot:
    buffer: torch.Tensor
    released: torch.cuda.Event | None = None


class RowReceiver:
    """The drafter's side: asks for the next rows as buffers come free, hands them out in order."""

    def __init__(
        self,
        layout: RowLayout,
        source: Callable[[int], int],
        device: torch.device,
        transport: Transport,
        control: Control,
        lifecycle: Lifecycle,
        depth: int = 2,
    ) -> None:
        self._layout, self._source, self._transport, self._device = layout, source, transport, device
        self._control, self._lifecycle, self._depth = control, lifecycle, depth
        self._free = deque(_Slot(layout.buffer(device)) for _ in range(depth + 1))
        self._coming: deque[tuple[int, _Slot, Callable[[], object]]] = deque()
        self._in_use: _Slot | None = None

    def prefetch(self, indices: Iterable[int]) -> None:
        """Ask, without waiting, for those of the coming rows `indices` (in order) that their targets have ready."""
        coming = [index for index, _, _ in self._coming]
        for index in indices:
            if index in coming:
                continue
            if len(self._coming) == self._depth or not self._request(index):
                return

    def take(self, index: int, timeout: float) -> RowBatch:
        """Row `index`; its buffer is the caller's until the next `take`, whatever is queued on the stream included."""
        if self._in_use is not None:
            if self._device.type == "cuda":
                self._in_use.released = _now()
            self._free.append(self._in_use)
        if not self._coming:
            what = f"row {index} from rank {self._source(index)}"
            self._lifecycle.wait_until(lambda: self._request(index), what, timeout, 0.001)
        found, self._in_use, finish = self._coming.popleft()
        assert found == index, f"rows are taken in order: asked for {index}, next is {found}"
        finish()
        return self._layout.batch(index, self._in_use.buffer)

    def _request(self, index: int) -> bool:
        header = self._control.get(f"ready/{index}")
        if header is None:
            return False
        source = self._source(index)
        self._layout.check(header, index, source)
        slot = self._free.popleft()
        self._control.set(f"go/{index}", True)
        self._coming.append((index, slot, self._transport.receive(slot.buffer, source, slot.released)))
        return True
