"""The whole forward of a row against each block on its own: context, positions, labels and loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from models.dflash import DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch
from models.loss import position_weights
from tests.training import BLOCK_SIZE, CONFIG, HIDDEN, VOCABULARY

torch.set_num_threads(1)
MASK = CONFIG.mask_token_id
LENGTHS, PADDING = (13, 9, 20), 5


def packed_row(index: int = 0) -> RowBatch:
    generator = torch.Generator().manual_seed(index)
    doc = [document for document, length in enumerate(LENGTHS) for _ in range(length)] + [-1] * PADDING
    positions = [position for length in LENGTHS for position in range(length)] + [0] * PADDING
    doc_S = torch.tensor(doc, dtype=torch.int32)
    return RowBatch(
        index=index,
        features=torch.randn(len(doc), 2 * HIDDEN, generator=generator),
        ids=torch.randint(VOCABULARY - 1, (len(doc),), generator=generator),
        loss_mask=(torch.rand(len(doc), generator=generator) < 0.9) & (doc_S >= 0),
        doc=doc_S,
        positions=torch.tensor(positions),
    )


@pytest.fixture
def forward() -> DraftForward:
    torch.manual_seed(0)
    drafter = DFlashDrafter(CONFIG)
    ends = FrozenEnds(torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY, HIDDEN))
    return DraftForward(drafter, ends, anchors=12, backend="sdpa", gamma=2.0, seed=5)


def loss_of_one_block(forward: DraftForward, batch: RowBatch, anchor: int) -> tuple[torch.Tensor, float]:
    """Weighted cross entropy and weights of one block, drafted alone as in decoding."""
    document = batch.doc == batch.doc[anchor]
    before = document & (torch.arange(len(batch.doc)) < anchor)
    context = int(before.sum())
    ids = torch.tensor([int(batch.ids[anchor])] + [MASK] * (BLOCK_SIZE - 1))
    hidden = forward.drafter(
        forward.ends.embed[ids],
        batch.features[before],
        torch.arange(context),
        torch.arange(context, context + BLOCK_SIZE),
        torch.ones(BLOCK_SIZE, context + BLOCK_SIZE, dtype=torch.bool),
        "sdpa",
    )
    logits, weights = hidden @ forward.ends.head.T, position_weights(BLOCK_SIZE, forward.gamma)
    loss, total = hidden.sum() * 0, 0.0
    for k in range(1, BLOCK_SIZE):
        label = anchor + k
        if label < len(batch.doc) and batch.doc[label] == batch.doc[anchor] and batch.loss_mask[label]:
            loss = loss + weights[k] * cross_entropy(logits[k], batch.ids[label])
            total += float(weights[k])
    return loss, total


def test_a_packed_row_equals_its_blocks_one_by_one(forward: DraftForward) -> None:
    batch = packed_row()
    anchors = forward.block_inputs(batch).anchors
    assert anchors.keep_N.all()
    alone = [loss_of_one_block(forward, batch, int(anchor)) for anchor in anchors.position_N]
    expected = torch.stack([loss for loss, _ in alone]).sum()
    sums = forward(batch)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-5, atol=1e-5)
    assert sums.weight.item() == pytest.approx(sum(weight for _, weight in alone), rel=1e-5)
    assert sums.blocks.item() == 12
    gradients = torch.autograd.grad(sums.loss, list(forward.drafter.parameters()))
    wanted = torch.autograd.grad(expected, list(forward.drafter.parameters()))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-3, atol=1e-4)
        assert gradient.abs().sum() > 0


def test_surplus_blocks_are_masks_alone_and_change_nothing(forward: DraftForward) -> None:
    batch = packed_row()
    every = DraftForward(forward.drafter, forward.ends, anchors=60, backend="sdpa", gamma=2.0)
    more = DraftForward(forward.drafter, forward.ends, anchors=90, backend="sdpa", gamma=2.0)
    inputs = more.block_inputs(batch)
    assert not inputs.anchors.keep_N.all()
    assert inputs.ids.view(90, BLOCK_SIZE)[~inputs.anchors.keep_N].eq(MASK).all()
    torch.testing.assert_close(every(batch).loss, more(batch).loss, rtol=1e-5, atol=1e-4)


def test_anchors_depend_on_seed_and_micro_batch(forward: DraftForward) -> None:
    batch = packed_row()
    again = RowBatch(1, batch.features, batch.ids, batch.loss_mask, batch.doc, batch.positions)
    assert forward(batch).loss.item() == forward(batch).loss.item()
    assert forward(batch).loss.item() != forward(again).loss.item()


def test_a_row_without_a_valid_anchor_gives_zero_loss_and_gradient(forward: DraftForward) -> None:
    batch = packed_row()
    silent = RowBatch(0, batch.features, batch.ids, batch.loss_mask & False, batch.doc, batch.positions)
    sums = forward(silent)
    assert (sums.loss.item(), sums.weight.item(), sums.blocks.item()) == (0, 0, 0)
    assert all(g.eq(0).all() for g in torch.autograd.grad(sums.loss, list(forward.drafter.parameters())))
