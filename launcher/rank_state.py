"""What the main thread and the watchdog of one rank tell each other. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from launcher.errors import ExitCode
from launcher.outcome import Failure

# `runtime.grace` is from the signal to the end of everything: ranks that have to be cut off leave this long before it,
# or a fifth of it, so that torchrun and launch.sh can end within it as well.
MARGIN_SECONDS, MARGIN_SHARE = 2.0, 0.2
# After a failure anywhere the main thread has this long to end by itself.
LAST_SECONDS = 3.0


@dataclass
class Phase:
    """A named stretch of work with a deadline on the monotonic clock."""

    name: str
    started: float
    timeout: float
    defer_stop: bool
    option: str | None = None
    """The option that holds the deadline, where its name does not tell."""


@dataclass(frozen=True)
class Stop:
    """A stop that was asked for."""

    code: ExitCode
    cause: str
    """The signal, as the user is told."""
    since: float
    """When it came, on this machine's monotonic clock."""


@dataclass
class RankState:
    """What the main thread and the watchdog of one rank tell each other; single attributes, no lock needed."""

    phases: list[Phase]
    step: int = 0
    waiting_for: str | None = None
    stop: Stop | None = None
    failure: Failure | None = None
    leaving: tuple[ExitCode, float] | None = None
    """The code this rank said goodbye with, and when (monotonic)."""
    training: tuple[str, int] | None = None
    """Phase and step of the drafters while a stop is under way, which a target is ahead of; None: this rank's own."""

    @property
    def left(self) -> bool:
        return self.leaving is not None

    def leave_with(self, code: ExitCode) -> None:
        self.leaving = (code, time.monotonic())

    @property
    def phase(self) -> Phase:
        return self.phases[-1]

    @property
    def place(self) -> tuple[str, int]:
        """Phase and step that a stop is said to have come at."""
        return self.training or (self.phase.name, self.step)


@dataclass(frozen=True)
class Limits:
    """Seconds: of silence before a rank counts as lost; from a stop signal to the end; from a goodbye to the end."""

    heartbeat: float
    grace: float
    shutdown: float

    @property
    def work_after_stop(self) -> float:
        """Seconds from a stop signal until a rank that is still at work is cut off."""
        return self.grace - margin(self.grace)


def margin(grace: float) -> float:
    """Seconds of `runtime.grace` that are kept for the end itself."""
    return min(MARGIN_SECONDS, MARGIN_SHARE * grace)
