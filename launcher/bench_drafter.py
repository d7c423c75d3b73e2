"""Measure the drafter's training step: the one that training runs, part by part, against what the device can do.

Several drafters train as in a run, on a GPU each; the first one's times are reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import DeviceMesh

from launcher.bench_timing import Marks, copy_rate, matmul_rate
from launcher.config_sections import TrainConfig
from launcher.control import Control
from launcher.drafter_step import DrafterStep
from launcher.plan_shapes import step_shape
from launcher.step_optimizers import DTYPES
from launcher.work_model import datasheet, step_work, update_bytes
from models.attention import choose_backend
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import BlockInputs, DraftForward, FrozenEnds, RowBatch
from models.loss import LossSums
from models.masks import context_bounds

PARTS = ("mask", "forward", "head+loss", "backward", "optimizer")
WARM_UP = 5
# Seconds for ranks to meet, one of which may still compile.
LIMIT = 600.0


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    config: DFlashConfig
    context: int
    anchors: int
    precision: str
    sharded: bool
    steps: int
    device: str
    drafters: int = 1
    """Ranks that train together; more than one need `sharded`."""


class MarkedForward(DraftForward):
    """The forward of training, with a mark behind each of its parts."""

    marks: Marks

    def block_inputs(self, batch: RowBatch) -> BlockInputs:
        inputs = super().block_inputs(batch)
        self.marks.mark()
        return inputs

    def hidden(self, batch: RowBatch, inputs: BlockInputs) -> Tensor:
        hidden = super().hidden(batch, inputs)
        self.marks.mark()
        return hidden

    def score(self, batch: RowBatch, inputs: BlockInputs, hidden: Tensor) -> LossSums:
        sums = super().score(batch, inputs, hidden)
        self.marks.mark()
        return sums


def bench_drafter(options: BenchOptions) -> dict[str, Any]:
    """All numbers of one shape: milliseconds, TFLOP/s, shares, rows per second, gigabytes. See `launcher.bench`."""
    control = Control("127.0.0.1", 0, "bench", serve=True)
    if options.drafters == 1:
        _rank(0, control.server.port, options)
    else:
        mp.spawn(_rank, (control.server.port, options), nprocs=options.drafters)
    return control.get("report")


def _rank(rank: int, port: int, options: BenchOptions) -> None:
    """One drafter; the first one leaves its report in the store."""
    torch.manual_seed(0)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    elif options.drafters > 1:
        torch.set_num_threads(1)
    control = Control("127.0.0.1", port, "bench", timeout=LIMIT)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=control.group_store("group"),
        rank=rank,
        world_size=options.drafters,
        timeout=timedelta(seconds=LIMIT),
    )
    try:
        report = _measure(options)
        if rank == 0:
            control.set("report", report)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(options: BenchOptions) -> dict[str, Any]:
    rate = matmul_rate(options.device, options.precision)
    bandwidth = copy_rate(options.device)
    marks = Marks(options.device)
    step, batch = _make_step(options, marks), _make_batch(options)
    started = time.perf_counter()
    _run(step, batch, marks, 0)
    _finish(options.device)
    first = time.perf_counter() - started
    for number in range(WARM_UP):
        _run(step, batch, marks, number)
    marks.steps.clear()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(options.steps):
        _run(step, batch, marks, number)
    *parts, whole = marks.medians()
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    visible = _visible(step, batch)
    return _report(options, dict(zip(PARTS, parts, strict=True)), whole, visible, rate, bandwidth, first, peak)


def _make_step(options: BenchOptions, marks: Marks) -> DrafterStep:
    backend = choose_backend("auto", options.device)
    train = TrainConfig.model_validate({"anchors": options.anchors, "precision": options.precision, "lr": 1e-5})
    config, dtype = options.config, DTYPES[options.precision]
    with torch.device(options.device):
        drafter = DFlashDrafter(config)
        ends = FrozenEnds(*(torch.randn(config.vocab_size, config.hidden_size).mul_(0.02).to(dtype) for _ in range(2)))
    if options.device == "cuda":
        drafter.compile_layers()

    def make_forward(drafter: DFlashDrafter) -> DraftForward:
        forward = MarkedForward(
            drafter, ends, anchors=options.anchors, backend=backend, float8=train.precision == "float8", seed=train.seed
        )
        forward.marks = marks
        return forward

    mesh = DeviceMesh(options.device, list(range(options.drafters)))
    return DrafterStep(drafter, make_forward, mesh, train, total_steps=10**6, sharded=options.sharded)


def _make_batch(options: BenchOptions) -> RowBatch:
    """One document over the whole row, all of it supervised: no slot is left without an anchor."""
    config, length = options.config, options.context
    with torch.device(options.device):
        return RowBatch(
            index=0,
            features=torch.randn(length, len(config.target_layer_ids) * config.hidden_size, dtype=torch.bfloat16).to(
                DTYPES[options.precision]
            ),
            ids=torch.randint(config.vocab_size, (length,)),
            loss_mask=torch.ones(length, dtype=torch.bool),
            doc=torch.zeros(length, dtype=torch.int32),
            positions=torch.arange(length),
        )


def _run(step: DrafterStep, batch: RowBatch, marks: Marks, number: int) -> None:
    marks.begin()
    step.accumulate(batch, last=True)
    marks.mark()
    step.update(number)
    marks.mark()


def _visible(step: DrafterStep, batch: RowBatch) -> float:
    """Mean context tokens that a block token sees: those of its document before its anchor."""
    low_N, high_N = context_bounds(DraftForward.block_inputs(step.forward, batch).anchors, batch.doc)
    return float((high_N - low_N).float().mean())


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _report(
    options: BenchOptions,
    parts: dict[str, float],
    whole: float,
    visible: float,
    rate: float,
    bandwidth: float,
    first: float,
    peak: int,
) -> dict[str, Any]:
    config = options.config
    work = step_work(step_shape(config, options.context, options.anchors, visible))
    operations = {"forward": work.forward, "head+loss": work.head, "backward": work.backward}
    floors = {name: count / rate * 1e3 for name, count in operations.items()}
    floors |= {
        "mask": 0.0,
        "optimizer": update_bytes(work.parameters, DTYPES[options.precision].itemsize) / bandwidth * 1e3,
    }
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    sheet = datasheet(gpu, options.precision)
    achieved = work.total / whole * 1e3
    return {
        "device": gpu,
        "torch": torch.__version__,
        "precision": options.precision,
        "sharded": options.sharded,
        "drafters": options.drafters,
        "context": options.context,
        "anchors": options.anchors,
        "block_size": config.block_size,
        "hidden": config.hidden_size,
        "layers": config.num_layers,
        "vocabulary": config.vocab_size,
        "parts_ms": {name: round(parts[name], 3) for name in PARTS},
        "floor_ms": {name: round(floors[name], 3) for name in PARTS},
        "step_ms": round(whole, 3),
        "tflop": round(work.total / 1e12, 6),
        "tflops": round(achieved / 1e12, 6),
        "matmul_tflops": round(rate / 1e12, 6),
        "share_of_matmul": round(achieved / rate, 4),
        "share_of_datasheet": None if sheet is None else round(achieved / 1e12 / sheet, 4),
        "copy_gbs": round(bandwidth / 1e9, 1),
        "rows_per_s": round(options.drafters * 1e3 / whole, 3),
        "peak_gb": round(peak / 1e9, 3),
        "first_step_s": round(first, 2),
        "furthest": max(PARTS, key=lambda name: parts[name] - floors[name]),
    }
