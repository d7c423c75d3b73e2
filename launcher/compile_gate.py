"""The compile gate: drafter ranks take turns to compile the training step that they will run.

A turn runs forward, backward and the optimizer on a scratch drafter at the real shapes, sharded over this rank alone,
so that no collective waits for ranks whose turn has not come. The scratch drafter goes; the code it compiled stays and
serves the real one, and from then on a recompile is an error.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch._dynamo.utils import counters

from launcher.barrier import OrderedTurns
from launcher.compile_proof import (
    Proof,
    ProofError,
    activation_bound,
    dense_score_bytes,
    flex_kernels,
    reference_errors,
    require_bound,
    require_close,
    require_flex_kernels,
)
from launcher.drafter_step import DrafterStep
from models.draft_step import RowBatch

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class TurnReport:
    """One rank's entry of compile_report.json; times in seconds, `start` and `end` since the epoch."""

    rank: int
    role: str
    start: float
    end: float
    seconds: float
    parts: dict[str, float]
    cache_hits: int
    cache_misses: int
    peak_bytes: int
    proof: dict[str, Any]
    verified: bool

    def line(self, place: int, count: int) -> str:
        cache = f"{self.cache_hits} cache hits" + (f", {self.cache_misses} misses" if self.cache_misses else "")
        return f"compile {place + 1}/{count} rank {self.rank} {self.seconds:.1f} s ({cache})"


class Stopwatch:
    """Named laps of a turn, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


def pass_gate(
    rank: int,
    turns: OrderedTurns,
    make_step: Callable[[], DrafterStep],
    batch: RowBatch,
    accumulation: int,
    announce: Callable[[str], None],
) -> TurnReport:
    """Take this rank's turn: compile the step, prove it, drop the scratch drafter.

    Args:
        make_step: builds a scratch step over this rank alone; called before the turn, beside other ranks' turns.
        batch: a row of the real shape.
        accumulation: micro-batches per step, of which the gate runs two kinds: inner and last.

    Raises:
        ProofError: the compiled step could not be proved.
    """
    step = make_step()
    with turns.turn(rank) as turn:
        watch = Stopwatch()
        counters.clear()
        _run_step(step, batch, accumulation)
        watch.lap("compile")
        proof = _prove(step, batch, accumulation)
        watch.lap("proof")
    hits, misses = cache_counts()
    report = TurnReport(
        rank,
        "drafter",
        turn.start,
        turn.end,
        round(turn.seconds, 3),
        watch.laps,
        hits,
        misses,
        proof.peak_bytes,
        asdict(proof),
        True,
    )
    announce(f"{report.line(turn.place, turn.count)}  {proof.line()}")
    del step
    gc.collect()
    if batch.features.is_cuda:
        torch.cuda.empty_cache()
    return report


def _run_step(step: DrafterStep, batch: RowBatch, accumulation: int) -> None:
    """The training step as the loop runs it, its accumulation boundary included."""
    if accumulation > 1:
        step.accumulate(batch, last=False)
    step.accumulate(batch, last=True)
    if not step.update(0).read()["finite"]:
        raise ProofError("the first step gave a gradient that is not finite", "check the target's features")


def _prove(step: DrafterStep, batch: RowBatch, accumulation: int) -> Proof:
    kernels: tuple[str, ...] = ()
    peak = bound = dense = 0
    config, forward = step.drafter.config, step.forward
    if batch.features.is_cuda and forward.backend == "flex":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kernels = flex_kernels(lambda: _run_step(step, batch, accumulation))
        peak = torch.cuda.max_memory_allocated() - before - step.parameter_bytes()
        row_length = batch.doc.shape[0]
        dense = dense_score_bytes(config, forward.anchors, row_length)
        bound = activation_bound(config, forward.anchors, row_length, batch.features.element_size())
        require_flex_kernels(kernels)
    output_error, gradient_error = reference_errors(step.drafter, forward, batch)
    breaks = sum(counters["graph_break"].values())
    proof = Proof(kernels, peak, bound, dense, output_error, gradient_error, breaks)
    require_bound(proof)
    require_close(output_error, gradient_error, step.precision)
    if breaks:
        raise ProofError(f"{breaks} graph breaks: {', '.join(counters['graph_break'])}", "mend the layer's code")
    return proof


def cache_counts() -> tuple[int, int]:
    """Hits and misses of Inductor's and AOTAutograd's caches since the counters were cleared."""
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"] + autograd["autograd_cache_bypass"]
    return hits, misses


def forbid_recompiles(on_recompile: str) -> None:
    """After the gate: a recompile raises, or is logged with its reason."""
    if on_recompile == "error":
        torch._dynamo.config.error_on_recompile = True
    else:
        torch._logging.set_logs(recompiles=True)


def recompile_reason(error: BaseException) -> str | None:
    """What changed, if `error` says that the compiler was about to compile again after the gate."""
    if not isinstance(error, torch._dynamo.exc.RecompileError):
        return None
    return " ".join(str(error).split())


def write_report(path: Path, reports: list[TurnReport], extra: dict[str, Any]) -> None:
    """`compile_report.json`: all turns, in rank order."""
    turns = [asdict(report) for report in sorted(reports, key=lambda report: report.rank)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**extra, "turns": turns}, indent=2) + "\n")
    os.replace(temporary, path)
