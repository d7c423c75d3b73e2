"""Rates of the training loop, and the shares of it in which drafters and targets had nothing to compute on.

On a GPU all times are the stream's, between events: a host that waits while kernels still run costs nothing and does
not count, and reading a step's numbers late does not change them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean

import torch
import torch.distributed as dist

Mark = torch.cuda.Event | float
"""A point in time: an event on the current stream, or seconds on the host's clock."""


class Clock:
    """Marks points in time on a device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, or on a GPU when all work queued so far is done."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def has_passed(mark: Mark) -> bool:
    """Whether the device has come to a mark."""
    return isinstance(mark, float) or mark.query()


def seconds_between(start: Mark, end: Mark) -> float:
    """Waits for `end` where the device is not there yet."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class RowPace:
    """How one row came about: what its target took for it, how long that target had idled before it, and how many rows
    were on their way to the drafter when it asked for this one."""

    busy: float
    idle: float
    ready: int


@dataclass
class _Step:
    start: Mark
    end: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    rows: Sequence[RowPace] = ()


class Meter:
    """Times steps from the end of the last one to their own end, and the waits for rows in them."""

    def __init__(self, row_length: int, rows_per_step: int, device: torch.device) -> None:
        self._row_length, self._rows, self._clock = row_length, rows_per_step, Clock(device)
        self._ended: deque[_Step] = deque()
        self._step = _Step(self._clock.mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the taking of a row."""
        before = self._clock.mark()
        yield
        self._step.waits.append((before, self._clock.mark()))

    def end_step(self, rows: Sequence[RowPace]) -> None:
        """All work of a step on these rows is done (on a GPU: queued)."""
        self._step.rows = rows
        self._step.end = self._clock.mark()
        self._ended.append(self._step)
        self._step = _Step(self._step.end)

    def skip(self) -> None:
        """Leave the time since the last step out: a save, an evaluation."""
        self._step = _Step(self._clock.mark())

    def lap(self) -> dict[str, float]:
        """Rates of the oldest step not yet read, which the device has finished.

        `data_wait`, `target_wait`: shares of the time in which this drafter, and the targets of its rows, had nothing
        to do; `rows_ready`: rows on their way when one was asked for; `*_row_seconds`: work on one row.
        """
        step = self._ended.popleft()
        assert step.end is not None, "a step is read after its end"
        seconds = max(seconds_between(step.start, step.end), 1e-9)
        waited = min(seconds, sum(seconds_between(before, after) for before, after in step.waits))
        busy, idle = (sum(getattr(row, name) for row in step.rows) for name in ("busy", "idle"))
        peak = torch.cuda.max_memory_allocated() if self._clock.on_gpu else 0
        return {
            "step_seconds": round(seconds, 4),
            "rows_per_s": self._rows / seconds,
            "tokens_per_s": self._rows * self._row_length / seconds,
            "data_wait": waited / seconds,
            "target_wait": idle / max(busy + idle, 1e-9),
            "rows_ready": mean(row.ready for row in step.rows),
            "target_row_seconds": busy / len(step.rows),
            "drafter_row_seconds": (seconds - waited) / len(step.rows),
            "peak_memory_gb": peak / 1e9,
        }


# Drafters step together, so the one that waits longest holds up all; of targets and queues the mean counts.
OVER_DRAFTERS = {
    "data_wait": max,
    "target_wait": mean,
    "rows_ready": mean,
    "target_row_seconds": mean,
    "drafter_row_seconds": min,
}


def over_drafters(lap: dict[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    """The lap with what concerns all drafters taken over all of them. A small gloo collective; every drafter calls it.

    A drafter that waits for another one in a collective looks busy: the least busy one shows what a row takes.
    """
    mine = torch.tensor([lap[name] for name in OVER_DRAFTERS], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    columns = zip(*(row.tolist() for row in everyone), strict=True)
    merged = {name: over(column) for (name, over), column in zip(OVER_DRAFTERS.items(), columns, strict=True)}
    return lap | merged
