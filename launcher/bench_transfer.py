"""Measure the hand-off of rows between two ranks, by the code of training: bare, and behind a drafter's compute.

./launch.sh bench transfer [--shape qwen3-8b] [--context 3072] [--steps 50] [--share-gpus] [--json]

NCCL between two GPUs; CUDA IPC where they share one (through pinned host memory if that is forbidden, and then it says
so); gloo between CPU ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.control import Control
from launcher.errors import DeadlineError
from launcher.meter import Clock, seconds_between
from launcher.row_layout import RowLayout
from launcher.transfer import RowReceiver, RowSender
from launcher.transport_choice import make_transport
from launcher.work_model import find_gpu

LIMIT = 120.0
WARM_UP = 5
SLOTS = 2
# Compute behind which a transfer should vanish, as a multiple of the time that a row takes by itself.
COMPUTE = 2.0


@dataclass(frozen=True)
class TransferOptions:
    """Rows of `context` tokens with `width` features each; `shared`: both ranks on one GPU."""

    context: int
    width: int
    rows: int
    device: str
    shared: bool

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.context, self.width, torch.float32 if self.device == "cpu" else torch.bfloat16)

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" and not self.shared else "gloo"


class _Patience:
    """Waits as `Lifecycle` does, without a run around it."""

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, interval: float = 0.002) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {timeout:.0f} s for {what}", "see the other rank's error above")
            time.sleep(interval)


def bench_transfer(options: TransferOptions) -> dict[str, Any]:
    """Milliseconds and GB/s of a row, and what of it a drafter waits for that computes meanwhile."""
    control = Control("127.0.0.1", 0, "bench", serve=True)
    mp.spawn(_rank, (control.server.port, options), nprocs=2)
    bare, behind, compute = control.get("bare"), control.get("behind"), control.get("compute")
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    size = options.layout.nbytes
    return {
        "device": gpu,
        "torch": torch.__version__,
        "backend": options.backend,
        "way": control.get("way"),
        **asdict(options),
        "row_mb": round(size / 1e6, 3),
        "row_ms": round(bare * 1e3, 3),
        "row_median_ms": round(control.get("median") * 1e3, 3),
        "gbs": round(size / bare / 1e9, 3),
        **share_of_link(gpu, options.backend, size / bare),
        "rows_per_s": round(1 / bare, 1),
        "compute_ms": round(compute * 1e3, 3),
        "wait_ms_behind_compute": round(behind * 1e3, 3),
        "hidden": round(1 - min(1.0, behind / bare), 3),
    }


def share_of_link(gpu: str, backend: str, rate: float) -> dict[str, float | None]:
    """The link between two GPUs by its datasheet, and the share that `rate` bytes per second are of it.

    None where the GPU is not known, or rows do not leave it.
    """
    sheet = find_gpu(gpu) if backend == "nccl" else None
    if sheet is None:
        return {"link_gbs": None, "share_of_link": None}
    return {"link_gbs": sheet.link_gbs, "share_of_link": round(rate / 1e9 / sheet.link_gbs, 4)}


def transfer_table(report: dict[str, Any]) -> str:
    """The report for people."""
    link = report["link_gbs"]
    share = f" ({report['share_of_link']:.0%} of the link's datasheet, {link:.0f})" if link else ""
    return (
        f"{report['device']}, torch {report['torch']}, {report['way']}"
        f"{' on one GPU' if report['shared'] else ''}: rows of {report['row_mb']:.1f} MB\n"
        f"bare: {report['row_ms']:.2f} ms a row (median {report['row_median_ms']:.2f}), {report['gbs']:.2f} GB/s"
        f"{share}, {report['rows_per_s']:.0f} rows/s\n"
        f"behind {report['compute_ms']:.1f} ms of compute a row: {report['wait_ms_behind_compute']:.2f} ms of waiting"
        f" ({report['hidden']:.0%} hidden)"
    )


def _rank(rank: int, port: int, options: TransferOptions) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", 0 if options.shared else rank)
        torch.cuda.set_device(device)
    control = Control("127.0.0.1", port, "bench", timeout=LIMIT)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group(options.backend, store=control.group_store("group"), rank=rank, world_size=2, timeout=limit)
    try:
        (_send if rank == 0 else _receive)(options, device, control)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _send(options: TransferOptions, device: torch.device, control: Control) -> None:
    assert dist.group.WORLD is not None
    transport = make_transport(options.backend, dist.group.WORLD, device, LIMIT, control)
    sender = RowSender(options.layout, SLOTS, device, transport, control, _Patience())
    row = torch.arange(options.context, dtype=torch.int32)
    for index in range(2 * (WARM_UP + options.rows)):
        buffer = sender.slot(lambda: False, LIMIT)
        assert buffer is not None, "it is given out until the end"
        options.layout.ints(buffer)[0].copy_(row, non_blocking=True)
        sender.offer(index, 1, buffer, options.layout.header(index, row.numpy()))
    sender.drain(lambda: False, LIMIT)
    sender.close(lambda: False, LIMIT)


def _receive(options: TransferOptions, device: torch.device, control: Control) -> None:
    assert dist.group.WORLD is not None
    transport = make_transport(options.backend, dist.group.WORLD, device, LIMIT, control)
    receiver = RowReceiver(options.layout, lambda index: 0, device, transport, control, _Patience())
    count = WARM_UP + options.rows
    whole, middle, _ = _take_rows(receiver, Clock(device), range(count), lambda: None)
    control.set("bare", whole)
    control.set("median", middle)
    compute = _busy(device, COMPUTE * whole)
    *_, waits = _take_rows(receiver, Clock(device), range(count, 2 * count), compute)
    receiver.close()
    control.set("way", transport.way)
    control.set("compute", COMPUTE * whole)
    control.set("behind", waits)


def _take_rows(
    receiver: RowReceiver, clock: Clock, indices: range, compute: Callable[[], None]
) -> tuple[float, float, float]:
    """Seconds of a row by mean and by median, and mean seconds waited for it, after the warm-up, on the device's clock.

    Rates go by the mean: of several rows in flight some come at once, and the median leaves the wait for those out.
    """
    marks = []
    for index in indices:
        before = clock.mark()
        receiver.take(index, LIMIT)
        marks.append((before, clock.mark()))
        receiver.prefetch(range(index + 1, min(index + 3, indices.stop)))
        compute()
    counted = marks[WARM_UP:]
    ends = [marks[WARM_UP - 1][1], *(end for _, end in counted)]
    periods = [seconds_between(*pair) for pair in pairwise(ends)]
    return mean(periods), median(periods), mean(seconds_between(*pair) for pair in counted)


def _busy(device: torch.device, seconds: float) -> Callable[[], None]:
    """Work of about `seconds`: matrix products on a GPU, which leave the host free, or a sleep."""
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    clock = Clock(device)
    for _ in range(3):
        start = clock.mark()
        _ = square @ square
        end = clock.mark()
    count = max(1, round(seconds / seconds_between(start, end)))

    def multiply() -> None:
        for _ in range(count):
            _ = square @ square

    return multiply
