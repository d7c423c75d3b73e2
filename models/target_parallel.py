"""A target that several ranks share: each loads its slices, and the ranks add their outputs up.

transformers builds the rank's narrower model; its slices are read from the safetensors files, and behind each row-wise
product of the plan the outputs of all ranks are added. Norms, embeddings and the head are whole on every rank.
transformers' own loader takes the ranks of the whole job for one model, and its interface differs from release to
release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from models.target_files import first_line, quiet_transformers
from models.target_random import RandomWeights
from models.target_slices import (
    LAYER,
    SUMMED,
    TargetShard,
    ending,
    generic,
    narrow_config,
    plan_styles,
    slice_styles,
    tail,
    take_slice,
)
from models.target_weights import check_complete, tensor_files

# Products of one expert, as files name them; in memory the experts of a layer are one tensor.
EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
EXPERT_STYLES = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "colwise"),
    "down_proj": "rowwise",
    "w2": "rowwise",
}


def load_shard(
    auto_class: Any,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool,
    shard: TargetShard,
) -> PreTrainedModel:
    """This rank's part of the model of `config`, with its slices of the weights in `folder`.

    Raises:
        ValueError: a model that cannot be shared, before any weight is read; or weights missing.
    """
    styles, narrow = plan_styles(config), narrow_config(config, shard.size)
    with torch.device("meta"):
        whole, part = (auto_class.from_config(c, trust_remote_code=trust_remote_code) for c in (config, narrow))
    sliced = slice_styles(whole, part, styles, shard.size)
    if RandomWeights.marked(folder):
        model = _random_shard(auto_class, RandomWeights.of(folder), narrow, whole, sliced, dtype, device, shard)
    else:
        depth = config.num_hidden_layers
        weights = read_shard(folder, part, sliced, depth, dtype, torch.device(device), shard)
        with quiet_transformers():
            model, info = type(part).from_pretrained(
                None,
                config=narrow,
                state_dict=weights,
                dtype=dtype,
                device_map={"": torch.device(device)},
                output_loading_info=True,
            )
        check_complete(model, info, folder)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    add_up_outputs(model, styles, shard)
    return model


def read_shard(
    folder: Path,
    model: nn.Module,
    sliced: Mapping[str, str],
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: TargetShard,
) -> dict[str, Tensor]:
    """This rank's slices of the tensors that the first `depth` layers and the ends of `model` need, on `device`."""
    wanted = {ending(name) for name, _ in model.named_parameters()}
    files = sorted(tensor_files(folder).items(), key=lambda item: (item[1], item[0]))
    weights = {}
    try:
        for path, items in groupby(files, key=lambda item: item[1]):
            with safe_open(path, framework="pt") as file:
                for key, _ in items:
                    layer = LAYER.search(key)
                    if int(layer[2]) < depth if layer else ending(key) in wanted:
                        weights[key] = _read(file, key, sliced, shard).to(device, dtype)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"target.model: cannot load the weights in {folder}: {first_line(error)}") from error
    return weights


def add_up_outputs(model: nn.Module, styles: Mapping[str, str], shard: TargetShard) -> None:
    """Behind each row-wise product, and behind each layer's experts, add the outputs of all ranks."""
    ops = torch.ops._c10d_functional

    def add_up(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(output, "sum", shard.group))

    for name, module in model.named_modules():
        style = styles.get(generic(name))
        if style == SUMMED or (style == "rowwise" and isinstance(module, nn.Linear)):
            module.register_forward_hook(add_up)
            bias = getattr(module, "bias", None)
            if shard.rank and isinstance(bias, Tensor):
                bias.data.zero_()  # it is added once, by the first rank


def _random_shard(
    auto_class: Any,
    weights: RandomWeights,
    narrow: PreTrainedConfig,
    whole: nn.Module,
    sliced: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    shard: TargetShard,
) -> PreTrainedModel:
    """The slices of what `RandomWeights.build` draws for the full model, one tensor at a time."""
    with torch.device(device):
        model = auto_class.from_config(narrow, dtype=dtype)
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        if parameter.ndim > 1:
            drawn = torch.empty(full.shape, dtype=dtype, device=device)
            weights.fill(name, drawn)
            style = sliced.get(tail(name))
            parameter.data.copy_(drawn if style is None else take_slice(drawn, list(full.shape), style, shard))
    return model


def _read(file: Any, key: str, sliced: Mapping[str, str], shard: TargetShard) -> Tensor:
    expert = EXPERT.search(key)
    style = EXPERT_STYLES.get(expert[1]) if expert else sliced.get(tail(key))
    if style is None:
        return file.get_tensor(key)
    source = file.get_slice(key)
    return take_slice(source, source.get_shape(), style, shard)
