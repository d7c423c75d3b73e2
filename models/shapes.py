"""Shapes of well-known targets, and where else a target's config.json may lie. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 49280,  # the demo tokenizer's 49,152 ids and some unused rows
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {  # the demo's target
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
}
DEMO_SHAPE = "smollm2-135m"


def find_shape(model: str) -> dict[str, Any]:
    """The configuration of `target.model`, as its config.json has it, without fetching or converting anything.

    Raises:
        ValueError: it is not known here; says where it was looked for.
    """
    name = DEMO_SHAPE if model == "demo" else model.removeprefix("random:")
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    for file in (path, path / "config.json"):
        if file.name.endswith(".json") and file.is_file():
            return _text_config(file)
    if (cached := _in_hub_cache(model)) is not None:
        return _text_config(cached)
    if (known := name.rpartition("/")[2].lower()) in SHAPES:
        return SHAPES[known]
    raise ValueError(
        f"the shape of {model} is not known: no config.json in that folder or in the hub's cache"
        f" -> give a folder, or random:SHAPE with one of {', '.join(SHAPES)}"
    )


def _in_hub_cache(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _text_config(file: Path) -> dict[str, Any]:
    """A decoder's own configuration: that of a multi-modal model lies one level down."""
    values = json.loads(file.read_text())
    return values | values.get("text_config", {})
