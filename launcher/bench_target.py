"""Measure the target's forward over a packed row: stock transformers, ours uncompiled, ours compiled.

Stock is the whole decoder in eager mode with all its hidden states, as a trainer without this launcher would run it.
Ours stops at the last tap and writes the features where they will be sent from.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from launcher.bench_timing import Marks, matmul_rate
from launcher.step_optimizers import DTYPES
from launcher.work_model import TargetShape, datasheet
from models.dflash import default_layer_ids
from models.target import TappedTarget, token_errors
from models.target_random import RandomWeights
from models.target_weights import cut_config

WARM_UP = 3


@dataclass(frozen=True)
class TargetOptions:
    """What to measure; `documents` share the row, each half as long as the one before."""

    config: PreTrainedConfig
    context: int
    documents: int
    taps: int
    attention: str
    precision: str
    steps: int
    device: str


@dataclass(frozen=True)
class Timing:
    """One way to run the row: milliseconds, its first call in seconds, bytes at its peak, features or None."""

    ms: float
    first_s: float
    peak: int
    features: Tensor | None


def bench_target(options: TargetOptions) -> dict[str, Any]:
    """All numbers of one shape: milliseconds and TFLOP/s of each way, tokens and rows per second, gigabytes."""
    torch.manual_seed(0)
    rate = matmul_rate(options.device, options.precision)
    row = make_row(options)
    depth = options.config.num_hidden_layers
    layer_ids = default_layer_ids(depth, min(options.taps, depth))
    stock = _measure(_stock(options, row), options)
    target = _target(options, layer_ids)
    out = torch.empty(options.context, len(layer_ids) * target.hidden_size, dtype=target.decoder.dtype).to(
        row[0].device
    )
    eager = _measure(lambda: target(*row, out=out), options)
    if options.attention == "flex":
        target.use_packed_attention()
    target.compile_layers()
    compiled = _measure(lambda: target(*row, out=out), options)
    assert eager.features is not None and compiled.features is not None
    error = float(token_errors(compiled.features, eager.features).mean())
    timings = {"stock eager": stock, "ours eager": eager, "ours compiled": compiled}
    layers = {"stock eager": depth, "ours eager": len(target.layers), "ours compiled": len(target.layers)}
    return _report(options, layer_ids, timings, layers, rate, error, float(row[2].float().mean()) + 1)


def make_row(options: TargetOptions) -> tuple[Tensor, Tensor, Tensor]:
    """ids, doc and positions of a full row of `documents`."""
    lengths, left = [], options.context
    for _ in range(options.documents - 1):
        lengths.append(left // 2)
        left -= lengths[-1]
    lengths.append(left)
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.randint(options.config.vocab_size, (options.context,))
    return ids.to(options.device), doc.to(options.device), positions.to(options.device)


def _stock(options: TargetOptions, row: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    model = _build(options, options.config)
    ids, _, positions = row

    @torch.no_grad()
    def run() -> None:
        model(input_ids=ids[None], position_ids=positions[None], use_cache=False, output_hidden_states=True)

    return run


def _target(options: TargetOptions, layer_ids: list[int]) -> TappedTarget:
    return TappedTarget(_build(options, cut_config(options.config, max(layer_ids) + 1)), layer_ids)


def _build(options: TargetOptions, config: PreTrainedConfig) -> Any:
    return (
        RandomWeights(seed=0).build(AutoModel, config, DTYPES[options.precision], torch.device(options.device)).eval()
    )


def _measure(run: Callable[[], Tensor | None], options: TargetOptions) -> Timing:
    """Time `run` after a warm-up; what an earlier way held is given back first."""
    cuda = options.device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks, started = Marks(options.device), time.perf_counter()
    features = run()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - started
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            marks.steps.clear()
        marks.begin()
        run()
        marks.mark()
    ms = marks.medians()[-1]
    return Timing(
        ms, first, torch.cuda.max_memory_allocated() if cuda else 0, None if features is None else features.clone()
    )


def _report(
    options: TargetOptions,
    layer_ids: list[int],
    timings: dict[str, Timing],
    layers: dict[str, int],
    rate: float,
    error: float,
    visible: float,
) -> dict[str, Any]:
    work = {name: _shape(options.config, count).operations(options.context, visible) for name, count in layers.items()}
    tflops = {name: work[name] / timing.ms / 1e9 for name, timing in timings.items()}
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    sheet, best = datasheet(gpu, options.precision), timings["ours compiled"]
    floors = {name: work[name] / rate * 1e3 for name in timings}
    return {
        "device": gpu,
        "torch": torch.__version__,
        "precision": options.precision,
        "attention": options.attention,
        "context": options.context,
        "documents": options.documents,
        "layer_ids": list(layer_ids),
        "layers": layers,
        "parts_ms": {name: round(timing.ms, 3) for name, timing in timings.items()},
        "floor_ms": {name: round(floor, 3) for name, floor in floors.items()},
        "part_tflops": {name: round(value, 6) for name, value in tflops.items()},
        "part_peak_gb": {name: round(timing.peak / 1e9, 3) for name, timing in timings.items()},
        "tflop": round(work["ours compiled"] / 1e12, 6),
        "tflops": round(tflops["ours compiled"], 6),
        "matmul_tflops": round(rate / 1e12, 6),
        "share_of_matmul": round(tflops["ours compiled"] * 1e12 / rate, 4),
        "share_of_datasheet": None if sheet is None else round(tflops["ours compiled"] / sheet, 4),
        "tokens_per_s": round(options.context / best.ms * 1e3, 1),
        "rows_per_s": round(1e3 / best.ms, 3),
        "peak_gb": round(best.peak / 1e9, 3),
        "first_call_s": round(best.first_s, 2),
        "feature_error": error,
        "furthest": max(timings, key=lambda name: timings[name].ms - floors[name]),
    }


def _shape(config: PreTrainedConfig, layers: int) -> TargetShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TargetShape(
        hidden=config.hidden_size,
        intermediate=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        vocabulary=config.vocab_size,
        experts=_experts(config) or 1,
        experts_per_token=getattr(config, "num_experts_per_tok", None) or 1,
        layers=layers,
        query_width=config.num_attention_heads * head_dim,
        key_width=config.num_key_value_heads * head_dim,
    )


def _experts(config: PreTrainedConfig) -> int | None:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)


def target_table(report: dict[str, Any]) -> str:
    """The report for people."""
    sheet = report["share_of_datasheet"]
    parts = ("layers", "parts_ms", "floor_ms", "part_tflops", "part_peak_gb")
    rows = [(name, *(report[part][name] for part in parts)) for name in report["parts_ms"]]
    return "\n".join(
        [
            f"{report['device']}, torch {report['torch']}, {report['precision']}: {report['shape']},"
            f" {report['context']} tokens in {report['documents']} documents, taps {report['layer_ids']},"
            f" attention {report['attention']}",
            f"{'way':<15}{'layers':>7}{'ms':>9}{'floor':>9}{'TFLOP/s':>9}{'GB':>7}",
            *(
                f"{name:<15}{n:>7}{ms:>9.2f}{floor:>9.2f}{rate:>9.4g}{gb:>7.1f}"
                for name, n, ms, floor, rate, gb in rows
            ),
            f"compiled: {report['share_of_matmul']:.0%} of the measured {report['matmul_tflops']:.4g} TFLOP/s"
            + (f", {sheet:.0%} of the datasheet" if sheet else "")
            + f"; features differ from eager by {report['feature_error']:.1e}",
            f"{report['tokens_per_s']:,.0f} tok/s, {report['rows_per_s']:.3g} rows/s, first call"
            f" {report['first_call_s']:.1f} s; furthest from its floor: {report['furthest']}",
        ]
    )
