"""The process groups of a run and the meshes over them: made by all ranks in one order, torn down by the stack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from launcher.runtime import Device, RankEnv
from launcher.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from launcher.control import Control


@dataclass(frozen=True)
class Groups:
    """Process groups of one rank; a group it does not belong to is None.

    rows: carries feature rows. drafters: those of this node, which hold the weights in shards together.
    copies: the drafters in the same place on every node, which hold the same shard; None on a single node. votes: all
    drafters, gloo, for agreements. saves: the first node's drafters, gloo, for checkpoints written beside training.
    solo: this drafter alone, for its turn at the gate. target: the ranks that share this rank's target, where there
    are several. What carries tensors of GPUs is NCCL wherever each rank of the group has a GPU of its own.
    """

    rows: ProcessGroup
    rows_backend: str
    drafters: ProcessGroup | None = None
    copies: ProcessGroup | None = None
    votes: ProcessGroup | None = None
    saves: ProcessGroup | None = None
    solo: ProcessGroup | None = None
    target: ProcessGroup | None = None


def join_groups(
    stack: ExitStack,
    env: RankEnv,
    device: Device,
    topology: Topology,
    control: Control,
    timeout: float,
    patience: float,
) -> Groups:
    """Create all process groups, in the same order on every rank; the stack tears them down.

    Args:
        timeout: seconds until all ranks have met.
        patience: seconds after which a collective is given up; longer than any deadline, whose error says more.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=control.group_store("world"),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout),
    )
    limit = timedelta(seconds=patience)
    stack.callback(dist.destroy_process_group)
    gpus: list[str | None] = [None] * env.world_size
    dist.all_gather_object(gpus, device.uuid)
    own_group = partial(_own_group, env.rank, limit)
    nodes = topology.leaders_by_node("drafter")
    rows_backend = choose_backend(gpus)  # without NCCL rows go by CUDA IPC, or by gloo through the host
    rows = _new_group(backend=rows_backend, timeout=limit)
    drafters = own_group(nodes, gpus)
    copies = own_group(list(zip(*nodes, strict=True)), gpus) if len(nodes) > 1 else None
    votes = own_group([topology.drafter_ranks])
    saves = own_group(nodes[:1])
    targets = [topology.target_group(index) for index in range(topology.target_count)]
    target = own_group(targets, gpus) if topology.split.target_tp > 1 else None
    if drafters is None:
        return Groups(rows, rows_backend, target=target)
    # Alone on its GPU as far as NCCL can tell: a turn's weights stay off the host, also where ranks share the GPU.
    alone = "nccl" if device.kind == "cuda" else "gloo"
    solo = _new_group([env.rank], backend=alone, timeout=limit, use_local_synchronization=True)
    return Groups(rows, rows_backend, drafters, copies, votes, saves, solo)


def choose_backend(gpus: Sequence[str | None]) -> str:
    """The backend for ranks on these GPUs (None: on a CPU). NCCL refuses two ranks on one GPU; gloo does not."""
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def _own_group(
    rank: int, limit: timedelta, members: Sequence[Sequence[int]], gpus: Sequence[str | None] | None = None
) -> ProcessGroup | None:
    """Of several groups the one that this rank is in, if any; every rank takes part in making all of them.

    Args:
        gpus: those of all ranks, for groups that exchange tensors on them; otherwise gloo serves.
    """
    backends = ["gloo" if gpus is None else choose_backend([gpus[member] for member in ranks]) for ranks in members]
    groups = [
        _new_group(list(ranks), backend=backend, timeout=limit)
        for ranks, backend in zip(members, backends, strict=True)
    ]
    return next((group for ranks, group in zip(members, groups, strict=True) if rank in ranks), None)


def _new_group(ranks: list[int] | None = None, **options: Any) -> ProcessGroup:
    """A process group that this rank may or may not be in; torch's own stand-in where it is not."""
    import torch.distributed as dist

    return cast("ProcessGroup", dist.new_group(ranks, **options))


def solo_mesh(groups: Groups, device: Device) -> DeviceMesh:
    """The mesh of this drafter alone."""
    from torch.distributed import DeviceMesh

    assert groups.solo is not None, "only drafter ranks train"
    return DeviceMesh.from_group(groups.solo, device.kind)


def drafter_mesh(groups: Groups, device: Device, topology: Topology) -> DeviceMesh:
    """The mesh of all drafters, for FSDP2: shards within a node and, on several nodes, a copy on each of them.

    So weights are gathered inside a node only, what nodes exchange is one shard's gradients, and the first node's
    drafters hold everything that a checkpoint needs.
    """
    from torch.distributed import DeviceMesh

    assert groups.drafters is not None, "only drafter ranks train"
    if groups.copies is None:
        return DeviceMesh.from_group(groups.drafters, device.kind)
    ranks, names = [list(node) for node in topology.leaders_by_node("drafter")], ("nodes", "drafters")
    return DeviceMesh.from_group([groups.copies, groups.drafters], device.kind, ranks, mesh_dim_names=names)
