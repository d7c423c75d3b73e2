"""The pipeline on GPUs: the share of the slower side that a run reaches, and ranks that share one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
ROOT = Path(__file__).resolve().parents[2]
MAIN = str(ROOT / "launcher" / "main.py")


def launch(words: list[str], limit: float) -> str:
    """Run the launcher; its output, after code 0."""
    done = subprocess.run([sys.executable, MAIN, *words], cwd=ROOT, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def bench(*words: str, limit: float = 900) -> dict[str, Any]:
    report = json.loads(launch(["bench", *words, "--json"], limit).splitlines()[-1])
    print(json.dumps(report, indent=1))
    return report


@two_gpus
@pytest.mark.multigpu
def test_two_gpus_reach_the_slower_side_and_the_drafter_hardly_waits() -> None:
    report = bench("pipeline", "--warm")
    assert report["share_of_slower"] >= 0.95 and report["data_wait"] <= 0.03


@two_gpus
@pytest.mark.multigpu
def test_rows_go_by_nccl_and_vanish_behind_compute() -> None:
    report = bench("transfer", limit=180)
    assert report["backend"] == "nccl" and report["gbs"] > 20 and report["hidden"] > 0.8


@one_gpu
@pytest.mark.gpu
def test_two_ranks_of_one_gpu_hand_rows_over_by_ipc() -> None:
    report = bench("transfer", "--share-gpus", limit=300)
    assert report["way"] == "CUDA IPC" and report["gbs"] > 5


@one_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("split", [(1, 1), (2, 2), (5, 3)], ids=str)
def test_more_ranks_than_gpus_train_to_the_end(split: tuple[int, int], tmp_path: Path) -> None:
    """FSDP2 over gloo among drafters of one GPU, rows by CUDA IPC, a save and an evaluation."""
    targets, drafters = split
    words = ["--preset=tiny", "--device=cuda", "--runtime.share_gpus=true", "--target.dtype=auto", "--max-steps=12"]
    words += ["--train.precision=auto", f"--topology.targets={targets}", f"--topology.drafters={drafters}"]
    words += [f"--run-dir={tmp_path}", "--eval.prompts=2", "--eval.max_new_tokens=4"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(
        [sys.executable, MAIN, *words],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "CUDA IPC cannot be used" not in done.stdout
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 12)
    losses = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in losses if "loss" in entry] == list(range(1, 13))
