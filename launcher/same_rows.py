"""The rows of several nodes, which each node packs for itself: how many there are, and that they are the same."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Tell the other ranks, of this node and of others, that this node has its rows."""
    rank.control.set(rows_key(rank.role.node), asdict(Packed(len(rows), rows.stats.content)))


def count_rows(rank: Rank) -> int:
    """The number of rows, once the targets have packed them; the first drafter looks at those of every node.

    Raises:
        UserError: nodes have other rows than the first one.
    """
    what, timeout = "the targets to pack the rows", rank.config.runtime.load_timeout
    nodes = range(rank.topology.nodes if rank.leads_drafters else 1)
    packed = [Packed(**rank.wait_for(rows_key(node), f"{what} on node {node}", timeout)) for node in nodes]
    check_same(packed)
    return packed[0].rows


def check_same(packed: Sequence[Packed]) -> None:
    """Refuse nodes whose rows differ: a micro-batch names a row by its place, so they would train on other data."""
    others = [f"node {node} has {one}" for node, one in enumerate(packed) if one != packed[0]]
    if others:
        raise UserError(
            f"data.path: the rows are not the same on all nodes: node 0 has {packed[0]}; {'; '.join(others)}",
            "give every node the same chats, in the same order, and the same tokenizer",
        )
