"""Roles, groups and routes for every world size and split."""

from __future__ import annotations

from collections import Counter

import pytest

from launcher.errors import UserError
from launcher.topology import Split, build_topology, default_split, resolve_split

SPLITS = [Split(targets, drafters, tp) for targets in range(1, 7) for drafters in range(1, 7) for tp in (1, 2, 4)]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_roles_are_targets_first_and_cover_all_ranks(split: Split, nodes: int) -> None:
    topology = build_topology(split, nodes)
    assert [role.rank for role in topology.roles] == list(range(split.ranks * nodes))
    assert len(topology.drafter_ranks) == topology.drafter_count == split.drafters * nodes
    assert len(topology.target_ranks) == topology.target_count * split.target_tp
    for node in range(nodes):
        names = [role.name for role in topology.roles if role.node == node]
        assert names == ["target"] * (split.targets * split.target_tp) + ["drafter"] * split.drafters
    assert [topology.roles[rank].index for rank in topology.drafter_ranks] == list(range(topology.drafter_count))
    for index in range(topology.target_count):
        group = topology.target_group(index)
        assert len(group) == split.target_tp
        assert [topology.roles[rank].tp_rank for rank in group] == list(range(split.target_tp))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_routes_stay_on_a_node_and_are_even(split: Split, nodes: int) -> None:
    topology = build_topology(split, nodes)
    count = topology.drafter_count * split.targets * 4
    routes = [topology.route(m) for m in range(count)]
    drafters = Counter(drafter for _, drafter in routes)
    targets = Counter(target for target, _ in routes)
    assert set(drafters.values()) == {count // topology.drafter_count}
    assert set(targets.values()) == {count // topology.target_count}
    for target, drafter in routes:
        assert target // split.targets == drafter // split.drafters


def test_routes_of_one_node_are_the_plain_remainders() -> None:
    topology = build_topology(Split(5, 3))
    assert [topology.route(m) for m in range(20)] == [(m % 5, m % 3) for m in range(20)]


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, "1t+1d"), (3, "2t+1d"), (4, "2t+2d"), (8, "5t+3d"), (16, "10t+6d")]
)
def test_default_split(ranks: int, expected: str) -> None:
    assert str(default_split(ranks)) == expected


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", range(2, 40))
def test_default_split_fits_any_number_of_ranks(ranks: int, tp: int) -> None:
    if ranks <= tp:
        with pytest.raises(UserError, match=f"start at least {tp + 1} ranks"):
            default_split(ranks, tp)
        return
    split = default_split(ranks, tp)
    assert split.ranks == ranks and split.targets >= 1 and split.drafters >= 1


@pytest.mark.parametrize(
    ("asked", "expected"), [((None, None), "5t+3d"), ((6, None), "6t+2d"), ((None, 1), "7t+1d"), ((4, 4), "4t+4d")]
)
def test_split_takes_what_is_left(asked: tuple[int | None, int | None], expected: str) -> None:
    assert str(resolve_split(8, *asked)) == expected


@pytest.mark.parametrize("asked", [(8, None), (None, 8), (5, 2), (9, None), (3, 3)])
def test_impossible_split_names_one_that_fits(asked: tuple[int | None, int | None]) -> None:
    with pytest.raises(UserError, match=r"but 8 ranks started -> for example topology.targets=5 topology.drafters=3"):
        resolve_split(8, *asked)


def test_single_rank_is_refused() -> None:
    with pytest.raises(UserError, match="1 rank cannot hold"):
        resolve_split(1, None, None)
