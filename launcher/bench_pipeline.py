"""Measure a whole run of one target and one drafter against each side alone, on long-tailed packed chats.

./launch.sh bench pipeline [--shape qwen3-8b] [--steps 200] [--share-gpus] [--json]

The run is the launcher itself, from its own command line; its metrics are what is reported. Then each side does the
same rows by itself, on one device, by the same classes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from launcher.config import Config, for_device, to_toml, validate
from launcher.errors import LauncherError
from launcher.plan_shapes import RunShape, run_shape, step_shape
from launcher.run_record import read_run
from launcher.work_model import datasheet, step_work

if TYPE_CHECKING:
    from launcher.bench_alone import Alone

MAIN = Path(__file__).resolve().parent / "main.py"
RUN_SECONDS = 3600.0
# Steps left out: first calls, the first checkpoint of the allocator's pools, the first rows.
WARM_UP = 10
# Assistant words of a chat: log-normal, so that most are short and some fill a row.
MEDIAN_WORDS, SPREAD = 180.0, 1.1
ALONE_ROWS = 40


@dataclass(frozen=True)
class PipelineOptions:
    """What to run."""

    shape: str
    context: int
    anchors: int
    layers: int
    block_size: int
    precision: str
    steps: int
    device: str
    shared: bool


def bench_pipeline(options: PipelineOptions, folder: Path, measure: Callable[[Config, int], Alone]) -> dict[str, Any]:
    """Rates of the run and of its sides, and the share of the slower side's rate that the run reaches.

    Args:
        folder: for the run, its chats and its compile cache.
        measure: each side alone, on that many rows; imported by the caller once the run has ended.

    Raises:
        LauncherError: the run failed; shows its last lines.
    """
    config = for_device(pipeline_config(options, folder), options.device)
    steps = run_launcher(config, folder)
    run, memory = rates_of_run(steps), read_run(config.runtime.run_dir).memory
    alone = measure(config, min(ALONE_ROWS, options.steps))
    slower = min(alone.target_rows, alone.drafter_rows)
    return {
        **asdict(options),
        "gpu": alone.gpu,
        "torch": alone.torch,
        **run,
        "target_alone": round(alone.target_rows, 3),
        "drafter_alone": round(alone.drafter_rows, 3),
        "share_of_slower": round(run["rows_per_s"] / slower, 4),
        "sides": sides_alone(run_shape(config), alone, round(mean(step["blocks"] for step in steps))),
        "peak_gb": {
            role: round(max((sample.gpu or 0 for sample in memory if sample.role == role), default=0) / 1e9, 3)
            for role in ("target", "drafter")
        },
    }


def sides_alone(shape: RunShape, alone: Alone, blocks: int) -> dict[str, dict[str, float | None]]:
    """TFLOP/s of each side's useful work alone, and its shares of what the GPU's matrix products reach.

    Args:
        blocks: of a row, by the mean; anchors that a row has no place for are no useful work.
    """
    step = step_work(step_shape(shape.drafter, shape.context, blocks, alone.visible))
    target = alone.target_rows * shape.target.operations(shape.context, alone.visible)
    number = "float32" if shape.itemsize == 4 else "bf16"
    return {
        "target": _shares(target, alone.target_matmul, datasheet(alone.gpu, number)),
        "drafter": _shares(
            alone.drafter_rows * step.total, alone.drafter_matmul, datasheet(alone.gpu, shape.precision)
        ),
    }


def _shares(rate: float, matmul: float, sheet: float | None) -> dict[str, float | None]:
    return {
        "tflops": round(rate / 1e12, 6),
        "matmul_tflops": round(matmul / 1e12, 6),
        "share_of_matmul": round(rate / matmul, 4),
        "share_of_datasheet": None if sheet is None else round(rate / 1e12 / sheet, 4),
    }


def pipeline_table(report: dict[str, Any]) -> str:
    """The report for people."""
    sides = "; ".join(_side_line(role, side) for role, side in report["sides"].items())
    return (
        f"{report['gpu']}{' shared' if report['shared'] else ''}, torch {report['torch']}, {report['precision']}:"
        f" {report['shape']}, {report['context']}-token rows, {report['anchors']} anchors, 1t+1d,"
        f" {report['steps']} steps\n"
        f"run {report['rows_per_s']:.3g} rows/s; target alone {report['target_alone']:.3g}, drafter alone"
        f" {report['drafter_alone']:.3g}: {report['share_of_slower']:.1%} of the slower side\n"
        f"the drafter waited {report['data_wait']:.1%} of the time, the target {report['target_wait']:.1%};"
        f" {report['rows_ready']:.1f} rows on their way when one was asked for\n"
        f"alone: {sides}; GPU memory in use in the run at most {report['peak_gb']['target']:.1f} GB (target),"
        f" {report['peak_gb']['drafter']:.1f} GB (drafter)"
    )


def _side_line(role: str, side: dict[str, Any]) -> str:
    sheet = side["share_of_datasheet"]
    return (
        f"{role} {side['tflops']:.4g} TFLOP/s of useful work, {side['share_of_matmul']:.0%} of the measured"
        f" {side['matmul_tflops']:.4g}" + (f", {sheet:.0%} of the datasheet" if sheet else "")
    )


def pipeline_config(options: PipelineOptions, folder: Path) -> Config:
    """The configuration of the run; writes its chats."""
    chats = folder / "chats.jsonl"
    write_chats(chats, words=options.context * min(options.steps, 64))
    return validate(
        {
            "target": {"model": f"random:{options.shape}"},
            "drafter": {"layers": options.layers, "block_size": options.block_size},
            "data": {"path": str(chats), "row_length": options.context, "holdout": 0},
            "train": {"max_steps": options.steps, "anchors": options.anchors, "precision": options.precision},
            "topology": {"targets": 1, "drafters": 1},
            "compile": {"cache_dir": str(folder / "compile")},
            "runtime": {
                "run_dir": str(folder / "run"),
                "device": options.device,
                "share_gpus": options.shared,
                "resume": "none",
            },
            "checkpoint": {"every": 0},
            "log": {"tensorboard": False, "every": max(1, options.steps // 4)},
        }
    )


def write_chats(path: Path, words: int) -> None:
    """Chats of about `words` words together, the same ones every time."""
    draw, written = random.Random(0), 0
    with path.open("w") as file:
        while written < words:
            length = max(8, round(draw.lognormvariate(0.0, SPREAD) * MEDIAN_WORDS))
            answer = " ".join(str(draw.randrange(1000)) for _ in range(length))
            turns = [("user", f"Give me {length} numbers."), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
            written += length


def run_launcher(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Start the launcher on a configuration and wait for its end; the metrics of its steps."""
    file = folder / "bench.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, str(MAIN), "--config", str(file)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise LauncherError(f"bench pipeline: the run ended with code {done.returncode}:\n{last}", "see its message")
    lines = (config.runtime.run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if "step_seconds" in (entry := json.loads(line))]


def rates_of_run(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the steps after the first ones, weighted by their time."""
    counted = steps[min(WARM_UP, len(steps) // 2) :]
    seconds = sum(step["step_seconds"] for step in counted)

    def over_time(name: str) -> float:
        return sum(step[name] * step["step_seconds"] for step in counted) / seconds

    return {
        "rows_per_s": round(over_time("rows_per_s"), 3),
        "data_wait": round(over_time("data_wait"), 4),
        "target_wait": round(over_time("target_wait"), 4),
        "rows_ready": round(over_time("rows_ready"), 2),
    }
