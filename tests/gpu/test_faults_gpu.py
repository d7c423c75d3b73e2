"""Faults that only GPUs have, through the real launcher: no memory left, and a collective that a rank never joins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launcher.trial import Trial, run_trial

LIMIT = 600.0
FLAGS = [
    "--preset=tiny",
    "--device=cuda",
    "--data.row_length=128",
    "--data.holdout=2",
    "--train.max_steps=20",
    "--train.precision=bf16",
    "--target.dtype=bfloat16",
    "--runtime.gpu_wait=0",
    # Nothing is compiled here, and FlexAttention refuses to run so.
    "--drafter.attention=sdpa",
    "--target.compile=false",
]


def launch(folder: Path, fault: str, *flags: str) -> Trial:
    environment = {"LAUNCHER_FAULT": fault, "XDG_CACHE_HOME": str(folder / "cache"), "TORCHDYNAMO_DISABLE": "1"}
    cache = f"--compile.cache_dir={folder / 'compile'}"
    return run_trial([*FLAGS, cache, *flags], folder / "run", environment, LIMIT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_without_memory_names_who_holds_it_and_what_to_lower(tmp_path: Path) -> None:
    """One GPU for both ranks; the drafter asks for more than any GPU has."""
    flags = ("--topology.targets=1", "--topology.drafters=1", "--runtime.share_gpus=true")
    trial = launch(tmp_path, "oom@step:3:1", *flags, "--runtime.memory_snapshot=true")
    assert trial.broken() == [] and trial.code == 75, trial.console
    status = trial.status
    assert (status.rank, status.phase, status.error) == (1, "step", "OutOfMemoryError")
    assert "lower train.anchors or data.row_length" in status.reason
    log = Path(str(status.log))
    text = log.read_text()
    assert "PyTorch CUDA memory summary" in text, "torch's own summary"
    assert "are in use:" in text and "pid" in text, "NVML's table of processes"
    assert (log.parent / "traces" / "memory_rank_1.pickle").stat().st_size > 0


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_collective_that_a_rank_never_joins_leaves_a_dump_of_both(tmp_path: Path) -> None:
    """Two drafters, each on a GPU of its own, one of them beside a target; the second one hangs in a step, the first
    waits for it in NCCL."""
    flags = ("--topology.targets=1", "--topology.drafters=2", "--runtime.share_gpus=true", "--runtime.step_timeout=30")
    trial = launch(tmp_path, "hang@step:5:2", *flags)
    assert trial.broken() == [] and trial.code == 75, trial.console
    assert (trial.status.rank, trial.status.phase) == (2, "step")
    traces = Path(str(trial.status.log)).parent / "traces"
    assert str(traces.name) in trial.console, "the box says where"
    assert {"nccl_rank_1.json", "nccl_rank_2.json"} <= {path.name for path in traces.iterdir()}
    waiting = json.loads((traces / "nccl_rank_1.json").read_text())["entries"]
    assert any(entry["state"] != "completed" for entry in waiting), "the collective that rank 1 is still in"
