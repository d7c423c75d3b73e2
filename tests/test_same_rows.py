"""Nodes pack their rows for themselves: whoever packs later than another node lets no other data in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.control import Control
from launcher.errors import DeadlineError, UserError
from launcher.same_rows import count_rows, publish_rows
from launcher.topology import Split, build_topology
from tests.gates import StandIn

TOPOLOGY = build_topology(Split(1, 2), nodes=3)


def rank_of(control: Control, number: int) -> Any:
    role, lifecycle = TOPOLOGY.roles[number], StandIn(control)

    def wait_for(key: str, what: str, timeout: float) -> Any:
        lifecycle.wait_until(lambda: control.has(key), what, timeout, 0.01)
        return control.get(key)

    leads = role.name == "drafter" and role.index == 0
    config = SimpleNamespace(runtime=SimpleNamespace(load_timeout=0.3))
    parts = {"role": role, "topology": TOPOLOGY, "control": control, "config": config, "leads_drafters": leads}
    return SimpleNamespace(**parts, wait_for=wait_for)


def tell(control: Control, node: int, rows: int, content: str) -> None:
    class Rows(list[int]):
        stats = SimpleNamespace(content=content)

    (leader,) = (role.rank for role in TOPOLOGY.roles if role.node == node and role.local_rank == 0)
    publish_rows(rank_of(control, leader), cast(Any, Rows(range(rows))))


@pytest.fixture
def control() -> Control:
    return Control("127.0.0.1", 0, "test", serve=True)


def drafters(control: Control) -> tuple[Any, Any]:
    first, other, *_ = (rank_of(control, rank) for rank in TOPOLOGY.drafter_ranks)
    return first, other


def test_nodes_with_the_same_rows_go_on(control: Control) -> None:
    for node in range(3):
        tell(control, node, 5, "a" * 64)
    assert [count_rows(rank) for rank in drafters(control)] == [5, 5]


@pytest.mark.parametrize(("rows", "content"), [(6, "a" * 64), (5, "b" * 64)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_other_rows_are_refused_by_whoever_sees_them_first(
    control: Control, rows: int, content: str, order: tuple[int, ...]
) -> None:
    """Node 2 has other rows: the first of the others to follow it says so, or it does, before anybody has compiled."""
    for node in order:
        mine = (rows, content) if node == 2 else (5, "a" * 64)
        seen = [other for other in order[: order.index(node)] if (other == 2) != (node == 2)]
        if not seen:
            tell(control, node, *mine)
            continue
        known = min(order[: order.index(node) + 1])
        with pytest.raises(UserError, match=rf"node {known} has 5 rows, content a{{12}}; node 2 has {rows} rows, "):
            tell(control, node, *mine)
        return


def test_a_drafter_that_does_not_lead_waits_for_the_first_node_alone(control: Control) -> None:
    tell(control, 0, 5, "a" * 64)
    _, other = drafters(control)
    assert count_rows(other) == 5


def test_a_node_that_packs_for_too_long_is_named(control: Control) -> None:
    tell(control, 0, 5, "a" * 64)
    tell(control, 2, 5, "a" * 64)
    with pytest.raises(DeadlineError, match="pack the rows on node 1"):
        count_rows(drafters(control)[0])
