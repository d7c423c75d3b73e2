"""Whether a run that ended starts again. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ExitCode
from launcher.status import Status

# Attempts in a row that reach no new step before restarting is given up.
FUTILE_ATTEMPTS = 3


@dataclass(frozen=True)
class Ended:
    """How an attempt ended, and whether its user wants no other one."""

    status: Status
    stop_asked: bool = False


def may_restart(ended: Sequence[Ended], max_restarts: int) -> bool:
    """Whether to start again: a retry may help, nobody wants it to stop, restarts are left, and steps were gained."""
    if ended[-1].status.code != ExitCode.RETRY or ended[-1].stop_asked or len(ended) > max_restarts:
        return False
    steps = [attempt.status.step or 0 for attempt in ended]
    futile = steps[-FUTILE_ATTEMPTS:]
    return len(steps) < FUTILE_ATTEMPTS or max(futile) > max(steps[:-FUTILE_ATTEMPTS], default=min(futile))
