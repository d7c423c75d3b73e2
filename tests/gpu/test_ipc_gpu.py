"""Rows by CUDA IPC between two processes, beside the way through the host: values, speed, what is left behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.ipc_rows import LAYOUT, hand_over

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


def visible(count: int) -> list[str]:
    masks = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return [masks[0], masks[count - 1]]


def rates(seen: list[dict[str, Any]]) -> tuple[float, float]:
    """GB/s by IPC and through the host."""
    shared, host = (LAYOUT.nbytes / seconds / 1e9 for seconds in seen[1]["seconds"])
    print(f"{LAYOUT.nbytes / 1e6:.0f} MB a row: {seen[1]['way']} {shared:.2f} GB/s, through the host {host:.2f} GB/s")
    print(seen)
    return shared, host


@pytest.fixture(autouse=True)
def _expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@one_gpu
@pytest.mark.gpu
def test_ranks_of_one_gpu_hand_rows_over_by_ipc_several_times_as_fast_as_through_the_host() -> None:
    seen = hand_over(visible(1))
    shared, host = rates(seen)
    assert [one["way"] for one in seen] == ["CUDA IPC"] * 2 and seen[0]["warnings"] == seen[1]["warnings"] == []
    assert shared >= 3 * host
    assert seen[0]["left_in_shm"] == [], "torch's counts of mappings go when both sides have let go"


@two_gpus
@pytest.mark.multigpu
def test_a_rank_that_sees_only_the_other_gpu_maps_the_rows_too() -> None:
    seen = hand_over(visible(2))
    shared, host = rates(seen)
    assert [one["way"] for one in seen] == ["CUDA IPC"] * 2 and shared >= 3 * host


@one_gpu
@pytest.mark.gpu
def test_where_mapping_is_forbidden_rows_go_through_the_host_and_one_warning_says_why() -> None:
    seen = hand_over(visible(1), forbidden=True)
    shared, host = rates(seen)
    assert [one["way"] for one in seen] == ["gloo through pinned host memory"] * 2 and shared < 2 * host
    (warning,) = seen[0]["warnings"] + seen[1]["warnings"]
    assert warning.endswith("rank 1 cannot map memory of rank 0: mapping: operation not permitted")
