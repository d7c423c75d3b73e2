"""The life of one rank: phases with deadlines, agreed stops, the only waiting primitive, and the ways to leave.

A rank makes one Lifecycle after it has the control plane. `main` wraps the work:

    try:
        ...
        code = lifecycle.finish("trained 100 steps")
    except BaseException as error:
        code = lifecycle.fail(error)
    lifecycle.leave(code)
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher import faults
from launcher.errors import DeadlineError, ExitCode, PeerFailed, StopRequested
from launcher.outcome import (
    Failure,
    Leaving,
    failed_status,
    failure_of,
    finished_status,
    is_secondary,
    known_failure,
    process_code,
    publish_failure,
    report,
    stopped_status,
)
from launcher.peers import Member
from launcher.processes import die_with_parent, shut_down_compile_workers
from launcher.rank_state import Limits, Phase, RankState
from launcher.signal_inbox import catch_signals
from launcher.status import Status, write_status
from launcher.stop_wish import EVIDENCE_SECONDS
from launcher.watchdog import TICK, Watchdog

if TYPE_CHECKING:
    from launcher.config import RuntimeConfig
    from launcher.control import Control
    from launcher.topology import Role

log = logging.getLogger("launcher")

# Seconds between two looks of a rank that has waited for a while.
SLOW_POLL = 0.02
# An error that looks like the echo of another rank's end waits this long for that rank's own story.
ECHO_SECONDS = 2.5
PHASE_OPTIONS = {"turn": "compile.turn_timeout"}


class Lifecycle:
    """One rank's phases, waits and end. Main thread only, except for its watchdog."""

    def __init__(
        self, control: Control, role: Role, world_size: int, run_dir: Path, log_path: Path, runtime: RuntimeConfig
    ) -> None:
        self.control, self.role, self.world_size, self.run_dir = control, role, world_size, run_dir
        self.log_path = log_path
        self._limits = Limits(runtime.heartbeat_timeout, runtime.grace)
        # Outside all phases there is no deadline of its own: a peer that waits for this rank has one.
        self._state = RankState([Phase("start", time.monotonic(), math.inf, False)])
        self._watchdog: Watchdog | None = None

    def start(self) -> None:
        """Catch signals, die with the parent, dump stacks on crashes, say who we are and start the watchdog."""
        inbox = catch_signals()
        die_with_parent()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("a", buffering=1)
        faulthandler.enable(self._log)
        if self.control.claim("running", self.role.rank):
            self._write_running()
        me = Member.this_process(self.role, str(self.log_path))
        self.control.set(f"phase/{self.role.rank}", ["start", 0])
        self.control.set(f"member/{self.role.rank}", vars(me))
        own_connection = self.control.clone()
        self._watchdog = Watchdog(
            own_connection, me, self.world_size, self._state, inbox, self._limits, self.run_dir, self._log, option_of
        )
        self._watchdog.start()
        inbox.watched = True

    def close(self) -> None:
        """End the watchdog. Signals stay caught: the rank is on its way out."""
        catch_signals().watched = False
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        faulthandler.cancel_dump_traceback_later()

    # Where we are

    @property
    def step(self) -> int:
        """The training step; goes into heartbeats, failures and the status."""
        return self._state.step

    @step.setter
    def step(self, value: int) -> None:
        self._state.step = value

    @property
    def phase_name(self) -> str:
        """The innermost phase."""
        return self._state.phase.name

    @property
    def stop_code(self) -> ExitCode | None:
        """The exit code of an asked-for stop, None while nobody asked."""
        return self._state.stop

    @contextlib.contextmanager
    def phase(self, name: str, timeout: float, defer_stop: bool = False) -> Generator[None]:
        """A named stretch of work that ends this rank when it takes longer than `timeout` seconds.

        `defer_stop` leaves stop wishes to the caller, who reads `stop_code` and agrees with the others.
        """
        self._state.phases.append(Phase(name, time.monotonic(), timeout, defer_stop))
        self._tell_phase()
        try:
            faults.trip(name, self.step)
            self.check()
            yield
        except BaseException as error:
            # The error is reported where it arose, not in the phase around it.
            if not hasattr(error, "launcher_phase"):
                error.launcher_phase = name  # type: ignore[attr-defined]
            raise
        finally:
            self._state.phases.pop()
            if len(self._state.phases) == 1:
                self._state.phases[0].name = f"after {name}"
        self._tell_phase()

    def check(self) -> None:
        """Raise if the run is ending; local and cheap, for loops.

        Raises:
            PeerFailed: another rank failed; the message is that rank's.
            StopRequested: a stop was asked for, and the current phase does not defer it.
        """
        if (failure := self._state.failure) is not None:
            raise PeerFailed(str(failure))
        if self._state.stop is not None and not any(phase.defer_stop for phase in self._state.phases):
            raise StopRequested(self._state.stop)

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, interval: float = 0.002) -> None:
        """Poll `ready` after `interval` seconds, then ever more rarely down to SLOW_POLL; the only way a rank waits.

        Eight ranks that each asked the store every 2 ms would keep a core of a small host busy.

        Raises:
            DeadlineError: `timeout` seconds passed; the message names `what`.
            PeerFailed, StopRequested: as `check`.
        """
        deadline = time.monotonic() + timeout
        outer, self._state.waiting_for = self._state.waiting_for, what
        try:
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(f"waited {timeout:.0f} s for {what}", f"see its log in {self.log_path.parent}")
                time.sleep(interval)
                interval = max(interval, min(interval * 1.25, SLOW_POLL))
        finally:
            self._state.waiting_for = outer

    # Ways to leave

    def finish(self, reason: str = "") -> ExitCode:
        """Say that this rank is done; the last one writes the status."""
        self._goodbye("done", finished_status(reason, self.step, self.run_dir))
        return ExitCode.FINISHED

    def fail(self, error: BaseException) -> ExitCode:
        """End with an error: the first failure of the run is reported, later ones stay quiet in their logs."""
        phase = getattr(error, "launcher_phase", self._state.phase.name)
        if isinstance(error, StopRequested):
            return self._stopped(error.code, phase)
        peer_failed = isinstance(error, PeerFailed)
        self._log.write(f"ended by {error}\n" if peer_failed else "".join(traceback.format_exception(error)))
        self._await_root_cause(error)
        if self._state.stop is not None and self._state.failure is None:
            return self._stopped(self._state.stop, phase, f"; while stopping: {type(error).__name__}: {error}")
        failure = self._state.failure or self._publish(error, phase)
        self.control.set(f"left/{self.role.rank}", "failed")
        self._state.leave_with(ExitCode(failure.code))
        return ExitCode(failure.code)

    def leave(self, code: ExitCode, close: Callable[[], None] | None = None) -> NoReturn:
        """End the process within seconds, whatever hangs: the watchdog is left running to see to that.

        `close` gives back what the rank holds; after a failure it is left to the system, for it may wait for a dead
        peer or record half of something.
        """
        self._state.leave_with(code)
        if close is not None and process_code(code) == ExitCode.FINISHED:
            try:
                close()
            except Exception as error:  # the run has ended well, and its status says so
                log.warning("closing: %s: %s", type(error).__name__, error)
        shut_down_compile_workers()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(process_code(code))

    def _publish(self, error: BaseException, phase: str) -> Failure:
        name = f"{self.role.name} {self.role.index}"
        failure = failure_of(error, self.role.rank, name, phase, self.step, str(self.log_path))
        return publish_failure(self.control, failure, self.run_dir)

    def _await_root_cause(self, error: BaseException) -> None:
        """Give the watchdog time to learn of the failure or the stop that this error is an echo of."""
        patience = ECHO_SECONDS if is_secondary(error) else 0.0
        if self._watchdog is not None and self._watchdog.has_wish:
            patience = max(patience, EVIDENCE_SECONDS + 2 * TICK)
        deadline = time.monotonic() + patience
        while self._state.failure is None and self._state.stop is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _stopped(self, code: ExitCode, phase: str, note: str = "") -> ExitCode:
        place = {"code": int(code), "phase": phase, "step": self.step, "note": note}
        self.control.set(f"stopped/{self.role.name}", place)
        self._goodbye("stopped", stopped_status(code, phase, self.step, self.run_dir, note))
        return code

    def _goodbye(self, how: Leaving, status: Status) -> None:
        """Say goodbye; the last rank to do so knows that all went well and writes the status."""
        self.control.set(f"left/{self.role.rank}", how)
        self._state.leave_with(ExitCode(status.code or 0))
        if self.control.add("goodbyes") == self.world_size:
            # Targets run ahead; the drafters know the step that training has reached.
            stopped = self.control.get("stopped/drafter") or self.control.get("stopped/target")
            if stopped is not None:
                code, phase, step, note = ExitCode(stopped["code"]), stopped["phase"], stopped["step"], stopped["note"]
                status = stopped_status(code, phase, step, self.run_dir, note)
            report(status, self.run_dir)

    def _tell_phase(self) -> None:
        """Others name this phase should the process vanish."""
        self.control.set(f"phase/{self.role.rank}", [self._state.phase.name, self.step])

    def _write_running(self) -> None:
        write_status(self.run_dir, Status(state="running", reason="started", phase=self._state.phase.name))
        if (failure := known_failure(self.control)) is not None:
            write_status(self.run_dir, failed_status(failure, self.run_dir))


def option_of(phase: str) -> str:
    """The option that holds the deadline of a phase."""
    return PHASE_OPTIONS.get(phase, f"runtime.{phase}_timeout")
