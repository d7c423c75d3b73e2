"""The rows of several nodes, which each node packs for itself: how many there are, and that they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from launcher.data import PackedRows
from launcher.errors import UserError
from launcher.rank import Rank


@dataclass(frozen=True)
class Packed:
    """What a node tells of its rows."""

    rows: int
    content: str

    def __str__(self) -> str:
        return f"{self.rows} rows, content {self.content[:12]}"


def rows_key(node: int) -> str:
    return f"rows/{node}"


def publish_rows(rank: Rank, rows: PackedRows) -> None:
    """Tell the other ranks, of this node and of others, that this node has its rows; look at what others have told.

    Nobody waits: of any two nodes the later one sees the rows of the other, and no drafter need compile before that.

    Raises:
        UserError: nodes have other rows than the first of them.
    """
    control = rank.control
    control.set(rows_key(rank.role.node), asdict(Packed(len(rows), rows.stats.content)))
    told = {node: control.get(rows_key(node)) for node in range(rank.topology.nodes)}
    check_same({node: Packed(**values) for node, values in told.items() if values is not None})


def count_rows(rank: Rank) -> int:
    """The number of rows, once the targets have packed them; the first drafter waits for those of every node."""
    what, timeout = "the targets to pack the rows", rank.config.runtime.load_timeout
    nodes = range(rank.topology.nodes if rank.leads_drafters else 1)
    packed = [Packed(**rank.wait_for(rows_key(node), f"{what} on node {node}", timeout)) for node in nodes]
    return packed[0].rows


def check_same(packed: Mapping[int, Packed]) -> None:
    """Refuse nodes whose rows differ: a micro-batch names a row by its place, so they would train on other data."""
    first = min(packed)
    others = [f"node {node} has {one}" for node, one in packed.items() if one != packed[first]]
    if others:
        whose = f"node {first} has {packed[first]}; {'; '.join(others)}"
        raise UserError(
            f"data.path: the rows are not the same on all nodes: {whose}",
            "give every node the same chats, in the same order, and the same tokenizer",
        )
