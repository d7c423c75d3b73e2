"""Read a target's config and weights: from safetensors straight to the device, tensor by tensor, or random ones.

Files are mapped into memory, so all targets of a node share one copy in the page cache, and none holds the whole model
on the host.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from models.errors import first_line
from models.target_files import quiet_transformers
from models.target_random import RandomWeights


@dataclass(frozen=True)
class LoadOptions:
    """Where a target's files are, and how its weights are held."""

    folder: Path
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config, from its folder only."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.model: cannot read {folder}/config.json: {first_line(error)}") from error
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        # transformers' SDPA leaves the soft cap out: up to 5.17 without a word, and as the default.
        config._attn_implementation = "eager"
    return config


def cut_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of `config` with only the first layers; settings listed per layer are cut to match."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        return cut  # which layers share keys is counted from the top, so this family cannot be cut
    old = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == old:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return cut


def load_model(auto_class: Any, config: PreTrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """The model of `config` with the weights in the folder.

    Raises:
        ValueError: files that cannot be read, or weights that are not in them.
    """
    folder = options.folder
    if RandomWeights.marked(folder):
        return RandomWeights.of(folder).build(auto_class, config, options.dtype, options.device)
    try:
        with quiet_transformers():
            model, info = auto_class.from_pretrained(
                folder,
                config=config,
                dtype=options.dtype,
                device_map={"": options.device},
                use_safetensors=True,
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"target.model: cannot load the weights in {folder}: {first_line(error)}") from error
    check_complete(model, info, folder)
    return model


def check_complete(model: PreTrainedModel, info: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model with weights that its files did not give.

    transformers fills what it does not find with random numbers: the loss then stalls at ln(V), without a word.
    """
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    absent += [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise ValueError(f"target.model: {len(absent)} weights are not in {folder}: {', '.join(absent[:5])}")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Each tensor of a safetensors folder, one file or sharded, and the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {key: folder / file for key, file in json.loads(index.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files
