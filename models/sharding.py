"""A drafter's sharded weights, made whole."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def whole_tensor(tensor: Tensor) -> Tensor:
    """`tensor` itself, or all rows of one that FSDP2 split over its ranks, each of which has to call this.

    Where one rank has all rows they are returned as they are: not a copy, and nothing is sent.

    `DTensor.full_tensor` goes through a collective that crashes for CUDA tensors over gloo, which ranks that share a
    GPU use (pytorch #132471, #152645); the plain all-gather works on every backend.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, shards = tensor.device_mesh, tensor.device_mesh.ndim - 1
    placement = tensor.placements[shards]
    assert isinstance(placement, Shard) and placement.dim == 0, f"not split by rows: {tensor.placements}"
    group, ranks = mesh.get_group(shards), mesh.size(shards)
    own = tensor.to_local().detach()
    if ranks == 1:
        return own
    rows = -(-tensor.shape[0] // ranks)  # as torch.chunk: the last ranks may have fewer rows, or none
    padded = own.new_zeros(rows, *tensor.shape[1:])
    padded[: own.shape[0]] = own
    whole = own.new_empty(rows * ranks, *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[: tensor.shape[0]]
