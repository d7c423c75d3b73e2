"""Rows through memory that two processes share: one target and two drafters, with host memory in a GPU's place."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from launcher.control import Control
from launcher.ipc_imports import Imports
from launcher.ipc_memory import outside_expandable_segments
from launcher.ipc_transport import IpcTransport
from launcher.transfer import RowReceiver, RowSender
from launcher.transports import GlooTransport
from tests.rank_pool import run_ranks
from tests.shared_files import SharedFiles, heard
from tests.test_transfer import LAYOUT, ROWS, SLOTS, StandIn, check, fill, row

DRAFTERS = 2
CPU = torch.device("cpu")


@dataclass
class Seen:
    """What one rank saw of a run."""

    way: str
    warnings: list[str]
    exports: int
    opened: int
    left: list[str]


def run_rank(port: int, forbidden: str, delay: float) -> Seen:
    rank, memory, warnings = dist.get_rank(), SharedFiles(forbidden, delay), list[str]()
    control = Control("127.0.0.1", port, "test", timeout=20)
    assert dist.group.WORLD is not None
    transport = IpcTransport(GlooTransport(dist.group.WORLD, CPU, 20), memory, control, rank, 20)
    with heard(warnings):
        if rank == 0:
            send_rows(RowSender(LAYOUT, SLOTS, CPU, transport, control, cast(Any, StandIn())), transport)
        else:
            take_rows(RowReceiver(LAYOUT, lambda index: 0, CPU, transport, control, cast(Any, StandIn())), rank)
    left = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    return Seen(transport.way, warnings, memory.exports, memory.opened, left)


def send_rows(sender: RowSender, transport: IpcTransport) -> None:
    for index in range(ROWS):
        buffer = sender.slot(lambda: False, 20)
        assert buffer is not None
        fill(buffer, index)
        sender.offer(index, 1 + index % DRAFTERS, buffer, LAYOUT.header(index, row(index)["ints"][0].numpy()))
    sender.drain(lambda: False, 20)
    if transport.way == "CUDA IPC":
        assert not transport.closable(), "the drafters map the rows until all have come to the barrier"
    dist.barrier()
    sender.close(lambda: False, 20)


def take_rows(receiver: RowReceiver, rank: int) -> None:
    mine = range(rank - 1, ROWS, DRAFTERS)
    for place, index in enumerate(mine):
        batch = receiver.take(index, 20)
        receiver.prefetch(mine[place + 1 : place + 3])
        check(batch, index)
    dist.barrier()
    receiver.close()


def play(forbidden: str = "", delay: float = 0.0) -> list[Seen]:
    server = Control("127.0.0.1", 0, "test", serve=True)
    seen = run_ranks(1 + DRAFTERS, run_rank, server.server.port, forbidden, delay)
    assert all(isinstance(one, Seen) for one in seen), seen
    return seen


def test_rows_are_copied_out_of_the_targets_own_buffers_each_mapped_once() -> None:
    """A target that refilled a buffer before the late copy of it ran would spoil the row: `check` sees that."""
    target, *drafters = play(delay=0.02)
    assert {one.way for one in (target, *drafters)} == {"CUDA IPC"}
    assert target.exports <= DRAFTERS * (SLOTS + 1) < ROWS and not target.warnings
    assert target.left == [], "its memory goes once the drafters have let go"
    for drafter in drafters:
        assert drafter.opened <= SLOTS + 1 and not drafter.warnings
    assert sum(drafter.opened for drafter in drafters) == target.exports, "torch counts each export as one mapping"


@pytest.mark.parametrize(
    ("forbidden", "reason"),
    [
        ("export", "rank 0 cannot export memory: export: operation not permitted"),
        ("open", r"rank \d cannot map memory of rank 0: open: operation not permitted"),
        ("read", r"rank \d reads other bytes in the memory of rank 0 than lie there"),
    ],
)
def test_where_memory_cannot_be_shared_rows_go_through_the_host_and_one_warning_says_why(
    forbidden: str, reason: str
) -> None:
    seen = play(forbidden)
    assert {one.way for one in seen} == {"gloo"}
    (warning,) = [line for one in seen for line in one.warnings]
    assert warning.startswith("CUDA IPC cannot be used, rows between ranks that share GPUs go through the host: ")
    assert re.search(reason + "$", warning)


def sender_to_a_silent_drafter(server: Control) -> RowSender:
    """A target whose one row was asked for, by a drafter that can map it and never says that it copied it."""
    transport = IpcTransport(cast(Any, None), SharedFiles(), server, 0, 1)
    sender = RowSender(LAYOUT, 1, CPU, transport, server, cast(Any, StandIn()))
    server.set("ipc/0/1/answer", {"refused": None})
    server.set("go/0", True)
    buffer = sender.slot(lambda: False, 1)
    assert buffer is not None
    sender.offer(0, 1, buffer, {})
    return sender


def test_a_buffer_is_not_given_out_while_the_drafter_may_still_read_it() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    sender = sender_to_a_silent_drafter(server)
    with pytest.raises(AssertionError, match="waited for a free buffer"):
        sender.slot(lambda: False, 0.2)
    server.set("ipc/0/1/copied/0", True)
    assert sender.slot(lambda: False, 1) is not None
    assert not server.has("ipc/0/1/copied/0"), "the key of a row goes with it"


def test_a_run_that_stops_does_not_wait_for_copies_or_mappings() -> None:
    sender = sender_to_a_silent_drafter(Control("127.0.0.1", 0, "test", serve=True))
    sender.drain(lambda: True, 1)
    sender.close(lambda: True, 1)


def test_a_drafter_that_never_answers_is_given_up_by_name() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    transport = IpcTransport(cast(Any, None), SharedFiles(), server, 0, 0.1)
    sender = RowSender(LAYOUT, 1, CPU, transport, server, cast(Any, StandIn()))
    buffer = sender.slot(lambda: False, 1)
    assert buffer is not None
    server.set("go/0", True)
    with pytest.raises(Exception, match="rank 1 to say whether it can map the memory of rank 0"):
        sender.offer(0, 1, buffer, {})


class Broken:
    """A copy that the device could not run."""

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError("an illegal memory access")

    def finish(self) -> int:
        return 0


def test_a_copy_that_fails_ends_the_drafter_at_its_next_row_and_is_told_at_once() -> None:
    server, lines = Control("127.0.0.1", 0, "test", serve=True), list[str]()
    imports = Imports(SharedFiles(), server, 1, 1)
    with heard(lines):
        imports.tell_when(Broken(), 0, {"row": 0})
        deadline = time.monotonic() + 5
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lines == ["cannot tell a target that its row was copied: an illegal memory access"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        imports.tell_when(Broken(), 0, {"row": 1})
    assert not server.has("ipc/0/1/copied/0")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_is_exported_lies_outside_expandable_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said = "max_split_size_mb:128,expandable_segments:True", []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    with pytest.raises(MemoryError), outside_expandable_segments():
        assert said == ["max_split_size_mb:128,expandable_segments:False"]
        raise MemoryError
    assert said[1:] == [settings]
