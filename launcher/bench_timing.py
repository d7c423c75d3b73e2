"""Timing on a device: marks between parts of a step, and what the device can do at most.

Parts are timed inside whole steps by events at their borders (CUDA events, or the clock on CPU), so that each is
measured as it runs in training, with the device as busy and as warm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.meter import Clock, Mark, seconds_between
from launcher.step_optimizers import DTYPES
from models.float8 import matmul8, quantize_rows


class Marks:
    """Times of the borders between parts, one list per step; read after the device has finished."""

    def __init__(self, device: str) -> None:
        self._clock = Clock(torch.device(device))
        self.steps: list[list[Mark]] = []

    def begin(self) -> None:
        self.steps.append([])
        self.mark()

    def mark(self) -> None:
        self.steps[-1].append(self._clock.mark())

    def medians(self) -> list[float]:
        """Milliseconds of each part, the median over the steps; then of the whole step."""
        rows = [[1e3 * seconds_between(*pair) for pair in zip(marks, marks[1:], strict=False)] for marks in self.steps]
        return [statistics.median(part) for part in zip(*rows, strict=True)] + [statistics.median(map(sum, rows))]


def matmul_rate(device: str, precision: str) -> float:
    """Operations per second of a large matrix product on random data, held for as long as a step takes or longer.

    The first products of a cold GPU run some tenths faster than it can sustain; a step is long enough to feel that.
    """
    size, count = (8192, 100) if device == "cuda" else (512, 5)
    dtype = DTYPES[precision]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if precision == "float8":
        operands = *quantize_rows(a), *quantize_rows(b)
        run: Callable[[], Tensor] = lambda: matmul8(*operands, dtype)  # noqa: E731
    else:
        run = lambda: a @ b.t()  # noqa: E731
    return 2 * size**3 / (_median_ms(run, device, count) / 1e3)


def copy_rate(device: str) -> float:
    """Bytes per second of a copy within memory, read and written bytes both counted."""
    source = torch.empty((1 << 30) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median_ms(lambda: target.copy_(source), device, 10) / 1e3)


def _median_ms(run: Callable[[], Any], device: str, count: int) -> float:
    """The median over the later half of `count` runs in a row."""
    marks = Marks(device)
    for _ in range(count):
        marks.begin()
        run()
        marks.mark()
    marks.steps = marks.steps[count // 2 :]
    return marks.medians()[-1]
