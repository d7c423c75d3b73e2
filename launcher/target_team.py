"""The ranks of one target, kept in step: the first one leads, the others wait for its word before every row.

A row's forward holds collectives of all ranks of the target, and a rank inside a collective hears nothing. So nobody
enters one alone: whether there is a next row, turn or prompt is the leader's decision, and the others poll for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from launcher.barrier import OrderedTurns, Turn
from launcher.rank import Rank
from models.target_slices import TargetShard

INTERVAL = 0.002


class TargetTeam:
    """This rank's place among the ranks of its target; alone, every agreement is its own decision."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._size = rank, rank.topology.split.target_tp
        self._key = f"team/{rank.role.index}"
        # Decisions are numbered alike on all ranks. The leader tells the number of its last one and all that it
        # refused: one key, never waited for, yet nobody misses a decision however far behind. With said = 7 and
        # refused = [5], a follower that asks for number 3 hears yes, for 5 no, and for 8 waits.
        self._said = self._met = 0
        self._refused: list[int] = []

    @property
    def leads(self) -> bool:
        """Whether this rank decides, takes turns and sends features."""
        return self._rank.role.tp_rank == 0

    @property
    def shard(self) -> TargetShard | None:
        """This rank's part of the target; None where it has all of it."""
        if self._size == 1:
            return None
        group = self._rank.groups.target
        assert group is not None, "a target of several ranks has a group"
        return TargetShard(self._rank.role.tp_rank, self._size, group.group_name)

    def agree(self, decide: Callable[[], bool], what: str, timeout: float) -> bool:
        """The leader's decision, on every rank; the others wait for it up to `timeout` seconds."""
        self._said += 1
        if not self.leads:
            return self._hear(what, timeout)
        going = decide()
        if self._size > 1:
            self._refused += [] if going else [self._said]
            self._rank.control.set(self._key, {"said": self._said, "refused": self._refused})
        return going

    def meet(self, what: str, timeout: float) -> None:
        """Wait until all ranks of the target are here, before they enter a collective."""
        if self._size == 1:
            return
        self._met += 1
        control, place = self._rank.control, f"{self._key}/met/{self._met}"
        control.set(f"{place}/{self._rank.role.tp_rank}", True)
        keys = [f"{place}/{member}" for member in range(self._size)]
        awaited = f"the other ranks of target {self._rank.role.index} to {what}"
        self._rank.lifecycle.wait_until(partial(control.has, *keys), awaited, timeout, 0.02)

    @contextmanager
    def turn(self, turns: OrderedTurns) -> Iterator[Turn]:
        """The target's turn at the gate: the leader takes it, the others share it."""
        role = self._rank.role
        if self.leads:
            with turns.turn(role.rank) as turn:
                self.agree(lambda: True, "begin the turn", turns.limit)
                yield turn
            return
        self.agree(lambda: True, "begin the turn", turns.limit)
        with self._rank.lifecycle.phase("turn", self._rank.config.compile.turn_timeout):
            yield Turn(role.rank, role.tp_rank, self._size, lambda: None, start=time.time())

    def _hear(self, what: str, timeout: float) -> bool:
        """Wait for the leader's decision number `_said`; all that it has said are to go on but those it lists."""
        control, number, heard = self._rank.control, self._said, {}

        def told() -> bool:
            heard.update(control.get(self._key) or {})
            return heard.get("said", 0) >= number

        leader = self._rank.topology.target_group(self._rank.role.index)[0]
        self._rank.lifecycle.wait_until(told, f"rank {leader}, which leads this target, to {what}", timeout, INTERVAL)
        return number not in heard["refused"]


class SharedRows:
    """What a leader's RowSender is to the other ranks of its target: buffers to fill that go nowhere."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def slot(self, ended: Callable[[], bool], timeout: float) -> Tensor:
        """The one buffer; work on it is queued in order."""
        return self._buffer

    def offer(self, index: int, rank: int, buffer: Tensor, header: dict[str, object]) -> None:
        """Only the leader's features are sent."""

    def drain(self, ended: Callable[[], bool], timeout: float) -> None:
        """Nothing is on its way."""

    def close(self, ended: Callable[[], bool], timeout: float) -> None:
        """Nobody else has this buffer."""
