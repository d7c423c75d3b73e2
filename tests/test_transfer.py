"""Rows between a target and a drafter: two real gloo processes, and the checks of a row's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.control import Control
from launcher.transfer import GlooTransport, HeaderMismatch, RowLayout, RowReceiver, RowSender

LAYOUT = RowLayout(row_length=48, width=10, dtype=torch.bfloat16)
ROWS = 12


@dataclass
class StandIn:
    """Lifecycle's wait, for a test that must not hang."""

    def wait_until(self, ready: Any, what: str, timeout: float, interval: float = 0.002) -> None:
        import time

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


def run_pair(rank: int, port: int) -> None:
    control = Control("127.0.0.1", port, "test", timeout=20)
    dist.init_process_group("gloo", store=control.group_store("pg"), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    device, life = torch.device("cpu"), cast(Any, StandIn())
    transport = GlooTransport(dist.group.WORLD, device, 20)
    if rank == 0:
        sender = RowSender(LAYOUT, 2, device, transport, control, life)
        for index in range(ROWS):
            buffer = sender.slot(lambda: False, 20)
            assert buffer is not None
            LAYOUT.features(buffer).copy_(row(index)["features"])
            LAYOUT.ints(buffer).copy_(row(index)["ints"])
            LAYOUT.loss_mask(buffer).copy_(row(index)["loss_mask"])
            sender.offer(index, 1, buffer, LAYOUT.header(index, row(index)["ints"][0].numpy()))
        for _ in range(2):  # as before an evaluation and at the end
            sender.drain(lambda: False, 20)
    else:
        receiver = RowReceiver(LAYOUT, lambda index: 0, device, transport, control, life)
        for index in range(ROWS):
            batch = receiver.take(index, 20)
            receiver.prefetch(range(index + 1, min(index + 3, ROWS)))
            wanted = row(index)
            assert batch.index == index and batch.ids.dtype == torch.int64
            assert torch.equal(batch.features, wanted["features"])
            assert torch.equal(torch.stack([batch.ids, batch.doc, batch.positions]), wanted["ints"].long())
            assert torch.equal(batch.loss_mask, wanted["loss_mask"].bool())
    dist.barrier()
    dist.destroy_process_group()


def test_rows_arrive_whole_and_in_order() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    context = mp.spawn(run_pair, (server.server.port,), nprocs=2, join=False)
    assert context is not None
    while not context.join(timeout=60):
        pass
    assert not server.has("ready/0") and not server.has("go/0"), "the keys of a row go with it"


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


def test_stopping_gives_no_buffer() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    sender = RowSender(LAYOUT, 1, torch.device("cpu"), cast(Any, None), server, cast(Any, StandIn()))
    assert sender.slot(lambda: True, 5) is None
