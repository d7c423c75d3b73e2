"""Errors a user can act on, each with the exit code that `status.json` records.

Exit codes: 0 finished, 1 unclassified, 75 a retry may help, 78 do not retry, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.outcome import Failure


class ExitCode(IntEnum):
    """What `launch.sh` returns; raw torchrun only ever returns 0 or 1."""

    FINISHED = 0
    UNCLASSIFIED = 1
    RETRY = 75
    DO_NOT_RETRY = 78
    INTERRUPTED = 130
    TERMINATED = 143


class LauncherError(Exception):
    """An error with one clear line for the user: what happened, and what to do about it."""

    code = ExitCode.UNCLASSIFIED
    ranks_at_fault: frozenset[int] = frozenset()
    """Where all ranks raise what happened on some, those; the others let them report it."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} -> {self.fix}" if self.fix else self.what


class UserError(LauncherError):
    """Wrong input: config, paths, checkpoint, environment. Trying again without a change cannot help."""

    code = ExitCode.DO_NOT_RETRY


class RetryableError(LauncherError):
    """A condition that may pass: a lost rank, a hang, no memory, a full disk."""

    code = ExitCode.RETRY


class ConfigError(UserError):
    """All the problems of one configuration, a line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DeadlineError(RetryableError):
    """A bounded wait ran out; the message names what was awaited."""

    verdict: Failure | None = None
    """Whom to blame, where that is known."""
    awaited: int | None = None
    """The rank that should have said something, where that is not the first one of the node."""


class PeerFailed(RetryableError):
    """Another rank failed first; its own error is the root cause and is reported instead of this one."""


class StopRequested(LauncherError):
    """The user or the scheduler asked the run to stop (SIGINT, SIGTERM, SIGUSR1)."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__("stopped by Ctrl-C" if code is ExitCode.INTERRUPTED else "stopped by SIGTERM")
        self.code = code
