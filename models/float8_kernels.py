"""Triton kernel that transposes a matrix on its way to float8: tiles are read and written in whole cache lines.

Fused with what comes before it, Inductor writes the transposed values one by one: 4.4 ms of a step of 92 ms on an H200.
Imported on CUDA only: Triton does not come with CPU builds of torch.
"""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

ROWS, COLUMNS = 128, 64
WARPS = 4


@triton.jit
def _transpose(
    x_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    x8 = (x.to(tl.float32) / tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tl.trans(x8), mask=tl.trans(inside))


def transpose8(x_RC: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(x / scale).T in the float8 `dtype`, [C, R], contiguous; `scale` is a float32 scalar on the device."""
    rows, columns = x_RC.shape
    out_CR = x_RC.new_empty((columns, rows), dtype=dtype)
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    _transpose[grid](x_RC, scale, out_CR, rows, columns, *x_RC.stride(), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out_CR
