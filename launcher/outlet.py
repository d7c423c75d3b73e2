"""Words for whoever may be looking: a terminal or a pipe that is allowed to be slow, paused or closed. No torch."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections import deque
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# What an outlet keeps for a reader that does not read; older lines give way to newer ones.
KEPT_BYTES = 1 << 20
# How long the end of a process waits for such a reader.
LAST_SECONDS = 2.0


class Outlet(io.BufferedIOBase):
    """Writes to a descriptor from a thread of its own, so that nobody waits for its reader, and no error comes back.

    A process that waited for its terminal would stand still with it (Ctrl-S, a paused pager), and all ranks with it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._kept = self._lost = 0
        self._writing, self._gone = False, False
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="outlet", daemon=True).start()

    @property
    def name(self) -> int:
        """The descriptor, as of an unnamed file."""
        return self._descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: ReadableBuffer, /) -> int:
        """Take bytes that belong together, such as a line; never waits and never fails."""
        line = bytes(text)
        with self._changed:
            if not self._gone:
                self._lines.append(line)
                self._kept += len(line)
                while self._kept > KEPT_BYTES and len(self._lines) > 1:
                    self._kept -= len(self._lines.popleft())
                    self._lost += 1
                self._changed.notify_all()
        return len(line)

    def drain(self, patience: float = LAST_SECONDS) -> bool:
        """Wait until the reader has everything, at most `patience` seconds; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._gone or not (self._lines or self._writing), patience)

    def _serve(self) -> None:
        while True:
            part = self._next()
            try:
                while part:
                    part = part[os.write(self._descriptor, part) :]
            except OSError:  # the reader has gone; what is said is in a log as well
                with self._changed:
                    self._gone = True
                    self._lines.clear()
                    self._changed.notify_all()
                return

    def _next(self) -> bytes:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines)
            self._writing = True
            lost, self._lost = self._lost, 0
            note = f"[launch] {lost} lines left out: nobody read them in time\n" if lost else ""
            line = self._lines.popleft()
            self._kept -= len(line)
            return note.encode() + line


def open_closed_streams() -> None:
    """Give standard streams that the caller closed to nobody: else the next file takes their place, and what is said.

    Python has None in their stead, which cannot even be asked whether it is a terminal.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def guard_stderr() -> None:
    """From here on nothing that this process says on stderr waits for its reader; its end does, for a moment."""
    out = outlet(2)
    sys.stderr = io.TextIOWrapper(out, encoding="utf-8", errors="backslashreplace", write_through=True)
    atexit.register(out.drain)


@cache
def outlet(descriptor: int) -> Outlet:
    """The one outlet of this process to a standard stream."""
    return Outlet(descriptor)
