"""Rotary position embedding with float32 frequencies that no cast, meta device or sharding can touch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.dflash_config import DFlashConfig


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin for a list of positions, float32 [T, D/2].

    A plain object on purpose: FSDP2 casts floating tensors among a layer's inputs to the parameters' dtype, but does
    not look inside objects it does not know, so the angles keep float32 precision.
    """

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, end: int | None = None) -> RotaryTable:
        """The table of positions start..end of the list."""
        return RotaryTable(self.cos[start:end], self.sin[start:end])

    def rotate(self, x_ThD: Tensor) -> Tensor:
        """Rotate x [T, heads, D], in float32, returned in x's dtype; the two halves of D are the pairs (as in HF)."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        first, second = x_ThD.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_ThD.dtype)


class RotaryEmbedding:
    """Inverse frequencies of a configuration, kept in float32 outside the module tree, one copy per device.

    As a module's buffer they would be rounded by `.to(bfloat16)` (phase errors that grow with the position) and left
    uninitialised by `to_empty`; nor do they belong in a checkpoint.
    """

    def __init__(self, config: DFlashConfig) -> None:
        inv_freq, self.scale = _inverse_frequencies(config)
        self._by_device = {inv_freq.device: inv_freq}

    def inv_freq(self, device: torch.device) -> Tensor:
        """float32 [D/2] on `device`; copied there once."""
        if device not in self._by_device:
            # decoding may come first: a tensor made in inference mode could never be used in training
            with torch.inference_mode(False):
                self._by_device[device] = self._by_device[torch.device("cpu")].to(device)
        return self._by_device[device]

    def table(self, positions_T: Tensor) -> RotaryTable:
        """The table of integer positions [T], on their device."""
        with torch.no_grad():
            angles_TD = positions_T.float()[:, None] * self.inv_freq(positions_T.device)
            return RotaryTable(angles_TD.cos() * self.scale, angles_TD.sin() * self.scale)


def _inverse_frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
    if config.rope_parameters is None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        return 1.0 / (config.rope_theta**exponents), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = Qwen3Config(**config.to_dict())
    with torch.device("cpu"):  # also while the drafter is built on the meta device
        inv_freq, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](hf_config, torch.device("cpu"))
    return inv_freq.float(), float(scale)
