"""Triton kernel of the loss: a chunk of logits becomes cross entropy, correctness and, in place, its gradient.

One program per row reads the row twice (the second time mostly from L2) and writes it once. Nothing of the size of
the logits is allocated. Imported on CUDA only: Triton does not come with CPU builds of torch.
"""

from __future__ import annotations

import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

BLOCK = 8192
WARPS = 16


@triton.jit
def _score_row(
    logits_ptr,
    row_stride,
    label_ptr,
    supervised_ptr,
    ce_ptr,
    hit_ptr,
    vocabulary,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lane = tl.arange(0, BLOCK)
    if tl.load(supervised_ptr + row) == 0:
        tl.store(ce_ptr + row, 0.0)
        tl.store(hit_ptr + row, 0.0)
        if WITH_GRAD:
            for start in range(0, vocabulary, BLOCK):
                index = start + lane
                zero = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + index, zero, mask=index < vocabulary)
        return

    log2_e: tl.constexpr = 1.4426950408889634
    label = tl.load(label_ptr + row)
    at_label = tl.load(logits_ptr + label).to(tl.float32)
    # Starting from the label's logit keeps the running maximum finite whatever comes first.
    peak = at_label
    mass = tl.zeros([BLOCK], tl.float32)
    beaten = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        index = start + lane
        x = tl.load(logits_ptr + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
        # As argmax does, the first of several equal maxima wins.
        beaten |= ((x > at_label) | ((x == at_label) & (index < label))).to(tl.int32)
        new_peak = tl.maximum(peak, tl.max(x, 0))
        mass = mass * tl.exp2((peak - new_peak) * log2_e) + tl.exp2((x - new_peak) * log2_e)
        peak = new_peak
    total = tl.sum(mass, 0)
    tl.store(ce_ptr + row, (peak - at_label) + tl.log2(total) / log2_e)
    tl.store(hit_ptr + row, (tl.max(beaten, 0) == 0).to(tl.float32))

    if WITH_GRAD:
        scale = 1.0 / total
        for start in range(0, vocabulary, BLOCK):
            index = start + lane
            inside = index < vocabulary
            x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
            grad = tl.exp2((x - peak) * log2_e) * scale - (index == label).to(tl.float32)
            tl.store(logits_ptr + index, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def score_chunk_(logits: Tensor, labels: Tensor, supervised: Tensor, ce: Tensor, hit: Tensor, with_grad: bool) -> None:
    """`models.loss.score_chunk_reference_` in one kernel.

    Args:
        logits: [C, V], rows contiguous; overwritten by the gradient if `with_grad`.
        labels: int64 [C].
        supervised: bool [C].
        ce, hit: float32 [C], filled.
        with_grad: whether the gradient is needed.
    """
    rows, vocabulary = logits.shape
    _score_row[(rows,)](
        logits,
        logits.stride(0),
        labels,
        supervised,
        ce,
        hit,
        vocabulary,
        WITH_GRAD=with_grad,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
