"""What a rank says when memory runs out: who has how much of it, and which two options to lower. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil

HISTORY_ENTRIES = 100_000
# What frees most, of what does not change the model that is trained.
LOWER = {"drafter": "train.anchors or data.row_length", "target": "data.row_length or topology.rows_in_flight"}


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the host; torch's class is known by its name."""
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)


def advice(role: str) -> str:
    """What to do about it, for `target 0` or `drafter 0`."""
    return f"lower {LOWER[role.partition(' ')[0]]}"


def record_history() -> None:
    """Let torch keep who allocated what, for the snapshot of `memory_report`."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)


def memory_report(snapshot: Path | None) -> str:
    """For the rank's log: torch's own summary, the processes on its GPU by NVML, the ranks of the host.

    Args:
        snapshot: file for what `record_history` kept.
    """
    parts = []
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        parts.append(cuda.memory_summary(abbreviated=True))
        if snapshot is not None:
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            cuda.memory._dump_snapshot(str(snapshot))
            parts.append(f"snapshot for https://pytorch.org/memory_viz: {snapshot}")
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "\n".join([*parts, *(_gpu_table(uuid) if uuid else []), *_host_table()])


def _gpu_table(uuid: str) -> list[str]:
    from launcher.memory import GpuProbe

    probe = GpuProbe(uuid)
    used = probe.used()
    if used is None:
        return []
    rows = [f"  pid {pid:>8} {size / 1e9:8.2f} GB" for pid, size in probe.processes()]
    return [f"{used / 1e9:.2f} GB of {uuid} are in use:", *rows]


def _host_table() -> list[str]:
    memory, rows = psutil.virtual_memory(), []
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            rows.append(f"  pid {process.pid:>8} {process.memory_info().rss / 1e9:8.2f} GB")
    free = f"{memory.available / 1e9:.2f} of {memory.total / 1e9:.2f} GB of host memory are free; this node's ranks:"
    return [free, *rows]
