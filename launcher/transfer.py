"""Feature rows from a target to a drafter: a ready message, an answer, then one message of bytes.

Nothing is posted before both sides are there: a pre-posted NCCL receive would spin on the drafter's SMs until the
sender comes. Memory is bounded on both sides: a target computes `slots` rows ahead, a drafter asks for DEPTH.

    target:  compute row m -> set ready/m ............. see go/m -> send
    drafter: buffer free and ready/m seen -> check the header -> set go/m -> receive -> check the ids -> train
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from launcher.control import Control
from launcher.meter import Clock, Mark, RowPace, has_passed, seconds_between
from launcher.row_layout import RowLayout
from launcher.transports import Arrival, Departure, Transport
from models.draft_step import RowBatch

# Rows that a drafter has on their way beside the one it trains on.
DEPTH = 2


class Waits(Protocol):
    """The part of `Lifecycle` that a transfer needs."""

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, interval: float = ...) -> None: ...


@dataclass
class _Offer:
    index: int
    rank: int
    buffer: torch.Tensor
    header: dict[str, Any]
    idle_from: Mark | None
    start: Mark
    end: Mark
    announced: bool = False

    def announcement(self) -> dict[str, Any]:
        """The header with what the row took; the device has computed it."""
        idle = 0.0 if self.idle_from is None else seconds_between(self.idle_from, self.start)
        return self.header | {"busy": seconds_between(self.start, self.end), "idle": idle}


class RowSender:
    """The target's side: up to `slots` rows computed ahead, sent as their drafters ask for them."""

    def __init__(
        self,
        layout: RowLayout,
        slots: int,
        device: torch.device,
        transport: Transport,
        control: Control,
        lifecycle: Waits,
    ) -> None:
        self._transport, self._control, self._lifecycle, self._clock = transport, control, lifecycle, Clock(device)
        # Buffers free for a next row once the last one has left them.
        with transport.memory():
            self._free = [(layout.buffer(device), Departure()) for _ in range(slots)]
        self._offers: list[_Offer] = []
        self._idle_from: Mark | None = None
        self._start = self._clock.mark()

    def slot(self, ended: Callable[[], bool], timeout: float) -> torch.Tensor | None:
        """A buffer to fill; waits while all are on their way. None once `ended()` says that the run stops."""
        self._lifecycle.wait_until(lambda: self._pump() or ended(), self._awaited("a free buffer"), timeout)
        if ended():
            return None
        buffer, sent = self._free.pop(next(place for place, (_, sent) in enumerate(self._free) if sent.gone()))
        sent.finish()
        self._start = self._clock.mark()
        return buffer

    def offer(self, index: int, rank: int, buffer: torch.Tensor, header: dict[str, Any]) -> None:
        """Put a buffer, filled since `slot` gave it, up for the drafter at `rank`."""
        end = self._clock.mark()
        self._offers.append(_Offer(index, rank, buffer, header, self._idle_from, self._start, end))
        self._idle_from = end
        self._pump()

    def drain(self, ended: Callable[[], bool], timeout: float) -> None:
        """Wait until every offered row is gone, or the run stops."""
        what = self._awaited("the last rows to be taken")
        self._lifecycle.wait_until(lambda: (self._pump() and not self._on_their_way()) or ended(), what, timeout)
        for place, (buffer, sent) in enumerate(self._free):
            if sent.gone():
                sent.finish()  # once only: a gloo send that has been waited for blocks a second wait
                self._free[place] = buffer, Departure()
        self._idle_from = None  # what follows is no wait for drafters: an evaluation, or the end

    def close(self, ended: Callable[[], bool], timeout: float) -> None:
        """Give the buffers back, after `drain`; where drafters have mapped them, once those have let go."""
        what = "the drafters to let go of the rows' memory"
        self._lifecycle.wait_until(lambda: self._transport.closable() or ended(), what, timeout)
        self._free.clear()
        self._transport.close()

    def _on_their_way(self) -> bool:
        return bool(self._offers) or not all(sent.gone() for _, sent in self._free)

    def _pump(self) -> bool:
        """Announce what is computed, send what is asked for; True when a buffer is free."""
        # A drafter takes what comes from here in the order it asked. Its asks of rows m and m + 1 may both come between
        # two looks, so while its row m is not seen to be asked for, no later one is looked at.
        holding: set[int] = set()
        for offer in list(self._offers):
            self._announce(offer)
            if offer.rank not in holding and offer.announced and self._control.has(f"go/{offer.index}"):
                self._send(offer)
            else:
                holding.add(offer.rank)
        return any(sent.gone() for _, sent in self._free)

    def _announce(self, offer: _Offer) -> None:
        if not offer.announced and has_passed(offer.end):
            place = self._transport.place(offer.buffer, offer.rank)
            self._control.set(f"ready/{offer.index}", offer.announcement() | place)
            offer.announced = True

    def _send(self, offer: _Offer) -> None:
        self._free.append((offer.buffer, self._transport.send(offer.buffer, offer.rank)))
        self._offers.remove(offer)
        self._control.delete(f"ready/{offer.index}")
        self._control.delete(f"go/{offer.index}")

    def _awaited(self, what: str) -> str:
        pending = ", ".join(f"row {offer.index} to rank {offer.rank}" for offer in self._offers)
        return f"{what} ({pending})" if pending else what


@dataclass
class _Slot:
    buffer: torch.Tensor
    released: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Coming:
    index: int
    slot: _Slot
    header: dict[str, Any]
    arrival: Arrival


class RowReceiver:
    """The drafter's side: asks for the next rows as buffers come free, hands them out in order."""

    def __init__(
        self,
        layout: RowLayout,
        source: Callable[[int], int],
        device: torch.device,
        transport: Transport,
        control: Control,
        lifecycle: Waits,
    ) -> None:
        self._layout, self._source, self._transport, self._device = layout, source, transport, device
        self._control, self._lifecycle = control, lifecycle
        self._free = deque(_Slot(layout.buffer(device)) for _ in range(DEPTH + 1))
        self._coming: deque[_Coming] = deque()
        self._in_use: _Slot | None = None
        self._paces: list[RowPace] = []

    def prefetch(self, indices: Iterable[int]) -> None:
        """Ask, without waiting, for those of the coming rows `indices` (in order) that their targets have ready."""
        coming = [row.index for row in self._coming]
        for index in indices:
            if index in coming:
                continue
            if len(self._coming) == DEPTH or not self._request(index):
                return

    def take(self, index: int, timeout: float) -> RowBatch:
        """Row `index`; its buffer is the caller's until the next `take`, whatever is queued on the stream included.

        Raises:
            HeaderMismatch: another row, shape, or other ids than were sent.
        """
        if self._in_use is not None:
            if self._device.type == "cuda":
                self._in_use.released = torch.cuda.Event()
                self._in_use.released.record()
            self._free.append(self._in_use)
        ready, source = len(self._coming), self._source(index)
        what = f"row {index} from rank {source}"
        if not self._coming:
            self._lifecycle.wait_until(lambda: self._request(index), what, timeout, 0.001)
        row = self._coming.popleft()
        self._in_use = row.slot
        assert row.index == index, f"rows are taken in order: asked for {index}, next is {row.index}"
        self._lifecycle.wait_until(row.arrival.ready, f"the bytes of {what}", timeout, 0.0002)
        self._layout.check_ids(row.header, row.arrival.finish(), index, source)
        self._paces.append(RowPace(row.header["busy"], row.header["idle"], ready))
        return self._layout.batch(index, row.slot.buffer)

    def drain(self, timeout: float) -> None:
        """Let the rows that were asked for arrive, to be dropped: a message half received would hold up the end."""
        for row in self._coming:
            self._lifecycle.wait_until(row.arrival.ready, f"the bytes of row {row.index}", timeout)
            row.arrival.finish()
        self._coming.clear()

    def close(self) -> None:
        """Let go of what the targets share; nothing is on its way, and no row is asked for any more."""
        self._transport.close()

    def paces(self) -> list[RowPace]:
        """How the rows taken since the last call came about."""
        paces, self._paces = self._paces, []
        return paces

    def _request(self, index: int) -> bool:
        header = self._control.get(f"ready/{index}")
        if header is None:
            return False
        source = self._source(index)
        self._layout.check(header, index, source)
        slot = self._free.popleft()
        self._control.set(f"go/{index}", True)
        arrival = self._transport.receive(slot.buffer, source, slot.released, self._layout.checksum, header)
        self._coming.append(_Coming(index, slot, header, arrival))
        return True
