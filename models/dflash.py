"""The DFlash drafter: a small Qwen3-shaped stack that drafts whole blocks from the target's hidden states.

Each block row attends to the target's context features before its anchor and to all rows of its own block. The
context passes through one projection (`fc`, `hidden_norm`) and from there only into every layer's keys and values, so
context tokens cost no queries, no output projection and no MLP. Embedding and head are the target's and stay outside.
Source: the DFlash paper and the z-lab `dflash` package, whose parameter names these are.

Shapes: S context tokens, T = N * B block tokens (N blocks of B), H hidden, K tapped target layers.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from models.attention import AttentionMask, Backend
from models.dflash_config import DFlashConfig, default_layer_ids
from models.drafter_layer import DFlashLayer, Linear, RMSNorm
from models.rope import RotaryEmbedding

__all__ = ["DFlashConfig", "DFlashDrafter", "DraftCache", "default_layer_ids"]

INIT_STD = 0.02


class DraftCache:
    """Context keys and values of every layer for decoding one sequence; block rows are never stored."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, n, D] to a layer's context and return the whole of it."""
        old = self._layers[layer]
        if old is not None:
            keys, values = torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)
        self._layers[layer] = (keys, values)
        return keys, values


class DFlashDrafter(nn.Module):
    """The trainable drafter; its state dict is exactly the exported tensor set, without a prefix.

    Weights are drawn from torch's default generator: seed it first. Built on the meta device nothing is drawn; call
    `init_weights` after `to_empty`.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, fresh_blocks=i == 0) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)
        if not self.fc.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal(0, 0.02) for matrices, ones for norms."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, INIT_STD)
            else:
                parameter.fill_(1.0)

    def use_linear(self, linear: Linear) -> None:
        """Run the GEMMs of block rows by `linear`; see `DFlashLayer.use_linear`."""
        for layer in cast("list[DFlashLayer]", list(self.layers)):
            layer.use_linear(linear)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile what `forward` runs, in place and for static shapes: each layer, `context` and `finish`.

        Functions are replaced rather than modules wrapped: parameter names stay, and FSDP's hooks run uncompiled
        around the compiled code. The first layer has a graph of its own, the others share one. `draft` stays
        uncompiled, as its lengths vary.
        """
        compiled = partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
        for layer in self.layers:
            layer.forward = compiled(layer.forward)
        self.context = compiled(self.context)
        self.finish = compiled(self.finish)

    def context(self, features_SF: Tensor) -> Tensor:
        """Features [S, K*H] -> context [S, H], computed once and read by every layer."""
        return self.hidden_norm(self.fc(features_SF))

    def finish(self, x_TH: Tensor) -> Tensor:
        """The final norm, [T, H] -> [T, H]."""
        return self.norm(x_TH)

    def forward(
        self,
        block_embeddings: Tensor,
        features: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        mask: AttentionMask,
        backend: Backend,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, for all blocks of a row at once.

        block_embeddings [T, H] (in each block the anchor's token, then mask tokens; the first layer relies on it) and
        features [S, K*H], both in the weights' dtype;
        context_positions int [S] and block_positions int [T] (position(anchor) + offset) count within a document;
        mask over [T, S + T] as `models.masks` makes it for the backend.
        """
        context_SH = self.context(features)
        rope = self.rotary.table(torch.cat([context_positions, block_positions]))
        x_TH = block_embeddings
        for layer in self.layers:
            x_TH = layer(x_TH, context_SH, rope, mask, backend)
        return self.finish(x_TH)

    def new_cache(self) -> DraftCache:
        """An empty cache for one sequence."""
        return DraftCache(self.config.num_layers)

    @torch.no_grad()
    def draft(self, block_embeddings: Tensor, new_features: Tensor, cache: DraftCache, start: int) -> Tensor:
        """Hidden states [B, H] of the block at positions start..start+B-1, given features up to start - 1.

        block_embeddings [B, H]: a token, then mask tokens.
        new_features [n, K*H] are those of the positions cache.length..start-1, which are added to the cache.
        Raises ValueError when they do not end right before `start`.
        """
        if cache.length + len(new_features) != start:
            raise ValueError(f"features end at {cache.length + len(new_features)}, but the block starts at {start}")
        positions = torch.arange(cache.length, start + len(block_embeddings), device=block_embeddings.device)
        rope, split = self.rotary.table(positions), len(new_features)
        context_nH = self.hidden_norm(self.fc(new_features))
        x_BH = block_embeddings
        for index, layer in enumerate(cast("list[DFlashLayer]", list(self.layers))):
            new = layer.self_attn.keys_values(context_nH, rope.rows(0, split))
            x_BH = layer.draft(x_BH, cache.extend(index, *new), rope.rows(split))
        cache.length = start
        return self.norm(x_BH)
