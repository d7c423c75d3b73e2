"""GPU memory of both roles of a planned run. No torch."""

from __future__ import annotations

from launcher.plan_shapes import RunShape
from launcher.step_memory import StateBytes, step_bound
from launcher.work_model import Gpu, TargetShape
from models.target_bytes import CONTEXT_BYTES, TargetBytes, TargetUse, fewest_ranks

COMPUTE_BYTES = 2


def target_bytes(shape: RunShape) -> TargetBytes:
    """What a target's ranks hold at their peak, as a run counts it before it loads one; norms and routers left out."""
    target = shape.target
    use = TargetUse(
        target.hidden,
        shape.drafter.intermediate_size,
        target.vocabulary,
        shape.itemsize,
        shape.context,
        shape.row_bytes,
        shape.rows_in_flight,
    )
    evaluated = _weights(shape.whole_target, shape.itemsize, 1 if shape.tied else 2) if shape.evaluated else None
    return use.peak(_weights(target, shape.itemsize, 1), evaluated)


def target_memory(shape: RunShape, target_tp: int = 1) -> int:
    """Bytes of a target's rank."""
    return target_bytes(shape).of_rank(target_tp)


def target_ranks(shape: RunShape, gpu: Gpu) -> int | None:
    """The fewest ranks of this GPU that hold a target and divide its heads and widths; None: no number of them does."""
    return fewest_ranks(list(shape.target_sizes), target_bytes(shape), gpu.memory_gb * 1e9)


def _weights(target: TargetShape, itemsize: int, ends: int) -> TargetBytes:
    """Bytes of the layers, which ranks divide, and of one or both ends, which they do not."""
    embedding = target.vocabulary * target.hidden
    return TargetBytes((target.parameters - embedding) * itemsize, ends * embedding * itemsize)


def drafter_memory(shape: RunShape, shards: int, sharded: bool) -> float:
    """Bytes of a drafter's rank at the peak of its step."""
    parameters, drafter = shape.work.parameters, shape.drafter
    accumulating = shape.accumulation * shape.draws > 1
    # FSDP2 keeps float32 masters and moments in shards and gathers working copies; one rank keeps everything.
    if sharded:
        kept, state = 12 * parameters / shards, StateBytes(parameters * (2 + 4 * accumulating), 4 * parameters)
    else:
        kept, state = 14 * parameters, StateBytes(4 * parameters * accumulating, 2 * parameters)
    ends = (1 if shape.tied else 2) * drafter.vocab_size * drafter.hidden_size * COMPUTE_BYTES
    step = step_bound(drafter, shape.anchors, shape.context, COMPUTE_BYTES, state, drafter.vocab_size)
    return kept + ends + 3 * shape.row_bytes + step + CONTEXT_BYTES
