"""Sharded weights made whole on real gloo ranks, without the collective of DTensor.full_tensor."""

from __future__ import annotations

import pytest
import torch

from models.sharding import whole_tensor
from tests.rank_pool import run_ranks
from tests.sharded_trainer import Trainer


def gather_all() -> dict[str, tuple[torch.Size, bool, bool]]:
    """Per tensor: its shape, whether this rank holds a part only, and whether the whole is DTensor's own."""
    return {
        name: (whole.shape, weight.to_local().shape != weight.shape, torch.equal(whole, weight.full_tensor()))
        for name, weight in Trainer().model.state_dict().items()
        for whole in [whole_tensor(weight)]
    }


def whole_of_the_only_rank() -> list[bool]:
    """Per tensor: whether the whole is the memory of the weight itself."""
    weights = Trainer().model.state_dict().values()
    return [whole_tensor(weight).data_ptr() == weight.to_local().data_ptr() for weight in weights]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_tensors_are_those_of_dtensor(ranks: int) -> None:
    """Seven and three rows: shards that differ in length, and, on four ranks, one without any row."""
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "1.weight": (3, 7), "1.bias": (3,)}
    for gathered in run_ranks(ranks, gather_all):
        assert {name: shape for name, (shape, _, _) in gathered.items()} == shapes
        assert all(split == (ranks > 1) and equal for _, split, equal in gathered.values())


def test_the_rows_of_one_rank_are_not_copied() -> None:
    (same,) = run_ranks(1, whole_of_the_only_rank)
    assert same == [True] * 4


def test_a_plain_tensor_is_itself() -> None:
    tensor = torch.ones(2)
    assert whole_tensor(tensor) is tensor
