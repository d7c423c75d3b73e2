"""The rank-ordered barrier over a real store, ranks as threads that compile nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from launcher.barrier import Order, OrderedTurns, Turn, predecessors
from launcher.control import Control
from launcher.errors import DeadlineError, PeerFailed
from tests.gates import StandIn

JOINED: dict[int, float] = {}


def run_ranks(
    nodes: list[list[int]], order: Order, body: Callable[[Turn], None], timeout: float = 20.0
) -> dict[int, Any]:
    """Each rank passes a turn and joins; returns its Turn or its error, by rank; `joined` is set after the join."""
    JOINED.clear()
    server = Control("127.0.0.1", 0, "test", serve=True)
    results: dict[int, Any] = {}

    def rank_main(rank: int) -> None:
        control = server.clone()
        turns = OrderedTurns("drafters", nodes, order, timeout, control, cast(Any, StandIn(control)))
        try:
            with turns.turn(rank) as turn:
                body(turn)
            turns.join()
            JOINED[rank] = time.time()
            results[rank] = turn
        except Exception as error:
            control.claim("failure", f"rank {rank}: {error}")
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in reversed(sum(nodes, []))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_turns_pass_in_rank_order_without_overlap() -> None:
    ranks = [5, 6, 7]
    turns: dict[int, Turn] = run_ranks([ranks], "ordered", lambda turn: time.sleep(0.1))
    assert all(turns[a].end <= turns[b].start for a, b in zip(ranks, ranks[1:], strict=False))
    assert all(turn.seconds >= 0.1 for turn in turns.values())
    assert [turns[rank].place for rank in ranks] == [0, 1, 2]


def test_leader_goes_first_and_the_rest_together() -> None:
    both = threading.Barrier(2, timeout=20)

    def body(turn: Turn) -> None:
        if turn.rank != 2:
            both.wait()

    turns: dict[int, Turn] = run_ranks([[2, 3, 4]], "leader_first", body)
    assert turns[2].end <= min(turns[3].start, turns[4].start)


def test_a_turn_passed_on_early_is_waited_for_at_the_end_only() -> None:
    ends: dict[int, float] = {}
    all_three = threading.Barrier(3, timeout=20)

    def body(turn: Turn) -> None:
        turn.pass_on()
        all_three.wait()  # what follows the turn holds nobody up
        ends[turn.rank] = time.time()

    turns: dict[int, Turn] = run_ranks([[2, 3, 4]], "ordered", body)
    assert turns[2].end <= turns[3].start and turns[3].end <= turns[4].start
    assert all(turns[rank].end <= ends[rank] for rank in turns)
    assert min(JOINED.values()) >= max(ends.values()), "nobody leaves before all have ended"


def test_nodes_take_turns_of_their_own_and_join_together() -> None:
    nodes = [[1, 2], [4, 5]]
    first_of_both = threading.Barrier(2, timeout=20)

    def body(turn: Turn) -> None:
        if turn.place == 0:
            first_of_both.wait()

    turns: dict[int, Turn] = run_ranks(nodes, "ordered", body)
    for first, second in nodes:
        assert turns[first].end <= turns[second].start
        assert [turns[first].place, turns[second].place] == [0, 1] and turns[first].count == 2
    assert min(JOINED.values()) >= max(turns[2].end, turns[5].end)


def test_a_failed_turn_reaches_every_rank_as_its_own_error() -> None:
    def body(turn: Turn) -> None:
        if turn.rank == 6:
            raise ValueError("compile broke")

    start = time.monotonic()
    results = run_ranks([[5, 6, 7, 8]], "ordered", body)
    assert time.monotonic() - start < 10
    assert isinstance(results[6], ValueError)
    for rank in (5, 7, 8):
        assert isinstance(results[rank], PeerFailed) and "rank 6: compile broke" in str(results[rank])


def test_waiting_is_bounded_and_names_the_rank() -> None:
    results = run_ranks([[0, 1]], "ordered", lambda turn: time.sleep(1.5 if turn.rank == 0 else 0), timeout=0.1)
    assert isinstance(results[1], DeadlineError) and "turn of rank 0" in str(results[1])


@pytest.mark.parametrize(
    ("order", "expected"),
    [("ordered", [[], [4], [4, 5]]), ("leader_first", [[], [4], [4]]), ("parallel", [[], [], []])],
)
def test_predecessors(order: Order, expected: list[list[int]]) -> None:
    assert [predecessors(order, [4, 5, 6], rank) for rank in (4, 5, 6)] == expected


def test_only_the_first_of_a_node_waits_for_nobody() -> None:
    turns = OrderedTurns("drafter", [[2, 3], [6, 7]], "ordered", 1.0, cast("Any", None), cast("Any", None))
    assert [turns.waits(rank) for rank in (2, 3, 6, 7)] == [False, True, False, True]
