"""The drafter's loss: cross entropy of block tokens through the frozen head, in sums that add over ranks.

Notation: N blocks, B block size, H hidden, V vocabulary, R = N*(B-1) rows that can carry loss (offset 0 is given).

The head is frozen, so the gradient of a row's cross entropy by its hidden state, (softmax - onehot) @ head, needs
nothing from the backward pass but one number: the row's weight. The forward therefore computes it at once, chunk
by chunk, and keeps [R, H] instead of the logits; decay and D-PACE weights scale its rows afterwards. That is two
GEMMs for head and loss, no recomputation, and no [R, V] tensor in float32 or for longer than its chunk.
Sources: DFlash (arXiv 2602.06036, Eq. 4), D-PACE (arXiv 2605.18810).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from models import loss_reference
from models.anchors import Anchors
from models.chunks import CHUNK_BYTES, chunk_rows
from models.float8 import E4M3, Head8, matmul8, quantize_rows

LossKind = Literal["decay", "dpace"]


@dataclass
class LossSums:
    """Sums over the blocks of a micro-batch; all of them add over micro-batches and ranks. Float32, on the device.

    The mean loss is `loss / weight`, the acceptance length `accepted / blocks`, both after adding.
    """

    loss: Tensor
    """Weighted sum of cross entropies (nats), differentiable."""
    weight: Tensor
    """Sum of the weights."""
    correct_B: Tensor
    """Supervised tokens whose label is the most likely one, by offset in the block."""
    count_B: Tensor
    """Supervised tokens by offset."""
    accepted: Tensor
    """Sum over blocks of leading correct tokens + 1: what a target step would gain under teacher forcing."""
    blocks: Tensor
    """Blocks that carry loss."""


def default_gamma(block_size: int) -> float:
    """Decay of the position weights: 7, 5 and 4 for 16, 10 and 8 (the paper's); on the line between 8 and 16 else."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, 1.0 + 0.375 * block_size)


def position_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k-1)/gamma) for offsets k = 1..B-1, and 0 for the anchor; float32 [B]."""
    offset_B = torch.arange(block_size, device=device, dtype=torch.float32)
    return torch.where(offset_B > 0, torch.exp((1 - offset_B) / gamma), 0.0)


def block_labels(
    ids_S: Tensor, loss_mask_S: Tensor, doc_S: Tensor, anchors: Anchors, block_size: int
) -> tuple[Tensor, Tensor]:
    """The token that each block position must predict, and whether it carries loss.

    Position k of the block at anchor a predicts the token at a+k itself. It carries loss if that token is a
    training target of the anchor's document; the anchor and padding blocks carry none.

    Returns:
        labels int64 [N, B] (a token of the row even where unsupervised), supervised bool [N, B].
    """
    offset_B = torch.arange(block_size, device=ids_S.device)
    wanted_NB = anchors.position_N[:, None] + offset_B
    index_NB = wanted_NB.clamp(max=ids_S.shape[0] - 1)
    same_document_NB = doc_S[index_NB] == doc_S[anchors.position_N][:, None]
    inside_NB = (wanted_NB == index_NB) & (offset_B > 0) & anchors.keep_N[:, None]
    return ids_S[index_NB], inside_NB & same_document_NB & loss_mask_S[index_NB]


def dpace_weights(ce_NK: Tensor, supervised_NK: Tensor, alpha: float) -> Tensor:
    """Position weights of D-PACE for offsets 1..B-1: the expected accepted tokens that hang on each position.

    A position's smoothed probability is (1-alpha) exp(-CE) + alpha (1 where unsupervised); its weight is the sum,
    over supervised positions at or after it, of the product of probabilities up to there. No gradient flows.
    """
    smoothed_NK = torch.where(supervised_NK, (1 - alpha) * torch.exp(-ce_NK.detach()) + alpha, 1.0)
    reach_NK = smoothed_NK.cumprod(1) * supervised_NK
    return reach_NK.flip(1).cumsum(1).flip(1)


def draft_loss(
    hidden: Tensor,
    head_weight: Tensor | Head8,
    labels: Tensor,
    supervised: Tensor,
    *,
    kind: LossKind,
    gamma: float,
    alpha: float,
) -> LossSums:
    """Head, cross entropy and its gradient, and the metrics of one micro-batch. Never waits for the device.

    Args:
        hidden: [N*B, H], the drafter's output.
        head_weight: [V, H], the target's frozen head; as `Head8` its two GEMMs run in float8.
        labels: int64 [N, B].
        supervised: bool [N, B].
        kind: `decay` or `dpace`.
        gamma: decay of the position weights.
        alpha: smoothing of D-PACE.
    """
    blocks, block_size = labels.shape
    ce_NK, hit_NK = _HeadLoss.apply(hidden.view(blocks, block_size, -1), head_weight, labels, supervised)
    carries_NK = supervised[:, 1:]
    if kind == "dpace":
        weight_NK = dpace_weights(ce_NK, carries_NK, alpha) * carries_NK
    else:
        weight_NK = position_weights(block_size, gamma, hidden.device)[1:] * carries_NK
    leading_N = hit_NK.cumprod(1).sum(1)
    scored_N = carries_NK.any(1)
    return LossSums(
        loss=(weight_NK * ce_NK).sum(),
        weight=weight_NK.sum(),
        correct_B=pad(hit_NK.sum(0), (1, 0)),
        count_B=pad(carries_NK.sum(0, dtype=torch.float32), (1, 0)),
        accepted=((leading_N + 1) * scored_N).sum(),
        blocks=scored_N.sum(dtype=torch.float32),
    )


class _HeadLoss(torch.autograd.Function):
    """Cross entropy and correctness of offsets 1..B-1; unsupervised ones give 0 and no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor | Head8, labels: Tensor, supervised: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, B, H], head [V, H], labels and supervised [N, B] -> CE and hits, float32 [N, B-1]."""
        rows = hidden[:, 1:].reshape(-1, hidden.shape[-1])
        labels_R, supervised_R = labels[:, 1:].reshape(-1), supervised[:, 1:].reshape(-1)
        options = labels_R, supervised_R, ctx.needs_input_grad[0]
        if isinstance(head, Head8):
            ce_R, hit_R, unit_RH = unit_loss8(rows, head, *options)
        else:
            ce_R, hit_R, unit_RH = unit_loss_exact(rows, head, *options)
        ctx.save_for_backward(unit_RH)
        ctx.hidden_dtype = hidden.dtype
        hit_NK = hit_R.view(hidden.shape[0], -1)
        ctx.mark_non_differentiable(hit_NK)
        return ce_R.view_as(hit_NK), hit_NK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        grad_ce_NK = grad_outputs[0]
        (unit_RH,) = ctx.saved_tensors
        blocks, offsets = grad_ce_NK.shape
        grad = unit_RH.new_empty((blocks, offsets + 1, unit_RH.shape[1]), dtype=ctx.hidden_dtype)
        grad[:, 0] = 0
        # float32 weights times rows in compute precision, rounded once, in one kernel.
        torch.mul(unit_RH.view(blocks, offsets, -1), grad_ce_NK[:, :, None], out=grad[:, 1:])
        return grad, None, None, None


UnitLoss = tuple[Tensor, Tensor, Tensor | None]
"""Per row: cross entropy and whether the label is the most likely token, float32 [R]; d CE / d row at weight 1,
[R, H], or None. Unsupervised rows give 0 everywhere."""


def unit_loss_exact(rows: Tensor, head: Tensor, labels: Tensor, supervised: Tensor, with_grad: bool) -> UnitLoss:
    """Both GEMMs in the head's dtype.

    Args:
        rows: [R, H].
        head: [V, H].
        labels: int64 [R].
        supervised: bool [R].
        with_grad: whether the gradient is needed.
    """
    rows = rows.to(head.dtype)
    ce, hit = rows.new_empty((2, len(rows)), dtype=torch.float32)
    unit = torch.empty_like(rows) if with_grad else None
    chunks = _chunks(len(rows), len(head) * rows.element_size(), rows.device.type)
    logits = rows.new_empty((chunks[0].stop, len(head)))
    score_ = _kernels(rows.device.type).score_chunk_
    for chunk in chunks:
        scores = torch.mm(rows[chunk], head.t(), out=logits[: chunk.stop - chunk.start])
        score_(scores, labels[chunk], supervised[chunk], ce[chunk], hit[chunk], with_grad)
        if unit is not None:
            torch.mm(scores, head, out=unit[chunk])
    return ce, hit, unit


def unit_loss8(rows: Tensor, head: Head8, labels: Tensor, supervised: Tensor, with_grad: bool) -> UnitLoss:
    """Both GEMMs in float8; arguments as for `unit_loss_exact`.

    The gradient is softmax @ head - head[label]. Only the first term goes through float8, as exp(logit - largest),
    which uses the format's whole range; the label's row is subtracted as it is.
    """
    ce, hit = rows.new_empty((2, len(rows)), dtype=torch.float32)
    unit = torch.empty_like(rows) if with_grad else None
    vocabulary = len(head.by_token_VH)
    chunks = _chunks(len(rows), vocabulary * 2, rows.device.type)
    odds = rows.new_empty((chunks[0].stop, vocabulary), dtype=E4M3)
    scale = rows.new_empty((chunks[0].stop, 1), dtype=torch.float32)
    score_ = _kernels(rows.device.type).score_chunk8_
    for chunk in chunks:
        size = chunk.stop - chunk.start
        logits = matmul8(*quantize_rows(rows[chunk]), head.by_token_VH, head.token_scale_V1, torch.bfloat16)
        score_(logits, odds[:size], scale[:size], labels[chunk], supervised[chunk], ce[chunk], hit[chunk], with_grad)
        if unit is not None:
            mean = matmul8(odds[:size], scale[:size], head.by_channel_HV, head.channel_scale_H1, rows.dtype, exact=True)
            torch.sub(mean, head.exact_VH[labels[chunk]] * supervised[chunk, None], out=unit[chunk])
    return ce, hit, unit


def _chunks(total: int, row_bytes: int, device_type: str) -> list[slice]:
    size = chunk_rows(total, row_bytes, CHUNK_BYTES[device_type])
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _kernels(device_type: str) -> Any:
    if device_type == "cuda":
        from models import loss_kernels  # Triton comes with CUDA builds of torch only

        return loss_kernels
    return loss_reference
