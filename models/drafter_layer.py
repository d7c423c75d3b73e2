"""One layer of the drafter: Qwen3-shaped, with keys and values of the context beside those of the blocks.

Shapes: S context tokens, T = N * B block tokens (N blocks of B), H hidden, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionMask, Backend, attend
from models.dflash_config import DFlashConfig
from models.rope import RotaryTable

Linear = Callable[[Tensor, Tensor], Tensor]
"""(rows [T, in], weight [out, in]) -> [T, out]: the GEMM of block rows; `use_linear` exchanges it."""


def linear_of_fresh_blocks(x_TH: Tensor, weight: Tensor, block_size: int) -> Tensor:
    """`F.linear` of blocks as they enter the first layer: an anchor's token, then one mask token over and over.

    Each distinct row is multiplied once, N + 1 instead of N * B of them, in forward and backward alike. Gradients of
    the equal rows arrive at the first of them as their sum, which is all that the norm before needs: embeddings are
    frozen.
    """
    x_NBH = x_TH.unflatten(0, (-1, block_size))
    out = F.linear(torch.cat([x_NBH[:, 0], x_NBH[0, 1:2]]), weight)
    masks = out[-1].expand(len(x_NBH), block_size - 1, -1)
    return torch.cat([out[:-1, None], masks], dim=1).flatten(0, 1)


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

    def __init__(self, config: DFlashConfig, fresh_blocks: bool) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)
        self.fresh_blocks = fresh_blocks
        self.project: Linear = (
            partial(linear_of_fresh_blocks, block_size=config.block_size) if fresh_blocks else F.linear
        )
        self.linear: Linear = F.linear

    def queries_keys_values(self, u_TH: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """Of block rows: queries [1, heads, T, D], keys and values [1, kv_heads, T, D]."""
        q_TD, k_TD, v_TD = self._project(self.project, u_TH, self.q_proj, self.k_proj, self.v_proj)
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
    """One pre-norm layer. It holds no index and no other state, so that all but the first share one compiled graph.

    Args:
        fresh_blocks: whether it is the first, whose block rows are an anchor's token and mask tokens.
    """

    def __init__(self, config: DFlashConfig, fresh_blocks: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, fresh_blocks)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def use_linear(self, linear: Linear) -> None:
        """Run the GEMMs of block rows by `linear`; those of few rows stay as they are: of context, of fresh blocks."""
        self.self_attn.linear = self.mlp.linear = linear
        if not self.self_attn.fresh_blocks:
            self.self_attn.project = linear

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
