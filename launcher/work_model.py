"""How much work a drafter step and a target's forward are, in operations and bytes, and what GPUs can do. No torch.

Counted per row of S context tokens and N blocks of B tokens: a multiply-add is two operations, a weight is used once
forward and twice backward (once where no gradient flows on: features and the frozen head), nothing is recomputed, and
the head sees all N*B rows, as trainers that do not leave out the anchors' rows count it (they are 1 of B).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A datasheet: dense TFLOP/s, memory, and bytes per second one way to the GPUs of a node and to other nodes."""

    name: str
    bf16_tflops: float
    float8_tflops: float
    memory_tbs: float
    memory_gb: float
    link_gbs: float
    """NVLink, or PCIe where there is none."""
    network_gbs: float = 50.0
    """Of the network card that a GPU usually has to itself."""

    def tflops(self, precision: str) -> float:
        return self.float8_tflops if precision == "float8" else self.bf16_tflops


GPUS = (
    Gpu("B200", 2250.0, 4500.0, 8.0, 180.0, 900.0),
    Gpu("H200", 989.0, 1979.0, 4.8, 141.0, 450.0),
    Gpu("H100", 989.0, 1979.0, 3.35, 80.0, 450.0),
    Gpu("A100", 312.0, 312.0, 2.0, 80.0, 300.0, 25.0),
    Gpu("A100 40GB", 312.0, 312.0, 1.555, 40.0, 300.0, 25.0),
    Gpu("L40S", 362.0, 733.0, 0.86, 48.0, 32.0, 25.0),
    Gpu("RTX 4090", 165.0, 330.0, 1.0, 24.0, 32.0, 12.5),
)
# What drivers add to a name without meaning another datasheet.
MAKERS_WORDS = {"nvidia", "geforce", "sxm", "sxm4", "sxm5", "sxm6", "hbm2e", "hbm3", "hbm3e"}


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


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target as far as it runs: `layers` up to the last tapped one."""

    layers: int
    hidden: int
    intermediate: int
    query_width: int
    key_width: int
    vocabulary: int
    experts: int = 1
    experts_per_token: int = 1

    @property
    def parameters(self) -> int:
        """Weights held: the embedding and all layers, every expert of them."""
        return self.vocabulary * self.hidden + self.layers * self._layer(self.experts)

    def operations(self, context: int, visible: float) -> float:
        """Operations of a row of `context` tokens that see `visible` keys on average."""
        attention = 4 * visible * self.query_width
        return context * self.layers * (2 * self._layer(self.experts_per_token) + attention)

    def _layer(self, experts: int) -> int:
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        return attention + 3 * self.hidden * self.intermediate * experts


def find_gpu(name: str) -> Gpu | None:
    """The datasheet of a GPU by its own name or the one that drivers give it ("NVIDIA H100 80GB HBM3"), if it is known.

    Another form (PCIe, NVL, Laptop, a MIG slice) or another amount of memory has another datasheet.
    """
    words = set(re.split(r"[\s-]+", name.lower().strip()))
    return next((gpu for gpu in GPUS if _is_named(gpu, words)), None)


def _is_named(gpu: Gpu, words: set[str]) -> bool:
    own = set(gpu.name.lower().split())
    same = MAKERS_WORDS | {f"{gpu.memory_gb:.0f}gb"}
    return own <= words and all(word in same or word.startswith("sm_") for word in words - own)


def datasheet(gpu: str, precision: str) -> float | None:
    """Datasheet TFLOP/s of a GPU's dense matrix units, if it is known; None for float32, which does not use them."""
    sheet = find_gpu(gpu)
    return None if sheet is None or precision == "float32" else sheet.tflops(precision)
