"""What carries the tensors of a group: NCCL where each rank has a GPU of its own, gloo elsewhere."""

from __future__ import annotations

import pytest

from launcher.groups import choose_backend


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["GPU-0", "GPU-1"], "nccl"),
        (["GPU-1"], "nccl"),
        (["GPU-1", "GPU-0", "GPU-1"], "gloo"),
        ([None, None], "gloo"),
        (["GPU-0", None], "gloo"),
    ],
)
def test_nccl_carries_a_group_unless_two_of_its_ranks_are_on_one_gpu(gpus: list[str | None], backend: str) -> None:
    assert choose_backend(gpus) == backend
