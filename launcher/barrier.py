"""The rank-ordered barrier: ranks pass one after another, then all go on together.

Turns are polled store keys, not chained collectives: a rank that waits is inside no collective, so a slow turn can
outlast any process-group timeout, and a failed turn reaches every rank as that rank's own error within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from launcher.control import Control
from launcher.lifecycle import Lifecycle

Order = Literal["ordered", "leader_first", "parallel"]


def predecessors(order: Order, ranks: Sequence[int], rank: int) -> list[int]:
    """The ranks whose turns must be over before `rank` starts its own."""
    place = ranks.index(rank)
    if order == "ordered":
        return list(ranks[:place])
    if order == "leader_first":
        return list(ranks[:1]) if place else []
    return []


@dataclass
class Turn:
    """One rank's turn: wall-clock seconds since the epoch."""

    rank: int
    place: int
    count: int
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class OrderedTurns:
    """A barrier that `ranks` pass in order, named so that several can exist in one run."""

    def __init__(
        self, name: str, ranks: Sequence[int], order: Order, turn_timeout: float, control: Control, lifecycle: Lifecycle
    ) -> None:
        self._name, self._ranks, self._order = name, list(ranks), order
        self._turn_timeout, self._control, self._lifecycle = turn_timeout, control, lifecycle

    @property
    def limit(self) -> float:
        """Seconds that all turns together may take."""
        return self._turn_timeout * (len(self._ranks) + 1)

    @contextmanager
    def turn(self, rank: int) -> Iterator[Turn]:
        """Wait for the turn of `rank`, hold it for the body, pass it on.

        A body that raises does not pass the turn on: the failure ends the run on every rank.
        """
        turn = Turn(rank, self._ranks.index(rank), len(self._ranks))
        for before in predecessors(self._order, self._ranks, rank):
            # The owner of a turn is held to its own deadline; the margin covers its start-up.
            done = self._done(before)
            self._lifecycle.wait_until(partial(self._control.has, done), f"turn of rank {before}", self.limit, 0.02)
        with self._lifecycle.phase("turn", self._turn_timeout):
            turn.start = time.time()
            yield turn
            turn.end = time.time()
        self._control.set(self._done(rank), {"start": turn.start, "end": turn.end})

    def join(self) -> None:
        """Wait until every rank has passed."""
        keys = [self._done(rank) for rank in self._ranks]
        what = f"turns of ranks {', '.join(map(str, self._ranks))}"
        self._lifecycle.wait_until(partial(self._control.has, *keys), what, self.limit, 0.02)

    def _done(self, rank: int) -> str:
        return f"turns/{self._name}/{rank}"
