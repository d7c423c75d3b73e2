"""The process groups of a run and the meshes over them: made by all ranks in one order, torn down by the stack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from launcher.runtime import Device, RankEnv
from launcher.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from launcher.control import Control


@dataclass(frozen=True)
class Groups:
    """Process groups of one rank; a group it does not belong to is None.

    rows: carries feature rows (NCCL, or gloo). drafters: those of this node, which hold the weights in shards together.
    copies: the drafters in the same place on every node, which hold the same shard; None on a single node. votes: all
    drafters, gloo, for agreements. saves: the first node's drafters, gloo, for checkpoints written beside training.
    solo: this drafter alone, for its turn at the gate. target: the ranks that share this rank's target, where there
    are several.
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
    # NCCL refuses two ranks on one GPU; rows then go by CUDA IPC, or by gloo through the host.
    backend = "nccl" if device.kind == "cuda" and not device.shared else "gloo"
    nodes = topology.leaders_by_node("drafter")
    rows = _new_group(backend=backend, timeout=limit)
    drafters = _own_group(nodes, env.rank, backend, limit)
    copies = _own_group(list(zip(*nodes, strict=True)), env.rank, backend, limit) if len(nodes) > 1 else None
    votes = _own_group([topology.drafter_ranks], env.rank, "gloo", limit)
    saves = _own_group(nodes[:1], env.rank, "gloo", limit)
    targets = [topology.target_group(index) for index in range(topology.target_count)]
    target = _own_group(targets, env.rank, backend, limit) if topology.split.target_tp > 1 else None
    if drafters is None:
        return Groups(rows, backend, target=target)
    # Alone on its GPU as far as NCCL can tell: a turn's weights stay off the host, also where ranks share the GPU.
    alone = "nccl" if device.kind == "cuda" else "gloo"
    solo = _new_group([env.rank], backend=alone, timeout=limit, use_local_synchronization=True)
    return Groups(rows, backend, drafters, copies, votes, saves, solo)


def _own_group(members: Sequence[Sequence[int]], rank: int, backend: str, limit: timedelta) -> ProcessGroup | None:
    """Of several groups the one that this rank is in, if any; every rank takes part in making all of them."""
    groups = [_new_group(list(ranks), backend=backend, timeout=limit) for ranks in members]
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
