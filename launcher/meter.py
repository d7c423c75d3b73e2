"""Rates of the training loop, and the share of it in which a drafter had nothing to compute on.

On a GPU all times are the stream's, between events: a host that waits while kernels still run costs nothing and does
not count, and reading a step's numbers late does not change them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Mark = torch.cuda.Event | float
"""A point in time: an event on the current stream, or seconds on the host's clock."""


@dataclass
class _Step:
    start: Mark
    end: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


class Meter:
    """Times steps from the end of the last one to their own end, and the waits for rows in them."""

    def __init__(self, row_length: int, rows_per_step: int, device: torch.device) -> None:
        self._row_length, self._rows, self._on_gpu = row_length, rows_per_step, device.type == "cuda"
        self._ended: deque[_Step] = deque()
        self._step = _Step(self._mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the taking of a row."""
        before = self._mark()
        yield
        self._step.waits.append((before, self._mark()))

    def end_step(self) -> None:
        """All work of a step is done (on a GPU: queued)."""
        end = self._mark()
        self._step.end = end
        self._ended.append(self._step)
        self._step = _Step(end)

    def skip(self) -> None:
        """Leave the time since the last step out: a save, an evaluation."""
        self._step = _Step(self._mark())

    def lap(self) -> dict[str, float]:
        """Rates of the oldest step not yet read, which the device has finished."""
        step = self._ended.popleft()
        assert step.end is not None, "a step is read after its end"
        seconds = max(_seconds(step.start, step.end), 1e-9)
        waited = sum(_seconds(before, after) for before, after in step.waits)
        peak = torch.cuda.max_memory_allocated() if self._on_gpu else 0
        return {
            "step_seconds": round(seconds, 4),
            "rows_per_s": self._rows / seconds,
            "tokens_per_s": self._rows * self._row_length / seconds,
            "data_wait": min(1.0, waited / seconds),
            "peak_memory_gb": peak / 1e9,
        }

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
