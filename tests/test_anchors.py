"""Anchors: which are valid, that the draw is uniform, static in shape and a function of seed and index alone."""

from __future__ import annotations

import torch

from models.anchors import anchor_generator, sample_anchors, valid_anchors


def row(*documents: str, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss mask and documents of a row; a document is a string of `x` (supervised) and `.`."""
    mask = [token == "x" for document in documents for token in document] + [False] * padding
    doc = [index for index, document in enumerate(documents) for _ in document] + [-1] * padding
    return torch.tensor(mask), torch.tensor(doc, dtype=torch.int32)


def draw(mask: torch.Tensor, doc: torch.Tensor, slots: int, micro_batch: int = 0):
    return sample_anchors(mask, doc, slots, anchor_generator(0, micro_batch, "cpu"))


def test_a_valid_anchor_is_supervised_and_followed_by_a_supervised_token_of_its_document() -> None:
    mask, doc = row("..xxx", "xx.x", "x", padding=2)
    assert valid_anchors(mask, doc).nonzero().flatten().tolist() == [2, 3, 5]


def test_the_last_token_of_a_row_is_no_anchor() -> None:
    mask, doc = row("xxx")
    assert valid_anchors(mask, doc).tolist() == [True, True, False]


def test_anchors_are_distinct_valid_and_ascending() -> None:
    mask, doc = row("." * 20 + "x" * 60, "x" * 40, padding=9)
    anchors = draw(mask, doc, 32)
    assert anchors.position_N.dtype == torch.int64
    assert anchors.keep_N.all()
    assert valid_anchors(mask, doc)[anchors.position_N].all()
    assert (anchors.position_N.diff() > 0).all()


def test_surplus_slots_come_last_repeat_the_last_anchor_and_are_not_kept() -> None:
    mask, doc = row("..xxxx", padding=3)
    anchors = draw(mask, doc, 5)
    assert anchors.position_N.tolist() == [2, 3, 4, 4, 4]
    assert anchors.keep_N.tolist() == [True, True, True, False, False]


def test_more_slots_than_tokens_and_rows_without_an_anchor_keep_their_shape() -> None:
    mask, doc = row("xx")
    assert draw(mask, doc, 4).position_N.tolist() == [0, 0, 0, 0]
    nothing = draw(torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int32), 4)
    assert nothing.position_N.tolist() == [0, 0, 0, 0]
    assert not nothing.keep_N.any()


def test_each_valid_anchor_is_drawn_equally_often() -> None:
    mask, doc = row("." * 5 + "x" * 21)
    counts = torch.zeros(26)
    for micro_batch in range(2000):
        counts[draw(mask, doc, 5, micro_batch).position_N] += 1
    assert counts[:5].sum() == 0
    assert (counts[5:25] / 500 - 1).abs().max() < 0.2


def test_the_draw_depends_on_seed_and_micro_batch_only() -> None:
    mask, doc = row("x" * 200)
    draws = [
        sample_anchors(mask, doc, 8, anchor_generator(seed, index, "cpu")).position_N.tolist()
        for seed, index in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert draws[0] == draws[3]
    assert len({tuple(positions) for positions in draws}) == 3
