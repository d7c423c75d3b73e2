"""Embedding and head are the target's own, read without the rest; the mask token is a row nobody uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.target import load_full_target
from models.target_ends import default_mask_token_id, load_frozen_ends
from models.target_random import RandomWeights

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_small(folder: Path, model_type: str, **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB" if model_type == "qwen3" else "1GB")
    return model


@pytest.mark.parametrize(
    ("model_type", "values", "tied"),
    [
        ("qwen3", {**SMALL, "tie_word_embeddings": False}, False),
        ("llama", {**SMALL, "tie_word_embeddings": True}, True),
        ("gemma3_text", SMALL, True),
        ("gemma3", {"text_config": SMALL, "vision_config": VISION}, True),
        ("gpt_neox", SMALL, False),
    ],
)
def test_ends_are_the_targets_own(model_type: str, values: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = save_small(tmp_path, model_type, **values)
    ends = load_frozen_ends(tmp_path, torch.float32, "cpu")
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    assert torch.equal(ends.embed, embedding.weight) and torch.equal(ends.head, head.weight)
    assert (ends.embed is ends.head) == tied
    assert not ends.embed.requires_grad and not ends.head.requires_grad


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {k: v for k, v in changes.items() if v is not None}
    kept = {key: value for key, value in weights.items() if changes.get(key, value) is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_padded_vocabulary_is_cut_and_faults_are_named(tmp_path: Path) -> None:
    model = save_small(tmp_path, "llama", **SMALL)
    head: Any = model.get_output_embeddings()
    rewrite(tmp_path, **{"lm_head.weight": torch.cat([head.weight.data, torch.full((3, 32), 9.0)])})
    assert torch.equal(load_frozen_ends(tmp_path, torch.float32, "cpu").head, head.weight)
    rewrite(tmp_path, **{"lm_head.weight": torch.zeros(60, 32)})
    with pytest.raises(ValueError, match=r"lm_head.weight is \[60, 32\], expected \[61, 32\]"):
        load_frozen_ends(tmp_path, torch.float32, "cpu")
    rewrite(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ValueError, match="no tensor lm_head.weight"):
        load_frozen_ends(tmp_path, torch.float32, "cpu")


def test_random_ends_match_the_random_model(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SMALL, tie_word_embeddings=False).save_pretrained(tmp_path)
    RandomWeights(seed=3).mark(tmp_path)
    ends = load_frozen_ends(tmp_path, torch.bfloat16, "cpu")
    model: Any = load_full_target(tmp_path, torch.bfloat16, "cpu")
    assert torch.equal(ends.embed, model.get_input_embeddings().weight)
    assert torch.equal(ends.head, model.get_output_embeddings().weight)


class Vocabulary:
    bos_token_id, eos_token_id, pad_token_id, unk_token_id = 0, 1, 1, None

    def __init__(self, ids: list[int]) -> None:
        self.added_tokens_decoder = {
            i: type("Token", (), {"special": True, "__str__": lambda _: "<s>"})() for i in (0, 2)
        }
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return {str(token_id): token_id for token_id in self.ids}


def test_mask_token_is_the_first_unused_row() -> None:
    config = AutoConfig.for_model("gemma3", text_config=SMALL, vision_config=VISION)
    unused: Any = Vocabulary([token_id for token_id in range(61) if token_id not in (57, 59)])
    assert default_mask_token_id(config, unused) == 57
    full: Any = Vocabulary(list(range(61)))
    with pytest.raises(ValueError, match=r"drafter.mask_token_id: .* all 61 rows .* for example 2 <s>"):
        default_mask_token_id(config, full)
