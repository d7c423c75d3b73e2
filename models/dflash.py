"""The DFlash drafter: a small Qwen3-shaped stack that drafts whole blocks from the target's hidden states.

Each block row attends to the target's context features before its anchor and to all rows of its own block. The
context passes through one projection (`fc`, `hidden_norm`) and from there only into every layer's keys and values, so
context tokens cost no queries, no output projection and no MLP. Embedding and head are the target's and stay outside.
Source: the DFlash paper and the z-lab `dflash` package, whose parameter names these are.

Shapes: S context tokens, T = N * B block tokens (N blocks of B), H hidden, K tapped target layers, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionMask, Backend, attend
from models.dflash_config import DFlashConfig, default_layer_ids
from models.rope import RotaryEmbedding, RotaryTable

__all__ = ["DFlashConfig", "DFlashDrafter", "DraftCache", "default_layer_ids"]

INIT_STD = 0.02

Linear = Callable[[Tensor, Tensor], Tensor]
"""(rows [T, in], weight [out, in]) -> [T, out]: the GEMM of block rows; `use_linear` exchanges it."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Queries from the block stream; keys and values from context and block stream by the same projections."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)
        self.linear: Linear = F.linear

    def queries_keys_values(self, u_TH: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """Of block rows: queries [1, heads, T, D], keys and values [1, kv_heads, T, D]."""
        q_TD, k_TD, v_TD = self._project(self.linear, u_TH, self.q_proj, self.k_proj, self.v_proj)
        return self._heads(q_TD, self.q_norm, rope), *self._as_keys_values(k_TD, v_TD, rope)

    def keys_values(self, u_TH: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor]:
        """Of context rows, each [1, kv_heads, T, D]."""
        k_TD, v_TD = self._project(F.linear, u_TH, self.k_proj, self.v_proj)
        return self._as_keys_values(k_TD, v_TD, rope)

    def _project(self, linear: Linear, u_TH: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
        """Several projections of the same rows in one GEMM: alone, those of few heads leave most of a GPU idle."""
        weights = [projection.weight for projection in projections]
        return linear(u_TH, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)

    def _as_keys_values(self, k_TD: Tensor, v_TD: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor]:
        """Values are neither normalised nor rotated."""
        return self._heads(k_TD, self.k_norm, rope), v_TD.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]

    def _heads(self, x_TD: Tensor, norm: RMSNorm, rope: RotaryTable) -> Tensor:
        return rope.rotate(norm(x_TD.unflatten(-1, (-1, self.head_dim)))).transpose(0, 1)[None]

    def output(self, heads_1hTD: Tensor) -> Tensor:
        """[T, H]"""
        return self.linear(heads_1hTD[0].transpose(0, 1).flatten(1), self.o_proj.weight)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.linear: Linear = F.linear

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.linear(x, self.gate_proj.weight)) * self.linear(x, self.up_proj.weight)
        return self.linear(gated, self.down_proj.weight)


class DFlashLayer(nn.Module):
    """One pre-norm layer. It holds no index and no other state, so that all layers share one compiled graph."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_TH: Tensor, context_SH: Tensor, rope: RotaryTable, mask: AttentionMask, backend: Backend
    ) -> Tensor:
        """[T, H] -> [T, H]; `rope` covers context then block tokens [S + T]; mask as in `attend`."""
        split = context_SH.shape[0]
        context = self.self_attn.keys_values(context_SH, rope.rows(0, split))
        return self._block(x_TH, context, rope.rows(split), mask, backend)

    def draft(self, x_BH: Tensor, context: tuple[Tensor, Tensor], rope: RotaryTable) -> Tensor:
        """The same for one block whose context keys and values are ready and all visible; `rope` covers the block."""
        return self._block(x_BH, context, rope, None, "sdpa")

    def _block(
        self,
        x_TH: Tensor,
        context: tuple[Tensor, Tensor],
        rope: RotaryTable,
        mask: AttentionMask,
        backend: Backend,
    ) -> Tensor:
        u_TH = self.input_layernorm(x_TH)
        q, k_block, v_block = self.self_attn.queries_keys_values(u_TH, rope)
        k = torch.cat([context[0], k_block], dim=2)
        v = torch.cat([context[1], v_block], dim=2)
        x_TH = x_TH + self.self_attn.output(attend(q, k, v, mask, backend))
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


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
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
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
        """Run the GEMMs of block rows by `linear`; those of context rows, a twentieth of the work, stay as they are."""
        for layer in cast("list[DFlashLayer]", list(self.layers)):
            layer.self_attn.linear = layer.mlp.linear = linear

    def compile_layers(self, backend: str = "inductor", options: dict[str, str | bool | int] | None = None) -> None:
        """Compile what `forward` runs, in place and for static shapes: each layer, `context` and `finish`.

        Functions are replaced rather than modules wrapped: parameter names stay, and FSDP's hooks run uncompiled
        around the compiled code. The first layer has a graph of its own (its input needs no gradient), the others share
        one. `draft` stays uncompiled, as its lengths vary.
        """
        compiled = partial(torch.compile, backend=backend, options=options, dynamic=False, fullgraph=True)
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

        block_embeddings [T, H] (the anchor's token, then mask tokens), features [S, K*H], both in the weights' dtype;
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
