"""torchrun under watch by its parent: how long it may take, and the status of a run whose ranks could not write one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config import Config
from launcher.console import Tee
from launcher.deadlines import scale_deadlines
from launcher.errors import ExitCode
from launcher.fallback_status import StuckStart, fallback_status, own_lines
from launcher.members import STATES
from launcher.outcome import record, reported_end
from launcher.processes import read_process
from launcher.rank_state import LAST_SECONDS, margin
from launcher.restarts import Ended, wants_another_start
from launcher.siblings import find_ranks
from launcher.status import Status
from launcher.torchrun import Torchrun

# What torchrun takes to notice that its workers have ended, and to end itself.
TORCHRUN_SECONDS = 5.0
# Waits of `runtime.init_timeout` each that a rank goes through before it has a log.
EARLY_WAITS = 3


@dataclass(frozen=True)
class Start:
    """The first moments of an attempt, in which no rank can tell that another one hangs.

    Args:
        attempt: its folder, where every rank opens a log once it has joined the store.
        limit: seconds until one has.
    """

    attempt: Path
    limit: float
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > self.limit and not any(self.attempt.glob("rank_*.log"))

    def failure(self, torchrun: int) -> StuckStart | None:
        """Of torchrun's children the one that is stopped, or else the first one, where the start is late."""
        if not self.late:
            return None
        why = f"no rank has reported for {self.limit:.0f} s"
        states = {
            rank: process.state
            for rank, pid in sorted(find_ranks(torchrun).pids.items())
            if (process := read_process(pid))
        }
        if not states:
            return StuckStart(None, f"{why}: torchrun has not started any -> see its log")
        rank = min(states, key=lambda rank: (states[rank] != "T", rank))
        what = STATES.get(states[rank], "they hang in imports, or in the disk under them")
        return StuckStart(rank, f"{why}: {what} -> see the log, and raise runtime.init_timeout if it is only slow")


def run_torchrun(torchrun: Torchrun, config: Config, attempt: Path, tee: Tee) -> Ended:
    """torchrun from its start to its end, or to that of our patience."""
    run_dir, log = config.runtime.run_dir, attempt / "torchrun.log"
    with torchrun:
        assert torchrun.process.stdout is not None, "it was asked for as a pipe"
        copying = tee.follow(torchrun.process.stdout)
        runtime = scale_deadlines(config, "cpu")[0].runtime
        patience = LAST_SECONDS + runtime.shutdown_timeout + TORCHRUN_SECONDS
        grace = runtime.grace - margin(runtime.grace) / 2
        start = Start(attempt, EARLY_WAITS * runtime.init_timeout)
        code = torchrun.wait(
            lambda: (reported_end(run_dir) or tee.heard) is not None, lambda: start.late, grace, patience
        )
        status = reported_end(run_dir) or tee.heard
        stuck = start.failure(torchrun.process.pid) if code is None and status is None else None
    copying.join(timeout=2.0)
    if code is not None:  # else the ranks were killed, and what they saw of that in each other is not the cause
        status = status or reported_end(run_dir) or tee.heard
    asked = list(torchrun.asked)
    if status is None or (asked and wants_another_start(status, attempt)):
        status = record_fallback(fallback_status(code, asked, log, run_dir, stuck), run_dir, attempt)
        if status.state == "failed":
            tee.say("\n".join(own_lines(log)))
    return Ended(status, bool(asked))


def record_fallback(status: Status, run_dir: Path, attempt: Path) -> Status:
    """Write the status that no rank could write; if this process cannot either, the disk is why."""
    taken = [record(status, folder) for folder in (run_dir, attempt)]
    if not all(taken) and status.code == ExitCode.UNCLASSIFIED:
        return replace(status, code=ExitCode.RETRY, reason=f"{status.reason}; the disk of {run_dir} takes no status")
    return status
