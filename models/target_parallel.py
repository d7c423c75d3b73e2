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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from models.errors import first_line
from models.target_files import quiet_transformers
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
from models.target_weights import LoadOptions, check_complete, tensor_files

# Products of one expert, as files name them; in memory the experts of a layer are one tensor.
EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
EXPERT_STYLES = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "colwise"),
    "down_proj": "rowwise",
    "w2": "rowwise",
}


def load_shard(auto_class: Any, config: PreTrainedConfig, options: LoadOptions, shard: TargetShard) -> PreTrainedModel:
    """This rank's part of the model of `config`, with its slices of the weights in the folder.

    Raises:
        ValueError: a model that cannot be shared, before any weight is read; or weights missing.
    """
    styles, narrow = plan_styles(config), narrow_config(config, shard.size)
    with torch.device("meta"):
        trust = options.trust_remote_code
        whole, part = (auto_class.from_config(c, trust_remote_code=trust) for c in (config, narrow))
    sliced = slice_styles(whole, part, styles, shard.size)
    if RandomWeights.marked(options.folder):
        model = _random_shard(auto_class, narrow, whole, sliced, options, shard)
    else:
        weights = read_shard(part, sliced, options, shard)
        model = _with_weights(type(part), narrow, weights, options)
    add_up_outputs(model, styles, shard)
    return model


def read_shard(
    part: PreTrainedModel, sliced: Mapping[str, str], options: LoadOptions, shard: TargetShard
) -> dict[str, Tensor]:
    """This rank's slices of the tensors that the layers and the ends of `part` need, on the device."""
    wanted, depth = {ending(name) for name, _ in part.named_parameters()}, part.config.num_hidden_layers
    files = sorted(tensor_files(options.folder).items(), key=lambda item: (item[1], item[0]))
    weights = {}
    try:
        for path, items in groupby(files, key=lambda item: item[1]):
            with safe_open(path, framework="pt") as file:
                for key, _ in items:
                    layer = LAYER.search(key)
                    if int(layer[2]) < depth if layer else ending(key) in wanted:
                        weights[key] = _read(file, key, sliced, shard).to(options.device, options.dtype)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"target.model: cannot load the weights in {options.folder}: {first_line(error)}") from error
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
    narrow: PreTrainedConfig,
    whole: nn.Module,
    sliced: Mapping[str, str],
    options: LoadOptions,
    shard: TargetShard,
) -> PreTrainedModel:
    """The slices of what `RandomWeights.build` draws for the full model, one tensor at a time."""
    weights = RandomWeights.of(options.folder)
    with options.device:
        model = auto_class.from_config(narrow, dtype=options.dtype)
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        if parameter.ndim > 1:
            drawn = torch.empty(full.shape, dtype=options.dtype, device=options.device)
            weights.fill(name, drawn)
            style = sliced.get(tail(name))
            parameter.data.copy_(drawn if style is None else take_slice(drawn, list(full.shape), style, shard))
    return model


def _with_weights(
    model_class: Any, config: PreTrainedConfig, weights: dict[str, Tensor], options: LoadOptions
) -> PreTrainedModel:
    folder = options.folder
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=options.dtype,
            device_map={"": options.device},
            output_loading_info=True,
        )
    check_complete(model, info, folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _read(file: Any, key: str, sliced: Mapping[str, str], shard: TargetShard) -> Tensor:
    expert = EXPERT.search(key)
    style = EXPERT_STYLES.get(expert[1]) if expert else sliced.get(tail(key))
    if style is None:
        return file.get_tensor(key)
    source = file.get_slice(key)
    return take_slice(source, source.get_shape(), style, shard)
