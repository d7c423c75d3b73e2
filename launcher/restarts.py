"""Whether a run that ended starts again, and with which command. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint_folder import newest_published
from launcher.cli import Command, parse
from launcher.config import Config
from launcher.errors import ExitCode
from launcher.split_choice import flags_of_another_start
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
    return _would_help(ended[-1]) and len(ended) <= max_restarts and not _is_futile(ended)


def why_given_up(ended: Sequence[Ended], max_restarts: int) -> str:
    """Why the restarts that were asked for are over though one might help; else empty."""
    if not max_restarts or not _would_help(ended[-1]) or may_restart(ended, max_restarts):
        return ""
    if not _is_futile(ended):
        return f"this was the last of --max-restarts {max_restarts}"
    best = max(attempt.status.step or 0 for attempt in ended)
    return f"{FUTILE_ATTEMPTS} attempts in a row came no further than step {best}, so another restart would not either"


def _would_help(last: Ended) -> bool:
    return last.status.code == ExitCode.RETRY and not last.stop_asked


def _is_futile(ended: Sequence[Ended]) -> bool:
    steps = [attempt.status.step or 0 for attempt in ended]
    futile = steps[-FUTILE_ATTEMPTS:]
    return len(steps) >= FUTILE_ATTEMPTS and max(futile) <= max(steps[:-FUTILE_ATTEMPTS], default=min(futile))


def newest_checkpoint(config: Config) -> tuple[Path, int] | None:
    """The run's newest checkpoint and its inode: steps of another beginning may have the same names."""
    newest = newest_published(config.runtime.run_dir)
    return None if newest is None else (newest, newest.stat().st_ino)


def going_on(command: Command, before: tuple[Path, int] | None) -> Command:
    """The command of the next attempt: wherever the run was told to begin, it does so once.

    Args:
        before: the newest checkpoint that was there before the first attempt.
    """
    if command.config.runtime.resume == "auto" or newest_checkpoint(command.config) in {None, before}:
        return command
    return parse([*command.args, "--resume=auto"])


def wants_another_start(status: Status, attempt: Path) -> bool:
    """Whether an attempt ended only because its ranks know a better split."""
    return status.state == "finished" and bool(flags_of_another_start(attempt))
