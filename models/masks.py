"""The attention mask of the blocks: as a dense predicate, and as FlexAttention's tile tables without a grid.

Notation: S row length, N anchors (blocks) per row, B block size. Queries are the N*B block tokens, keys are the
S context tokens followed by the same N*B block tokens. Block j starts at anchor a:

- it sees the context of its own document strictly before the anchor: an interval [start of document, a);
- it sees all of itself, in both directions, and no other block;
- a padding block (`keep_N` False) sees only itself, so that no softmax is empty.

Since a query sees two intervals, a tile is full, partial or empty by comparing interval bounds. The tables that
`create_block_mask` gets from a grid of N*B x (S+N*B) predicates take Q_tiles x KV_tiles integers here.
Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from models.anchors import Anchors

P = ParamSpec("P")
T = TypeVar("T")
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


class Tiles(NamedTuple):
    """Which tiles a BlockMask visits. Leading dimension 2: partial tiles, full tiles. All int32."""

    kv_count: Tensor
    """[2, Q_tiles], tiles to visit for each row of tiles."""
    kv_index: Tensor
    """[2, Q_tiles, KV_tiles], those tiles in ascending order, then the others."""
    q_count: Tensor
    """[2, KV_tiles], the same by column."""
    q_index: Tensor
    """[2, KV_tiles, Q_tiles]"""


class TileTables(NamedTuple):
    """The tensors of the block mask. All int32."""

    tiles: Tiles
    low_Q: Tensor
    """[Q_tiles * TILE], first context key that each query sees."""
    high_Q: Tensor
    """Where its context ends."""
    own_Q: Tensor
    """First key of its own block."""


def classify_tiles(low_N: Tensor, high_N: Tensor, block_size: int, row_length: int) -> tuple[Tensor, Tensor]:
    """Which tiles are partly and which wholly allowed, bool [Q_tiles, KV_tiles] each, from the context bounds."""
    device, blocks = low_N.device, low_N.shape[0]
    q_tiles = -(-blocks * block_size // TILE)
    kv_tiles = -(-(row_length + blocks * block_size) // TILE)
    first_row = torch.arange(q_tiles, device=device) * TILE
    first_block = first_row // block_size
    last_block = ((first_row + TILE - 1) // block_size).clamp(max=blocks - 1)
    # The blocks of a tile, one more than fit where the tile cuts blocks at both ends; the last one is repeated.
    span = torch.arange((TILE + block_size - 2) // block_size + 1, device=device)
    member = torch.minimum(first_block[:, None] + span, last_block[:, None])
    low, high = low_N[member][:, :, None], high_N[member][:, :, None]
    begin = torch.arange(kv_tiles, device=device) * TILE
    end = begin + TILE
    seen = ((low < end) & (high > begin) & (low < high)).any(1)
    own_begin = row_length + first_block[:, None] * block_size
    own_end = row_length + (last_block[:, None] + 1) * block_size
    own = (own_begin < end) & (own_end > begin)
    # As in create_block_mask, a tile that reaches past the last row is not full.
    full = ((low <= begin) & (high >= end)).all(1) & (first_row + TILE <= blocks * block_size)[:, None]
    return (seen | own) & ~full, full


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of tiles, how many are set, and all indices with the set ones first; int32 [..., R] and [..., R, C].

    The running sum is a product with a triangle of ones, exact in float32: Inductor of torch 2.11 and 2.12 cannot fuse
    a scan over more than 128 (pytorch #180221), which is a row of 16,384 tokens.
    """
    columns = torch.arange(tiles.shape[-1], device=tiles.device)
    rank = (tiles.float() @ (columns[:, None] <= columns).float()).long()
    count = rank[..., -1:]
    place = torch.where(tiles, rank - 1, count + columns - rank)
    index = torch.empty_like(place).scatter(-1, place, columns.expand_as(place))
    return count[..., 0].int().contiguous(), index.int().contiguous()


def order_tiles(partial: Tensor, full: Tensor) -> Tiles:
    """The lists of tiles, by row and by column, from bool [Q_tiles, KV_tiles] each."""
    both = torch.stack((partial, full))
    return Tiles(*_ordered(both), *_ordered(both.mT))


def compiled_on(device_type: str, make_tables: Callable[P, T]) -> Callable[P, T]:
    """`make_tables`, compiled on GPUs, where each of its 40 to 60 small kernels costs more to launch than to run."""
    return _compiled(make_tables) if device_type == "cuda" else make_tables


@cache
def _compiled(make_tables: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(make_tables, dynamic=False, fullgraph=True)


def sparse_mask(tiles: Tiles, lengths: tuple[int, int], mask_mod: Callable[..., Tensor]) -> BlockMask:
    """The BlockMask over `lengths` queries and keys that visits `tiles`; `mask_mod` decides in the partial ones."""
    # FlexAttention's kernels walk along a row of indices without asking for its stride.
    assert all(table.is_contiguous() for table in tiles), "a table of tiles is not contiguous"
    kv_count, kv_index, q_count, q_index = (table[:, None, None] for table in tiles)
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=kv_count[0],
        kv_indices=kv_index[0],
        full_kv_num_blocks=kv_count[1],
        full_kv_indices=kv_index[1],
        q_num_blocks=q_count[0],
        q_indices=q_index[0],
        full_q_num_blocks=q_count[1],
        full_q_indices=q_index[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def tile_tables(position_N: Tensor, keep_N: Tensor, doc_S: Tensor, block_size: int) -> TileTables:
    """All tensors of the mask from anchors and documents; pure and static in shape, so it compiles to few kernels."""
    row_length, rows = doc_S.shape[0], position_N.shape[0] * block_size
    low_N, high_N = context_bounds(Anchors(position_N, keep_N), doc_S)
    tiles = order_tiles(*classify_tiles(low_N, high_N, block_size, row_length))
    # A kernel works on whole tiles, so the bounds reach to the end of the last one; a row past N*B sees nothing.
    padding = -rows % TILE
    row_Q = torch.arange(rows + padding, device=doc_S.device)
    block_Q = (row_Q // block_size).clamp(max=position_N.shape[0] - 1)
    inside_Q = row_Q < rows
    own_Q = torch.where(inside_Q, row_length + block_Q * block_size, row_length + rows + padding)
    bounds_Q = (low_N[block_Q] * inside_Q, high_N[block_Q] * inside_Q, own_Q)
    return TileTables(tiles, *(bound.int() for bound in bounds_Q))


def block_mask(anchors: Anchors, doc_S: Tensor, block_size: int, row_length: int) -> BlockMask:
    """`dense_mask` as a FlexAttention BlockMask, made of device tensors without a grid and without a wait.

    Args:
        anchors: N slots, ascending (any order is correct, ascending is fast).
        doc_S: int32, document of each context token, -1 for padding.
        block_size: B.
        row_length: S; need not be a multiple of a tile.
    """
    tables = compiled_on(doc_S.device.type, tile_tables)(anchors.position_N, anchors.keep_N, doc_S, block_size)
    return mask_from(tables, anchors.position_N.shape[0] * block_size, block_size, row_length)


def mask_from(tables: TileTables, rows: int, block_size: int, row_length: int) -> BlockMask:
    """The BlockMask of `tables` for N*B rows."""
    visible = _interval_mask_mod(tables.low_Q, tables.high_Q, tables.own_Q, block_size)
    return sparse_mask(tables.tiles, (rows, row_length + rows), visible)


def _interval_mask_mod(low_Q: Tensor, high_Q: Tensor, own_Q: Tensor, block_size: int) -> Callable[..., Tensor]:
    """The predicate on single tokens, evaluated by the kernel in partial tiles only."""

    def blocks_see_context_and_themselves(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        in_context = (kv_index >= low_Q[q_index]) & (kv_index < high_Q[q_index])
        own = own_Q[q_index]
        return in_context | ((kv_index >= own) & (kv_index < own + block_size))

    return blocks_see_context_and_themselves
