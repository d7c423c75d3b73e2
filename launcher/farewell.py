"""The ways a rank leaves: finished, stopped or failed, each said to the others once and recorded by one of them."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from launcher.errors import DeadlineError, ExitCode, PeerFailed, StopRequested
from launcher.out_of_memory import is_out_of_memory, memory_report
from launcher.outcome import (
    STOP_KEY,
    Failure,
    Leaving,
    failed_status,
    failure_of,
    finished_status,
    is_secondary,
    process_code,
    publish_failure,
    report,
    report_alone,
    stopped_status,
)
from launcher.processes import flush_output, shut_down_compile_workers
from launcher.rank_state import RankState
from launcher.status import Status
from launcher.stop_wish import EVIDENCE_SECONDS

if TYPE_CHECKING:
    from launcher.control import Control
    from launcher.topology import Role

log = logging.getLogger("launcher")

# An error that looks like the echo of another rank's end waits this long for that rank's own story.
ECHO_SECONDS = 2.5
# The watchdog decides what a signal means when its time for evidence is over; it looks this often.
DECISION_SECONDS = 0.5
# Where no signal is known by its name.
CAUSES = {ExitCode.INTERRUPTED: "Ctrl-C", ExitCode.TERMINATED: "SIGTERM"}


@dataclass
class Farewell:
    """How one rank ends; main thread only. `snapshot`: save the allocator's history when memory runs out."""

    control: Control
    role: Role
    world_size: int
    run_dir: Path
    log_path: Path
    state: RankState
    snapshot: bool

    @property
    def _snapshot(self) -> Path | None:
        return self.log_path.parent / "traces" / f"memory_rank_{self.role.rank}.pickle" if self.snapshot else None

    def finish(self, reason: str = "") -> ExitCode:
        """Say that this rank is done; the last one writes the status."""
        self._goodbye("done", finished_status(reason, self.state.step, self.run_dir))
        return ExitCode.FINISHED

    def fail(self, error: BaseException, log_file: IO[str], has_wish: Callable[[], bool]) -> ExitCode:
        """End with an error: the first failure of the run is reported, later ones stay quiet in their logs.

        Never raises, whatever is gone: the store with its node, the disk.

        Args:
            log_file: the rank's log, which loses lines rather than raise.
            has_wish: tells whether a stop signal came whose meaning is not yet decided.
        """
        phase = getattr(error, "launcher_phase", self.state.phase.name)
        try:
            self._write_down(error, log_file)
            return self._tell(error, phase, has_wish)
        except Exception as trouble:
            log.warning("no other rank was told: %s: %s", type(trouble).__name__, trouble)
            return self._leave_alone(error, phase)

    def _write_down(self, error: BaseException, log_file: IO[str]) -> None:
        """Into the log first: once others know, this rank has seconds left."""
        if isinstance(error, StopRequested):
            return
        peer_failed = isinstance(error, PeerFailed)
        log_file.write(f"ended by {error}\n" if peer_failed else "".join(traceback.format_exception(error)))
        if is_out_of_memory(error):
            try:
                log_file.write(memory_report(self._snapshot) + "\n")
            except Exception as trouble:  # of a broken device or a full disk; the cause is the error itself
                log_file.write(f"no report on memory: {type(trouble).__name__}: {trouble}\n")

    def _tell(self, error: BaseException, phase: str, has_wish: Callable[[], bool]) -> ExitCode:
        """Publish the failure, or say that this rank stops, once it is clear which of them it is."""
        if isinstance(error, StopRequested):
            return self._stopped(error.code, phase)
        self._await_root_cause(error, has_wish)
        if self.state.stop is not None and self.state.failure is None:
            return self._stopped(self.state.stop.code, phase, f"; while stopping: {type(error).__name__}: {error}")
        failure = self.state.failure or self._publish(error, phase)
        self.control.set(f"left/{self.role.rank}", "failed")
        self.state.leave_with(ExitCode(failure.code))
        return ExitCode(failure.code)

    def _leave_alone(self, error: BaseException, phase: str) -> ExitCode:
        """The end where the store cannot be reached: the code is the stop's or the error's own."""
        known = self.state.stop
        stop = error.code if isinstance(error, StopRequested) else None if known is None else known.code
        if stop is not None and self.state.failure is None:
            cause, step = known.cause if known else CAUSES[stop], self.state.step
            note = "; the other ranks could not be told"
            status = stopped_status(stop, cause, phase, step, self.run_dir, note)
        else:
            status = failed_status(self.state.failure or self._failure(error, phase), self.run_dir)
        report_alone(status, self.run_dir, self.role.local_rank)
        code = ExitCode(status.code or 0)
        self.state.leave_with(code)
        return code

    def leave(self, code: ExitCode, close: Callable[[], None] | None = None) -> NoReturn:
        """End the process within seconds, whatever hangs: the watchdog is left running to see to that.

        `close` gives back what the rank holds; after a failure it is left to the system, for it may wait for a dead
        peer or record half of something.
        """
        self.state.leave_with(code)
        if close is not None and process_code(code) == ExitCode.FINISHED:
            try:
                close()
            except Exception as error:  # the run has ended well, and its status says so
                log.warning("closing: %s: %s", type(error).__name__, error)
        shut_down_compile_workers()
        logging.shutdown()
        flush_output()
        os._exit(process_code(code))

    def _publish(self, error: BaseException, phase: str) -> Failure:
        return publish_failure(self.control, self._failure(error, phase), self.run_dir, self.role.node)

    def _failure(self, error: BaseException, phase: str) -> Failure:
        name = f"{self.role.name} {self.role.index}"
        verdict = error.verdict if isinstance(error, DeadlineError) else None
        return verdict or failure_of(error, self.role.rank, name, phase, self.state.step, str(self.log_path))

    def _await_root_cause(self, error: BaseException, has_wish: Callable[[], bool]) -> None:
        """Give the watchdog time to learn of the failure or the stop that this error is an echo of."""
        others = getattr(error, "ranks_at_fault", None) or {self.role.rank}
        patience = ECHO_SECONDS if is_secondary(error) or self.role.rank not in others else 0.0
        if has_wish():
            patience = max(patience, EVIDENCE_SECONDS + DECISION_SECONDS)
        deadline = time.monotonic() + patience
        while self.state.failure is None and self.state.stop is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _stopped(self, code: ExitCode, phase: str, note: str = "") -> ExitCode:
        told = self.control.claimed(STOP_KEY)  # whoever was asked has said by which signal
        cause = told["cause"] if told else CAUSES[code]
        place = {"code": int(code), "cause": cause, "phase": phase, "step": self.state.step, "note": note}
        self.control.set(f"stopped/{self.role.name}", place)
        self._goodbye("stopped", stopped_status(code, cause, phase, self.state.step, self.run_dir, note))
        return code

    def _goodbye(self, how: Leaving, status: Status) -> None:
        """Say goodbye; the last rank of a node to do so knows that all went well there and writes its status."""
        self.control.set(f"left/{self.role.rank}", how)
        self.state.leave_with(ExitCode(status.code or 0))
        if self.control.add(f"goodbyes/{self.role.node}") == self._ranks_of_node():
            # Targets run ahead; the drafters know the step that training has reached.
            stopped = self.control.get("stopped/drafter") or self.control.get("stopped/target")
            if stopped is not None:
                code = ExitCode(stopped.pop("code"))
                status = stopped_status(code, run_dir=self.run_dir, **stopped)
            report(status, self.run_dir)

    def _ranks_of_node(self) -> int:
        members = (self.control.get(f"member/{rank}") for rank in range(self.world_size))
        return sum(member is not None and member["node"] == self.role.node for member in members)
