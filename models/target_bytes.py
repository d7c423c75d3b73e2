"""Device memory of a target's rank: the arithmetic that a run and `plan` share. No torch, no transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT_BYTES = 1 << 30
"""Device context and libraries."""
GATE_ROWS = 2
"""Rows that the gate compares, beside those in flight."""
# Numbers of a config that a rank has its share of.
WIDTHS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class TargetBytes:
    """Bytes of a target: what its ranks divide among them, and what each of them has whole."""

    divided: int
    whole: int

    def of_rank(self, size: int) -> int:
        """Bytes of one rank of `size`."""
        return self.divided // size + self.whole

    def __add__(self, other: TargetBytes) -> TargetBytes:
        return TargetBytes(self.divided + other.divided, self.whole + other.whole)


@dataclass(frozen=True)
class TargetUse:
    """What a target does with its weights; sizes of the model, bytes of a number, rows and what is held of them."""

    hidden: int
    intermediate: int
    vocabulary: int
    itemsize: int
    row_length: int
    row_bytes: int
    rows_in_flight: int

    def peak(self, layers: TargetBytes, evaluated: TargetBytes | None) -> TargetBytes:
        """Bytes at the peak.

        Args:
            layers: weights up to the last tapped layer.
            evaluated: weights of the whole model where it decodes held-out prompts: it and both ends are then loaded
                beside the layers.
        """
        # In a layer of an uncompiled forward: residual, norm and its float32 copy, queries, keys, values; the MLP's 3.
        activations = self.row_length * self.itemsize * (8 * self.hidden + 3 * self.intermediate)
        rows = (self.rows_in_flight + GATE_ROWS) * self.row_bytes
        total = layers + TargetBytes(0, rows + activations + CONTEXT_BYTES)
        if evaluated is not None:
            total += evaluated + TargetBytes(0, 2 * self.vocabulary * self.hidden * self.itemsize)
        return total


def widths_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a config that must divide by the ranks that share it."""
    return {name: value for name in WIDTHS if isinstance(value := config.get(name), int) and value}


def sizes_that_divide(widths: Mapping[str, int]) -> list[int]:
    """The numbers of ranks that divide all of them, ascending."""
    common = math.gcd(*widths.values())
    return [size for size in range(1, common + 1) if common % size == 0]


def fewest_ranks(sizes: list[int], need: TargetBytes, memory: float) -> int | None:
    """The fewest ranks of `memory` bytes that hold the target; None: no number of them does."""
    return next((size for size in sizes if need.of_rank(size) <= memory), None)
