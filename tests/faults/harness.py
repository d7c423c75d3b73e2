"""Runs through the real launcher with an injected fault, a few at a time, and what must hold after every one of them.

A scenario is one or more starts in one run folder. All scenarios of the collected tests run in a small pool, because
most of their time is imports and waits; a test then looks at the results of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launcher.checkpoint_folder import published
from launcher.manifest import problems_of
from launcher.status import Status, read_status

ROOT = Path(__file__).resolve().parents[2]
STRUCK = "injected fault"
# No start may take longer, the fault's own deadline included; generous because runs share few cores.
LIMIT = 150.0
FLAGS = [
    "--preset=tiny",
    "--device=cpu",
    "--data.row_length=64",
    "--data.holdout=2",
    "--train.anchors=4",
    "--train.max_steps=6",
    "--checkpoint.every=2",
    "--checkpoint.asynchronous=false",
    "--runtime.step_timeout=40",
]


@dataclass(frozen=True)
class Start:
    """One `launch.sh` of a scenario.

    Args:
        fault: value of LAUNCHER_FAULT.
        act: called with the running start once the fault has struck, e.g. to send a signal.
        before: called with the run folder before the start, e.g. to spoil a checkpoint.
        split: targets and drafters.
    """

    fault: str = ""
    flags: tuple[str, ...] = ()
    act: Callable[[Running], None] | None = None
    before: Callable[[Path], None] | None = None
    split: tuple[int, int] = (1, 1)
    compiled: bool = False


@dataclass(frozen=True)
class Scenario:
    """Starts of one run, one after another."""

    name: str
    starts: tuple[Start, ...]

    def __str__(self) -> str:
        return self.name


@dataclass
class Running:
    """A start that is under way."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path

    def wait_for(self, text: str, timeout: float = LIMIT) -> None:
        """Wait until some rank's log or the console says `text`."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            if any(text in path.read_text() for path in [self.output, *(self.run_dir / "logs").glob("*.log")]):
                return
            time.sleep(0.05)

    def send(self, *numbers: signal.Signals, gap: float = 1.5) -> None:
        """Send signals to the launcher, `gap` seconds apart."""
        for place, number in enumerate(numbers):
            time.sleep(gap if place else 0.0)
            self.process.send_signal(number)

    def child(self, word: str) -> psutil.Process:
        """The process of this start whose command line holds `word` first, torchrun before the ranks."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in found if any(word in part for part in process.cmdline()))


@dataclass
class Result:
    """How a start ended."""

    run_dir: Path
    code: int
    console: str
    seconds: float
    left: list[str]
    status: Status
    logs: str = field(repr=False, default="")
    metrics: tuple[dict[str, Any], ...] = field(repr=False, default=())
    """Lines of metrics.jsonl as they were after this start."""
    checkpoint_problems: tuple[str, ...] = ()
    """What was wrong after this start with the checkpoint that its status names."""

    @property
    def last_lines(self) -> str:
        """The final box and the command below it."""
        return "\n".join(self.console.rstrip().splitlines()[-16:])


def play(scenario: Scenario, folder: Path, cache: Path, chats: Path) -> list[Result]:
    """Run all starts of a scenario."""
    run_dir = folder / scenario.name.replace(" ", "-") / "run"
    return [_play_start(scenario.name, start, run_dir, cache, chats) for start in scenario.starts]


def check(result: Result, state: str, code: int, words: tuple[str, ...] = ()) -> None:
    """What must hold after every start, whatever happened in it."""
    status = result.status
    assert (status.state, status.code, result.code) == (state, code, code), f"{status}\n{result.console}"
    assert result.left == [], "processes are left"
    assert result.seconds < LIMIT
    for word in words:
        assert word in f"{status.rank} {status.role} {status.phase} {status.reason}", f"{word} is not in {status}"
    if state != "finished":
        assert f"run {state} (exit code {code})" in result.last_lines, result.console
    if state in {"failed", "stopped"} and code != 78:
        assert "--resume auto" in result.last_lines
    assert "Traceback" not in result.console, result.console
    if code != 78:
        assert result.checkpoint_problems == ()
    steps = [entry["step"] for entry in result.metrics]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or counted twice"


def newest(run_dir: Path) -> Path:
    return published(run_dir)[0]


def _play_start(name: str, start: Start, run_dir: Path, cache: Path, chats: Path) -> Result:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    if start.before is not None:
        start.before(run_dir)
    mark = f"{name}-{time.monotonic_ns()}"
    output = run_dir.parent / f"{mark.replace(' ', '-')}.txt"
    targets, drafters = start.split
    split = [f"--topology.targets={targets}", f"--topology.drafters={drafters}"]
    data = [f"--data.path={chats}", f"--run-dir={run_dir}", f"--compile.cache_dir={cache / 'compile'}"]
    environment = os.environ | {
        "LAUNCHER_FAULT": start.fault,
        "FAULT_MARK": mark,
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        # Compiling is not what most of these runs are about, and takes most of their time.
        "TORCHDYNAMO_DISABLE": "0" if start.compiled else "1",
    }
    began = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "launcher" / "main.py"), *FLAGS, *split, *data, *start.flags],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
    try:
        if start.act is not None:
            running = Running(process, run_dir, output)
            running.wait_for(STRUCK)
            start.act(running)
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = 999
    seconds = time.monotonic() - began
    left = _end_marked(mark)
    process.wait()
    status = read_status(run_dir) or Status(state="running")
    logs = "".join(path.read_text() for path in sorted((run_dir / "logs").glob("rank_*.log")))
    record = run_dir / "metrics.jsonl"
    metrics = tuple(json.loads(line) for line in record.read_text().splitlines()) if record.exists() else ()
    checkpoint = status.last_checkpoint
    problems = tuple(problems_of(Path(checkpoint))) if checkpoint is not None else ()
    return Result(run_dir, code, output.read_text(), seconds, left, status, logs, metrics, problems)


def _end_marked(mark: str) -> list[str]:
    """Kill what is left of a start, after a moment for those on their way out; returns what it was."""
    deadline = time.monotonic() + 2.0
    while (left := [process for process in psutil.process_iter() if _has_mark(process, mark)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    names = [" ".join(process.cmdline()[-3:]) for process in left]
    for process in left:
        process.kill()
    return names


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("FAULT_MARK") == mark
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False
