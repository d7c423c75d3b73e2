"""The ranks of one target: what the leader decides is what every rank does, in the same order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.control import Control
from launcher.errors import DeadlineError
from launcher.target_team import TargetTeam
from launcher.topology import Split, build_topology
from tests.gates import StandIn

DECISIONS = [True, False, True, True, False, False, True]


def make_team(control: Control, rank: int, size: int = 2) -> TargetTeam:
    topology = build_topology(Split(1, 1, size))
    lifecycle = StandIn(control)
    fake = SimpleNamespace(role=topology.roles[rank], topology=topology, control=control, lifecycle=lifecycle)
    return TargetTeam(cast(Any, fake))


def test_the_others_hear_every_decision_however_late() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    leader, follower = make_team(server, 0), make_team(server.clone(), 1)
    for decision in DECISIONS:  # all of them before the other rank asks for the first
        assert leader.agree(lambda decision=decision: decision, "go on", 1.0) is decision
    assert [follower.agree(lambda: pytest.fail("a follower decides nothing"), "go on", 1.0) for _ in DECISIONS] == (
        DECISIONS
    )


def test_a_silent_leader_is_named_when_the_time_is_over() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    with pytest.raises(DeadlineError, match="rank 0, which leads this target, to go on with row 7"):
        make_team(server, 1).agree(lambda: True, "go on with row 7", 0.05)


def test_ranks_meet_before_a_collective() -> None:
    server = Control("127.0.0.1", 0, "test", serve=True)
    met: list[int] = []

    def arrive(control: Control, rank: int) -> None:
        make_team(control, rank).meet("load", 10.0)
        met.append(rank)

    thread = threading.Thread(target=arrive, args=(server.clone(), 1))
    thread.start()
    thread.join(0.2)
    assert met == []
    arrive(server, 0)
    thread.join(10)
    assert sorted(met) == [0, 1]


def test_a_target_of_one_rank_asks_nobody() -> None:
    alone = make_team(cast(Any, None), 0, size=1)
    assert alone.leads and alone.shard is None
    alone.meet("load", 0.0)
    assert not alone.agree(lambda: False, "go on", 0.0)
