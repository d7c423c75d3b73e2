"""What the user of a run sees, kept in console.log as well. No torch."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import IO

COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Tee:
    """Passes lines on to stdout and, without colours, to a file.

    A closed terminal never stops the file, nor a full disk the terminal: whoever writes into a pipe that nobody empties
    would stand still.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._terminal, self._warned = True, False

    def write(self, line: bytes) -> None:
        with self._lock:
            self._keep(COLOURS.sub(b"", line))
            self._show(line)

    def _keep(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            if not self._warned:
                self._show(f"[launch] console.log lacks lines from here: {error.strerror}\n".encode())
            self._warned = True

    def _show(self, line: bytes) -> None:
        if not self._terminal:
            return
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except (OSError, ValueError):  # the reader of our output has gone
            self._terminal = False

    def say(self, text: str) -> None:
        self.write(text.encode() + b"\n")

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Copy a pipe until its last writer closes it, in a thread."""
        thread = threading.Thread(target=self._copy, args=(pipe,), name="console", daemon=True)
        thread.start()
        return thread

    def _copy(self, pipe: IO[bytes]) -> None:
        for line in iter(pipe.readline, b""):
            self.write(line)

    def close(self) -> None:
        with self._lock:
            self._file.close()
