"""Stop signals as bytes on a pipe, so that a thread sees them while the main thread sits in native code. No torch.

A Python handler runs only when the main thread comes back to bytecode, which a gloo collective may keep from happening
for minutes; the byte on the wakeup descriptor is written at once.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from launcher.errors import ExitCode

STOP_SIGNALS = {
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGUSR1: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
    signal.SIGINT: ExitCode.INTERRUPTED,
}
# A terminal and a parent, GNU timeout, or a scheduler and torchrun deliver one wish twice; only a later signal is a
# second one.
SAME_WISH_SECONDS = 1.0


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop; not SIGHUP where it is ignored, as nohup asks for."""
    return [n for n in STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def cause_of(number: signal.Signals) -> str:
    """What a stop signal is called in what the user reads."""
    return "Ctrl-C" if number is signal.SIGINT else number.name


class StoppedBy(SystemExit):
    """The end of a process by a stop signal that nothing else takes: its code, and no traceback."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(int(STOP_SIGNALS[number]))
        self.stop_code, self.cause = STOP_SIGNALS[number], cause_of(number)


class Wishes(list[signal.Signals]):
    """What a process was asked for by stop signals, in order; for those that have no inbox."""

    _first = 0.0

    def add(self, number: int) -> bool:
        """Take a signal in; False if it only repeats the first wish."""
        now = time.monotonic()
        if self and now - self._first <= SAME_WISH_SECONDS:
            return False
        self._first = self._first or now
        self.append(signal.Signals(number))
        return True


class SignalInbox:
    """Collects stop signals of this process from the moment it is made; main thread only."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        for end in (self.descriptor, self._write):
            os.set_blocking(end, False)
        self.watched = False
        """Set once a thread drains the pipe; until then a second signal ends the process here."""
        self.asked: float | None = None
        """When the first stop signal came (monotonic)."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def drain(self) -> list[signal.Signals]:
        """The stop signals that came since the last call; never blocks."""
        try:
            numbers = os.read(self.descriptor, 1024)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.asked = self.asked or now
        if not self.watched and now - self.asked > SAME_WISH_SECONDS:
            os._exit(STOP_SIGNALS[signal.Signals(number)])


_inbox: SignalInbox | None = None


def catch_signals() -> SignalInbox:
    """The inbox of this process, made on the first call; `main` calls it before torch is imported."""
    global _inbox
    if _inbox is None:
        _inbox = SignalInbox()
    return _inbox
