"""One torchrun and everything it started: spawned, signalled, waited for, and gone at the end. No torch.

Ranks live in sessions of their own, so a process group does not reach them. This process therefore adopts orphans
(PR_SET_CHILD_SUBREAPER): whatever the run leaves behind is its descendant, and is found and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from launcher.signal_inbox import STOP_SIGNALS, Wishes, stop_signals

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0
# What torchrun passes on to its workers; of itself it would be killed by SIGUSR1.
PASSED_ON = {"PET_SIGNALS_TO_HANDLE": ",".join([*(number.name for number in STOP_SIGNALS), "SIGQUIT"])}
# Ranks that outlive torchrun end by themselves within moments; none is waited for longer than this.
LEAVE_SECONDS = 5.0


@contextlib.contextmanager
def collected_stops() -> Iterator[Wishes]:
    """Stop signals only make the list longer meanwhile."""
    asked = Wishes()

    def note(number: int, frame: FrameType | None) -> None:
        asked.add(number)

    previous = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Torchrun:
    """A running torchrun. Use as a context manager: on exit no process of it is left.

    Args:
        asked: what this process was asked for by stop signals, in order; one wish may come as several signals.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, asked: Wishes) -> None:
        self._command, self._environment, self._log = command, environment, log
        self.asked = asked

    def __enter__(self) -> Torchrun:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and is passed on once
                preexec_fn=lambda: _end_with(parent),
            )
        return self

    def __exit__(self, *error: object) -> None:
        kill_descendants(LEAVE_SECONDS if self.process.poll() is not None else 0.0)
        self.process.wait()

    def wait(
        self, ended: Callable[[], bool], hopeless: Callable[[], bool], grace: float, patience: float
    ) -> int | None:
        """torchrun's exit code; None if it had to be given up.

        A first stop wish is passed on. torchrun is given up at the second one, or when it still runs `grace` seconds
        after the first one, or `patience` seconds after the run itself has ended.

        Args:
            ended: whether the run has reported its end.
            hopeless: whether nothing is to be expected of it.
        """
        passed_on, deadline, next_look = False, math.inf, 0.0
        while (code := self.process.poll()) is None:
            now = time.monotonic()
            if self.asked and not passed_on:
                passed_on, deadline = True, min(deadline, now + grace)
                self._pass_on(self.asked[0])
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                if ended():
                    deadline = min(deadline, now + patience)
                elif hopeless():
                    return None
            if len(self.asked) > 1 or now > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return code

    def _pass_on(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


def kill_descendants(patience: float) -> None:
    """Wait up to `patience` seconds for every descendant of this process to end, then kill what is left."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience)
    deadline = time.monotonic() + LEAVE_SECONDS
    while alive and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1.0)
        alive = psutil.Process().children(recursive=True)


def _end_with(parent: int) -> None:
    """In the child, before torchrun: if the parent is killed, stop in good order."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
