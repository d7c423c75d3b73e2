"""A target's turn at the gate: compile its layers on a row of the run, pass the turn on, prove the features.

The proof compares the compiled features with those of stock transformers on the same row (its own attention, dense
mask, uncompiled), counts the fused attention kernels on a GPU, and shows that a second run compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import counters

from launcher.barrier import Turn
from launcher.compile_gate import ADVICE, cause_of, compile_and_prove, raise_unless_uncompilable
from launcher.compile_proof import ProofError, break_problems, launches, watch_step
from launcher.compile_report import Stopwatch, TurnReport
from launcher.recompiles import graphs_compiled
from models.draft_step import RowBatch
from models.errors import first_line
from models.target import TappedTarget, token_errors

# Mean and worst relative error of a token's features, compiled against stock. In bf16 a mixture of experts sends some
# tokens elsewhere, whose features then are others altogether.
TOLERANCES = {torch.bfloat16: (0.05, 0.5), torch.float32: (1e-3, 1e-2)}
MIXTURE_TOLERANCES = {torch.bfloat16: (0.2, 2.0), torch.float32: (1e-2, 1.0)}


@dataclass(frozen=True)
class TargetProof:
    """What one turn showed.

    peak_bytes: memory of a row above what was allocated before it; 0 where it is not counted (CPU).
    missing: why it is not proved, a phrase each.
    """

    attention: str
    graphs: int = 0
    graph_breaks: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    mean_error: float = 0.0
    worst_error: float = 0.0
    missing: tuple[str, ...] = ()

    def line(self) -> str:
        """A line for the console."""
        if self.missing:
            return f"NOT PROVED: {'; '.join(self.missing)}"
        fused = f", {launches(self.kernels)[0]} flex kernels" if self.kernels else ""
        memory = f", {self.peak_bytes / 1e9:.1f} GB a row" if self.peak_bytes else ""
        return (
            f"{self.attention}{fused}{memory}, features differ from stock by {self.mean_error:.1e} (worst token"
            f" {self.worst_error:.1e}), {self.graph_breaks} graph breaks"
        )


def pass_target_gate(
    rank: int,
    turn_of: AbstractContextManager[Turn],
    target: TappedTarget,
    run_row: Callable[[], RowBatch],
    announce: Callable[[str], None],
    record: Callable[[TurnReport], None],
) -> TurnReport:
    """Take this target's turn.

    Args:
        rank: this rank.
        turn_of: the target's turn, waited for when it is entered.
        target: not compiled yet.
        run_row: runs the target on the same row each time it is called.
        announce: gets a line for the console.
        record: gets the report, proved or not.

    Raises:
        ProofError: the target does not compile, or is not what it should be; the message says what was missing. Other
            errors of the target are raised as they are. The turn is recorded before.
    """

    def compile_and_run() -> None:
        target.compile_layers()
        run_row()

    watch = Stopwatch()
    with target.stock_attention():
        expected = run_row()
    watch.lap("stock")
    with turn_of as turn:
        watch.lap("wait")
        counters.clear()
        proof, cache, failure = compile_and_prove(
            turn,
            watch,
            compile_and_run,
            lambda: examine(target, expected, run_row),
            TargetProof(_attention(target)),
            "the target's layers did not run",
        )
        report = TurnReport.of(rank, "target", turn, watch.laps, cache, proof)
        announce(report.line(turn, proof))
        record(report)
        _judge(proof, failure)
    return report


def _attention(target: TappedTarget) -> str:
    return "flex" if target.packed else "sdpa"


def _judge(proof: TargetProof, failure: Exception | None) -> None:
    """Raise for what is missing; for layers that do not compile, with the way out."""
    if failure is not None:
        raise_unless_uncompilable(failure)
        cause = cause_of(failure)
        raise ProofError(
            f"the target's layers do not compile: {type(cause).__name__}: {first_line(cause)}",
            "set target.compile=false and target.attention=sdpa for this target, or choose another one",
        ) from failure
    if proof.missing:
        raise ProofError("; ".join(proof.missing), ADVICE)


def examine(target: TappedTarget, expected: RowBatch, run_row: Callable[[], RowBatch]) -> TargetProof:
    """Look at a compiled target that has run once; nothing is raised for what is missing."""
    graphs, found, kernels, peak = graphs_compiled(), [], {}, 0
    if expected.features.is_cuda:
        kernels, peak = watch_step(lambda: found.append(run_row()))
    else:
        found.append(run_row())
    real, limits = expected.doc >= 0, MIXTURE_TOLERANCES if target.mixes_experts else TOLERANCES
    error_S = token_errors(found[0].features, expected.features)[real]
    mean, worst = float(error_S.mean()), float(error_S.max())
    missing = [
        *graph_problems(graphs, graphs_compiled()),
        *break_problems(counters["graph_break"]),
        *number_problems(mean, worst, *limits[expected.features.dtype]),
        *(kernel_problems(kernels, target.attention_layers) if expected.features.is_cuda and target.packed else []),
    ]
    breaks = sum(counters["graph_break"].values())
    return TargetProof(_attention(target), graphs, breaks, kernels, peak, mean, worst, tuple(missing))


def graph_problems(graphs: int, after: int) -> list[str]:
    """A phrase where nothing was compiled, or a second run compiled more."""
    if graphs == 0:
        return ["no layer of the target was compiled"]
    return [f"the target compiled {after - graphs} more graphs when it ran again"] if after > graphs else []


def number_problems(mean: float, worst: float, mean_limit: float, worst_limit: float) -> list[str]:
    """A phrase where the features differ from stock transformers' by more than rounding."""
    if mean <= mean_limit and worst <= worst_limit:
        return []
    return [
        f"the compiled target's features differ from stock transformers' by {mean:.1e} (at most {mean_limit:.0e}), the"
        f" worst token by {worst:.1e} (at most {worst_limit:.0e})"
    ]


def kernel_problems(kernels: Mapping[str, int], wanted: int) -> list[str]:
    """A phrase where a layer's attention was not the fused kernel."""
    count = launches(kernels)[0]
    if count == wanted:
        return []
    return [f"the target's fused flex attention kernel ran {count} times instead of {wanted}: attention fell back"]
