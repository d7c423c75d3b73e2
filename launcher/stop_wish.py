"""What the stop signals of this rank mean: the user's wish, its repetition, or torchrun tidying up after a failure."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from launcher.rank_state import Stop
from launcher.siblings import find_siblings
from launcher.signal_inbox import SAME_WISH_SECONDS, STOP_SIGNALS, SignalInbox, cause_of

# torchrun sends SIGTERM to the others when one rank fails: evidence of that has this long to show itself.
EVIDENCE_SECONDS = 1.0
# The watchdog looks every TICK.
TAKEN_SECONDS = 1.0


@dataclass
class StopWish:
    """Reads the inbox of this rank; times are monotonic seconds.

    Args:
        ranks: those of this node.
    """

    inbox: SignalInbox
    ranks: frozenset[int]
    say: Callable[[str], None]
    pending: Stop | None = None
    """A wish that is not yet taken for one."""
    missing: frozenset[int] = frozenset()
    """Ranks of this node that were gone already when SIGTERM came."""
    _first: Stop | None = None
    _read: float = 0.0
    _due: float = 0.0

    def read(self, now: float) -> Stop | None:
        """Take new signals in; the wish, if one of them repeats it."""
        again = None
        for number in self.inbox.drain():
            if self._first is None:
                self._first = self._begin(number, now)
            elif now - self._read > SAME_WISH_SECONDS:
                self.say(f"{number.name} again")
                again = self._first
        return again

    def take(self, now: float) -> Stop | None:
        """A wish whose time for evidence of a failed peer is over; once."""
        if self.pending is None or now < self._due:
            return None
        wish, self.pending = self.pending, None
        return wish

    def forgotten(self, now: float) -> Stop | None:
        """A wish that nobody takes though its time has come: the thread that should waits for the store."""
        return self.pending if now > self._due + TAKEN_SECONDS else None

    def _begin(self, number: signal.Signals, now: float) -> Stop:
        self.say(f"{number.name} received")
        doubtful = number is signal.SIGTERM
        self._due = now + EVIDENCE_SECONDS if doubtful else now
        self.missing = find_siblings().missing(self.ranks) if doubtful else frozenset()
        came = min(now, self.inbox.asked or now)  # before anybody read the inbox, if the main thread could note it
        wish, self._read = Stop(STOP_SIGNALS[number], cause_of(number), came), now
        self.pending = wish  # last: another thread takes it
        return wish
