"""What `models.loss_kernels` computes, in plain PyTorch: the CPU path, and the reference in tests."""

from __future__ import annotations

import torch
from torch import Tensor

ODDS_SCALE = 256.0
"""Float8 odds are exp(logit - largest) times this, so that the smallest ones still have digits."""


def score_chunk_(logits: Tensor, labels: Tensor, supervised: Tensor, ce: Tensor, hit: Tensor, with_grad: bool) -> None:
    """Fill `ce` and `hit` (float32 [C]) and turn `logits` [C, V] into the gradient of the cross entropy, in place.

    Args:
        logits: [C, V], rows contiguous; overwritten by softmax - onehot if `with_grad`.
        labels: int64 [C].
        supervised: bool [C]; other rows give 0 everywhere.
        ce, hit: float32 [C], filled with the cross entropy and whether the label comes first among the largest logits.
        with_grad: whether the gradient is needed.
    """
    scores = logits.float()
    at_label = scores.gather(1, labels[:, None])
    total = scores.logsumexp(1, keepdim=True)
    _fill(ce, hit, (total - at_label).squeeze(1), logits, labels, supervised)
    if with_grad:
        grad = scores.sub_(total).exp_() if scores is logits else (scores - total).exp()
        grad.scatter_add_(1, labels[:, None], torch.full_like(at_label, -1)).masked_fill_(~supervised[:, None], 0)
        logits.copy_(grad)


def score_chunk8_(
    logits: Tensor,
    odds: Tensor,
    scale: Tensor,
    labels: Tensor,
    supervised: Tensor,
    ce: Tensor,
    hit: Tensor,
    with_grad: bool,
) -> None:
    """Fill `ce` and `hit` as `score_chunk_` does, and the softmax as `odds * scale`.

    Args:
        logits: [C, V], read only.
        odds: e4m3 [C, V], filled with exp(logit - largest) * ODDS_SCALE if `with_grad`.
        scale: float32 [C, 1], filled with what turns odds into probabilities.
        labels, supervised, ce, hit, with_grad: as for `score_chunk_`.
    """
    scores = logits.float()
    scores -= scores.amax(1, keepdim=True)
    total = scores.exp().sum(1)
    at_label = scores.gather(1, labels[:, None]).squeeze(1)
    _fill(ce, hit, total.log() - at_label, logits, labels, supervised)
    if with_grad:
        odds.copy_((scores.exp() * ODDS_SCALE).masked_fill(~supervised[:, None], 0))
        scale.copy_((supervised / (total * ODDS_SCALE))[:, None])


def _fill(ce: Tensor, hit: Tensor, entropy: Tensor, logits: Tensor, labels: Tensor, supervised: Tensor) -> None:
    ce.copy_(entropy).masked_fill_(~supervised, 0)
    hit.copy_(logits.argmax(1) == labels).mul_(supervised)
