"""What the stop signals of this rank mean: the user's wish, its repetition, or torchrun tidying up after a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from launcher.errors import ExitCode
from launcher.processes import missing_siblings
from launcher.signal_inbox import SAME_WISH_SECONDS, STOP_SIGNALS, SignalInbox

# torchrun sends SIGTERM to the others when one rank fails: evidence of that has this long to show itself.
EVIDENCE_SECONDS = 1.0


@dataclass
class StopWish:
    """Reads the inbox of this rank; times are monotonic seconds."""

    inbox: SignalInbox
    say: Callable[[str], None]
    pending: ExitCode | None = None
    """Code of a wish that is not yet taken for one."""
    missing: int = 0
    """Ranks of this node that were gone already when SIGTERM came."""
    _first: float | None = None
    _due: float = 0.0

    def read(self, now: float) -> bool:
        """Take new signals in; True if one of them repeats an earlier wish."""
        again = False
        for number in self.inbox.drain():
            if self._first is None:
                self._first = now
                self._begin(number, now)
            elif now - self._first > SAME_WISH_SECONDS:
                self.say(f"{number.name} again")
                again = True
        return again

    def take(self, now: float) -> ExitCode | None:
        """The code of a wish whose time for evidence of a failed peer is over; once."""
        if self.pending is None or now < self._due:
            return None
        code, self.pending = self.pending, None
        return code

    def _begin(self, number: signal.Signals, now: float) -> None:
        self.say(f"{number.name} received")
        doubtful = number is signal.SIGTERM
        self._due = now + EVIDENCE_SECONDS if doubtful else now
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        self.missing = missing_siblings(local) if doubtful and local else 0
        self.pending = STOP_SIGNALS[number]  # last: another thread takes it
