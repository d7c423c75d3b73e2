"""What the user of a run sees, kept in console.log as well. No torch."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import IO

from launcher.outlet import outlet
from launcher.status import Status, heard

COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Tee:
    """Passes lines on to stdout and, without colours, to a file.

    A closed or paused terminal never stops the file, nor a full disk the terminal: whoever writes into a pipe that
    nobody empties would stand still.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._terminal, self._warned = outlet(1), False
        self.heard: Status | None = None
        """The status that a rank could only say."""

    def write(self, line: bytes) -> None:
        with self._lock:
            self._keep(COLOURS.sub(b"", line))
            self._terminal.write(line)

    def _keep(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            if not self._warned:
                self._terminal.write(f"[launch] console.log lacks lines from here: {error.strerror}\n".encode())
            self._warned = True

    def say(self, text: str) -> None:
        self.write(text.encode() + b"\n")

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Copy a pipe until its last writer closes it, in a thread."""
        thread = threading.Thread(target=self._copy, args=(pipe,), name="console", daemon=True)
        thread.start()
        return thread

    def _copy(self, pipe: IO[bytes]) -> None:
        for line in iter(pipe.readline, b""):
            if (status := heard(COLOURS.sub(b"", line).decode(errors="replace"))) is not None:
                self.heard = status
            else:
                self.write(line)

    def close(self) -> None:
        """The terminal has a moment to take what it lacks."""
        self._terminal.drain()
        with self._lock:
            self._file.close()
