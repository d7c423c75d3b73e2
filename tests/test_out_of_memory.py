"""What a rank says when memory runs out, with a torch.cuda and an NVML of our own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launcher import memory, out_of_memory
from launcher.errors import ExitCode
from launcher.out_of_memory import is_out_of_memory, memory_report
from launcher.outcome import failure_of


@pytest.mark.parametrize(
    ("role", "options"),
    [("drafter 1", "train.anchors or data.row_length"), ("target 0", "data.row_length or topology.rows_in_flight")],
)
def test_the_reason_names_two_options_to_lower(role: str, options: str) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.20 GiB.")
    failure = failure_of(error, 1, role, "step", 3, "rank_1.log")
    assert failure.code == ExitCode.RETRY
    assert failure.reason.startswith(f"CUDA out of memory. Tried to allocate 9.20 GiB -> lower {options}")
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("out of memory"))


def test_the_report_has_torchs_summary_the_processes_of_the_gpu_and_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[str] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_summary=lambda abbreviated: "torch's summary",
        memory=SimpleNamespace(_dump_snapshot=saved.append),
    )
    probe = SimpleNamespace(used=lambda: 70_000_000_000, processes=lambda: [(7, 60_000_000_000), (8, 9_000_000_000)])
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(memory, "GpuProbe", lambda uuid: probe)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    monkeypatch.setattr(out_of_memory.os, "getppid", os.getpid)
    text = memory_report(tmp_path / "traces/memory_rank_1.pickle")
    assert "torch's summary" in text and "70.00 GB of GPU-1" in text
    assert "pid        7    60.00 GB" in text and "of host memory are free" in text
    assert saved == [str(tmp_path / "traces/memory_rank_1.pickle")] and saved[0] in text


def test_on_a_cpu_the_hosts_memory_is_reported_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GB of host memory are free" in memory_report(None).splitlines()[0]
