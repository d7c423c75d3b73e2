"""Labels, position weights, and the fused head and loss against plain float32 autograd."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from models import loss as loss_module
from models.anchors import Anchors
from models.float8 import Head8
from models.loss import (
    LossSums,
    block_labels,
    chunk_rows,
    default_gamma,
    dpace_weights,
    draft_loss,
    position_weights,
)

torch.set_num_threads(1)
BLOCKS, BLOCK_SIZE, HIDDEN, VOCABULARY = 6, 5, 16, 101


def example(scale: float = 1.0, seed: int = 0):
    """hidden [N*B, H] with gradient, head [V, H], labels [N, B], supervised [N, B]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS * BLOCK_SIZE, HIDDEN, generator=generator).mul_(scale).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(VOCABULARY, (BLOCKS, BLOCK_SIZE), generator=generator)
    supervised = torch.rand(BLOCKS, BLOCK_SIZE, generator=generator) < 0.8
    supervised[:, 0] = False
    supervised[-1] = False
    return hidden, head, labels, supervised


def plain_cross_entropy(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden @ head.T, labels.flatten(), reduction="none").view_as(labels)


def test_default_gamma_is_the_papers_and_grows_with_the_block() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    assert default_gamma(4) < default_gamma(8) < default_gamma(12) < default_gamma(16) < default_gamma(32)


def test_position_weights_leave_out_the_anchor_and_decay_from_one() -> None:
    weights = position_weights(4, 2.0)
    assert weights.tolist() == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1)])


def test_labels_are_the_tokens_at_the_same_position_within_document_and_loss_mask() -> None:
    ids = torch.arange(100, 110)
    doc = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, -1], dtype=torch.int32)
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    anchors = Anchors(torch.tensor([1, 6, 6]), torch.tensor([True, True, False]))
    labels, supervised = block_labels(ids, mask, doc, anchors, 5)
    assert labels[0].tolist() == [101, 102, 103, 104, 105]
    # Position 3 is unsupervised, but a token after the gap still counts; position 5 is another document.
    assert supervised.tolist() == [
        [False, True, False, True, False],
        [False, True, True, False, False],
        [False] * 5,
    ]
    assert labels.max() <= 109


@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 4 * 7, 1 << 30])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_decay_loss_and_gradient_equal_autograd(chunk_bytes: int, scale: float, monkeypatch) -> None:
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", chunk_bytes)
    hidden, head, labels, supervised = example(scale)
    sums = draft_loss(hidden, head, labels, supervised, kind="decay", gamma=3.0, alpha=0.5)
    (found,) = torch.autograd.grad(sums.loss / sums.weight, hidden)
    weights = position_weights(BLOCK_SIZE, 3.0) * supervised
    expected = (weights * plain_cross_entropy(hidden, head, labels)).sum()
    (gradient,) = torch.autograd.grad(expected / weights.sum(), hidden)
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(sums.weight, weights.sum())
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_dpace_loss_and_gradient_equal_autograd_with_constant_weights() -> None:
    hidden, head, labels, supervised = example(0.3)
    sums = draft_loss(hidden, head, labels, supervised, kind="dpace", gamma=1.0, alpha=0.5)
    (found,) = torch.autograd.grad(sums.loss, hidden)
    ce = plain_cross_entropy(hidden, head, labels)[:, 1:]
    weights = dpace_by_hand(ce.detach(), supervised[:, 1:], 0.5) * supervised[:, 1:]
    (gradient,) = torch.autograd.grad((weights * ce).sum(), hidden)
    torch.testing.assert_close(sums.weight, weights.sum())
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def dpace_by_hand(ce: torch.Tensor, supervised: torch.Tensor, alpha: float) -> torch.Tensor:
    weights = torch.zeros_like(ce)
    for block in range(ce.shape[0]):
        reach, terms = 1.0, []
        for k in range(ce.shape[1]):
            if supervised[block, k]:
                reach *= (1 - alpha) * math.exp(-float(ce[block, k])) + alpha
            terms.append(reach if supervised[block, k] else 0.0)
        for k in range(ce.shape[1]):
            weights[block, k] = sum(terms[k:])
    return weights


def test_dpace_weights_by_hand() -> None:
    ce = torch.tensor([[0.1, 2.0, 0.5, 3.0]])
    supervised = torch.tensor([[True, False, True, True]])
    torch.testing.assert_close(dpace_weights(ce, supervised, 0.5), dpace_by_hand(ce, supervised, 0.5))


def test_metrics_count_leading_matches_per_block() -> None:
    head = torch.eye(8)
    labels = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [0, 1, 2, 3]])
    predicted = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 7], [0, 0, 2, 3], [0, 1, 2, 3]])
    supervised = torch.tensor([[False, True, True, True]] * 2 + [[False, True, True, False], [False] * 4])
    sums = draft_loss(head[predicted].flatten(0, 1), head, labels, supervised, kind="decay", gamma=2.0, alpha=0.5)
    assert sums.correct_B.tolist() == [0, 2, 2, 2]
    assert sums.count_B.tolist() == [0, 3, 3, 2]
    assert sums.blocks.item() == 3
    assert sums.accepted.item() == (3 + 1) + (1 + 1) + (0 + 1)


def test_float8_head_is_near_the_exact_one() -> None:
    hidden, head, labels, supervised = example(0.5)
    decay_loss = partial(draft_loss, kind="decay", gamma=3.0, alpha=0.5)
    found = decay_loss(hidden, Head8.of(head), labels, supervised)
    wanted = decay_loss(hidden, head, labels, supervised)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-2, atol=0)
    grad, want = (torch.autograd.grad(sums.loss, hidden)[0] for sums in (found, wanted))
    assert (grad - want).norm() < 0.06 * want.norm()
    assert grad.view(BLOCKS, BLOCK_SIZE, -1)[~supervised].eq(0).all()


def test_unsupervised_rows_do_not_poison_the_gradient() -> None:
    hidden, head, labels, supervised = example()
    with torch.no_grad():
        hidden[-BLOCK_SIZE:] = math.inf
    sums = draft_loss(hidden, head, labels, supervised, kind="decay", gamma=3.0, alpha=0.5)
    (gradient,) = torch.autograd.grad(sums.loss, hidden)
    assert math.isfinite(sums.loss.item())
    assert gradient.isfinite().all()


def test_a_row_without_loss_gives_zeros_and_a_zero_gradient() -> None:
    hidden, head, labels, supervised = example()
    sums: LossSums = draft_loss(hidden, head, labels, supervised & False, kind="dpace", gamma=3.0, alpha=0.5)
    (gradient,) = torch.autograd.grad(sums.loss, hidden)
    assert (sums.loss.item(), sums.weight.item(), sums.blocks.item(), sums.accepted.item()) == (0, 0, 0, 0)
    assert gradient.eq(0).all()


def test_bfloat16_agrees_with_float32_on_the_same_values() -> None:
    hidden, head, labels, supervised = example()
    low = hidden.detach().bfloat16().requires_grad_()
    exact = low.detach().float().requires_grad_()
    head = head.bfloat16()
    decay_loss = partial(draft_loss, kind="decay", gamma=3.0, alpha=0.5)
    (found,) = torch.autograd.grad(decay_loss(low, head, labels, supervised).loss, low)
    (expected,) = torch.autograd.grad(decay_loss(exact, head.float(), labels, supervised).loss, exact)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 1e-2


def test_without_gradient_only_the_values_are_computed() -> None:
    hidden, head, labels, supervised = example()
    decay_loss = partial(draft_loss, kind="decay", gamma=3.0, alpha=0.5)
    with torch.no_grad():
        sums = decay_loss(hidden, head, labels, supervised)
    torch.testing.assert_close(sums.loss, decay_loss(hidden, head, labels, supervised).loss.detach())


@pytest.mark.parametrize(
    ("total", "row_bytes", "budget", "rows"),
    [(7680, 303872, 320 << 20, 1024), (7680, 98304, 320 << 20, 3072), (500, 1024, 300 << 10, 256), (20, 4, 8, 2)],
)
def test_chunks_fill_the_gpu_within_the_budget(total: int, row_bytes: int, budget: int, rows: int) -> None:
    assert chunk_rows(total, row_bytes, budget) == rows
    assert chunk_rows(total, 1, budget) <= total
