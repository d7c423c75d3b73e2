"""Rows between a target and a drafter: two real gloo processes, and the checks of a row's header."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from launcher.control import Control
from launcher.row_layout import HeaderMismatch, RowLayout, checksum_of
from launcher.transfer import RowReceiver, RowSender
from launcher.transports import Departure, GlooTransport, Transport
from models.draft_step import RowBatch
from tests.rank_pool import run_ranks

LAYOUT = RowLayout(row_length=48, width=10, dtype=torch.bfloat16)
ROWS, SLOTS = 12, 2


@dataclass
class StandIn:
    """Lifecycle's wait, for a test that must not hang."""

    def wait_until(self, ready: Any, what: str, timeout: float, interval: float = 0.002) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < deadline, f"waited for {what}"
            time.sleep(interval)


def row(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "features": torch.randn(48, 10, generator=generator).bfloat16(),
        "ints": torch.randint(-1, 50_000, (3, 48), generator=generator, dtype=torch.int32),
        "loss_mask": torch.randint(0, 2, (48,), generator=generator, dtype=torch.uint8),
    }


def fill(buffer: torch.Tensor, index: int) -> None:
    for part, value in row(index).items():
        getattr(LAYOUT, part)(buffer).copy_(value)


def check(batch: RowBatch, index: int) -> None:
    wanted = row(index)
    assert batch.index == index and batch.ids.dtype == torch.int64
    assert torch.equal(batch.features.cpu(), wanted["features"])
    assert torch.equal(torch.stack([batch.ids, batch.doc, batch.positions]).cpu(), wanted["ints"].long())
    assert torch.equal(batch.loss_mask.cpu(), wanted["loss_mask"].bool())


@dataclass(frozen=True)
class Pace:
    """Seconds that the sides take for a row, and a row whose ids are spoiled after its header was made."""

    target: float = 0.0
    drafter: float = 0.0
    spoiled: int | None = None

    @property
    def rows(self) -> int:
        return ROWS if self.spoiled is None else self.spoiled + 1


def run_pair(port: int, pace: Pace) -> None:
    control = Control("127.0.0.1", port, "test", timeout=20)
    assert dist.group.WORLD is not None
    device, life = torch.device("cpu"), cast(Any, StandIn())
    transport = GlooTransport(dist.group.WORLD, device, 20)
    if dist.get_rank() == 0:
        sender = RowSender(LAYOUT, SLOTS, device, transport, control, life)
        for index in range(pace.rows):
            buffer = sender.slot(lambda: False, 20)
            assert buffer is not None
            time.sleep(pace.target)
            fill(buffer, index)
            if index == pace.spoiled:
                LAYOUT.ints(buffer)[0, 7] += 1
            control.set(f"made/{index}", time.time())
            sender.offer(index, 1, buffer, LAYOUT.header(index, row(index)["ints"][0].numpy()))
        for _ in range(2):  # as before an evaluation and at the end
            sender.drain(lambda: False, 20)
    else:
        receive_all(RowReceiver(LAYOUT, lambda index: 0, device, transport, control, life), control, pace)
    dist.barrier()


def receive_all(receiver: RowReceiver, control: Control, pace: Pace) -> None:
    for index in range(pace.rows):
        if index == pace.spoiled:
            with pytest.raises(
                HeaderMismatch, match=rf"row {index} from rank 0: checksum of ids is -?\d+, expected -?"
            ):
                receiver.take(index, 20)
            return
        batch = receiver.take(index, 20)
        control.set(f"taken/{index}", time.time())
        receiver.prefetch(range(index + 1, min(index + 3, ROWS)))
        time.sleep(pace.drafter)
        check(batch, index)
    control.set("paces", [vars(pace) for pace in receiver.paces()])
    assert receiver.paces() == []


def play(pace: Pace) -> Control:
    """Run both sides to their end; returns the control plane with what they noted."""
    server = Control("127.0.0.1", 0, "test", serve=True)
    assert run_ranks(2, run_pair, server.server.port, pace) == [None, None]
    return server


def mean_of(paces: list[dict[str, float]], name: str) -> float:
    """Over the rows of the steady state."""
    return sum(pace[name] for pace in paces[4:]) / len(paces[4:])


def test_a_slow_drafter_holds_the_target_up_in_bounded_memory() -> None:
    noted = play(Pace(drafter=0.1))
    assert not noted.has("ready/0") and not noted.has("go/0"), "the keys of a row go with it"
    for index in range(ROWS):
        taken_before = [other for other in range(ROWS) if noted.get(f"taken/{other}") < noted.get(f"made/{index}")]
        # The rows of the sender's buffers, the two that the drafter asked for, and the one it works on.
        assert index - len(taken_before) < SLOTS + 3, f"row {index} was made with {taken_before} taken"
    paces = noted.get("paces")
    assert mean_of(paces, "idle") > 0.05 > mean_of(paces, "busy") and mean_of(paces, "ready") > 1.5


def test_a_slow_target_starves_the_drafter_and_shows_it() -> None:
    """A row leaves when the next one is announced, so the drafter may or may not see that one before it asks."""
    paces = play(Pace(target=0.1)).get("paces")
    assert mean_of(paces, "busy") > 0.09 > 0.05 > mean_of(paces, "idle") and mean_of(paces, "ready") < 1.5


def test_spoiled_ids_are_seen_before_the_row_is_used() -> None:
    play(Pace(spoiled=0))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"index": 4}, "row 3 from rank 2: index is 4, expected 3"),
        ({"width": 11}, "width is 11, expected 10"),
        ({"dtype": "torch.float32"}, "dtype is 'torch.float32', expected 'torch.bfloat16'"),
    ],
)
def test_a_header_that_differs_names_both_values(change: dict[str, Any], line: str) -> None:
    header = LAYOUT.header(3, np.arange(48, dtype=np.int32))
    LAYOUT.check(header, 3, 2)
    with pytest.raises(HeaderMismatch, match=line):
        LAYOUT.check(header | change, 3, 2)


@given(
    ids=arrays(np.int32, 48, elements=st.integers(0, 200_000)),
    place=st.integers(0, 47),
    other=st.integers(0, 47),
    change=st.integers(1, 1000),
)
def test_the_checksum_is_the_same_on_both_sides_and_sees_changes_and_swaps(
    ids: Any, place: int, other: int, change: int
) -> None:
    buffer = LAYOUT.buffer(torch.device("cpu"))
    LAYOUT.ints(buffer)[0].copy_(torch.as_tensor(ids))
    whole = checksum_of(ids)
    assert int(LAYOUT.checksum(buffer)) == whole == LAYOUT.header(0, ids)["ids"]
    changed, swapped = ids.copy(), ids.copy()
    changed[place] += change
    swapped[[place, other]] = ids[[other, place]]
    assert checksum_of(changed) != whole
    assert (checksum_of(swapped) == whole) == bool(ids[place] == ids[other] or place == other)


def test_stopping_gives_no_buffer() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    sender = RowSender(LAYOUT, 1, torch.device("cpu"), Sent(), server, cast(Any, StandIn()))
    assert sender.slot(lambda: True, 5) is None


class AsksBetweenLooks:
    """A control plane on which `late` keys come just after somebody has looked for `go/1` in vain."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.late: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        self.keys.add(key)

    def has(self, key: str) -> bool:
        seen = key in self.keys
        if key == "go/1":
            self.keys |= self.late
        return seen

    def delete(self, key: str) -> None:
        self.keys.remove(key)


@dataclass
class Sent(Transport):
    """A transport that notes the first byte of each row and who gets it."""

    way = "noted"
    rows: list[tuple[int, int]] = field(default_factory=list)

    def receive(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("it only sends")

    def send(self, buffer: torch.Tensor, rank: int) -> Departure:
        self.rows.append((int(buffer[0]), rank))
        return Departure()


def test_rows_leave_in_the_order_that_a_drafter_asks_for_them() -> None:
    control, transport = AsksBetweenLooks(), Sent()
    sender = RowSender(LAYOUT, 3, torch.device("cpu"), transport, cast(Any, control), cast(Any, StandIn()))
    for index, drafter in ((1, 7), (2, 8), (3, 7)):
        buffer = sender.slot(lambda: False, 5)
        assert buffer is not None
        sender.offer(index, drafter, buffer.fill_(index), {})
    control.late = {"go/1", "go/2", "go/3"}  # the sender sees 2 and 3 in the same round in which it missed 1
    sender.drain(lambda: False, 5)
    assert transport.rows == [(2, 8), (1, 7), (3, 7)], "another drafter is not held up"
