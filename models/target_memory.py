"""How much device memory a rank of a target takes, and how many ranks must share it. Weights are counted on meta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from models.target_bytes import TargetBytes, TargetUse, fewest_ranks
from models.target_slices import SLICED, plan_styles, possible_sizes, style_of
from models.target_weights import cut_config


def count_target(
    config: PreTrainedConfig,
    layer_ids: Sequence[int],
    row_length: int,
    row_bytes: int,
    rows_in_flight: int,
    dtype: torch.dtype,
    evaluated: bool,
) -> TargetBytes:
    """Bytes of a target at its peak.

    Args:
        config: the whole model's.
        layer_ids: tapped layers; those above the last one are not loaded.
        row_length: tokens of a row.
        row_bytes: bytes of a row that is sent.
        rows_in_flight: rows held ready at a time.
        dtype: of weights and features.
        evaluated: whether it decodes held-out prompts: the whole model and the ends are then loaded beside the layers.
    """
    text = config.get_text_config(decoder=True)
    width = getattr(text, "intermediate_size", 4 * text.hidden_size)
    width = max(width) if isinstance(width, list) else width
    use = TargetUse(text.hidden_size, width, text.vocab_size, dtype.itemsize, row_length, row_bytes, rows_in_flight)
    layers = _weights(AutoModel, cut_config(config, max(layer_ids) + 1), dtype)
    return use.peak(layers, _weights(AutoModelForCausalLM, config, dtype) if evaluated else None)


def ranks_needed(config: PreTrainedConfig, need: TargetBytes, memory: int) -> int | None:
    """The fewest ranks of `memory` bytes that hold the target and can divide it; None: no number of them does."""
    return fewest_ranks(possible_sizes(config), need, memory)


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
