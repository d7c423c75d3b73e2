"""Attention of the frozen target over packed rows, without a mask of S x S.

A query sees one interval of keys: from the start of its document, or of its sliding window, to itself. So the tiles
that FlexAttention visits follow from the interval bounds, and every model that reaches its attention through
transformers' AttentionInterface takes this path without a patch. Grouped queries and soft caps are FlexAttention's own.
torch's varlen attention was the other candidate: it has no soft cap, takes grouped queries from torch 2.12 on only, and
has no CPU kernel to be compared with a reference.

Nothing here falls back: what FlexAttention cannot serve raises ValueError and names the option that can.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from models.attention import FLEX_OPTIONS
from models.masks import TILE, Tiles, compiled_on, document_starts, sparse_mask

NAME = "packed_flex"
"""What transformers knows this attention by."""
ADVICE = " -> set target.attention=sdpa (a dense mask, slower)"
# Keywords of transformers' attention functions that say nothing the mask does not.
UNUSED = frozenset(
    {"sliding_window", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions"}
)
_row: ContextVar[Tensor | None] = ContextVar("packed_row", default=None)
_uncompiled: ContextVar[bool] = ContextVar("uncompiled", default=False)


def check_servable(model: PreTrainedModel) -> None:
    """Refuse a model whose attention cannot be replaced, by its class and config.

    Raises:
        ValueError: says why, and what to set.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if not (model._supports_flex_attn and model._supports_attention_backend):
        raise ValueError(f"target.attention: {name} does not run FlexAttention{ADVICE}")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"target.attention: {name} attends in chunks, which flex does not serve{ADVICE}")


@contextmanager
def packed_row(doc_S: Tensor) -> Generator[None]:
    """Within it, masks are those of this row; `doc_S` is int [S], contiguous documents, -1 for padding."""
    token = _row.set(doc_S)
    try:
        yield
    finally:
        _row.reset(token)


@contextmanager
def uncompiled_allowed() -> Generator[None]:
    """Within it attention runs uncompiled, with all scores: for rows of a few tokens, outside of a turn."""
    token = _uncompiled.set(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            yield
    finally:
        _uncompiled.reset(token)


def attention_starts(doc_S: Tensor, window: int | None) -> Tensor:
    """The first key that each query sees, int64 [S]; the last one is itself. A padding token sees only itself."""
    index_S = torch.arange(doc_S.shape[0], device=doc_S.device)
    first_S = torch.where(doc_S < 0, index_S, document_starts(doc_S))
    return first_S if window is None else torch.maximum(first_S, index_S - window + 1)


def causal_tiles(doc_S: Tensor, window: int | None) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """Tables of tiles, those of `Tiles` as pairs (partial, full), and the first key of each query, int32, up to the end
    of the last tile.

    The bounds never go down from query to query. So row i of tiles sees an interval that ends on the diagonal: partly
    from the tile of its first query's start, whole from where its last query's start lets it. Columns follow as
    intervals of rows, and every table is a few sums. Stacking them is left to the caller: fused with that, Inductor of
    torch 2.11 fails to compile.
    """
    length, device = doc_S.shape[0], doc_S.device
    count = -(-length // TILE)
    first_S = attention_starts(doc_S, window)
    padded = torch.nn.functional.pad(first_S, (0, count * TILE - length), value=count * TILE)
    starts = padded.view(count, TILE)
    tile = torch.arange(count, device=device)
    seen_from = starts[:, 0] // TILE
    full_from = torch.minimum((starts[:, -1] + TILE - 1) // TILE, tile)  # never its own tile, nor in a cut last row
    seen_to = (seen_from[:, None] <= tile).sum(0) - 1  # by column: the last row that sees it
    full_to = (full_from[:, None] <= tile).sum(0) - 1
    own, step = tile[:, None], tile[None, :]
    # Past their counts the lists hold any tiles.
    before = (full_from - seen_from)[:, None]
    row_partial = torch.where(step < before, seen_from[:, None] + step, own + step - before) % count
    row_full = (full_from[:, None] + step) % count
    column_partial = torch.where(step == 0, own, full_to[:, None] + step) % count
    column_full = (own + 1 + step) % count
    tables = (
        (full_from - seen_from + 1, tile - full_from),
        (row_partial, row_full),
        (seen_to - full_to + 1, full_to - tile),
        (column_partial, column_full),
    )
    return tuple((partial.int(), full.int()) for partial, full in tables), padded.int()


def causal_mask(doc_S: Tensor, window: int | None = None) -> BlockMask:
    """The mask of a packed row: causal, within documents, within `window` keys where given. No wait for the device."""
    make_tiles = causal_tiles if _uncompiled.get() else compiled_on(doc_S.device.type, causal_tiles)
    tables, first_S = make_tiles(doc_S, window)

    def within_document_and_window(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return (kv_index <= q_index) & (kv_index >= first_S[q_index])

    length = doc_S.shape[0]
    return sparse_mask(Tiles(*map(torch.stack, tables)), (length, length), within_document_and_window)


def _mask(*, config: PreTrainedConfig, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> BlockMask:
    """What transformers calls for a mask: once per forward and kind of layer."""
    doc_S = _row.get()
    assert doc_S is not None, "a packed target ran outside of TappedTarget.forward"
    if use_vmap:
        raise ValueError(f"target.attention: {config.model_type} adds to its causal mask{ADVICE}")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise ValueError(f"target.attention: {config.model_type} has local attention of an unknown kind{ADVICE}")
    return causal_mask(doc_S, local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention: q [1, heads, S, D], k, v [1, kv_heads, S, D]; gives [1, S, heads, D]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in UNUSED)
    if not isinstance(attention_mask, BlockMask) or not causal or dropout or unknown:
        what = ", ".join(unknown) or "attention that is not causal, has dropout, or brings a mask of its own"
        raise ValueError(f"target.attention: {type(module).__name__} uses {what}, which flex does not serve{ADVICE}")
    if not (torch.compiler.is_compiling() or _uncompiled.get()):
        raise RuntimeError("FlexAttention of the target must run compiled: call compile_layers()")

    out = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else _soft_cap(softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=FLEX_OPTIONS,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _soft_cap(limit: float) -> Callable[..., Tensor]:
    """Scores pressed between -limit and limit (Gemma 2)."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
