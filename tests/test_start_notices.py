"""Who says what a start has to say, on one node and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from launcher.cli import Command
from launcher.control import Control
from launcher.journal import Journal
from launcher.runtime import Device, RankEnv
from launcher.split_choice import Choice
from launcher.start_notices import announce_start, attempt_key
from launcher.topology import Split, build_topology
from launcher.worker import Start

SPLIT = Split(1, 1)


class Store:
    """Of the control store, what the first rank of each node has left in it."""

    def __init__(self, nodes: int) -> None:
        self._kept = {f"attempt/{node}": {"notices": [f"cache {node} is cold"]} for node in range(nodes)}

    def get(self, key: str) -> Any:
        return self._kept[key]


class Said:
    """A journal's console."""

    def __init__(self, speaks: bool) -> None:
        self.lines, self._speaks = list[str](), speaks

    def announce(self, text: str, every_rank: bool = False) -> None:
        self.lines += [text] * (self._speaks or every_rank)


def consoles(nodes: int) -> list[list[str]]:
    """What each node's console shows of a start with a target and a drafter on every node."""
    shown: list[list[str]] = [[] for _ in range(nodes)]
    topology = build_topology(SPLIT, nodes)
    for role in topology.roles:
        env = RankEnv(role.rank, role.local_rank, 2 * nodes, 2, "127.0.0.1", 1, 0, True)
        start = Start(Command("train"), env, topology, Device("cpu"), {}, (), Choice(SPLIT), None)
        said = Said(role.name == "drafter" and role.index == 0)
        announce_start(start, cast(Control, Store(nodes)), Path("logs"), cast(Journal, said))
        shown[role.node] += said.lines
    return shown


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_notices_of_every_node_are_on_its_own_console_once(nodes: int) -> None:
    shown = consoles(nodes)
    for node, lines in enumerate(shown):
        assert [line for line in lines if "is cold" in line] == [f"node {node}: cache {node} is cold"]
    assert sum("run folder" in line for lines in shown for line in lines) == 1


def test_one_node_needs_no_name() -> None:
    assert consoles(1)[0][0] == "cache 0 is cold"
    assert attempt_key(RankEnv(3, 1, 4, 2, "127.0.0.1", 1, 0, True)) == "attempt/1"
