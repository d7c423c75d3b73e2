"""The command `plan`: what a run should reach on GPUs that are not here, from the cost model, and where it ends.

./launch.sh plan --preset qwen3-8b --gpus 64 --gpu h200 [--json] [--section.key=value ...]

Nothing is started and no torch is loaded. The model counts operations and bytes, so it suits sizes that fill a GPU;
kernels of small models take their time to start, which is not counted. What it was fitted to is in plan_model.py.
"""

from __future__ import annotations

import json
from typing import Any

from launcher.cli import parse
from launcher.command_parser import CommandParser
from launcher.errors import UserError
from launcher.plan_memory import target_memory, target_ranks
from launcher.plan_model import Prediction, Scaling, predictions, scaling
from launcher.plan_shapes import RunShape, run_shape
from launcher.work_model import GPUS, Gpu, find_gpu

SPLITS_SHOWN = 4


def main(args: list[str]) -> int:
    """Print the plan; returns 0."""
    parser = CommandParser(
        "./launch.sh plan", description="Predict rates, memory and traffic of a run.", allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of all nodes together")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(gpu.name for gpu in GPUS)}")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    chosen, rest = parser.parse_known_args(args)
    gpu = find_gpu(chosen.gpu)
    if gpu is None:
        raise UserError(f"--gpu: no datasheet of {chosen.gpu}", f"one of {', '.join(gpu.name for gpu in GPUS)}")
    config = parse(rest).config
    ranks, nodes = whole_nodes(chosen.gpus, chosen.per_node, config.topology.target_tp)
    shape = run_shape(config)
    found = predictions(shape, gpu, ranks, nodes, config.topology.target_tp)
    growth = scaling(shape, gpu, chosen.per_node, config.topology.target_tp)
    print(json.dumps(as_json(shape, gpu, found, growth)) if chosen.json else as_text(shape, gpu, found, growth))
    return 0


def whole_nodes(gpus: int, per_node: int, target_tp: int) -> tuple[int, int]:
    """(ranks of a node, nodes).

    Raises:
        UserError: not a target and a drafter, or not whole nodes.
    """
    ranks = min(gpus, per_node)
    if ranks < target_tp + 1:
        raise UserError(
            f"--gpus {gpus} --per-node {per_node}: a node of {max(ranks, 0)} cannot hold a target of {target_tp} and a"
            " drafter",
            f"give at least {target_tp + 1}",
        )
    if gpus % ranks:
        raise UserError(f"--gpus {gpus} is not a whole number of nodes of {per_node}", "change --gpus or --per-node")
    return ranks, gpus // ranks


def as_json(shape: RunShape, gpu: Gpu, found: list[Prediction], growth: Scaling) -> dict[str, Any]:
    """Everything that is predicted; seconds, bytes and rows per second."""
    end = growth.end
    return {
        "gpu": gpu.name,
        "gpus": found[0].split.ranks * found[0].nodes,
        "best": str(found[0].split),
        "ranks_of_a_target": target_ranks(shape, gpu),
        "splits": [_numbers(prediction, gpu) for prediction in found],
        "scaling": [_numbers(prediction, gpu) for prediction in growth.steps],
        "stops_at_gpus": end.split.ranks * end.nodes if end else None,
        "stops_because": growth.reason(end, gpu) if end else None,
    }


def _numbers(prediction: Prediction, gpu: Gpu) -> dict[str, Any]:
    return {
        "split": str(prediction.split),
        "gpus": prediction.split.ranks * prediction.nodes,
        "rows_per_s": round(prediction.rows, 2),
        "tokens_per_s": round(prediction.tokens),
        "bound": prediction.bound,
        "target_rows_per_s": round(prediction.target_rows, 2),
        "drafter_rows_per_s": round(prediction.drafter_rows, 2),
        "target_gb": round(prediction.target_memory / 1e9, 1),
        "drafter_gb": round(prediction.drafter_memory / 1e9, 1),
        "fits": prediction.fits(gpu),
        "transfer_gbs": round(prediction.transfer_bytes / 1e9, 2),
        "gather_gb": round(prediction.exchange.gather_bytes / 1e9, 2),
        "reduce_gb": round(prediction.exchange.reduce_bytes / 1e9, 2),
        "network_gb": round(prediction.exchange.network_bytes / 1e9, 2),
        "exposed_ms": round(prediction.exchange.exposed * 1e3, 1),
        "rows_per_step": prediction.rows_per_step,
    }


def as_text(shape: RunShape, gpu: Gpu, found: list[Prediction], growth: Scaling) -> str:
    """The plan for people."""
    best = found[0]
    gpus = best.split.ranks * best.nodes
    lines = [
        f"{gpus} {gpu.name} on {best.nodes} node{'s' * (best.nodes > 1)}, {shape.context}-token rows, {shape.anchors}"
        f" anchors, {shape.precision}; best split per node: {best.split} ({best.rates})",
        f"{'split':<12}{'rows/s':>9}{'tok/s':>12}{'targets':>9}{'drafters':>9}{'target GB':>11}{'drafter GB':>11}"
        f"{'rows/step':>11}  bound by",
        *(_line(prediction, gpu) for prediction in found[:SPLITS_SHOWN]),
        _target_line(shape, gpu),
        f"features: {shape.row_bytes / 1e6:.0f} MB a row, {best.transfer_bytes / 1e9:.2f} GB/s from each target inside"
        f" its node (a link carries {gpu.link_gbs:.0f})",
        _exchange_line(best),
        _growth_line(growth),
        _end_line(growth, gpu),
    ]
    return "\n".join(lines)


def _target_line(shape: RunShape, gpu: Gpu) -> str:
    ranks, alone = target_ranks(shape, gpu), f"{target_memory(shape) / 1e9:.0f}"
    why = ", with the whole model for eval.prompts" if shape.evaluated else ""
    if ranks == 1:
        return f"a target fits one {gpu.name} ({alone} of {gpu.memory_gb:.0f} GB{why})"
    fix = "more ranks do not help" if ranks is None else f"set topology.target_tp={ranks}"
    return f"a target needs {alone} GB{why}, more than one {gpu.name} has ({gpu.memory_gb:.0f} GB): {fix}"


def _line(prediction: Prediction, gpu: Gpu) -> str:
    over = "" if prediction.fits(gpu) else f"; does not fit {gpu.memory_gb:.0f} GB"
    return (
        f"{prediction.split!s:<12}{prediction.rows:>9.1f}{prediction.tokens:>12,.0f}{prediction.target_rows:>9.1f}"
        f"{prediction.drafter_rows:>9.1f}{prediction.target_memory / 1e9:>11.1f}"
        f"{prediction.drafter_memory / 1e9:>11.1f}{prediction.rows_per_step:>11}  {prediction.bound}{over}"
    )


def _exchange_line(best: Prediction) -> str:
    exchange = best.exchange
    if not exchange.gather_bytes:
        return "FSDP2: one drafter, nothing to exchange"
    return (
        f"FSDP2: {exchange.gather_bytes / 1e9:.1f} GB gathered and {exchange.reduce_bytes / 1e9:.1f} GB reduced a step"
        f" and drafter, {exchange.network_bytes / 1e9:.1f} GB added up between nodes:"
        f" {(exchange.gather + exchange.reduce) * 1e3:.1f} ms, of which compute does not hide"
        f" {exchange.exposed * 1e3:.1f}"
    )


def _growth_line(growth: Scaling) -> str:
    best = max(step.rows / step.nodes for step in growth.steps)
    shares = (
        f"{step.split.ranks * step.nodes}: {step.rows:,.0f} ({step.rows / (best * step.nodes):.0%})"
        for step in growth.steps
    )
    node = growth.steps[0].split.ranks
    return f"rows/s by GPUs, in nodes of {node} (share of the best rate of a GPU): {', '.join(shares)}"


def _end_line(growth: Scaling, gpu: Gpu) -> str:
    end = growth.end
    if end is None:
        last = growth.steps[-1]
        return f"it still scales at {last.split.ranks * last.nodes} GPUs"
    return f"it stops scaling at {end.split.ranks * end.nodes} GPUs: {growth.reason(end, gpu)}"
