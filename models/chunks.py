"""How many rows of the head are scored at a time. No torch, so that memory can be planned without it."""

from __future__ import annotations

CHUNK_BYTES = {"cuda": 320 << 20, "cpu": 64 << 20}
"""Logits that exist at a time, by device; float8 odds add half of it."""


def chunk_rows(total: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: a multiple of 1,024 if the budget holds that many, else equal chunks in multiples of 128.

    The gradient's GEMM has rows x H outputs only; at H = 4,096 its tiles fill an H200 just once for each 1,024 rows,
    and at other counts leave up to a third of it idle (measured: 744 TFLOP/s at 1,024 rows, 675 at 1,920).
    """
    fitting = budget // row_bytes
    if fitting >= 1024:
        return min(total, fitting // 1024 * 1024)
    even = -(-total // max(1, -(-total * row_bytes // budget)))
    return min(total, -(-even // 128) * 128) if even > 128 else even
