"""What Linux knows about another process: alive, stopped, gone, and how it ended. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
# Of a log, where a crash is looked for.
TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class ProcessState:
    """One line of /proc/PID/stat."""

    state: str
    """R running, S sleeping, D in the kernel, T stopped, Z dead and not yet reaped."""
    start_ticks: int
    """Start time; with the pid it names a process even after the pid is used again."""
    exit_status: int
    """Wait status of a dead process; 0 while it lives."""

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


def read_process(pid: int) -> ProcessState | None:
    """The state of a process, None when there is no such process any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces; fields 3, 22 and 52 of proc_pid_stat(5) follow it.
    values = text.rpartition(")")[2].split()
    return ProcessState(values[0], int(values[19]), int(values[49]))


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the very process that started at `start_ticks` still runs."""
    process = read_process(pid)
    return process is not None and not process.dead and process.start_ticks == start_ticks


def kill_process(pid: int, start_ticks: int) -> None:
    """SIGKILL the very process that started at `start_ticks`, if it is still there."""
    if is_alive(pid, start_ticks):
        os.kill(pid, signal.SIGKILL)


def describe_exit(wait_status: int | None, log: Path) -> str:
    """How a process ended, in words, with what that usually means; `wait_status` None where its parent was faster."""
    if wait_status is None:
        if (crash := crash_in(log)) is not None:
            return f"crashed in native code: {crash} (stack in its log)"
        return "is gone (probably killed: SIGKILL, as the kernel does when the host runs out of memory)"
    if not os.WIFSIGNALED(wait_status):
        return f"left with exit code {os.waitstatus_to_exitcode(wait_status)} without a word"
    number = os.WTERMSIG(wait_status)
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return "was killed by SIGKILL (the kernel does that when the host runs out of memory; see dmesg)"
    if number in {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}:
        return f"crashed in native code with {name} (stack in its log)"
    return f"was killed by {name}"


def crash_in(log: Path) -> str | None:
    """What faulthandler wrote last into a log, for example "Segmentation fault"; None without a crash."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        _, mark, rest = file.read().decode(errors="replace").rpartition("Fatal Python error: ")
    return rest.splitlines()[0] if mark and rest else None


def shut_down_compile_workers() -> None:
    """End Inductor's worker pool, which can hold the exit of a process for minutes (pytorch issue #162199)."""
    if "torch._inductor.async_compile" in sys.modules:
        sys.modules["torch._inductor.async_compile"].shutdown_compile_workers()


def flush_output() -> None:
    """Hand over what stdout and stderr still hold; the way out leads on where the disk takes no more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
