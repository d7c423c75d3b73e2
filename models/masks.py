"""The attention mask of the blocks: as a dense predicate, and as FlexAttention's tile tables without a grid.

Notation: S row length, N anchors (blocks) per row, B block size. Queries are the N*B block tokens, keys are the
S context tokens followed by the same N*B block tokens. Block j starts at anchor a:

- it sees the context of its own document strictly before the anchor: an interval [start of document, a);
- it sees all of itself, in both directions, and no other block;
- a padding block (`keep_N` False) sees only itself, so that no softmax is empty.

Since a query sees two intervals, a tile is full, partial or empty by comparing interval bounds. The tables that
`create_block_mask` gets from a grid of N*B x (S+N*B) predicates take Q_tiles x KV_tiles integers here.
Source: DFlash (arXiv 2602.06036); issue 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from models.anchors import Anchors

TILE = 128
"""Rows and columns of a tile, FlexAttention's default."""


def document_starts(doc_S: Tensor) -> Tensor:
    """Index of the first token of each token's document, int64 [S]; documents are contiguous."""
    index_S = torch.arange(doc_S.shape[0], device=doc_S.device)
    begins = torch.nn.functional.pad(doc_S[1:] != doc_S[:-1], (1, 0), value=True)
    return torch.where(begins, index_S, 0).cummax(0).values


def context_bounds(anchors: Anchors, doc_S: Tensor) -> tuple[Tensor, Tensor]:
    """The context [low, high) that each block sees, int64 [N] each; empty (0, 0) for padding blocks."""
    low_N = document_starts(doc_S)[anchors.position_N]
    return low_N * anchors.keep_N, anchors.position_N * anchors.keep_N


def dense_mask(anchors: Anchors, doc_S: Tensor, block_size: int, row_length: int) -> Tensor:
    """The predicate itself, bool [N*B, S+N*B]: the reference for `block_mask`, and the mask of SDPA.

    Args:
        anchors: N slots.
        doc_S: int32, document of each context token, -1 for padding.
        block_size: B.
        row_length: S.
    """
    position_N, keep_N = anchors.position_N, anchors.keep_N
    index_S = torch.arange(row_length, device=doc_S.device)
    same_document_NS = doc_S[None, :] == doc_S[position_N][:, None]
    context_NS = keep_N[:, None] & same_document_NS & (index_S[None, :] < position_N[:, None])
    block_Q = torch.arange(position_N.shape[0], device=doc_S.device).repeat_interleave(block_size)
    return torch.cat((context_NS.repeat_interleave(block_size, dim=0), block_Q[:, None] == block_Q[None, :]), dim=1)


@dataclass(frozen=True)
class _Tiles:
    """Tile tables of one mask, bool [Q_tiles, KV_tiles]: what must be computed, and what needs no predicate."""

    partial: Tensor
    full: Tensor


def classify_tiles(low_N: Tensor, high_N: Tensor, block_size: int, row_length: int) -> _Tiles:
    """Which tiles of the mask are partly and which are wholly allowed, from the context bounds of the blocks."""
    device, blocks = low_N.device, low_N.shape[0]
    q_tiles = -(-blocks * block_size // TILE)
    kv_tiles = -(-(row_length + blocks * block_size) // TILE)
    first_row = torch.arange(q_tiles, device=device) * TILE
    first_block = first_row // block_size
    last_block = ((first_row + TILE - 1) // block_size).clamp_(max=blocks - 1)
    # The blocks of a tile, one more than fit where the tile cuts blocks at both ends; the last one is repeated.
    span = torch.arange((TILE + block_size - 2) // block_size + 1, device=device)
    member = torch.minimum(first_block[:, None] + span, last_block[:, None])
    low, high = low_N[member][:, :, None], high_N[member][:, :, None]
    begin = torch.arange(kv_tiles, device=device) * TILE
    end = begin + TILE
    seen = (low < end) & (high > begin) & (low < high)
    covered = (low <= begin) & (high >= end)
    own_begin = row_length + first_block[:, None] * block_size
    own_end = row_length + (last_block[:, None] + 1) * block_size
    own = (own_begin < end) & (own_end > begin)
    # As in create_block_mask, a tile that reaches past the last row is not full.
    full = covered.all(1) & (first_row + TILE <= blocks * block_size)[:, None]
    return _Tiles((seen.any(1) | own) & ~full, full)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of tiles, how many are set and their indices in front; int32 [..., R] and [..., R, C]."""
    return tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()


def block_mask(anchors: Anchors, doc_S: Tensor, block_size: int, row_length: int) -> BlockMask:
    """`dense_mask` as a FlexAttention BlockMask, made of device tensors without a grid and without a wait.

    Args:
        anchors: N slots, ascending (any order is correct, ascending is fast).
        doc_S: int32, document of each context token, -1 for padding.
        block_size: B.
        row_length: S; need not be a multiple of a tile.
    """
    low_N, high_N = context_bounds(anchors, doc_S)
    tiles = classify_tiles(low_N, high_N, block_size, row_length)
    both = torch.stack((tiles.partial, tiles.full))[:, None, None]  # [2, 1, 1, Q_tiles, KV_tiles]
    (kv_count, full_kv_count), (kv_index, full_kv_index) = _ordered(both)
    (q_count, full_q_count), (q_index, full_q_index) = _ordered(both.mT)
    rows = low_N.shape[0] * block_size
    return BlockMask(
        seq_lengths=(rows, row_length + rows),
        kv_num_blocks=kv_count,
        kv_indices=kv_index,
        full_kv_num_blocks=full_kv_count,
        full_kv_indices=full_kv_index,
        q_num_blocks=q_count,
        q_indices=q_index,
        full_q_num_blocks=full_q_count,
        full_q_indices=full_q_index,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_interval_mask_mod(low_N, high_N, block_size, row_length),
    )


def _interval_mask_mod(low_N: Tensor, high_N: Tensor, block_size: int, row_length: int) -> Callable[..., Tensor]:
    """The predicate on single tokens, evaluated by the kernel in partial tiles only."""
    device, blocks = low_N.device, low_N.shape[0]
    rows = blocks * block_size
    # A kernel works on whole tiles, so the tables reach to the end of the last tile; a row past N*B sees nothing.
    padding = (0, -rows % TILE)
    low_Q = torch.nn.functional.pad(low_N.int().repeat_interleave(block_size), padding)
    high_Q = torch.nn.functional.pad(high_N.int().repeat_interleave(block_size), padding)
    row_Q = torch.arange(rows + padding[1], device=device, dtype=torch.int32)
    own_Q = torch.where(row_Q < rows, row_Q - row_Q % block_size + row_length, row_length + rows + padding[1])

    def blocks_see_context_and_themselves(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        in_context = (kv_index >= low_Q[q_index]) & (kv_index < high_Q[q_index])
        own = own_Q[q_index]
        return in_context | ((kv_index >= own) & (kv_index < own + block_size))

    return blocks_see_context_and_themselves
