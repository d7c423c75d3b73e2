"""Targets of a given shape with seeded random weights, for benchmarks and tests without the real files."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from models.shapes import SHAPES

MARKER = "random_weights.json"


def shape_config(shape: str) -> PreTrainedConfig:
    """The config of a named shape or of a config.json.

    Raises:
        ValueError: neither.
    """
    if shape in SHAPES:
        values = dict(SHAPES[shape])
    elif Path(shape).is_file():
        values = json.loads(Path(shape).read_text())
    else:
        raise ValueError(f"target.model: no shape random:{shape} -> one of {', '.join(SHAPES)}, or a config.json")
    return AutoConfig.for_model(values.pop("model_type"), **values)


@dataclass(frozen=True)
class RandomWeights:
    """Weights drawn per tensor from its name, so that every rank and every part of the model agrees on them."""

    seed: int

    @staticmethod
    def marked(folder: Path) -> bool:
        return (folder / MARKER).is_file()

    def mark(self, folder: Path) -> None:
        (folder / MARKER).write_text(json.dumps(asdict(self)))

    @classmethod
    def of(cls, folder: Path) -> RandomWeights:
        return cls(**json.loads((folder / MARKER).read_text()))

    def build(
        self, auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
    ) -> PreTrainedModel:
        """The model of `config`, built on `device` directly; matrices are normal with std 0.02, norms stay one."""
        with device:
            model = auto_class.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                self.fill(name, parameter.data)
        return model

    def fill(self, name: str, tensor_: torch.Tensor) -> None:
        """Draw `tensor_` in place; a name counts the same with and without the prefix `model.`."""
        seed = zlib.crc32(name.removeprefix("model.").encode()) + self.seed
        tensor_.normal_(0.0, 0.02, generator=torch.Generator(tensor_.device).manual_seed(seed))
