"""Which side of a run holds the other up, and which split of its ranks would be better. Pure, no torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from launcher.topology import Split

# A split is worth a change when it promises this much more.
CLEAR_MARGIN = 0.1
# Sides whose rates differ by less keep each other busy.
EVEN = 0.05
# First steps: start-up, caches, the first rows.
WARM_UP_STEPS = 2
MEMORY_STEPS = 500


@dataclass(frozen=True)
class Rates:
    """Seconds of one fetched row: on one target; on one drafter with all its draws and its share of the update."""

    target: float
    drafter: float

    def rows_per_second(self, split: Split) -> float:
        """Rows per second of a split: those of its slower side."""
        return min(self.of_targets(split), self.of_drafters(split))

    def of_targets(self, split: Split) -> float:
        return split.targets / self.target

    def of_drafters(self, split: Split) -> float:
        return split.drafters / self.drafter

    def __str__(self) -> str:
        return f"target {_seconds(self.target)}/row, drafter {_seconds(self.drafter)}/row"


def possible_splits(ranks: int, target_tp: int = 1) -> list[Split]:
    """Every split that uses all ranks of a node, or as many as whole targets leave, most targets first."""
    return [
        Split(targets, ranks - targets * target_tp, target_tp) for targets in range((ranks - 1) // target_tp, 0, -1)
    ]


def best_split(ranks: int, rates: Rates, target_tp: int = 1) -> Split:
    """The split of a node with the most rows per second; of equals the one with fewer drafters, whose batch is smaller.

    Raises:
        ValueError: too few ranks for one target and one drafter.
    """
    return max(possible_splits(ranks, target_tp), key=rates.rows_per_second)


def is_clearly_better(split: Split, than: Split, rates: Rates) -> bool:
    return rates.rows_per_second(split) > (1 + CLEAR_MARGIN) * rates.rows_per_second(than)


def explain_choice(split: Split, other: Split, rates: Rates) -> str:
    """Why `split` and not `other`, in a line."""
    why = f"{rates}: {split} gives {rates.rows_per_second(split):.3g} rows/s"
    return why if split == other else f"{why}, {other} would give {rates.rows_per_second(other):.3g}"


class Balance:
    """Collects what training shows of both sides.

    Args:
        split: targets and drafters of a node.
    """

    def __init__(self, split: Split) -> None:
        self._split, self._steps = split, 0
        self._laps: deque[dict[str, float]] = deque(maxlen=MEMORY_STEPS)

    @property
    def steps(self) -> int:
        """How many steps count."""
        return len(self._laps)

    def add(self, lap: dict[str, float]) -> None:
        """A step's rates, as `Meter.lap` gives them."""
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._laps.append(lap)

    def rates(self) -> Rates | None:
        """Medians of the steps so far; None before there are any."""
        if not self._laps:
            return None
        return Rates(self._median("target_row_seconds"), self._median("drafter_row_seconds"))

    def verdict(self) -> str | None:
        """The side that held the other up and the split that would be better, in a line; None without steps."""
        rates = self.rates()
        if rates is None:
            return None
        return judge(self._split, rates, self._median("data_wait"), self._median("target_wait"))

    def _median(self, name: str) -> float:
        return median(lap[name] for lap in self._laps)


def judge(split: Split, rates: Rates, drafter_wait: float, target_wait: float) -> str:
    """The bottleneck of a run on `split`, and what another split of its ranks would give.

    Args:
        drafter_wait, target_wait: shares of the time in which a side had nothing to do.
    """
    ratio = rates.of_targets(split) / rates.of_drafters(split)
    side = "the drafters were" if ratio > 1 + EVEN else "the targets were" if ratio < 1 - EVEN else "neither side was"
    waits = f"drafters waited {drafter_wait:.0%} of the time, targets {target_wait:.0%}"
    best = best_split(split.ranks, rates, split.target_tp)
    if not is_clearly_better(best, split, rates):
        advice = f"no other split of {split.ranks} ranks is clearly better than {split}"
    else:
        flags = f"--topology.targets={best.targets} --topology.drafters={best.drafters}"
        gain = f"{rates.rows_per_second(best):.3g} rows/s instead of {rates.rows_per_second(split):.3g}"
        advice = f"{best} would give {gain} ({flags})"
    return f"{side} the bottleneck ({waits}; {rates}); {advice}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
