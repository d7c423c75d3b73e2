"""Triton kernel of AdamW with float32 masters: gradient in, master, moments and working copy out, in one pass.

28 bytes move per bfloat16 parameter: 2 for the gradient, 8 each for master and moments, 2 for the working copy.
Imported on CUDA only: Triton does not come with CPU builds of torch.
"""

from __future__ import annotations

import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

from models.master_weights import EPS

BLOCK = 2048
WARPS = 4


@triton.jit
def _adamw(
    working_ptr,
    grad_ptr,
    master_ptr,
    mean_ptr,
    square_ptr,
    count_ptr,
    divisor_ptr,
    skip_ptr,
    lr,
    beta1,
    beta2,
    decay,
    eps,
    size,
    BLOCK: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    count = tl.load(count_ptr)
    scale = 1.0 / tl.load(divisor_ptr)
    correction1 = 1.0 - tl.exp2(count * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(count * tl.log2(beta2))
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32) * scale
    mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
    square = tl.load(square_ptr + index, mask=inside, other=0.0)
    master = tl.load(master_ptr + index, mask=inside, other=0.0)
    mean += (grad - mean) * (1.0 - beta1)
    square = square * beta2 + grad * grad * (1.0 - beta2)
    master = master * (1.0 - lr * decay) - lr / correction1 * mean / (tl.sqrt(square / correction2) + eps)
    tl.store(mean_ptr + index, mean, mask=inside)
    tl.store(square_ptr + index, square, mask=inside)
    tl.store(master_ptr + index, master, mask=inside)
    tl.store(working_ptr + index, master.to(working_ptr.dtype.element_ty), mask=inside)


def adamw_(
    working: Tensor,
    grad: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    count: Tensor,
    divisor: Tensor,
    skip: Tensor,
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """`models.master_weights.adamw_reference_` in one kernel; tensors are read as flat, so they must be contiguous."""
    assert working.is_contiguous()
    size = working.numel()
    _adamw[(triton.cdiv(size, BLOCK),)](
        working,
        grad.contiguous(),
        *state,
        count,
        divisor,
        skip,
        lr,
        *betas,
        decay,
        EPS,
        size,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
