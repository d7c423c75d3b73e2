"""What a rank says: its own log file, and the lines that the user sees.

A rank's stdout and stderr, native output included, go to its log file. The console, kept aside, gets what is announced
and every warning or error of our own, marked with the rank that it comes from. Libraries speak in the log file alone.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.outlet import Outlet
from launcher.topology import Role

log = logging.getLogger("launcher")
# `extra` of a warning that all ranks of a role give alike: it reaches the console once, and every log file.
SHARED = {"shared": True}
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red"}


class ConsoleHandler(logging.Handler):
    """Announced lines as they are; warnings and errors with the rank in front; nothing of other packages.

    What is SHARED, and what `models` says, is the same on every rank, so only the rank that speaks repeats it.

    Args:
        outlet: what the console writes to; after an error, which may be a rank's last words, it is waited for.
    """

    def __init__(self, console: Console, role: Role, speaks: bool, outlet: Outlet | None = None) -> None:
        super().__init__()
        self._console, self._role, self._outlet = console, role, outlet
        self._speaks, self._packages = speaks, {"launcher", "models"} if speaks else {"launcher"}

    def filter(self, record: logging.LogRecord) -> bool:
        wanted = getattr(record, "announce", False) or record.levelno >= logging.WARNING
        heard = self._speaks or not getattr(record, "shared", False)
        return wanted and heard and record.name.partition(".")[0] in self._packages

    def emit(self, record: logging.LogRecord) -> None:
        of_all = getattr(record, "announce", False) or getattr(record, "shared", False)
        prefix = "" if of_all else f"[{self._role}] "
        style = _STYLES.get(record.levelno, "")
        self._console.print(Text(prefix + record.getMessage(), style=style), soft_wrap=True)
        if record.levelno >= logging.ERROR:
            self.flush()

    def flush(self) -> None:
        """Wait a moment for the reader; `logging.shutdown` calls it at the end."""
        if self._outlet is not None:
            self._outlet.drain()


class Journal:
    """The log of one rank. `speaks` is true for the one rank whose progress lines reach the console."""

    def __init__(self, role: Role, log_path: Path, speaks: bool) -> None:
        self.path, self.speaks = log_path, speaks
        log_path.parent.mkdir(parents=True, exist_ok=True)
        outlet = Outlet(os.dup(1))
        terminal = io.TextIOWrapper(outlet, encoding="utf-8", errors="replace", write_through=True)
        self.console = Console(file=terminal, highlight=False)
        self._redirect(log_path)
        file_handler = logging.StreamHandler(sys.stderr)
        file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.handlers = [file_handler, ConsoleHandler(self.console, role, speaks, outlet)]
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)

    def announce(self, text: str, every_rank: bool = False) -> None:
        """A line for the console if this rank speaks (or `every_rank` may); always in the log file."""
        log.info(text, extra={"announce": self.speaks or every_rank})

    @staticmethod
    def _redirect(log_path: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


class Progress:
    """The line of a step: loss, acceptance length, rates, waits, memory, time left."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self._first, self._last, self._start = first_step, last_step, time.monotonic()

    def line(self, step: int, metrics: dict[str, float]) -> str:
        done = max(1, step - self._first)
        left = (time.monotonic() - self._start) / done * (self._last - step)
        memory = metrics.get("peak_memory_gb")  # 0 where there is no GPU
        return (
            f"step {step:>{len(str(self._last))}}/{self._last}  loss {metrics['loss']:.3f}"
            f"  acceptance {metrics['acceptance_length']:.2f}  lr {metrics['lr']:.2e}"
            f"  {metrics['tokens_per_s']:,.0f} tok/s  {metrics['rows_per_s']:.2f} rows/s"
            f"  wait {metrics['data_wait']:.0%} (targets {metrics['target_wait']:.0%})"
            f"{f'  {memory:.1f} GB' if memory else ''}  ETA {clock(left)}"
        )


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
