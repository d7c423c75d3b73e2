"""Two processes that hand rows over on GPUs, by CUDA IPC and through the host; imported without touching a GPU."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.control import Control
from launcher.ipc_memory import CudaMemory, Words
from launcher.ipc_transport import IpcTransport
from launcher.row_layout import RowLayout
from launcher.transfer import RowReceiver, RowSender
from launcher.transports import GlooTransport, Transport
from tests.shared_files import heard
from tests.test_transfer import StandIn

LAYOUT = RowLayout(row_length=3072, width=5 * 4096, dtype=torch.bfloat16)
LIMIT, WARM_UP, ROWS, SLOTS = 60, 4, 24, 2


class Forbidden(CudaMemory):
    """A system that lets nobody map memory of another process."""

    def open(self, words: Words) -> torch.Tensor:
        raise RuntimeError("mapping: operation not permitted")


def hand_over(visible: list[str], forbidden: bool = False) -> list[dict[str, Any]]:
    """Send rows by IPC, then through the host. What the sender and the receiver saw of it.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the two ranks.
    """
    server = Control("127.0.0.1", 0, "test", serve=True)
    mp.spawn(_rank, (server.server.port, visible, forbidden), nprocs=2)
    return [server.get(f"seen/{rank}") for rank in range(2)]


def _rank(rank: int, port: int, visible: list[str], forbidden: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    control = Control("127.0.0.1", port, "test", timeout=LIMIT)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", store=control.group_store("group"), rank=rank, world_size=2, timeout=limit)
    assert dist.group.WORLD is not None
    host = GlooTransport(dist.group.WORLD, device, LIMIT)
    shared = IpcTransport(host, (Forbidden if forbidden else CudaMemory)(device), control, rank, LIMIT)
    side, warnings, seconds = (_send, _take)[rank], list[str](), list[float]()
    with heard(warnings):
        for number, transport in enumerate((shared, host)):
            rows = range(number * ROWS, (number + 1) * ROWS)
            seconds.append(side(transport, rows, device, control))
    left = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    seen = {"way": shared.way, "warnings": warnings, "seconds": seconds, "left_in_shm": left}
    control.set(f"seen/{rank}", seen)
    dist.barrier()
    dist.destroy_process_group()


def _send(transport: Transport, rows: range, device: torch.device, control: Control) -> float:
    sender = RowSender(LAYOUT, SLOTS, device, transport, control, cast(Any, StandIn()))
    for index in rows:
        _offer(sender, index)
    sender.drain(lambda: False, LIMIT)
    sender.close(lambda: False, LIMIT)
    return 0.0


def _offer(sender: RowSender, index: int) -> None:
    buffer = sender.slot(lambda: False, LIMIT)
    assert buffer is not None
    ids = torch.arange(index, index + LAYOUT.row_length, dtype=torch.int32)
    LAYOUT.features(buffer).fill_(index)
    LAYOUT.ints(buffer)[0].copy_(ids)
    sender.offer(index, 1, buffer, LAYOUT.header(index, ids.numpy()))


def _take(transport: Transport, rows: range, device: torch.device, control: Control) -> float:
    """Seconds of a row, each looked at as a whole on the GPU."""
    receiver = RowReceiver(LAYOUT, lambda index: 0, device, transport, control, cast(Any, StandIn()))
    start = 0.0
    for index in rows:
        if index == rows.start + WARM_UP:
            start = time.perf_counter()
        batch = receiver.take(index, LIMIT)
        receiver.prefetch(range(index + 1, min(index + 3, rows.stop)))
        assert torch.equal(batch.features, torch.full_like(batch.features, index)), f"row {index} has other features"
        assert torch.equal(batch.ids, torch.arange(index, index + LAYOUT.row_length, device=device))
    seconds = (time.perf_counter() - start) / (len(rows) - WARM_UP)
    receiver.close()
    return seconds
