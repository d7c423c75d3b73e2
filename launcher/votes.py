"""Votes: every rank of a group does its part and tells all how it went, so that all of them go on or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class VoteFailed(Exception):
    """Some ranks could not do their part; `causes` has their errors by rank of the run."""

    def __init__(self, causes: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())))
        self.causes = causes


class Votes:
    """Votes on a group, None for one process alone; called by all its ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)

    def take(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; returns what all of them returned.

        Raises:
            VoteFailed: on all ranks, if it failed on any.
        """
        outcome: tuple[T | None, str | None]
        try:
            outcome = (action(), None)
        except Exception as error:  # told to all the ranks, which raise it
            outcome = (None, describe(error))
        outcomes: list[Any] = [outcome]
        if self._group is not None:
            outcomes = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(outcomes, outcome, group=self._group)
        self.check({rank: cause for rank, (_, cause) in enumerate(outcomes) if cause is not None})
        return [value for value, _ in outcomes]

    def take_leader(self, action: Callable[[], object]) -> None:
        """As `take`, for what one rank does for all."""
        self.take(action if self.rank == 0 else lambda: None)

    def check(self, causes: dict[int, str]) -> None:
        """Raise for causes by rank of the group."""
        if causes:
            raise VoteFailed({self._global_rank(rank): cause for rank, cause in causes.items()})

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
