"""The one root cause of a failed run: who says it first, how it is kept and shown. No torch.

The first rank that claims the key `failure` writes `status.json` and prints the final box; the others stay quiet, so
that no innocent rank's traceback buries the cause.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.checkpoint_folder import newest_published
from launcher.errors import DeadlineError, ExitCode, LauncherError, PeerFailed
from launcher.out_of_memory import advice, is_out_of_memory
from launcher.status import FILE_NAME, Status, final_box, read_status, resume_command, spoken, write_status

if TYPE_CHECKING:
    from launcher.control import Control

log = logging.getLogger("launcher")

# launch.sh sets it: it prints the box itself, after everything that torchrun and dying ranks still say.
SUPERVISED = "LAUNCHER_SUPERVISED"
# Ranks set it for themselves where the status of their run folder is not theirs to change.
STATUS_VARIABLE = "LAUNCHER_STATUS_DIR"
FAILURE_KEY, STOP_KEY = "failure", "stop"
RETRY_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
# What collectives and the store raise when the other side has died; the peer's own end is the cause then.
CONNECTION_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
CONNECTION_WORDS = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "socket timeout")

Leaving = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Failure:
    """What went wrong, where; `rank` is the rank to blame, not always the one that found out."""

    rank: int
    role: str
    phase: str
    step: int
    code: int
    error: str
    reason: str
    log: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.role} failed in phase {self.phase} at step {self.step}: {self.reason}"


def failure_code(error: BaseException) -> ExitCode:
    """The exit code of an error: its own, 75 where trying again may help, else 1."""
    if isinstance(error, LauncherError):
        return error.code
    retry = is_out_of_memory(error) or is_secondary(error)
    if isinstance(error, OSError):
        retry = retry or error.errno in RETRY_ERRNOS
    # Writers in Rust and C++ (safetensors, torch.save) have the system's words alone.
    retry = retry or any(os.strerror(number) in str(error) for number in RETRY_ERRNOS)
    return ExitCode.RETRY if retry else ExitCode.UNCLASSIFIED


def failure_of(error: BaseException, rank: int, role: str, phase: str, step: int, log_path: str) -> Failure:
    """The failure that an exception of a rank's own makes."""
    name = type(error).__name__
    reason = str(error) or name
    if is_out_of_memory(error):
        reason = f"{reason.rstrip('.')} -> {advice(role)}; its log shows who holds how much"
    return Failure(rank, role, phase, step, int(failure_code(error)), name, reason, log_path)


def process_code(code: ExitCode) -> int:
    """What a rank's process leaves with. torchrun kills the others when one fails, so a stopped rank, whose peers may
    still be saving, leaves with 0; `status.json` has the true code."""
    return 0 if code in {ExitCode.TERMINATED, ExitCode.INTERRUPTED} else int(code)


def is_secondary(error: BaseException) -> bool:
    """Whether the error is likely the echo of another rank's end: a closed connection, a wait that ran out."""
    if isinstance(error, PeerFailed | DeadlineError | ConnectionError) or type(error).__name__ in CONNECTION_ERRORS:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONNECTION_WORDS)


def publish_failure(control: Control, failure: Failure, run_dir: Path, node: int = 0) -> Failure:
    """Claim the failure of the run; the winner writes the status and prints the box. Returns the winning failure."""
    if claim_failure(control, failure):
        tell_node(control, failure, run_dir, node)
        return failure
    return known_failure(control) or failure


def claim_failure(control: Control, failure: Failure) -> bool:
    """Make a failure the run's, unless another one was first."""
    return control.claim(FAILURE_KEY, asdict(failure))


def tell_node(control: Control, failure: Failure, run_dir: Path, node: int) -> None:
    """Write the status and print the box on one node, once: each node has a run folder and a console of its own."""
    if control.claim(f"told/{node}", failure.rank):
        report(failed_status(failure, run_dir), run_dir)


def tell_alone(failure: Failure, run_dir: Path, local_rank: int) -> None:
    """As `tell_node`, for ranks that have lost the store, and with it the claim."""
    report_alone(failed_status(failure, run_dir), run_dir, local_rank)


def known_failure(control: Control) -> Failure | None:
    claim = control.claimed(FAILURE_KEY)
    return None if claim is None else Failure(**claim)


def failed_status(failure: Failure, run_dir: Path) -> Status:
    """The status of a failed run, with the command to go on unless only another configuration can help."""
    checkpoint = newest_published(run_dir)
    hopeless = failure.code == ExitCode.DO_NOT_RETRY
    return Status(
        state="failed",
        code=failure.code,
        reason=failure.reason,
        error=failure.error,
        rank=failure.rank,
        role=failure.role,
        phase=failure.phase,
        step=failure.step,
        log=failure.log or None,
        last_checkpoint=None if checkpoint is None else str(checkpoint),
        resumable=checkpoint is not None and not hopeless,
        next_command=None if hopeless else resume_command(run_dir),
    )


def stopped_status(code: ExitCode, cause: str, phase: str, step: int, run_dir: Path, note: str = "") -> Status:
    """The status of a run that was asked to stop; `cause` is the signal, as the user is told."""
    checkpoint = newest_published(run_dir)
    return Status(
        state="stopped",
        code=code,
        reason=f"stopped by {cause} at step {step}{note}",
        phase=phase,
        step=step,
        last_checkpoint=None if checkpoint is None else str(checkpoint),
        resumable=checkpoint is not None,
        next_command=resume_command(run_dir),
    )


def finished_status(reason: str, step: int, run_dir: Path) -> Status:
    checkpoint = newest_published(run_dir)
    return Status(
        state="finished",
        code=ExitCode.FINISHED,
        reason=reason,
        step=step,
        last_checkpoint=None if checkpoint is None else str(checkpoint),
    )


def report(status: Status, run_dir: Path) -> None:
    """Write the status of this start and, unless `launch.sh` will read it and do so, end the console with the box."""
    written, supervised = record(status, status_folder(run_dir)), bool(os.environ.get(SUPERVISED))
    if supervised and not written:
        log.error(spoken(status), extra={"announce": True})
    if status.state in {"failed", "stopped"} and not supervised:
        log.error("\n%s", final_box(status), extra={"announce": True})


def report_once(status: Status, run_dir: Path) -> None:
    """Report, unless the status has an end already; without the store, so that two ranks may do so at once."""
    if reported_end(status_folder(run_dir)) is None:
        report(status, run_dir)


def report_alone(status: Status, run_dir: Path, local_rank: int) -> None:
    """Report without the store: the first rank of a node does, unless the status has an end already."""
    if local_rank == 0:
        report_once(status, run_dir)


def reported_end(folder: Path) -> Status | None:
    """The status that a run ended with; None while it runs or where there is none that anybody could read."""
    try:
        status = read_status(folder)
    except (OSError, ValueError):
        return None
    return None if status is None or status.state == "running" else status


def end_to_keep(run_dir: Path, dry_run: bool) -> Status | None:
    """The status that a start leaves alone: a dry run trains nothing, so a run that can go on stands where it stood."""
    return reported_end(run_dir) if dry_run and newest_published(run_dir) is not None else None


def status_folder(run_dir: Path) -> Path:
    """Where the ranks of this start write `status.json`: the run folder, or that of their attempt."""
    return Path(os.environ.get(STATUS_VARIABLE) or run_dir)


def record(status: Status, run_dir: Path) -> bool:
    """Write `status.json`; whether the disk took it. How a run ends never depends on that."""
    try:
        write_status(run_dir, status)
    except OSError as error:
        log.error("%s of %s is not written: %s", FILE_NAME, run_dir, error.strerror)
        return False
    return True
