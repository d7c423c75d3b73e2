"""How much work a drafter step must do, in floating-point operations and bytes, part by part. No torch.

Counted per row of S context tokens and N blocks of B tokens: a multiply-add is two operations, a weight is used once
forward and twice backward (once where no gradient flows on: features and the frozen head), nothing is recomputed, and
the head sees all N*B rows, as trainers that do not leave out the anchors' rows count it (they are 1 of B).
"""

from __future__ import annotations

from dataclasses import dataclass

# Dense bfloat16 and float8 TFLOP/s and memory TB/s of the datasheets.
DATASHEETS = {
    "H200": (989.0, 1979.0, 4.8),
    "H100": (989.0, 1979.0, 3.35),
    "A100": (312.0, 312.0, 2.0),
    "L40S": (362.0, 733.0, 0.86),
    "RTX 4090": (165.0, 330.0, 1.0),
}


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step; `visible` is the mean number of keys that a block token sees."""

    context: int
    anchors: int
    block_size: int
    hidden: int
    intermediate: int
    layers: int
    query_width: int
    key_width: int
    vocabulary: int
    taps: int
    visible: float


@dataclass(frozen=True)
class Work:
    """Operations of each part of a step, and its trained parameters (norms left out)."""

    forward: float
    head: float
    backward: float
    parameters: int

    @property
    def total(self) -> float:
        return self.forward + self.head + self.backward


def step_work(shape: StepShape) -> Work:
    """Operations of one row; the head's part holds its forward and its gradient by the rows."""
    tokens = shape.anchors * shape.block_size
    fuse = shape.taps * shape.hidden * shape.hidden
    keys = 2 * shape.hidden * shape.key_width
    layer = 2 * shape.hidden * shape.query_width + keys + 3 * shape.hidden * shape.intermediate
    attention = 4 * shape.visible * shape.query_width * shape.layers * tokens
    forward = 2 * (shape.context * (fuse + shape.layers * keys) + tokens * shape.layers * layer)
    backward = 2 * forward - 2 * shape.context * fuse
    head = 2 * 2 * tokens * shape.vocabulary * shape.hidden
    return Work(forward + attention, head, backward + 2.5 * attention, fuse + shape.layers * layer)


def update_bytes(parameters: int, compute_bytes: int = 2) -> int:
    """Least bytes of AdamW with float32 masters: gradient in, master and two moments in and out, working copy out."""
    return parameters * (2 * compute_bytes + 3 * 8)


def datasheet(gpu: str, precision: str) -> float | None:
    """Datasheet TFLOP/s of a GPU's dense matrix units, if it is known."""
    for name, (bf16, float8, _) in DATASHEETS.items():
        if name in gpu:
            return float8 if precision == "float8" else bf16
    return None
