"""The rank-ordered barrier: ranks pass one after another, then all go on together.

Turns are polled store keys, not chained collectives: a rank that waits is inside no collective, so a slow turn can
outlast any process-group timeout, and a failed turn reaches every rank as that rank's own error within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
    pass_on: Callable[[], None]
    """Let the next rank begin; called by the body once what must be serial is over, at the latest at its end."""
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it was, or has been so far."""
        return (self.end or time.time()) - self.start


class OrderedTurns:
    """A barrier that ranks pass in order, named so that several can exist in one run.

    Each node has an order of its own: its ranks share cores and a cache with each other only. All nodes join.
    """

    def __init__(
        self,
        name: str,
        ranks_by_node: Sequence[Sequence[int]],
        order: Order,
        turn_timeout: float,
        control: Control,
        lifecycle: Lifecycle,
    ) -> None:
        self._name, self._nodes, self._order = name, [list(ranks) for ranks in ranks_by_node], order
        self._turn_timeout, self._control, self._lifecycle = turn_timeout, control, lifecycle

    @property
    def limit(self) -> float:
        """Seconds that all turns together may take."""
        return self._turn_timeout * (max(map(len, self._nodes)) + 1)

    def waits(self, rank: int) -> bool:
        """Whether others' turns come before that of `rank`."""
        return bool(predecessors(self._order, self._of_node(rank), rank))

    @contextmanager
    def turn(self, rank: int) -> Iterator[Turn]:
        """Wait for the turn of `rank`, hold it for the body, pass it on.

        The body may pass the turn on before its end, and go on to what needs no turn; `join` waits for its end. A body
        that raises does not pass the turn on: the failure ends the run on every rank.
        """
        ranks = self._of_node(rank)
        turn = Turn(rank, ranks.index(rank), len(ranks), lambda: self._pass_on(turn))
        for before in predecessors(self._order, ranks, rank):
            # The owner of a turn is held to its own deadline; the margin covers its start-up.
            passed = self._key("passed", before)
            self._lifecycle.wait_until(partial(self._control.has, passed), f"turn of rank {before}", self.limit, 0.02)
        turn.start = time.time()
        with self._lifecycle.phase("turn", self._turn_timeout):
            yield turn
            self._pass_on(turn)
        self._control.set(self._key("done", rank), turn.seconds)

    def join(self) -> None:
        """Wait until every rank of every node has ended its turn."""
        ranks = [rank for ranks in self._nodes for rank in ranks]
        keys = [self._key("done", rank) for rank in ranks]
        what = f"turns of ranks {', '.join(map(str, ranks))}"
        self._lifecycle.wait_until(partial(self._control.has, *keys), what, self.limit, 0.02)

    def _pass_on(self, turn: Turn) -> None:
        if not turn.end:
            turn.end = time.time()
            self._control.set(self._key("passed", turn.rank), turn.seconds)

    def _of_node(self, rank: int) -> list[int]:
        return next(ranks for ranks in self._nodes if rank in ranks)

    def _key(self, what: str, rank: int) -> str:
        return f"turns/{self._name}/{what}/{rank}"
