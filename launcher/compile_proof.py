"""What a turn at the gate has to prove about the training step it compiled.

A warm-up that "worked" proves nothing: attention may have fallen back to dense scores without a word. So a turn shows
the fused kernels by name in forward and backward, once for every layer; a peak of memory under the block-sparse bound;
every tile of the mask; the numbers of a few blocks against a dense float32 reference, gradients included; and that
running the step again compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import counters

from launcher.drafter_step import DrafterStep
from launcher.errors import LauncherError
from launcher.recompiles import graphs_compiled
from launcher.reference_check import mask_problems, reference_errors
from launcher.step_memory import dense_score_bytes, step_bound
from models.draft_step import RowBatch
from models.masks import dense_mask

# Relative error of the compiled step against float32, by compute precision: bf16 operands give up to about 1e-2 per
# matmul chain, float8 operands 4e-2. Gradients pass through about twice as many GEMMs.
TOLERANCES = {"bf16": 0.05, "float32": 2e-3, "float8": 0.2}

UNCOMPILED = "some of the step ran uncompiled"


class ProofError(LauncherError):
    """The compiled step is not what it should be; the message says what was missing."""


@dataclass(frozen=True)
class Proof:
    """What one turn showed.

    kernels: launches of fused attention kernels by name, in one step.
    peak_bytes, bound_bytes: memory of a step above what was allocated before it; 0 where it is not counted (CPU).
    dense_bytes: what dense attention would add in one layer.
    missing: why the step is not proved, a phrase each; empty for a good turn.
    """

    backend: str
    graphs: int = 0
    graph_breaks: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    bound_bytes: int = 0
    dense_bytes: int = 0
    output_error: float | None = None
    gradient_error: float | None = None
    missing: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for the console."""
        if self.missing:
            return f"NOT PROVED: {'; '.join(self.missing)}"
        shown = f"error {self.output_error:.1e} (gradients {self.gradient_error:.1e}), {self.graph_breaks} graph breaks"
        if not self.bound_bytes:
            return shown
        forward, backward = launches(self.kernels)
        return (
            f"{self.peak_bytes / 1e9:.1f} GB of at most {self.bound_bytes / 1e9:.1f}; dense would need"
            f" {self.dense_bytes / 1e9:.1f} GB more a layer; {forward} forward and {backward} backward flex kernels;"
            f" {shown}"
        )


def examine(
    step: DrafterStep, batch: RowBatch, accumulation: int, run_step: Callable[[], None], fewest_graphs: int
) -> Proof:
    """Look at a compiled step that has run once; nothing is raised for what is missing.

    Args:
        step: the scratch step; its gradients are used up.
        batch: the row that it was compiled with.
        accumulation: micro-batches per optimizer step.
        run_step: runs the step once more.
        fewest_graphs: compiled graphs that the step is made of.
    """
    forward, graphs = step.forward, graphs_compiled()
    on_gpu = batch.features.is_cuda and forward.backend == "flex"
    kernels: dict[str, int] = {}
    peak = bound = dense = 0
    if on_gpu:
        bound, dense = memory_limits(step, batch, accumulation)
        kernels, peak = watch_step(run_step)
    else:
        run_step()
    inputs = forward.block_inputs(batch)
    missing = [] if graphs >= fewest_graphs else [_too_few(graphs, fewest_graphs)]
    if on_gpu:
        missing += kernel_problems(kernels, step.drafter.config.num_layers * min(accumulation, 2))
        missing += memory_problems(peak, bound, dense)
    if not isinstance(inputs.mask, torch.Tensor):
        wanted = dense_mask(inputs.anchors, batch.doc, forward.block_size, batch.doc.shape[0])
        missing += [f"the mask is wrong: {problem}" for problem in mask_problems(inputs.mask, wanted)]
    output_error, gradient_error = reference_errors(step.drafter, forward, batch, inputs)
    missing += number_problems(output_error, gradient_error, step.precision)
    missing += break_problems(counters["graph_break"])
    if (again := graphs_compiled() - graphs) > 0:
        missing.append(f"the step compiled {again} more graphs when it ran again")
    return Proof(
        forward.backend,
        graphs,
        sum(counters["graph_break"].values()),
        kernels,
        peak,
        bound,
        dense,
        output_error,
        gradient_error,
        tuple(missing),
    )


def memory_limits(step: DrafterStep, batch: RowBatch, accumulation: int) -> tuple[int, int]:
    """The block-sparse bound of a step above what is allocated before it, and what dense attention adds in a layer."""
    config, anchors, row_length = step.drafter.config, step.forward.anchors, batch.doc.shape[0]
    state, vocabulary = step.state_bytes(accumulation > 1), step.forward.ends.head.shape[0]
    bound = step_bound(config, anchors, row_length, batch.features.element_size(), state, vocabulary)
    return bound, dense_score_bytes(config, anchors, row_length)


def watch_step(run_step: Callable[[], None]) -> tuple[dict[str, int], int]:
    """Launches of each fused attention kernel in one step, and the peak of memory above what was allocated before."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_step()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {event.key: event.count for event in profiler.key_averages() if is_fused_attention(event.key)}, peak


def is_fused_attention(kernel: str) -> bool:
    """Whether a kernel is FlexAttention's template, not a small one that is fused with some of its neighbours' work."""
    return "triton_tem" in kernel and "flex_attention" in kernel


def launches(kernels: Mapping[str, int]) -> tuple[int, int]:
    """Launches of forward and of backward kernels."""
    backward = sum(count for name, count in kernels.items() if "backward" in name)
    return sum(kernels.values()) - backward, backward


def kernel_problems(kernels: Mapping[str, int], wanted: int) -> list[str]:
    """A phrase for forward and for backward where fewer than `wanted` fused kernels ran."""
    seen = f" (kernels seen: {', '.join(sorted(kernels)) or 'none'})"
    return [
        f"the fused flex attention kernel ran {count} times instead of {wanted} in {side}: attention fell back to the"
        f" dense path{seen}"
        for side, count in zip(("forward", "backward"), launches(kernels), strict=True)
        if count < wanted
    ]


def memory_problems(peak: int, bound: int, dense: int) -> list[str]:
    """A phrase where a step takes more memory than block-sparse attention can."""
    if peak <= bound:
        return []
    return [
        f"the step peaks at {peak / 1e9:.2f} GB, over the block-sparse bound of {bound / 1e9:.2f} GB (dense attention"
        f" adds {dense / 1e9:.1f} GB a layer)"
    ]


def number_problems(output_error: float, gradient_error: float, precision: str) -> list[str]:
    """A phrase where an error is over the tolerance of the compute precision (gradients: twice it)."""
    limit = TOLERANCES[precision]
    if output_error <= limit and gradient_error <= 2 * limit:
        return []
    return [
        f"the step differs from the dense float32 reference: outputs by {output_error:.1e} (at most {limit:.0e}),"
        f" gradients by {gradient_error:.1e} (at most {2 * limit:.0e})"
    ]


def break_problems(breaks: Mapping[str, int]) -> list[str]:
    """A phrase where the compiler left some of the code to Python; `breaks` has how often, by reason."""
    if not breaks:
        return []
    return [f"{sum(breaks.values())} graph breaks: {', '.join(map(str, breaks))}"]


def _too_few(graphs: int, wanted: int) -> str:
    return f"{graphs} graphs were compiled instead of {wanted}: {UNCOMPILED}"
