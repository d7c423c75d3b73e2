"""The end of last resort of a rank: a thread that nothing can hold up, for it never calls the control store.

The watchdog talks to the store, and a call may hang for as long as the store does: its host is stopped, or has vanished
without closing its connections. What must happen in time all the same happens here.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from launcher.errors import ExitCode
from launcher.members import Member
from launcher.outcome import Failure, Leaving, process_code, report_alone, report_once, stopped_status, tell_alone
from launcher.overdue import option_of
from launcher.processes import flush_output
from launcher.rank_state import LAST_SECONDS, Limits, RankState, Stop
from launcher.signal_inbox import SignalInbox
from launcher.stacks import dump_stacks
from launcher.stop_wish import StopWish

if TYPE_CHECKING:
    from launcher.control import Control

TICK = 0.25
# Errors of the store for so long, or a deadline that passed so long ago without a word of it.
STORE_LOST_SECONDS = 5.0
# The watchdog passes a goodbye on at its next tick; a store that hangs never takes it.
GOODBYE_SECONDS = 1.0


@dataclass
class Enforcer:
    """Runs in its own thread from `start` to `close`.

    Args:
        control: the watchdog's connection, of which only the age of its outstanding call is looked at.
        ranks: those of this node.
    """

    control: Control
    me: Member
    ranks: frozenset[int]
    state: RankState
    inbox: SignalInbox
    limits: Limits
    run_dir: Path
    log: IO[str]
    goodbye: Leaving | None = None
    """What the watchdog is to tell the others, and then set `said`."""
    said: threading.Event = field(default_factory=threading.Event)
    dumped: bool = False
    _closing: bool = False
    _failed_since: float | None = None
    _asked: float | None = None
    _silent: float = 0.0
    _last: float = 0.0

    def __post_init__(self) -> None:
        self.wish = StopWish(self.inbox, self.ranks, self.say)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="enforcer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join(timeout=4 * TICK)

    def own_failure(self, code: ExitCode, error: str, reason: str) -> Failure:
        state = self.state
        return Failure(self.me.rank, self.me.role, state.phase.name, state.step, code, error, reason, self.me.log)

    def last_word(self, failure: Failure) -> None:
        """End this rank without the store: say why in the log and to the node, then leave."""
        self.say(str(failure))
        stop = self.state.stop or self.wish.pending
        if stop is None or self.state.failure is not None:
            tell_alone(self.state.failure or failure, self.run_dir, self.me.local_rank)
            self._end(failure.code)
        note = f"; meanwhile: {failure.reason}"
        status = stopped_status(stop.code, stop.cause, *self.state.place, self.run_dir, note)
        report_alone(status, self.run_dir, self.me.local_rank)
        self._end(process_code(stop.code))

    def dump(self, why: str) -> None:
        self.dumped = True
        dump_stacks(self.log, why, Path(self.me.log).parent / "traces", self.me.rank)

    def say(self, text: str) -> None:
        self.log.write(f"[watchdog] {text}\n")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._tick(time.monotonic())
                select.select([self.inbox.descriptor], [], [], TICK)
        except BaseException as error:  # a rank that nothing ends could hang for ever
            self.say(f"the enforcer failed:\n{traceback.format_exc()}")
            self.last_word(
                self.own_failure(ExitCode.UNCLASSIFIED, type(error).__name__, f"the enforcer failed: {error}")
            )

    def _tick(self, now: float) -> None:
        again = self.wish.read(now)
        if again and not (self.state.failure or self.state.left):
            self._leave_stopped(self.state.stop or again, ", left at once after a second signal")
        silence = self._silence(now)
        if self.state.leaving is not None:
            self._end_leaving(*self.state.leaving, now)
        elif self.state.failure is not None:
            self._end_failed(self.state.failure, now)
        else:
            self._end_cut_off(silence, now)
            self._end_stopped(now)

    def _silence(self, now: float) -> float:
        """Seconds that the watchdog's call to the store has taken, without those in which this thread, too, stood."""
        asked = self.control.asked_at
        self._silent = 0.0 if asked is None or asked != self._asked else self._silent + min(now - self._last, 4 * TICK)
        self._asked, self._last = asked, now
        return self._silent

    def _end_leaving(self, code: ExitCode, since: float, now: float) -> None:
        if now - since > self.limits.shutdown:
            self.dump("ending this rank, it said goodbye and is still here")
            self._end(process_code(code))

    def _end_failed(self, failure: Failure, now: float) -> None:
        self._failed_since = self._failed_since or now
        if now - self._failed_since > LAST_SECONDS:
            self.dump(f"ending this rank, it is stuck after: {failure}")
            self._exit(ExitCode(failure.code), "failed")

    def _end_cut_off(self, silence: float, now: float) -> None:
        """End a rank whose store does not answer: as silent as a peer may be, or over a deadline of this rank."""
        limit = max(self.limits.heartbeat, STORE_LOST_SECONDS)
        late = [phase for phase in list(self.state.phases) if now - phase.started > phase.timeout + STORE_LOST_SECONDS]
        if silence > limit:
            reason = f"torchrun's store has not answered for {limit:.0f} s -> its process is stopped, or its node down"
        elif late and silence > STORE_LOST_SECONDS:
            reason = (
                f"phase {late[0].name} took longer than {late[0].timeout:.0f} s, and torchrun's store does not answer"
            )
            reason += f" -> see the stacks in its log; if it is only slow, raise {option_of(late[0])}"
        else:
            return
        self.dump(reason)
        self.last_word(self.own_failure(ExitCode.RETRY, "StoreSilent", reason))

    def _end_stopped(self, now: float) -> None:
        stop = self.state.stop or self.wish.forgotten(now)
        if stop is not None and now - stop.since > self.limits.work_after_stop:
            self.dump(f"ending this rank, runtime.grace of {self.limits.grace:.0f} s is over")
            self._leave_stopped(stop, f", before it could save: runtime.grace of {self.limits.grace:.0f} s was over")

    def _leave_stopped(self, stop: Stop, note: str) -> None:
        report_once(stopped_status(stop.code, stop.cause, *self.state.place, self.run_dir, note), self.run_dir)
        self._exit(stop.code, "stopped")

    def _exit(self, code: ExitCode, how: Leaving) -> None:
        self.goodbye = how
        if not self.said.wait(GOODBYE_SECONDS):
            self.say("could not say goodbye")
        self._end(process_code(code))

    def _end(self, code: int) -> NoReturn:
        flush_output()
        os._exit(code)
