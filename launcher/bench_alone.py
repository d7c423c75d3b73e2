"""One side of a run by itself: the target's forward and the drafter's step on a run's own rows, nothing in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from launcher.bench_timing import matmul_rate
from launcher.config import Config
from launcher.data import PackedRows, prepare_rows, row_order
from launcher.meter import Clock, seconds_between
from launcher.packing import Row
from launcher.rank import Models, compute_dtype, describe_models, to_compute
from launcher.row_layout import RowLayout
from launcher.step_factory import StepFactory
from models.target import load_tapped_target
from models.target_ends import load_frozen_ends
from models.target_files import user_cache

WARM_UP = 3


@dataclass(frozen=True)
class Alone:
    """Rows per second of each side, and of matrix products in its precision the operations per second."""

    target_rows: float
    drafter_rows: float
    gpu: str
    torch: str
    target_matmul: float
    drafter_matmul: float
    visible: float
    """Mean tokens of its document that a token sees, itself among them."""


def measure_alone(config: Config, rows: int) -> Alone:
    """Both sides, one after the other, on this process's device.

    Args:
        config: settled for the device, of one target and one drafter.
        rows: how many rows each side does after its warm-up.
    """
    device = torch.device("cuda:0" if config.runtime.device == "cuda" else "cpu")
    models = describe_models(config)
    packed = prepare_rows(config.data, models.tokenizer, user_cache())
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    number = "float32" if models.layout.dtype == torch.float32 else "bf16"
    target_rate, drafter_rate = (matmul_rate(device.type, precision) for precision in (number, config.train.precision))
    target = target_alone(config, models, packed, device, rows)
    gc.collect()
    drafter = drafter_alone(config, models, packed, device, rows)
    seen = mean(float(_row(packed, config.train.seed, WARM_UP + index).positions.mean()) + 1 for index in range(rows))
    return Alone(target, drafter, gpu, torch.__version__, target_rate, drafter_rate, seen)


def target_alone(config: Config, models: Models, packed: PackedRows, device: torch.device, rows: int) -> float:
    """Rows per second of the forward, as a target rank runs it."""
    layout = models.layout
    target = load_tapped_target(models.folder, models.drafter.target_layer_ids, layout.dtype, device)
    if config.target.attention == "flex":
        target.use_packed_attention()
    if config.target.compile:
        target.compile_layers()
    buffer = layout.buffer(device)

    def run(index: int) -> None:
        _fill(layout, buffer, packed, config.train.seed, index)
        batch = layout.batch(index, buffer)
        target(batch.ids, batch.doc, batch.positions, out=batch.features)

    return _rate(run, device, rows)


def drafter_alone(config: Config, models: Models, packed: PackedRows, device: torch.device, rows: int) -> float:
    """Rows per second of the training step, as the only drafter runs it; its features are random."""
    layout, dtype = models.layout, compute_dtype(config)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ends = load_frozen_ends(models.folder, dtype, device, config.target.trust_remote_code)
        factory = StepFactory(config, models.drafter, ends, device)
        step = factory.build(DeviceMesh(device.type, [0]), 10**6, sharded=False)
        buffer = layout.buffer(device)
        layout.features(buffer).normal_()

        def run(index: int) -> None:
            _fill(layout, buffer, packed, config.train.seed, index)
            step.accumulate(to_compute(layout.batch(index, buffer), dtype), last=True)
            step.update(index)

        return _rate(run, device, rows)
    finally:
        dist.destroy_process_group()


def _fill(layout: RowLayout, buffer: torch.Tensor, packed: PackedRows, seed: int, index: int) -> None:
    layout.write(buffer, _row(packed, seed, index))


def _row(packed: PackedRows, seed: int, index: int) -> Row:
    return packed.row(row_order(len(packed), seed, index))


def _rate(run: Callable[[int], None], device: torch.device, rows: int) -> float:
    clock = Clock(device)
    for index in range(WARM_UP):
        run(index)
    start = clock.mark()
    for index in range(WARM_UP, WARM_UP + rows):
        run(index)
    return rows / seconds_between(start, clock.mark())
