"""The ranks of a node as the system knows them, reported or not: the children of torchrun's agent. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Siblings:
    """Living children of one process: pids by rank, and how many cannot be told."""

    pids: dict[int, int]
    unreadable: int = 0

    def missing(self, expected: frozenset[int]) -> frozenset[int]:
        """The expected ranks that have no process any more.

        None as long as children that cannot be told may be them, or where the parent has started this rank alone.
        """
        candidates = expected - self.pids.keys()
        known = os.getpid() in self.pids.values() and len(candidates) > self.unreadable
        return candidates if known else frozenset()


def find_siblings() -> Siblings:
    """Who is there now."""
    return find_ranks(os.getppid())


def find_ranks(torchrun: int) -> Siblings:
    """The ranks among the children of a process."""
    pids: dict[int, int] = {}
    unreadable = 0
    for pid in _children_of(torchrun):
        try:
            rank = rank_of(pid)
        except PermissionError:
            unreadable += 1
            continue
        if rank is not None:
            pids[rank] = pid
    return Siblings(pids, unreadable)


def rank_of(pid: int) -> int | None:
    """RANK in the environment that a process was started with; None for other programs and for the dead.

    Raises:
        PermissionError: another user's process, or one that hides itself.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    value = next((entry.removeprefix(b"RANK=") for entry in variables if entry.startswith(b"RANK=")), b"")
    return int(value) if value.isdigit() else None


def _children_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []
