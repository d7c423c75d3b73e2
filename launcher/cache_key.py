"""What names a compile cache beside its environment: the settled options and the sizes of target and drafter.

The sizes and not the target's name or path: the same kernels serve a folder, a copy of it on another node, and the hub
name that it was fetched by. A key need not hold everything that changes code, as Inductor and Triton key each entry by
its source: two runs that differ in what is not listed here share a folder, and neither takes the other's kernels. No
torch: a folder is chosen before it is imported.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.config import Config
from launcher.fingerprint import Fingerprint, digest
from models.dflash_config import DFlashConfig
from models.shapes import fetch_shape

MIXTURE_KEYS = ("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")


def shape_fields(config: Config, device: str) -> dict[str, str]:
    """What decides the kernels of a run, name -> value.

    `compile` and `target_attention` change the target's graphs only, which could share a folder with others. They
    count because measured rates lie beside the kernels (split_choice), and a target's rate depends on both.

    Args:
        config: settled for its device (`for_device`).
        device: `cuda` or `cpu`.
    """
    target, drafter, train = config.target, config.drafter, config.train
    attention = drafter.attention if drafter.attention != "auto" else "flex" if device == "cuda" else "sdpa"
    options = {
        "device": device,
        "dtype": target.dtype,
        "compile": target.compile,
        "target_attention": target.attention,
        "draft_layers": drafter.layers,
        "block_size": drafter.block_size,
        "attention": attention,
        "row_length": config.data.row_length,
        "anchors": train.anchors,
        "loss": train.loss,
        "precision": train.precision,
    }
    return {name: str(value) for name, value in (_sizes(config) | options).items()}


def folder_name(fingerprint: Fingerprint, shape: dict[str, str]) -> str:
    """`<fingerprint digest>-<family and size of the target>-<digest of the shape>`."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", shape.get("model", "")).strip("-.")[:40] or "model"
    key = hashlib.sha256(repr(sorted(shape.items())).encode()).hexdigest()[:8]
    return f"{digest(fingerprint)}-{model}-{key}"


def _sizes(config: Config) -> dict[str, Any]:
    """Sizes of the target and of the drafter made for it, or the target's bare name where nothing tells them."""
    target = config.target
    try:
        raw = fetch_shape(target.model, target.revision)
        drafter = DFlashConfig.from_target(
            SimpleNamespace(**raw),
            layers=config.drafter.layers,
            block_size=config.drafter.block_size,
            mask_token_id=0,
            layer_ids=target.layer_ids,
        )
    except (ValueError, TypeError, AttributeError):  # a GGUF file; or one that the load refuses, with the reason
        return {"model": Path(target.model).name, "taps": target.layer_ids}
    family, depth = raw.get("model_type", "target"), drafter.num_target_layers
    return {
        "model": f"{family}-{drafter.hidden_size}x{depth}",
        "intermediate_size": drafter.intermediate_size,
        "heads": f"{drafter.num_heads}/{drafter.num_kv_heads} of {drafter.head_dim}",
        "vocab_size": drafter.vocab_size,
        "taps": list(drafter.target_layer_ids),
        **{key: raw[key] for key in MIXTURE_KEYS if raw.get(key)},
    }
