"""How much device memory a rank of a target takes, and how many ranks must share it. Weights are counted on meta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from models.target_slices import SLICED, plan_styles, possible_sizes, style_of
from models.target_weights import cut_config

CONTEXT_BYTES = 1 << 30
"""Device context and libraries."""


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


def count_target(
    config: PreTrainedConfig,
    layer_ids: Sequence[int],
    row_length: int,
    row_bytes: int,
    buffers: int,
    dtype: torch.dtype,
    evaluated: bool,
) -> TargetBytes:
    """Bytes of a target at its peak.

    Args:
        config: the whole model's.
        layer_ids: tapped layers; those above the last one are not loaded.
        row_length: tokens of a row.
        row_bytes: bytes of a row that is sent.
        buffers: rows held at a time.
        dtype: of weights and features.
        evaluated: whether it decodes held-out prompts: the whole model and the ends are then loaded beside the layers.
    """
    text = config.get_text_config(decoder=True)
    # In a layer of an uncompiled forward: residual, norm and its float32 copy, queries, keys, values; the MLP's three.
    width = getattr(text, "intermediate_size", 4 * text.hidden_size)
    width = max(width) if isinstance(width, list) else width
    activations = row_length * dtype.itemsize * (8 * text.hidden_size + 3 * width)
    total = _weights(AutoModel, cut_config(config, max(layer_ids) + 1), dtype)
    total += TargetBytes(0, buffers * row_bytes + activations + CONTEXT_BYTES)
    if evaluated:
        ends = TargetBytes(0, 2 * text.vocab_size * text.hidden_size * dtype.itemsize)
        total += _weights(AutoModelForCausalLM, config, dtype) + ends
    return total


def ranks_needed(config: PreTrainedConfig, need: TargetBytes, memory: int) -> int | None:
    """The fewest ranks of `memory` bytes that hold the target and can divide it; None: no number of them does."""
    return next((size for size in possible_sizes(config) if need.of_rank(size) <= memory), None)


def _weights(auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype) -> TargetBytes:
    styles = plan_styles(config) if len(possible_sizes(config)) > 1 else {}
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype)
    divided = whole = 0
    for name, parameter in model.named_parameters():
        if style_of(name, styles) in SLICED:
            divided += parameter.numel() * dtype.itemsize
        else:
            whole += parameter.numel() * dtype.itemsize
    return TargetBytes(divided, whole)
