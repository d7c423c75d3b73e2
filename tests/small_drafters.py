"""Drafters small enough for unit tests, one for each form of RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from models.dflash import DFlashConfig

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
ROPES = pytest.mark.parametrize("rope", [None, LINEAR, LLAMA3, YARN], ids=["default", "linear", "llama3", "yarn"])


def small_config(rope: dict[str, Any] | None = None, **changes: Any) -> DFlashConfig:
    target = Qwen3Config(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        max_position_embeddings=256,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1e6},
    )
    settings: dict[str, Any] = {"layers": 3, "block_size": 4, "mask_token_id": 96}
    return DFlashConfig.from_target(target, **settings | changes)


def fresh_blocks(config: DFlashConfig, blocks: int, **options: Any) -> Tensor:
    """Random embeddings [N*B, H] of blocks as they are drafted: a token each, then one mask token over and over."""
    tokens = torch.randn(blocks, 1, config.hidden_size, **options)
    mask = torch.randn(1, 1, config.hidden_size, **options).expand(blocks, config.block_size - 1, -1)
    return torch.cat([tokens, mask], dim=1).flatten(0, 1)
