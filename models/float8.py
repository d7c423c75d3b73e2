"""GEMMs in float8 (e4m3) with bfloat16 in and out: the layers' projections, and the frozen head.

Every operand is scaled just before its GEMM ("dynamic scaling"), so nothing is carried from step to step: by row where
its rows are summed over, as a whole where it must be transposed first. Masters, norms, attention, softmax
and the update stay as they are. On GPUs with float8 units (capability 8.9 and newer) a GEMM runs at about twice the
rate of bfloat16; elsewhere the same rounding is emulated, for tests and to compare loss curves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite e4m3 value."""


def quantize_rows(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [R, C], contiguous, and the float32 scale [R, 1] that they are multiplied by."""
    scale_R1 = (x_RC.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    return (x_RC.float() / scale_R1).to(E4M3).contiguous(), scale_R1


def matmul8(
    a_MK: Tensor, a_scale_M1: Tensor, b_NK: Tensor, b_scale_N1: Tensor, dtype: torch.dtype, exact: bool = False
) -> Tensor:
    """a @ b.T in `dtype`, [M, N], both operands with their scales by row.

    `exact` adds up in full float32, a sixth slower: for sums over the vocabulary.
    """
    if a_MK.is_cuda:
        scales = a_scale_M1, b_scale_N1.t()
        return torch._scaled_mm(a_MK, b_NK.t(), *scales, out_dtype=dtype, use_fast_accum=not exact)
    return ((a_MK.float() @ b_NK.float().t()) * a_scale_M1 * b_scale_N1.t()).to(dtype)


def quantize_transposed(x_RC: Tensor, scale_R1: Tensor) -> tuple[Tensor, Tensor]:
    """x.T in e4m3, [C, R], under one scale for all, float32 [C, 1]: the largest of the rows' scales.

    A scale for each column would need a reduction over columns, which costs more than the GEMM gains from it.
    """
    scale = scale_R1.amax()
    return transpose8(x_RC, scale), scale.expand(x_RC.shape[1], 1).contiguous()


@torch.library.custom_op("dflash::transpose8", mutates_args=())
def transpose8(x_RC: Tensor, scale: Tensor) -> Tensor:
    """(x / scale).T in e4m3, [C, R], contiguous, under a float32 scalar. An operator of its own, so that Inductor does
    not fuse it: a kernel that computes rows writes columns slowly."""
    return (x_RC.float() / scale).to(E4M3).t().contiguous()


@transpose8.register_kernel("cuda")
def _(x_RC: Tensor, scale: Tensor) -> Tensor:
    from models import float8_kernels  # Triton comes with CUDA builds of torch only

    return float8_kernels.transpose8(x_RC, scale, E4M3)


@transpose8.register_fake
def _(x_RC: Tensor, scale: Tensor) -> Tensor:
    return x_RC.new_empty((x_RC.shape[1], x_RC.shape[0]), dtype=E4M3)


class _Linear8(torch.autograd.Function):
    """All three GEMMs of a linear layer in float8; the operands of backward are cast again from bfloat16."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        x8_MK, x_scale_M1 = quantize_rows(x_MK)
        weight8_NK, weight_scale_N1 = quantize_rows(weight_NK)
        ctx.save_for_backward(x_MK, x_scale_M1, weight_NK, weight_scale_N1)
        return matmul8(x8_MK, x_scale_M1, weight8_NK, weight_scale_N1, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_MK, x_scale_M1, weight_NK, weight_scale_N1 = ctx.saved_tensors
        (grad_MN,) = grads
        grad8_MN, grad_scale_M1 = quantize_rows(grad_MN)
        weight_KN = quantize_transposed(weight_NK, weight_scale_N1)
        grad_NM, x_KM = quantize_transposed(grad_MN, grad_scale_M1), quantize_transposed(x_MK, x_scale_M1)
        grad_x_MK = matmul8(grad8_MN, grad_scale_M1, *weight_KN, x_MK.dtype)
        return grad_x_MK, matmul8(*grad_NM, *x_KM, weight_NK.dtype)


def linear8(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T with every GEMM, backward ones included, in float8. All dimensions must be multiples of 16."""
    return _Linear8.apply(x_MK, weight_NK)


@dataclass(frozen=True)
class Head8:
    """The frozen head in float8, once for logits and once for the gradient, which sums over the vocabulary."""

    by_token_VH: Tensor
    token_scale_V1: Tensor
    by_channel_HV: Tensor
    channel_scale_H1: Tensor
    exact_VH: Tensor
    """The head as it was: the label's row of the gradient is taken from it."""

    @classmethod
    def of(cls, head_VH: Tensor) -> Head8:
        return cls(*quantize_rows(head_VH), *quantize_rows(head_VH.t()), head_VH)


def require_float8(tokens: int, sizes: dict[str, int], capability: tuple[int, int] | None) -> None:
    """Raise ValueError where float8 cannot run.

    Args:
        tokens: block tokens of a row, N*B.
        sizes: named dimensions of weights.
        capability: of the GPU; None on CPU, where float8 is emulated.
    """
    if capability is not None and capability < (8, 9):
        raise ValueError(
            f"train.precision=float8 needs a GPU of compute capability 8.9 or newer, this one has "
            f"{capability[0]}.{capability[1]}; use bf16"
        )
    sizes = {"train.anchors * drafter.block_size": tokens, **sizes}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 16]
    if odd:
        raise ValueError(f"train.precision=float8 needs multiples of 16, not {', '.join(odd)}; use bf16")
