"""Who does what: world size and split -> roles, groups and routes. Pure, no torch.

Ranks of a node: its targets first, its drafters last. A target may span `target_tp` ranks. Micro-batch m of a run is
produced by target m mod T and consumed by drafter m mod D, so the order of rows never depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.errors import UserError

RoleName = Literal["target", "drafter"]


@dataclass(frozen=True)
class Split:
    """Targets and drafters of one node; a target takes `target_tp` ranks, a drafter one."""

    targets: int
    drafters: int
    target_tp: int = 1

    @property
    def ranks(self) -> int:
        return self.targets * self.target_tp + self.drafters

    def __str__(self) -> str:
        tp = f"(x{self.target_tp})" if self.target_tp > 1 else ""
        return f"{self.targets}t{tp}+{self.drafters}d"


@dataclass(frozen=True)
class Role:
    """What one rank is: `index` counts targets or drafters over all nodes, `tp_rank` the place in a target's group."""

    rank: int
    name: RoleName
    index: int
    node: int
    local_rank: int
    tp_rank: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.name} {self.index}"


@dataclass(frozen=True)
class Topology:
    """All roles of a run, by rank."""

    split: Split
    nodes: int
    roles: tuple[Role, ...]

    @property
    def world_size(self) -> int:
        return len(self.roles)

    @property
    def target_count(self) -> int:
        return self.split.targets * self.nodes

    @property
    def drafter_count(self) -> int:
        return self.split.drafters * self.nodes

    @property
    def drafter_ranks(self) -> tuple[int, ...]:
        return tuple(role.rank for role in self.roles if role.name == "drafter")

    @property
    def target_ranks(self) -> tuple[int, ...]:
        return tuple(role.rank for role in self.roles if role.name == "target")

    def leaders_by_node(self, name: RoleName) -> tuple[tuple[int, ...], ...]:
        """The ranks that take turns, node by node: all drafters, or the first rank of each target."""
        leaders = [role for role in self.roles if role.name == name and role.tp_rank == 0]
        return tuple(tuple(role.rank for role in leaders if role.node == node) for node in range(self.nodes))

    def target_group(self, index: int) -> tuple[int, ...]:
        """Ranks of target `index`, its leader (tp_rank 0) first."""
        return tuple(role.rank for role in self.roles if role.name == "target" and role.index == index)

    def drafter_rank(self, index: int) -> int:
        return self.drafter_ranks[index]

    def route(self, micro_batch: int) -> tuple[int, int]:
        """(target index, drafter index) of a micro-batch, both on one node.

        Micro-batches go to drafters in turn; the drafters of a node take theirs from that node's targets in turn.
        """
        drafter = micro_batch % self.drafter_count
        node, local_drafter = divmod(drafter, self.split.drafters)
        of_node = micro_batch // self.drafter_count * self.split.drafters + local_drafter
        return node * self.split.targets + of_node % self.split.targets, drafter


def default_split(ranks: int, target_tp: int = 1) -> Split:
    """5t+3d for eight ranks, 1t+1d for two; in between about five targets to three drafters.

    Raises:
        UserError: too few ranks for one target and one drafter.
    """
    if ranks < target_tp + 1:
        raise UserError(
            f"{ranks} rank{'s' * (ranks != 1)} cannot hold a target of {target_tp} and a drafter",
            f"start at least {target_tp + 1} ranks",
        )
    possible = [d for d in range(1, ranks) if (ranks - d) % target_tp == 0]
    drafters = min(possible, key=lambda d: (abs(d - ranks * 3 / 8), -d))
    return Split((ranks - drafters) // target_tp, drafters, target_tp)


def resolve_split(local_world_size: int, targets: int | None, drafters: int | None, target_tp: int = 1) -> Split:
    """The split of one node from what the config names; a missing side takes the ranks that are left.

    Raises:
        UserError: the split does not add up to the ranks of the node; the message names a split that does.
    """
    if targets is None and drafters is None:
        return default_split(local_world_size, target_tp)
    if targets is None:
        targets = (local_world_size - (drafters or 0)) // target_tp
    elif drafters is None:
        drafters = local_world_size - targets * target_tp
    split = Split(targets, drafters or 0, target_tp)
    if split.targets < 1 or split.drafters < 1 or split.ranks != local_world_size:
        fitting = default_split(local_world_size, target_tp)
        raise UserError(
            f"topology {split} needs {split.ranks} ranks, at least one target and one drafter, but {local_world_size}"
            f" rank{'s' * (local_world_size != 1)} started",
            f"for example topology.targets={fitting.targets} topology.drafters={fitting.drafters}",
        )
    return split


def build_topology(split: Split, nodes: int = 1) -> Topology:
    """Lay the roles out: node by node, targets first, drafters last."""
    roles: list[Role] = []
    for node in range(nodes):
        for local_rank in range(split.ranks):
            target_ranks = split.targets * split.target_tp
            rank = node * split.ranks + local_rank
            if local_rank < target_ranks:
                index, tp_rank = divmod(local_rank, split.target_tp)
                roles.append(Role(rank, "target", node * split.targets + index, node, local_rank, tp_rank))
            else:
                index = node * split.drafters + local_rank - target_ranks
                roles.append(Role(rank, "drafter", index, node, local_rank))
    return Topology(split, nodes, tuple(roles))


def node_problems(nodes: int, node: int, master: str, max_restarts: int) -> list[str]:
    """What does not fit together of --nnodes, --node-rank, --master and the flags that work on one node only."""
    host, _, port = master.rpartition(":")
    if nodes < 1:
        return [f"--nnodes: {nodes} nodes cannot hold a run -> give at least 1"]
    if nodes == 1:
        unused = [name for name, value in (("--node-rank", node), ("--master", master)) if value]
        return [f"{name}: means something with several nodes only -> add --nnodes N" for name in unused]
    problems = []
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        problems.append("--master: several nodes need host:port of node 0 -> for example --master 10.0.0.1:29500")
    if not 0 <= node < nodes:
        problems.append(f"--node-rank: {node} is no node of {nodes} -> 0 to {nodes - 1}")
    if max_restarts:
        problems.append("--max-restarts: works on one node only -> start all nodes again yourself, with the same flags")
    return problems
