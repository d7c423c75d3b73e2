"""The watchdog thread of a rank: heartbeats, deadlines, dead and silent peers, and what signals mean.

It does the work because the main thread may sit in native code for minutes: Python signal handlers do not run inside a
gloo collective. It has its own connection to the control plane. Where that hangs, the thread beside it (enforcer.py)
ends the rank.
"""

from __future__ import annotations

import faulthandler
import select
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.enforcer import STORE_LOST_SECONDS, TICK, Enforcer
from launcher.errors import DeadlineError, ExitCode
from launcher.members import Beat, Member
from launcher.outcome import STOP_KEY, Failure, known_failure, publish_failure, tell_node
from launcher.overdue import blame, overdue, overwaited
from launcher.peers import PeerTable
from launcher.rank_state import Limits, Phase, RankState, Stop
from launcher.signal_inbox import SignalInbox
from launcher.stacks import is_in_collective
from launcher.topology import Role

if TYPE_CHECKING:
    from launcher.control import Control

BEAT = 1.0
# Errors of ranks that do not move: what the others are at, and in which collective, helps to see why.
STUCK = {"DeadlineError", "PeerSilent"}
# A blamed rank without a heartbeat for so long is killed by its peers.
MUTE_SECONDS = 5.0


@dataclass
class Watchdog:
    """Runs in its own thread from `start` to `close`.

    Args:
        roles: those of all ranks.
    """

    control: Control
    me: Member
    roles: Sequence[Role]
    state: RankState
    inbox: SignalInbox
    limits: Limits
    run_dir: Path
    log: IO[str]
    _closing: bool = False
    _store_ok: float = 0.0
    _last_beat: float = 0.0
    _sequence: int = 0

    def __post_init__(self) -> None:
        node = frozenset(role.rank for role in self.roles if role.node == self.me.node)
        self._enforcer = Enforcer(
            self.control, self.me, node, self.state, self.inbox, self.limits, self.run_dir, self.log
        )

    def start(self) -> None:
        self._enforcer.start()
        self.peers = PeerTable(self.me, self.roles)
        self._store_ok = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def has_wish(self) -> bool:
        """Whether a stop signal came whose meaning is not yet decided."""
        return self._enforcer.wish.pending is not None

    def judge(self, error: DeadlineError, control: Control) -> Failure:
        """Whom a wait of the main thread has been in vain for; on the main thread's own connection."""
        own = self._own_beat(self.state.phase)
        culprit = blame(own, self.peers.beats(control, time.monotonic()))
        return overwaited(error, own, culprit, self.peers.member(culprit.rank))

    def close(self) -> None:
        """End both threads; waits for each at most a few ticks."""
        self._closing = True
        self._enforcer.close()
        self._thread.join(timeout=4 * TICK)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._tick(time.monotonic())
                select.select(self.peers.descriptors(), [], [], TICK)
        except BaseException as error:  # a rank without a watchdog could hang for ever
            self._enforcer.say(f"the watchdog failed:\n{traceback.format_exc()}")
            failure = self._enforcer.own_failure(
                ExitCode.UNCLASSIFIED, type(error).__name__, f"the watchdog failed: {error}"
            )
            self._enforcer.last_word(failure)
        finally:
            self.peers.close()

    def _tick(self, now: float) -> None:
        try:
            self._pass_goodbye_on()
            self._read_messages(now)
            self._check_deadline(now)
            self._beat(now)
            self._check_peers(now)
            self._decide_stop(now)
            self._store_ok = now
        except (RuntimeError, OSError) as error:
            self._on_store_error(error, now)

    def _pass_goodbye_on(self) -> None:
        enforcer = self._enforcer
        if enforcer.goodbye is not None and not enforcer.said.is_set():
            self.control.set(f"left/{self.me.rank}", enforcer.goodbye)
            enforcer.said.set()

    def _decide_stop(self, now: float) -> None:
        wish = self._enforcer.wish
        if self.state.stop or wish.pending:
            self.state.training = self.peers.training(self.control)
        stop = None if self.state.failure else wish.take(now)
        if stop is None:
            return
        if (lost := self.peers.lost_before_report(wish.missing, self.control)) is not None:
            self._publish(lost)
            return
        told = {"code": int(stop.code), "cause": stop.cause, "rank": self.me.rank, "age": now - stop.since}
        self.control.claim(STOP_KEY, told)
        self._learn_stop(now)

    def _learn_stop(self, now: float) -> None:
        """Take in a stop that a rank was asked for, of several the first that was told."""
        if self.state.stop is None and (told := self.control.claimed(STOP_KEY)) is not None:
            self.state.stop = Stop(ExitCode(told["code"]), told["cause"], now - told["age"])

    def _read_messages(self, now: float) -> None:
        if self.state.failure is None and (failure := known_failure(self.control)) is not None:
            tell_node(self.control, failure, self.run_dir, self.me.node)
            self._learn(failure)
        self._learn_stop(now)

    def _check_deadline(self, now: float) -> None:
        if self.state.failure or self.state.left:
            return
        for phase in list(self.state.phases):
            if now - phase.started > phase.timeout:
                self._on_deadline(phase)
                return

    def _on_deadline(self, phase: Phase) -> None:
        self._enforcer.dump(f"phase {phase.name} took longer than {phase.timeout:.0f} s")
        beats = self.peers.beats(self.control, time.monotonic())
        own = self._own_beat(phase)
        for beat in [own, *beats]:
            self._enforcer.say(f"  {beat}")
        culprit = blame(own, beats)
        where = self.peers.member(culprit.rank)
        self._publish(overdue(phase, own, culprit, where, self.state.waiting_for))

    def _own_beat(self, phase: Phase) -> Beat:
        waiting = self.state.waiting_for is not None or is_in_collective(threading.get_ident())
        seconds = time.monotonic() - phase.started
        return Beat(self.me.rank, self.me.role, self._sequence, phase.name, self.state.step, waiting, seconds)

    def _beat(self, now: float) -> None:
        if now - self._last_beat < BEAT:
            return
        self._last_beat = now
        self._sequence += 1
        self.control.set(f"beat/{self.me.rank}", vars(self._own_beat(self.state.phase)))
        # A C thread: it shows the stack of whatever keeps the GIL, which no Python thread could.
        faulthandler.dump_traceback_later(0.8 * self.limits.heartbeat, file=self.log)

    def _check_peers(self, now: float) -> None:
        if self.state.failure or self.state.left:
            return
        self.peers.refresh(self.control, now)
        lost = self.peers.find_gone(self.control) or self.peers.find_silent(self.control, now, self.limits.heartbeat)
        if lost is not None:
            self._publish(lost)

    def _publish(self, failure: Failure) -> None:
        self._learn(publish_failure(self.control, failure, self.run_dir, self.me.node))

    def _learn(self, failure: Failure) -> None:
        """Take in the failure of the run. A mute rank cannot leave by itself; torchrun would kill it after 30 s."""
        if self.peers.is_mute(failure.rank, min(MUTE_SECONDS, self.limits.heartbeat)):
            self.peers.member(failure.rank).kill()
        if failure.error in STUCK and not self._enforcer.dumped:
            self._enforcer.dump(f"dump because {failure}")
        # Only now: the main thread leaves as soon as it sees this.
        self.state.failure = failure

    def _on_store_error(self, error: Exception, now: float) -> None:
        if self.state.left or self._closing or now - self._store_ok < STORE_LOST_SECONDS:
            return
        reason = f"no contact with torchrun's store for {STORE_LOST_SECONDS:.0f} s: {error}"
        self._enforcer.last_word(self._enforcer.own_failure(ExitCode.RETRY, type(error).__name__, reason))
