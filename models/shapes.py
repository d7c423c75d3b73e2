"""Shapes of well-known targets, and where else a target's config.json may lie. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

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
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT = 5.0
"""Seconds."""


def find_shape(model: str, revision: str | None = None) -> dict[str, Any]:
    """The configuration of `target.model`, as its config.json has it, without fetching or converting anything.

    Args:
        revision: branch, tag or commit of a hub name.

    Raises:
        ValueError: it is not known here; says where it was looked for.
    """
    name = DEMO_SHAPE if model == "demo" else model.removeprefix("random:")
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    for file in (path, path / "config.json"):
        if file.name.endswith(".json") and file.is_file():
            return _text_config(file.read_bytes())
    if (cached := _in_hub_cache(model, revision)) is not None:
        return _text_config(cached.read_bytes())
    if (known := name.rpartition("/")[2].lower()) in SHAPES:
        return SHAPES[known]
    raise ValueError(
        f"the shape of {model} is not known: no config.json in that folder or in the hub's cache"
        f" -> give a folder, or random:SHAPE with one of {', '.join(SHAPES)}"
    )


def fetch_shape(model: str, revision: str | None = None) -> dict[str, Any]:
    """The same, with one look at the hub's config.json for a name that was never used here.

    Raises:
        ValueError: it is not known here, and not to be had at the first try.
    """
    try:
        return find_shape(model, revision)
    except ValueError:
        if Path(model).expanduser().exists() or not HUB_NAME.fullmatch(model):
            raise
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"the shape of {model} is not known here, and the hub must not be asked")
    # Not the hub's own client: without a network it tries for half a minute.
    request = Request(hf_hub_url(model, "config.json", revision=revision), headers=build_hf_headers())
    try:
        with urlopen(request, timeout=HUB_TIMEOUT) as answer:
            return _text_config(answer.read())
    except OSError as error:
        raise ValueError(f"the shape of {model} is not to be had from the hub: {error}") from error


def _in_hub_cache(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _text_config(content: bytes) -> dict[str, Any]:
    """A decoder's own configuration: that of a multi-modal model lies one level down."""
    values = json.loads(content)
    return values | values.get("text_config", {})
