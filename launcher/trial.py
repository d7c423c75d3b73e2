"""One short run with an injected fault, from its start to what it left behind; for soak runs and the fault tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launcher.manifest import problems_of
from launcher.status import Status, read_status

ROOT = Path(__file__).resolve().parent.parent
STRUCK = "injected fault"
MARK = "LAUNCHER_TRIAL"
# What is on its way out when the launcher returns has this long.
LEAVE_SECONDS = 2.0
# More than signal_inbox.SAME_WISH_SECONDS.
SIGNAL_GAP = 1.5
NEVER = 999


@dataclass
class Running:
    """A start that is under way."""

    process: subprocess.Popen[str]
    logs: Callable[[], list[Path]]
    """What this start has written so far."""

    def wait_for(self, text: str, timeout: float) -> bool:
        """Wait until some rank's log or the console says `text`; False if the run ends or the time is over first."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            if any(text in path.read_text(errors="replace") for path in self.logs()):
                return True
            time.sleep(0.05)
        return False

    def send(self, *numbers: signal.Signals) -> None:
        """Send signals to the launcher, far enough apart to be two wishes, as long as it is there."""
        for place, number in enumerate(numbers):
            time.sleep(SIGNAL_GAP if place else 0.0)
            if self.process.poll() is None:
                self.process.send_signal(number)

    def kill_torchrun(self) -> None:
        """SIGKILL the agent, if it is there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                if any(word.endswith("launcher/agent.py") for word in process.cmdline()):
                    process.kill()


@dataclass(frozen=True)
class Trial:
    """How a start ended, all of it as it was at that moment."""

    run_dir: Path
    code: int
    """The launcher's exit code, NEVER if it had to be killed."""
    seconds: float
    console: str
    logs: str
    status: Status
    left: tuple[str, ...]
    """Command lines of processes that it left behind; they are killed."""
    metrics: tuple[dict[str, Any], ...]
    checkpoint_problems: tuple[str, ...]
    """What is wrong with the checkpoint that the status names."""

    @property
    def struck(self) -> bool:
        return STRUCK in self.logs or STRUCK in self.console

    def broken(self, damage_is_known: bool = False) -> list[str]:
        """What must hold after any start and does not.

        Args:
            damage_is_known: the checkpoint that the status names was spoiled on purpose.
        """
        steps = [entry["step"] for entry in self.metrics if "loss" in entry]
        broken = [f"left behind: {line}" for line in self.left]
        if self.code == NEVER:
            broken.append("did not end in time")
        if self.status.code != self.code:
            broken.append(f"exit code {self.code}, but the status says {self.status.code}")
        if steps != list(range(1, len(steps) + 1)):
            broken.append(f"steps lost or counted twice: {steps}")
        damage = () if damage_is_known else self.checkpoint_problems
        broken += [f"checkpoint {self.status.last_checkpoint}: {problem}" for problem in damage]
        return broken


def run_trial(
    flags: list[str],
    run_dir: Path,
    environment: dict[str, str],
    limit: float,
    act: Callable[[Running], None] | None = None,
) -> Trial:
    """Start the launcher on `run_dir`, call `act` on it, and wait at most `limit` seconds for its end."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    output = run_dir.parent / f"console-{mark}.txt"
    earlier = set(_attempts(run_dir))

    def logs() -> list[Path]:
        new = [path for path in _attempts(run_dir) if path not in earlier]
        return [output, *(log for attempt in new for log in sorted(attempt.glob("*.log")))]

    began = time.monotonic()
    process = _start([*flags, f"--run-dir={run_dir}"], environment | {MARK: mark}, output)
    try:
        if act is not None:
            act(Running(process, logs))
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = NEVER
    except BaseException:  # a test's time limit, or Ctrl-C
        _end_marked(mark)
        raise
    seconds = time.monotonic() - began
    left = _end_marked(mark)
    process.wait()
    record, status = run_dir / "metrics.jsonl", read_status(run_dir) or Status(state="running")
    checkpoint = status.last_checkpoint
    return Trial(
        run_dir=run_dir,
        code=code,
        seconds=seconds,
        console=output.read_text(),
        logs="".join(path.read_text(errors="replace") for path in logs()[1:]),
        status=status,
        left=left,
        metrics=tuple(json.loads(line) for line in record.read_text().splitlines()) if record.exists() else (),
        checkpoint_problems=tuple(problems_of(Path(checkpoint))) if checkpoint is not None else (),
    )


def _start(flags: list[str], environment: dict[str, str], output: Path) -> subprocess.Popen[str]:
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launcher" / "main.py"), *flags],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # a terminal's Ctrl-C is meant for whoever plays the run
        )


def _attempts(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "attempts").glob("*"))


def _end_marked(mark: str) -> tuple[str, ...]:
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := [process for process in psutil.process_iter() if _has_mark(process, mark)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    names = tuple(f"pid {process.pid} {process.name()}" for process in left)
    for process in left:
        process.kill()
    return names


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False
