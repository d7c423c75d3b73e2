"""The command `bench`: how fast the parts of training run on this machine, against what it can do.

./launch.sh bench drafter [--shape qwen3-8b] [--context 3072] [--anchors 512] [--precision float8] [--json]
./launch.sh bench target [--shape qwen3-8b] [--context 3072] [--documents 3] [--json]
./launch.sh bench transfer [--shape qwen3-8b] [--context 3072] [--share-gpus] [--json]
./launch.sh bench pipeline [--shape qwen3-8b] [--steps 200] [--share-gpus] [--json]

On CPU a tiny shape runs by default. The first step is compiled from nothing, in a cache of its own, unless --warm.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.bench_pipeline import PipelineOptions, bench_pipeline, pipeline_table
from launcher.command_parser import CommandParser, at_least
from launcher.errors import UserError
from launcher.gpus import gpu_uuids
from launcher.runtime import RankEnv, choose_device

if TYPE_CHECKING:
    from launcher.bench_alone import Alone
    from launcher.config import Config

DEFAULTS = {"cuda": ("qwen3-8b", 3072, 512, 20), "cpu": ("tiny", 256, 16, 5)}
TRANSFERS, PIPELINE_STEPS = 50, 200
COUNT = at_least(1)


def main(args: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser("bench", description="measure a part of training on this machine")
    parts = parser.add_subparsers(dest="part", required=True)
    drafter = parts.add_parser("drafter", help="the drafter's training step, part by part")
    _common_options(drafter, ("bf16", "float32", "float8"))
    drafter.add_argument("--anchors", type=COUNT, help="blocks of a row")
    drafter.add_argument("--layers", type=COUNT, default=5, help="draft layers")
    drafter.add_argument("--block-size", type=at_least(2), default=16, help="tokens of a block")
    drafter.add_argument("--sharded", action="store_true", help="FSDP2, as with several drafters")
    drafter.add_argument("--drafters", type=COUNT, default=1, help="drafters that train together, on a GPU each")
    target = parts.add_parser("target", help="the target's forward: stock transformers, uncompiled, compiled")
    _common_options(target, ("bf16", "float32"))
    target.add_argument("--documents", type=COUNT, default=3, help="documents of a row")
    target.add_argument("--taps", type=COUNT, default=5, help="tapped layers")
    target.add_argument("--attention", default="flex", choices=("flex", "sdpa"))
    transfer = parts.add_parser("transfer", help="rows from one rank to another, bare and behind compute")
    _common_options(transfer, ("bf16", "float32"))
    transfer.add_argument("--taps", type=COUNT, default=5, help="tapped layers")
    transfer.add_argument("--share-gpus", action="store_true", help="both ranks on one GPU")
    pipeline = parts.add_parser("pipeline", help="one target and one drafter, against each of them alone")
    _common_options(pipeline, ("bf16", "float32", "float8"))
    pipeline.add_argument("--anchors", type=COUNT, help="blocks of a row")
    pipeline.add_argument("--layers", type=COUNT, default=5, help="draft layers")
    pipeline.add_argument("--block-size", type=at_least(2), default=16, help="tokens of a block")
    pipeline.add_argument("--share-gpus", action="store_true", help="both ranks on one GPU")
    chosen = parser.parse_args(args)
    measure, show = {
        "drafter": (_drafter, table),
        "target": (_target, _target_table),
        "transfer": (_transfer, _transfer_table),
        "pipeline": (_pipeline, pipeline_table),
    }[chosen.part]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with _compile_cache(chosen.warm):
        try:
            report = measure(chosen)
        except ValueError as error:
            raise UserError(f"bench {chosen.part}: {error}") from error
    print(json.dumps(report) if chosen.json else show(report))
    return 0


def _common_options(part: argparse.ArgumentParser, precisions: tuple[str, ...]) -> None:
    part.add_argument("--shape", help="target shape: qwen3-8b, qwen3-14b, tiny or a config.json")
    part.add_argument("--context", type=COUNT, help="context tokens of a row")
    part.add_argument("--precision", default="bf16", choices=precisions)
    part.add_argument("--steps", type=COUNT, help="measured steps, after a warm-up")
    part.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    part.add_argument("--warm", action="store_true", help="use the compile cache of the environment")
    part.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _device(requested: str) -> str:
    """The kind of device; this process sees only one GPU from here on. Before torch is imported."""
    device = choose_device(requested, False, gpu_uuids(requested), RankEnv(0, 0, 1, 1, "127.0.0.1", 0, 0, False))
    if device.uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid
    return device.kind


def _devices(requested: str, ranks: int, shared: bool = False) -> str:
    """The kind of device that several ranks will run on."""
    env = RankEnv(0, 0, ranks, ranks, "127.0.0.1", 0, 0, False)
    return choose_device(requested, shared, gpu_uuids(requested), env).kind


def _drafter(chosen: Any) -> dict[str, Any]:
    device = _device(chosen.device) if chosen.drafters == 1 else _devices(chosen.device, chosen.drafters)
    from launcher.bench_drafter import BenchOptions, bench_drafter
    from models.dflash import DFlashConfig
    from models.target_random import shape_config

    shape, context, anchors, steps = DEFAULTS[device]
    target = shape_config(chosen.shape or shape)
    config = DFlashConfig.from_target(
        target,
        layers=chosen.layers,
        block_size=chosen.block_size,
        mask_token_id=target.vocab_size - 1,
    )
    options = BenchOptions(
        config,
        chosen.context or context,
        chosen.anchors or anchors,
        chosen.precision,
        chosen.sharded or chosen.drafters > 1,
        chosen.steps or steps,
        device,
        chosen.drafters,
    )
    return {"shape": chosen.shape or shape} | bench_drafter(options)


def _target(chosen: Any) -> dict[str, Any]:
    device = _device(chosen.device)
    from launcher.bench_target import TargetOptions, bench_target
    from models.target_random import shape_config

    shape, context, _, steps = DEFAULTS[device]
    options = TargetOptions(
        shape_config(chosen.shape or shape),
        chosen.context or context,
        chosen.documents,
        chosen.taps,
        chosen.attention,
        chosen.precision,
        chosen.steps or steps,
        device,
    )
    return {"shape": chosen.shape or shape} | bench_target(options)


def _target_table(report: dict[str, Any]) -> str:
    from launcher.bench_target import target_table

    return target_table(report)


def _transfer(chosen: Any) -> dict[str, Any]:
    device = _devices(chosen.device, 2, chosen.share_gpus)
    from launcher.bench_transfer import TransferOptions, bench_transfer
    from models.shapes import find_shape

    shape, context, _, _ = DEFAULTS[device]
    width = chosen.taps * find_shape(f"random:{chosen.shape or shape}")["hidden_size"]
    options = TransferOptions(chosen.context or context, width, chosen.steps or TRANSFERS, device, chosen.share_gpus)
    return {"shape": chosen.shape or shape} | bench_transfer(options)


def _transfer_table(report: dict[str, Any]) -> str:
    from launcher.bench_transfer import transfer_table

    return transfer_table(report)


def _pipeline(chosen: Any) -> dict[str, Any]:
    device = _devices(chosen.device, 2, chosen.share_gpus)
    shape, context, anchors, _ = DEFAULTS[device]
    options = PipelineOptions(
        chosen.shape or shape,
        chosen.context or context,
        chosen.anchors or anchors,
        chosen.layers,
        chosen.block_size,
        chosen.precision,
        chosen.steps or PIPELINE_STEPS,
        device,
        chosen.share_gpus,
    )
    with tempfile.TemporaryDirectory(prefix="dflash-launcher-bench-") as folder:
        return bench_pipeline(options, Path(folder), _measure_alone)


def _measure_alone(config: Config, rows: int) -> Alone:
    """On one device of this process, which imports torch only now that the run has ended."""
    _device(config.runtime.device)
    from launcher.bench_alone import measure_alone

    return measure_alone(config, rows)


def _compile_cache(warm: bool) -> AbstractContextManager[Any]:
    """A fresh compile cache that is removed at the end. Set before torch is imported."""
    if warm:
        return nullcontext()
    folder = tempfile.TemporaryDirectory(prefix="dflash-launcher-bench-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder.name}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder.name}/triton"
    return folder


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    sheet, drafters = report["share_of_datasheet"], report["drafters"]
    lines = [
        f"{report['device']}, torch {report['torch']}, {report['precision']}"
        f"{', FSDP2' if report['sharded'] else ''}{f' over {drafters} drafters' if drafters > 1 else ''}:"
        f" {report['shape']}, {report['context']} context tokens,"
        f" {report['anchors']} anchors of {report['block_size']} tokens, {report['layers']} layers",
        f"{'part':<12}{'ms':>9}{'floor':>9}",
        *(f"{name:<12}{ms:>9.2f}{report['floor_ms'][name]:>9.2f}" for name, ms in report["parts_ms"].items()),
        f"{'step':<12}{report['step_ms']:>9.2f}{sum(report['floor_ms'].values()):>9.2f}",
        f"{report['tflops']:.4g} TFLOP/s of useful work: {report['share_of_matmul']:.0%} of the measured"
        f" {report['matmul_tflops']:.4g}" + (f", {sheet:.0%} of the datasheet" if sheet else ""),
        f"{report['rows_per_s']:.3g} rows/s, peak memory {report['peak_gb']:.1f} GB,"
        f" first step {report['first_step_s']:.1f} s; furthest from its floor: {report['furthest']}",
    ]
    return "\n".join(lines)
