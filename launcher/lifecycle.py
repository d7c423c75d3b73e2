"""The life of one rank: phases with deadlines, agreed stops, the only waiting primitive, and the ways to leave.

A rank makes one Lifecycle after it has the control plane. `main` wraps the work:

    try:
        ...
        code = lifecycle.finish("trained 100 steps")
    except BaseException as error:
        code = lifecycle.fail(error)
    lifecycle.leave(code)

Who ends a rank, when, with which code of the run, and who writes `status.json`. "Claims" is whoever says it first
(outcome.py); then each node has one rank that tells it. The constants are in farewell.py, stop_wish.py, enforcer.py.

    event                           who acts                     within              code       status by
    the work is done                main thread: finish          at once             0          last rank of each node
    an error of its own             main thread: fail            at once (*)         1, 75, 78  who claims the failure
    a wait ran out                  main thread: fail            2.5 s (*)           75         who claims the failure
    a phase's deadline              own watchdog                 its timeout + 0.25  75         who claims the failure
    a peer of its node died         every watchdog there         0.25 s              75         who claims the failure
    ... before it reported          every watchdog there         1.25 s              its own    who claims the failure
    a peer is silent                the watchdogs that watch it  heartbeat_timeout   75         who claims the failure
    another rank's failure          main thread: check, or else  0.25 s, or          that one's  already written
                                    own enforcer                 3 s after that
    first stop signal               main thread, after the vote  grace               130, 143   last rank of each node
    runtime.grace is nearly over    own enforcer                 grace - 2 s (1/5)   130, 143   first rank to do so
    second stop signal, > 1 s later own enforcer                 at once             130, 143   that rank
    torchrun's store is gone        main thread: fail, or else   its next call, or   the error's first rank of each node
                                    own watchdog                 5 s                 or 75
    the store does not answer       own enforcer                 heartbeat_timeout   75         first rank of each node
    ... and a deadline has passed   own enforcer                 5 s                 75         first rank of each node
    said goodbye, and still here    own enforcer                 shutdown_timeout    unchanged  already written
    torchrun died                   the kernel                   at once             75         launch.sh
    an error before all this        refusal.py                   0 to 9 s            its own    launch.sh
    a wait before it, in vain       refusal.py: the first rank   init_timeout        75         who claims the failure
    ... for a rank that is gone     refusal.py                   at once             its own    launch.sh (**)

(*) An error that looks like the echo of another rank's end gives that one 2.5 s to be told first; a stop signal whose
meaning is open 1.5 s. SIGTERM counts as a wish only if no rank of the node is found dead within 1 s of it.
(**) Under a bare torchrun, whose report nobody reads, the rank that waited: 75.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher import faults
from launcher.errors import DeadlineError, ExitCode, PeerFailed, StopRequested
from launcher.farewell import Farewell
from launcher.members import Member
from launcher.outcome import failed_status, known_failure, record, status_folder
from launcher.processes import die_with_parent
from launcher.rank_log import RankLog
from launcher.rank_state import Limits, Phase, RankState
from launcher.signal_inbox import catch_signals
from launcher.status import Status
from launcher.watchdog import Watchdog

if TYPE_CHECKING:
    from launcher.config_sections import RuntimeConfig
    from launcher.control import Control
    from launcher.topology import Role

# Seconds between two looks of a rank that has waited for a while.
SLOW_POLL = 0.02


class Lifecycle:
    """One rank's phases, waits and end. Main thread only, except for its watchdog."""

    def __init__(
        self,
        control: Control,
        role: Role,
        roles: Sequence[Role],
        run_dir: Path,
        log_path: Path,
        runtime: RuntimeConfig,
    ) -> None:
        self.control, self.role, self.run_dir, self.log_path = control, role, run_dir, log_path
        self._roles = roles
        self._limits = Limits(runtime.heartbeat_timeout, runtime.grace, runtime.shutdown_timeout)
        # Outside all phases there is no deadline of its own: a peer that waits for this rank has one.
        self._state = RankState([Phase("start", time.monotonic(), math.inf, False)])
        self._stops_are_agreed = False
        self._watchdog: Watchdog | None = None
        self._farewell = Farewell(control, role, len(roles), run_dir, log_path, self._state, runtime.memory_snapshot)

    def start(self) -> None:
        """Catch signals, die with the parent, dump stacks on crashes, say who we are and start the watchdog."""
        inbox = catch_signals()
        die_with_parent()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = RankLog(self.log_path)
        faulthandler.enable(self._log)
        if self.control.claim(f"running/{self.role.node}", self.role.rank):
            self._write_running()
        me = Member.this_process(self.role, str(self.log_path))
        self.control.set(f"phase/{self.role.rank}", ["start", 0])
        self.control.set(f"member/{self.role.rank}", vars(me))
        own_connection = self.control.clone()
        self._watchdog = Watchdog(
            own_connection, me, self._roles, self._state, inbox, self._limits, self.run_dir, self._log
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
        return None if self._state.stop is None else self._state.stop.code

    @contextlib.contextmanager
    def phase(self, name: str, timeout: float, defer_stop: bool = False, option: str | None = None) -> Generator[None]:
        """A named stretch of work that ends this rank when it takes longer than `timeout` seconds.

        `defer_stop` leaves stop wishes to the caller, who reads `stop_code` and agrees with the others. `option` holds
        the deadline where that is not the one of this name.
        """
        self._state.phases.append(Phase(name, time.monotonic(), timeout, defer_stop, option))
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

    @contextlib.contextmanager
    def agreed_stops(self) -> Generator[None]:
        """A stretch that a rank must not leave alone: its waits lie in phases that defer the stop to an agreement."""
        self._stops_are_agreed = True
        try:
            yield
        finally:
            self._stops_are_agreed = False

    def check(self) -> None:
        """Raise if the run is ending; local and cheap, for loops.

        Raises:
            PeerFailed: another rank failed; the message is that rank's.
            StopRequested: a stop was asked for, and the current phase does not defer it.
        """
        if (failure := self._state.failure) is not None:
            raise PeerFailed(str(failure))
        if self._state.stop is not None and not self._defers_stop:
            raise StopRequested(self._state.stop.code)

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, interval: float = 0.002) -> None:
        """Poll `ready` after `interval` seconds, then ever more rarely down to SLOW_POLL; the only way a rank waits.

        Eight ranks that each asked the store every 2 ms would keep a core of a small host busy.

        Raises:
            DeadlineError: `timeout` seconds passed; the message names `what`.
            PeerFailed, StopRequested: as `check`.
        """
        assert self._defers_stop or not self._stops_are_agreed, (
            f"a stop would end the wait for {what} on some ranks only"
        )
        deadline = time.monotonic() + timeout
        outer, self._state.waiting_for = self._state.waiting_for, what
        try:
            while not ready():
                self.check()
                if time.monotonic() > deadline:
                    raise self._in_vain(f"waited {timeout:.0f} s for {what}")
                time.sleep(interval)
                interval = max(interval, min(interval * 1.25, SLOW_POLL))
        finally:
            self._state.waiting_for = outer

    def _in_vain(self, what: str) -> DeadlineError:
        """The error of a wait that has run out, with the rank to blame where the heartbeats tell."""
        error = DeadlineError(what, f"see its log in {self.log_path.parent}")
        if self._watchdog is not None:
            error.verdict = self._watchdog.judge(error, self.control)
        return error

    @property
    def _defers_stop(self) -> bool:
        return any(phase.defer_stop for phase in self._state.phases)

    # Ways to leave

    def finish(self, reason: str = "") -> ExitCode:
        """Say that this rank is done; the last one writes the status."""
        return self._farewell.finish(reason)

    def fail(self, error: BaseException) -> ExitCode:
        """End with an error: the first failure of the run is reported, later ones stay quiet in their logs."""
        watchdog = self._watchdog
        return self._farewell.fail(error, self._log, lambda: watchdog is not None and watchdog.has_wish)

    def leave(self, code: ExitCode, close: Callable[[], None] | None = None) -> NoReturn:
        """End the process within seconds, whatever hangs: the watchdog is left running to see to that."""
        self._farewell.leave(code, close)

    def _tell_phase(self) -> None:
        """Others name this phase should the process vanish."""
        self.control.set(f"phase/{self.role.rank}", [self._state.phase.name, self.step])

    def _write_running(self) -> None:
        folder = status_folder(self.run_dir)
        record(Status(state="running", reason="started", phase=self._state.phase.name), folder)
        if (failure := known_failure(self.control)) is not None:
            record(failed_status(failure, self.run_dir), folder)
