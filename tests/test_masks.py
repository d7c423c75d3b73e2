"""The analytic tile tables equal those of the dense predicate, on any layout of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from models.anchors import Anchors, anchor_generator, sample_anchors
from models.masks import TILE, block_mask, compiled_on, dense_mask, document_starts

torch.set_num_threads(1)


def spelled_out_mask(anchors: Anchors, doc: list[int], block_size: int) -> torch.Tensor:
    """DFLASH's predicate, token by token."""
    row_length, slots = len(doc), len(anchors.position_N)
    mask = torch.zeros(slots * block_size, row_length + slots * block_size, dtype=torch.bool)
    for query in range(mask.shape[0]):
        block = query // block_size
        anchor = int(anchors.position_N[block])
        for key in range(mask.shape[1]):
            if key < row_length:
                mask[query, key] = bool(anchors.keep_N[block]) and key < anchor and doc[key] == doc[anchor]
            else:
                mask[query, key] = (key - row_length) // block_size == block
    return mask


def tile_table(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial and full tiles of a dense mask, padded with zeros to whole tiles."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % TILE, 0, -mask.shape[0] % TILE))
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE).sum((1, 3))
    full = tiles == TILE * TILE
    return (tiles > 0) & ~full, full


def table_of(count: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor:
    """A dense tile table from FlexAttention's counts and indices."""
    assert count is not None and index is not None
    table = torch.zeros(index.shape, dtype=torch.bool)
    for row in range(index.shape[2]):
        table[0, 0, row, index[0, 0, row, : count[0, 0, row]].long()] = True
    return table[0, 0]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """Loss mask, documents, slots, block size and seed of a row of packed documents with padding behind."""
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))
    padding = draw(st.integers(0, 150))
    doc = [index for index, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    seed = draw(st.integers(0, 2**31))
    share = draw(st.sampled_from((0.0, 0.1, 0.6, 0.95, 1.0)))
    mask = torch.rand(len(doc), generator=torch.Generator().manual_seed(seed)) < share
    doc_S = torch.tensor(doc, dtype=torch.int32)
    return mask & (doc_S >= 0), doc_S, draw(st.integers(1, 40)), draw(st.integers(4, 32)), seed


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(layouts())
def test_tiles_equal_those_of_the_dense_predicate(layout: tuple[torch.Tensor, torch.Tensor, int, int, int]) -> None:
    mask_S, doc_S, slots, block_size, seed = layout
    anchors = sample_anchors(mask_S, doc_S, slots, anchor_generator(seed, 0, "cpu"))
    row_length = len(doc_S)
    found = block_mask(anchors, doc_S, block_size, row_length)
    partial, full = tile_table(dense_mask(anchors, doc_S, block_size, row_length))
    assert table_of(found.kv_num_blocks, found.kv_indices).equal(partial)
    assert table_of(found.full_kv_num_blocks, found.full_kv_indices).equal(full)
    assert table_of(found.q_num_blocks, found.q_indices).equal(partial.T)
    assert table_of(found.full_q_num_blocks, found.full_q_indices).equal(full.T)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts())
def test_the_predicate_in_partial_tiles_equals_the_dense_one(layout) -> None:
    mask_S, doc_S, slots, block_size, seed = layout
    anchors = sample_anchors(mask_S, doc_S, slots, anchor_generator(seed, 0, "cpu"))
    row_length = len(doc_S)
    found = block_mask(anchors, doc_S, block_size, row_length)
    rows, columns = found.seq_lengths
    spelled = create_mask(found.mask_mod, 1, 1, rows, columns, device="cpu")[0, 0]
    assert spelled.equal(dense_mask(anchors, doc_S, block_size, row_length))


@pytest.mark.parametrize("block_size", [4, 7, 16])
def test_the_dense_predicate_equals_its_definition(block_size: int) -> None:
    doc = [0] * 9 + [1] * 14 + [2] * 5 + [-1] * 3
    doc_S = torch.tensor(doc, dtype=torch.int32)
    anchors = sample_anchors(doc_S >= 0, doc_S, 6, anchor_generator(3, block_size, "cpu"))
    surplus = Anchors(anchors.position_N, torch.tensor([True] * 4 + [False] * 2))
    for slots in (anchors, surplus):
        assert dense_mask(slots, doc_S, block_size, len(doc)).equal(spelled_out_mask(slots, doc, block_size))


def test_a_block_never_sees_its_own_anchor_or_a_later_token_of_the_context() -> None:
    doc_S = torch.zeros(20, dtype=torch.int32)
    anchors = Anchors(torch.tensor([0, 7]), torch.tensor([True, True]))
    context = dense_mask(anchors, doc_S, 4, 20)[:, :20]
    assert context.sum(1).tolist() == [0] * 4 + [7] * 4


def test_every_query_sees_something_so_that_no_softmax_is_empty() -> None:
    doc_S = torch.full((16,), -1, dtype=torch.int32)
    anchors = sample_anchors(doc_S >= 0, doc_S, 3, anchor_generator(0, 0, "cpu"))
    assert dense_mask(anchors, doc_S, 8, 16).sum(1).tolist() == [8] * 24


def test_document_starts() -> None:
    doc_S = torch.tensor([0, 0, 1, 2, 2, 2, -1], dtype=torch.int32)
    assert document_starts(doc_S).tolist() == [0, 0, 2, 3, 3, 3, 6]


def test_tables_are_compiled_once_for_gpus_and_run_as_they_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Callable[..., Any], dict[str, bool]]] = []

    def as_compiled(make: Callable[..., Any], **options: bool) -> Callable[..., Any]:
        asked.append((make, options))
        return lambda *arguments: make(*arguments)

    def first(doc_S: torch.Tensor) -> torch.Tensor:
        return doc_S

    def other(doc_S: torch.Tensor) -> torch.Tensor:
        return doc_S

    monkeypatch.setattr(torch, "compile", as_compiled)
    assert compiled_on("cpu", first) is first and asked == []
    compiled = compiled_on("cuda", first)
    assert compiled_on("cuda", first) is compiled and compiled_on("cuda", other) is not compiled
    options = {"dynamic": False, "fullgraph": True}
    assert asked == [(first, options), (other, options)]
