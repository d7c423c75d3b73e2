"""Memory of every rank, sampled while it runs: GPU by NVML (looked up by UUID), host by psutil.

Samples go to `memory.jsonl`, a line each; peaks are kept by phase for the summary. A failing NVML costs one warning.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml

from launcher.topology import Role

log = logging.getLogger("launcher")


class GpuProbe:
    """Used and total bytes of one GPU by NVML; None once NVML cannot tell."""

    def __init__(self, uuid: str) -> None:
        self._handle: Any = None
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            log.warning("GPU memory is not watched: NVML: %s", error)

    def used(self) -> int | None:
        if self._handle is None:
            return None
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except pynvml.NVMLError as error:
            log.warning("GPU memory is no longer watched: NVML: %s", error)
            self._handle = None
            return None

    def processes(self) -> list[tuple[int, int]]:
        """(pid, bytes) of every compute process on the GPU."""
        if self._handle is None:
            return []
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:
            return []
        return [(process.pid, int(process.usedGpuMemory or 0)) for process in running]


class MemoryWatcher:
    """Samples this rank's memory every `interval` seconds on a daemon thread.

    Args:
        path: memory.jsonl, shared by all ranks.
        uuid: the GPU's, None without one.
        phase: names what the rank is at.
    """

    def __init__(self, path: Path, role: Role, uuid: str | None, interval: float, phase: Callable[[], str]) -> None:
        self._path, self._role, self._interval, self._phase = path, role, interval, phase
        self._gpu = GpuProbe(uuid) if uuid else None
        self._process = psutil.Process()
        self._peaks: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watcher", daemon=True)

    def __enter__(self) -> MemoryWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * self._interval)

    def peaks(self) -> dict[str, dict[str, int]]:
        """Highest bytes by phase: `rss` (host, this rank) and `gpu` (the whole card, where there is one)."""
        self._sample()
        with self._lock:
            return {phase: dict(values) for phase, values in self._peaks.items()}

    def _run(self) -> None:
        try:
            with self._path.open("ab", buffering=0) as file:
                while not self._closed.is_set():
                    # One write of one line: appends of all ranks to the same file do not mix.
                    file.write((json.dumps(self._sample()) + "\n").encode())
                    self._closed.wait(self._interval)
        except OSError as error:
            log.warning("memory is no longer written to %s: %s", self._path.name, error.strerror)

    def _sample(self) -> dict[str, Any]:
        phase = self._phase()
        sample: dict[str, int] = {"rss": self._process.memory_info().rss}
        used = self._gpu.used() if self._gpu else None
        if used is not None:
            sample["gpu"] = used
        with self._lock:
            peaks = self._peaks.setdefault(phase, {})
            for key, value in sample.items():
                peaks[key] = max(peaks.get(key, 0), value)
        who = {"time": round(time.time(), 3), "rank": self._role.rank, "role": self._role.name, "phase": phase}
        return {**who, **sample, "host_available": psutil.virtual_memory().available}


def peaks_by_role(peaks: dict[Role, dict[str, dict[str, int]]]) -> str:
    """A line: for each role the highest GPU and host memory of a rank, which rank, and what it was at."""
    parts = []
    for name in ("target", "drafter"):
        mine = {role: phases for role, phases in peaks.items() if role.name == name}
        for kind, label in (("gpu", "GPU"), ("rss", "host")):
            found = [
                (values[kind], phase, role.rank)
                for role, phases in mine.items()
                for phase, values in phases.items()
                if kind in values
            ]
            if found:
                value, phase, rank = max(found)
                parts.append(f"{name} {label} {value / 1e9:.1f} GB (rank {rank}, {phase})")
    return "peak memory: " + ", ".join(parts)
