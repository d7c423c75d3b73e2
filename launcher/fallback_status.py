"""The status of a run whose ranks could not write one, read from how torchrun ended and what it logged. No torch."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint_folder import newest_published
from launcher.errors import ExitCode
from launcher.processes import describe_exit
from launcher.status import State, Status, resume_command

# torchrun's report of the first failure. Its own log lines and warnings say nothing about the run, nor do those of a
# rank that it stops amid its imports.
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)
REPORT_START = re.compile(r"^=+$")
NOISE = re.compile(
    r"^([IWE]\d{4} |\*{5,}|Setting OMP_NUM_THREADS|Traceback \(most recent call last\):$|Exception ignored in)"
    r"|elastic|StoppedBy|^\s*$"
)
TAIL_LINES = 20
TAIL_BYTES = 64 << 10
CODES = {code.value for code in ExitCode} - {ExitCode.FINISHED}


@dataclass(frozen=True)
class FirstFailure:
    """The rank that torchrun saw end first; a negative exit code is a signal."""

    rank: int
    exit_code: int


@dataclass(frozen=True)
class StuckStart:
    """The rank to blame for a start in which none has reported, if one is there."""

    rank: int | None
    reason: str


def fallback_status(
    code: int | None, asked: Sequence[signal.Signals], log: Path, run_dir: Path, stuck: StuckStart | None = None
) -> Status:
    """What to record for a run that ended without a word.

    Args:
        code: torchrun's exit code; negative where a signal ended it, None where it had to be killed.
        asked: the stop signals that the run was sent.
        stuck: why it had to be killed, if not for one of those.
    """
    failure = stuck or first_failure(tail(log))
    state, exit_code, reason = _verdict(code, asked, failure, log)
    checkpoint = newest_published(run_dir)
    hopeless = exit_code in {ExitCode.DO_NOT_RETRY, ExitCode.FINISHED}
    return Status(
        state=state,
        code=exit_code,
        reason=reason,
        rank=failure.rank if failure and state == "failed" else None,
        phase=None if state != "failed" or any(log.parent.glob("rank_*.log")) else "start",
        log=None if state == "finished" else str(log),
        last_checkpoint=None if checkpoint is None else str(checkpoint),
        resumable=checkpoint is not None and not hopeless,
        next_command=None if hopeless else resume_command(run_dir),
    )


def _verdict(
    code: int | None, asked: Sequence[signal.Signals], failure: FirstFailure | StuckStart | None, log: Path
) -> tuple[State, ExitCode, str]:
    """How the run ended, the exit code to return, and why."""
    if asked:
        interrupted = asked[0] is signal.SIGINT
        how = "at once, by a second signal" if len(asked) > 1 else "before its ranks could say so"
        reason = f"stopped by {'Ctrl-C' if interrupted else asked[0].name} {how}"
        return "stopped", ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED, reason
    if isinstance(failure, StuckStart):
        return "failed", ExitCode.RETRY, failure.reason
    if code == 0:
        return "finished", ExitCode.FINISHED, "every rank left with 0, none wrote a status"
    if code is None:
        return "failed", ExitCode.RETRY, "torchrun did not end and was killed"
    if code < 0:
        return "failed", ExitCode.RETRY, f"torchrun {describe_exit(-code, log)}"
    if failure is not None and failure.exit_code < 0:
        return "failed", ExitCode.RETRY, f"rank {failure.rank} {describe_exit(-failure.exit_code, log)}"
    known = failure is not None and failure.exit_code in CODES
    last = own_lines(log)[-1:] or [f"torchrun left with exit code {code} without a word"]
    return "failed", ExitCode(failure.exit_code) if failure and known else ExitCode.UNCLASSIFIED, last[0]


def first_failure(text: str) -> FirstFailure | None:
    """The root cause in torchrun's own report."""
    match = ROOT_CAUSE.search(text)
    return FirstFailure(int(match[1]), int(match[2])) if match else None


def own_lines(log: Path) -> list[str]:
    """The last lines that ranks left in torchrun's log, without what torchrun says about itself."""
    lines = []
    for line in tail(log).splitlines():
        if REPORT_START.match(line):
            break
        if not NOISE.search(line) and not line.startswith(" "):
            lines.append(line)
    return lines[-TAIL_LINES:]


def tail(log: Path) -> str:
    """The end of a log file; empty where there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
