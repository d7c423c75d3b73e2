"""Helpers: small targets of every family, whole or with a gap, and a packed row for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"head_dim": 8, **MOE},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},
}
LAYER_IDS = (3, 0, 4)
DOCUMENTS = (9, 14, 6)


def save_small(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split("-")[0], **SMALL | FAMILIES[family] | changes)
    # Eager attention is the definition: SDPA leaves out Gemma 2's soft cap in some versions.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():  # larger than usual, so that attention and soft caps matter
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def packed_row(padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, doc, positions of a row with DOCUMENTS and padding that is full of tokens."""
    lengths = [*DOCUMENTS, padding]
    ids = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    doc = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor(lengths)).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, doc, positions


def save_with_a_gap(folder: Path) -> None:
    """A small model whose second layer lacks a weight."""
    save_small("llama", folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
