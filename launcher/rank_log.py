"""The log file of a rank, for what must be written whatever happens: tracebacks, stacks, the watchdog's words."""

from __future__ import annotations

import io
from pathlib import Path


class RankLog(io.TextIOWrapper):
    """Appends unbuffered. On a full disk lines are lost; the rank that writes them still ends as it should."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "a"), encoding="utf-8", errors="replace", write_through=True)

    def write(self, text: str, /) -> int:
        """The characters written, 0 where the disk takes none: this log is where it would have been said."""
        try:
            return super().write(text)
        except OSError:
            return 0
