"""What the main thread and the watchdog of one rank tell each other. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from launcher.errors import ExitCode
from launcher.outcome import Failure


@dataclass
class Phase:
    """A named stretch of work with a deadline on the monotonic clock."""

    name: str
    started: float
    timeout: float
    defer_stop: bool


@dataclass
class RankState:
    """What the main thread and the watchdog of one rank tell each other; single attributes, no lock needed."""

    phases: list[Phase]
    step: int = 0
    waiting_for: str | None = None
    stop: ExitCode | None = None
    failure: Failure | None = None
    leaving: tuple[ExitCode, float] | None = None
    """The code this rank said goodbye with, and when (monotonic)."""

    @property
    def left(self) -> bool:
        return self.leaving is not None

    def leave_with(self, code: ExitCode) -> None:
        self.leaving = (code, time.monotonic())

    @property
    def phase(self) -> Phase:
        return self.phases[-1]


@dataclass(frozen=True)
class Limits:
    """Seconds: of silence before a rank counts as lost; from a stop signal to the end."""

    heartbeat: float
    grace: float
