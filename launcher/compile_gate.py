"""The compile gate: drafter ranks take turns to compile the training step that they will run.

A turn runs forward, backward and the optimizer on a scratch drafter at the real shapes, sharded over this rank alone,
so that no collective waits for ranks whose turn has not come. It is passed on once the step is compiled; the proof
follows while the next rank compiles, and nobody leaves the gate before all are proved. The scratch drafter goes; the
code it compiled stays and serves the real one, and from then on a recompile is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

from launcher.barrier import OrderedTurns, Turn
from launcher.compile_proof import UNCOMPILED, Proof, ProofError, examine
from launcher.compile_report import AnyProof, Stopwatch, TurnBook, TurnReport
from launcher.drafter_step import DrafterStep
from launcher.errors import ExitCode
from launcher.journal import SHARED
from launcher.outcome import failure_code
from launcher.recompiles import compiler_seconds
from launcher.warm_up import is_compiling_on
from models.draft_step import RowBatch
from models.errors import first_line

log = logging.getLogger("launcher")
P = TypeVar("P", bound=AnyProof)

ADVICE = (
    "look for suppressed compile errors (suppress_errors, error_on_nested_fx_trace), recompile limits, or a changed"
    " build; compile_report.json has the proof"
)


def pass_gate(
    rank: int,
    turns: OrderedTurns,
    step: DrafterStep,
    batch: RowBatch,
    accumulation: int,
    book: TurnBook,
    announce: Callable[[str], None],
    watch: Stopwatch,
) -> TurnReport:
    """Take this rank's turn: compile the step, pass the turn on, prove what was compiled.

    Args:
        step: a scratch step over this rank alone, built beside other ranks' turns.
        batch: a row of the real shape.
        accumulation: micro-batches per step, of which the gate runs two kinds: inner and last.
        book: gets the turn, proved or not.
        announce: gets a line for the console.
        watch: holds the laps from before the turn.

    Raises:
        ProofError: the step did not compile, or could not be proved; the message says what was missing. Other errors
            of the step are raised as they are. The report is written before.
    """
    with turns.turn(rank) as turn:
        watch.lap("wait")
        counters.clear()
        run_step = partial(run_once, step, batch, accumulation)
        proof, cache, failure = compile_and_prove(
            turn,
            watch,
            run_step,
            lambda: examine(step, batch, accumulation, run_step, fewest_graphs(step)),
            Proof(step.forward.backend),
            "the step did not run",
        )
        report = TurnReport.of(turn.rank, "drafter", turn, watch.laps, cache, proof)
        book.add(report)
        announce(report.line(turn, proof))
        _judge(proof, failure)
    return report


def compile_and_prove(
    turn: Turn, watch: Stopwatch, run: Callable[[], object], prove: Callable[[], P], unproved: P, undone: str
) -> tuple[P, tuple[int, int], Exception | None]:
    """Run for the first time what is to be compiled, pass the turn on, prove it.

    Args:
        watch: gets what of the run was tracing and compiling, and the proof.
        unproved: the proof where nothing is shown.
        undone: what is missing if `run` raises.

    Returns:
        The proof, hits and misses of the caches, and the error that ended it, to be raised once the turn is reported.
    """
    try:
        before = compiler_seconds()
        run()
        watch.lap("run", {part: seconds - before[part] for part, seconds in compiler_seconds().items()})
        cache, undone = cache_counts(), "the proof did not end"
        turn.pass_on()
        proof = prove()
        watch.lap("proof")
        return proof, cache, None
    except Exception as error:  # for the caller to raise
        cause = cause_of(error)
        missing = (f"{undone}: {type(cause).__name__}: {first_line(cause)}",)
        return replace(unproved, missing=missing), cache_counts(), error


def cause_of(error: Exception) -> Exception:
    """What a backend ran into, which torch wraps; else the error itself."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def raise_unless_uncompilable(failure: Exception) -> None:
    """Raise what says nothing about what was to be compiled; what is left is that it does not compile."""
    cause = cause_of(failure)
    if cause is not failure and failure_code(cause) is ExitCode.RETRY:  # no memory, or no room on a disk
        raise cause from failure
    if not isinstance(failure, TorchDynamoException | FailOnRecompileLimitHit):
        raise failure


def run_once(step: DrafterStep, batch: RowBatch, accumulation: int) -> None:
    """The training step as the loop runs it, its accumulation boundary included.

    Raises:
        ProofError: the gradient is not finite.
    """
    if accumulation > 1:
        step.accumulate(batch, last=False)
    step.accumulate(batch, last=True)
    if not step.update(0).read()["finite"]:
        raise ProofError("the first step gave a gradient that is not finite", "check the target's features")


def fewest_graphs(step: DrafterStep) -> int:
    """Compiled graphs of a step: projection of the context, first layer, other layers, final norm; on GPUs the mask."""
    layers = min(step.drafter.config.num_layers, 2)
    return 2 + layers + (step.forward.backend == "flex" and step.forward.ends.head.is_cuda)


def cache_counts() -> tuple[int, int]:
    """Hits and misses of Inductor's and AOTAutograd's caches since the counters were cleared."""
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"] + autograd["autograd_cache_bypass"]
    return hits, misses


def _judge(proof: Proof, failure: Exception | None) -> None:
    """Raise for what is missing; compiling that the user turned off is reported, not proved."""
    if failure is not None:
        raise_unless_uncompilable(failure)
    missing = proof.missing
    if missing and not is_compiling_on() and proof.backend == "sdpa":
        log.warning("the training step runs uncompiled and unproved: TORCHDYNAMO_DISABLE is set", extra=SHARED)
        missing = tuple(phrase for phrase in missing if UNCOMPILED not in phrase)
    if missing:
        raise ProofError("; ".join(missing), ADVICE) from failure
