"""Packing puts every document into one row, wastes little, and lays out what the masks rely on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launcher.packing import Document, build_row, has_anchor, plan_rows

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@given(lengths=LENGTHS)
def test_every_document_is_in_one_row_and_rows_hold_it(lengths: list[int]) -> None:
    plan = plan_rows(lengths, 64)
    assert sorted(index for row in plan for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 64 for row in plan)
    assert plan == plan_rows(lengths, 64)


@given(lengths=LENGTHS)
def test_best_fit_keeps_its_bound(lengths: list[int]) -> None:
    # Best fit decreasing needs at most 11/9 of the best plan's rows and 6/9 of a row more.
    least = -(-sum(lengths) // 64)
    assert len(plan_rows(lengths, 64)) <= 11 / 9 * max(least, sum(length > 32 for length in lengths)) + 1


def test_the_tightest_row_is_chosen() -> None:
    assert plan_rows([10, 7, 3], 10) == [[0], [1, 2]]
    assert plan_rows([6, 7, 3, 4], 10) == [[1, 2], [0, 3]]


def test_typical_chats_waste_little() -> None:
    lengths = np.random.RandomState(0).lognormal(5.2, 0.6, 2000).clip(20, 3072).astype(int).tolist()
    plan = plan_rows(lengths, 3072)
    assert sum(lengths) / (len(plan) * 3072) > 0.99


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), padding=st.integers(0, 5))
def test_row_layout(lengths: list[int], padding: int) -> None:
    documents = [Document(np.arange(1, length + 1, dtype=np.int32), np.arange(length) % 2 == 1) for length in lengths]
    row = build_row(documents, sum(lengths) + padding, pad_id=0)
    assert [part.shape for part in (row.ids, row.loss_mask, row.doc, row.positions)] == [(sum(lengths) + padding,)] * 4
    assert [part.dtype for part in (row.ids, row.loss_mask, row.doc, row.positions)] == ["i4", "?", "i4", "i4"]
    for number, document in enumerate(documents):
        own = row.doc == number
        assert np.array_equal(row.ids[own], document.ids) and np.array_equal(row.loss_mask[own], document.loss_mask)
        assert np.array_equal(row.positions[own], np.arange(len(document.ids)))
    unused = row.doc == -1
    assert unused.sum() == padding and not row.loss_mask[unused].any() and not row.ids[unused].any()


def test_an_anchor_needs_two_supervised_tokens_side_by_side() -> None:
    assert has_anchor(np.array([False, True, True]))
    assert not has_anchor(np.array([True, False, True]))
    assert not has_anchor(np.array([True]))
    assert not has_anchor(np.array([], np.bool_))
