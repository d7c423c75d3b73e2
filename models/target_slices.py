"""How a weight of the target is cut for the ranks that share it, from the model's own tensor-parallel plan.

A rank's model is a narrower one of the same kind: its config has the numbers of heads and the widths divided. The plan
(`base_model_tp_plan` of the config) says which weights that cuts, and along which dimension.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.target_bytes import WIDTHS, sizes_that_divide, widths_of

SLICED = ("colwise", "rowwise", "packed_colwise")
WHOLE = ("replicated_with_grad_allreduce", "replicate")
SUMMED = "moe_tp_experts"
LAYER = re.compile(r"(?:^|\.)(layers\.(\d+)\..+)$")


@dataclass(frozen=True)
class TargetShard:
    """One rank's part of a target: `rank` of `size`; `group` names the process group of these ranks."""

    rank: int
    size: int
    group: str


def narrow_config(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """The config of one rank's model.

    Raises:
        ValueError: a wrapped or quantised model, or a number that does not divide by `size`; says what would do.
    """
    kind, widths, sizes = config.model_type, _widths(config), possible_sizes(config)
    if _is_wrapped(config):
        raise ValueError(f"topology.target_tp: {kind} is wrapped or quantised and cannot be shared -> set it to 1")
    if size not in sizes:
        fitting = ", ".join(map(str, sizes))
        listed = ", ".join(f"{name} {value}" for name, value in widths.items() if value % size)
        raise ValueError(f"topology.target_tp: {listed} of {kind} cannot be divided by {size} -> one of {fitting}")
    narrow = copy.deepcopy(config)
    narrow.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, value in widths.items():
        setattr(narrow, name, value // size)
    return narrow


def possible_sizes(config: PreTrainedConfig) -> list[int]:
    """The numbers of ranks that divide a model's heads and widths, ascending; [1] where it cannot be shared."""
    if _is_wrapped(config) or _plan_problem(config):
        return [1]
    return sizes_that_divide(_widths(config))


def _widths(config: PreTrainedConfig) -> dict[str, int]:
    return widths_of({name: getattr(config, name, None) for name in WIDTHS})


def _is_wrapped(config: PreTrainedConfig) -> bool:
    return config.get_text_config(decoder=True) is not config or bool(getattr(config, "quantization_config", None))


def plan_styles(config: PreTrainedConfig) -> dict[str, str]:
    """How the model's plan treats each module or weight of its layers, by name with `*` for the layer's number.

    Raises:
        ValueError: no plan, or one with styles that are not served here.
    """
    if problem := _plan_problem(config):
        raise ValueError(f"topology.target_tp: {config.model_type} has {problem} and cannot be shared -> set it to 1")
    return _layer_plan(config)


def _layer_plan(config: PreTrainedConfig) -> dict[str, str]:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if name.startswith("layers.*.")}


def _plan_problem(config: PreTrainedConfig) -> str | None:
    styles = set(_layer_plan(config).values())
    unknown = sorted(styles - {*SLICED, *WHOLE, SUMMED})
    if unknown:
        return f"a plan with {', '.join(unknown)}"
    return None if styles else "no tensor-parallel plan"


def slice_styles(full: nn.Module, narrow: nn.Module, styles: Mapping[str, str], size: int) -> dict[str, str]:
    """The style of each parameter that a rank holds a slice of, by name from `layers.` on.

    Raises:
        ValueError: the narrower model is not what the plan makes of the full one.
    """
    found = {}
    for (name, whole), part in zip(full.named_parameters(), narrow.parameters(), strict=True):
        style = style_of(name, styles)
        expected = list(whole.shape)
        if style in SLICED and (dim := _dimension(style, whole.ndim)) is not None:
            expected[dim] //= size
            found[tail(name)] = style
        if list(part.shape) != expected:
            kind = type(full).__name__
            raise ValueError(f"topology.target_tp: {kind}'s plan does not fit its weight {name} -> set it to 1")
    return found


def take_slice(source: Any, shape: list[int], style: str, shard: TargetShard) -> Tensor:
    """This rank's slice of a tensor, or of a safetensors slice, which reads no more than that."""
    dim = _dimension(style, len(shape))
    assert dim is not None
    packs = 2 if style == "packed_colwise" else 1  # gate and up projection lie one after the other
    width, pack = shape[dim] // packs // shard.size, shape[dim] // packs
    before = (slice(None),) * dim
    starts = [number * pack + shard.rank * width for number in range(packs)]
    pieces = [source[(*before, slice(start, start + width))] for start in starts]
    return torch.cat(pieces, dim) if packs > 1 else pieces[0].contiguous()


def _dimension(style: str, ndim: int) -> int | None:
    """The sliced dimension of a weight [out, in], a bias [out] or experts [E, out, in]; None: whole on every rank."""
    if style == "rowwise":
        return ndim - 1 if ndim > 1 else None
    return max(0, ndim - 2)


def style_of(name: str, styles: Mapping[str, str]) -> str | None:
    """The style of a parameter: its own (a bare tensor), or that of the module whose weight or bias it is."""
    own = generic(name)
    module, _, leaf = own.rpartition(".")
    return styles.get(own) or (styles.get(module) if leaf in ("weight", "bias") else None)


def tail(name: str) -> str:
    """A name from `layers.` on, however a file or a wrapper begins it."""
    layer = LAYER.search(name)
    return layer[1] if layer else name


def generic(name: str) -> str:
    """The same with `*` for the layer's number, as plans name it."""
    return re.sub(r"\.\d+\.", ".*.", tail(name))


def ending(name: str) -> str:
    """The last two parts of a name, which prefixes leave alone."""
    return ".".join(name.split(".")[-2:])
