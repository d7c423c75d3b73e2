"""What reaches the console, what only the log file, and how progress is written."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from launcher.journal import SHARED, ConsoleHandler, Progress, clock
from launcher.topology import Role
from tests.full_pipes import fill

ROLE = Role(6, "drafter", 1, 0, 6)
METRICS = {
    "loss": 2.5,
    "acceptance_length": 3.25,
    "lr": 6e-4,
    "tokens_per_s": 12345.6,
    "rows_per_s": 4,
    "data_wait": 0.02,
    "target_wait": 0.6,
}
A_RANK = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from launcher.journal import SHARED, Journal
from launcher.topology import Role
journal = Journal(Role(6, "drafter", 1, 0, 6), Path(sys.argv[1]), speaks=sys.argv[2] == "speaks")
journal.announce("step 1")
journal.announce("compile 1/3", every_rank=True)
logging.getLogger("launcher").warning("slow disk")
logging.getLogger("launcher").warning("shared words", extra=SHARED)
logging.getLogger("transformers").error("library words")
warnings.warn("deprecated words")
print("printed words", flush=True)
subprocess.run(["echo", "native words"])
"""


@pytest.fixture
def handlers() -> Iterator[list[logging.Handler]]:
    """Handlers put into the list listen at the root logger for one test."""
    root = logging.getLogger()
    before = list(root.handlers)
    added: list[logging.Handler] = []
    yield added
    root.handlers = before


def listen(handlers: list[logging.Handler], console: Console, speaks: bool) -> ConsoleHandler:
    handler = ConsoleHandler(console, ROLE, speaks)
    handlers.append(handler)
    logging.getLogger().addHandler(handler)
    return handler


@pytest.mark.parametrize("speaks", [True, False])
def test_the_console_gets_announced_lines_and_our_warnings(handlers: list[logging.Handler], speaks: bool) -> None:
    text = io.StringIO()
    listen(handlers, Console(file=text), speaks)
    logging.getLogger("launcher").warning("[bold]disk[/bold] is slow: %s", "x" * 200)
    logging.getLogger("launcher.data").error("no rows")
    logging.getLogger("launcher").warning("announced", extra={"announce": True})
    logging.getLogger("launcher").info("kept in the file")
    logging.getLogger("transformers").warning("of a library")
    logging.getLogger("launcherish").warning("of a library")
    logging.getLogger("models.target_files").warning("the same on every rank")
    logging.getLogger("launcher.checkpoint").warning("of all drafters", extra=SHARED)
    lines = [f"[rank 6 drafter 1] [bold]disk[/bold] is slow: {'x' * 200}", "[rank 6 drafter 1] no rows", "announced"]
    lines += ["[rank 6 drafter 1] the same on every rank", "of all drafters"] if speaks else []
    assert text.getvalue().splitlines() == lines


def start_rank(log_path: Path, stdout: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", A_RANK, str(log_path), "speaks"]
    return subprocess.Popen(command, stdout=stdout, cwd=Path(__file__).resolve().parent.parent)


def test_a_closed_console_neither_fails_the_rank_nor_takes_its_log(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    rank = start_rank(tmp_path / "log", writing)
    os.close(writing)
    assert rank.wait(timeout=60) == 0
    log = (tmp_path / "log").read_text()
    for words in ("compile 1/3", "slow disk", "printed words", "native words"):
        assert words in log


def test_a_console_that_nobody_empties_does_not_hold_the_rank(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fill(writing)
    rank = start_rank(tmp_path / "log", writing)
    try:
        assert rank.wait(timeout=60) == 0
    finally:
        rank.kill()
        os.close(reading)
        os.close(writing)
    assert "native words" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("who", ["speaks", "quiet"])
def test_a_rank_says_everything_in_its_file_and_little_on_the_console(tmp_path: Path, who: str) -> None:
    log_path = tmp_path / "logs" / "rank_6.log"
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", A_RANK, str(log_path), who]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=True)
    spoken, shared = (["step 1"], ["shared words"]) if who == "speaks" else ([], [])
    assert ended.stdout.splitlines() == [*spoken, "compile 1/3", "[rank 6 drafter 1] slow disk", *shared]
    assert ended.stderr == ""
    log = log_path.read_text()
    for words in ("step 1", "compile 1/3", "slow disk", "shared", "library", "deprecated", "printed", "native"):
        assert words in log


def test_a_progress_line_has_what_users_look_for() -> None:
    progress = Progress(0, 1000)
    line = progress.line(10, METRICS | {"peak_memory_gb": 41.23})
    for words in ("step   10/1000", "loss 2.500", "acceptance 3.25", "12,346 tok/s", "wait 2%", "41.2 GB", "ETA 0:0"):
        assert words in line
    assert "GB" not in progress.line(10, METRICS | {"peak_memory_gb": 0.0}), "no GPU, no GPU memory"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.9, "1:00:00"), (36610, "10:10:10")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
