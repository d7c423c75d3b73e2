"""Ranks that stop making progress: the one at fault is named, its stacks are kept, and nobody waits for torchrun."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

HANGS = [
    (
        Scenario("hang in step", (Start("hang@step:2:1", ("--runtime.step_timeout=6",)),)),
        ("1 drafter 0 step", "longer than 6 s", "runtime.step_timeout"),
    ),
    (
        Scenario("hang in turn", (Start("hang@turn:1", ("--compile.turn_timeout=5",)),)),
        ("1 drafter 0 turn", "longer than 5 s", "compile.turn_timeout"),
    ),
    (
        Scenario("gil held", (Start("gil@init:1", ("--runtime.heartbeat_timeout=8",)),)),
        ("1 drafter 0 init", "no heartbeat for 8 s", "keeps the GIL"),
    ),
    (
        Scenario("sigstop", (Start("stop@init:0", ("--runtime.heartbeat_timeout=6",)),)),
        ("0 target 0 init", "no heartbeat for 6 s", "SIGSTOP"),
    ),
]


@pytest.mark.parametrize(("scenario", "words"), HANGS, ids=lambda value: str(value))
def test_a_rank_that_hangs_is_named(results: Results, scenario: Scenario, words: tuple[str, ...]) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, words)
    if scenario.name != "sigstop":
        assert "in _strike" in result.logs, "the stack of the hang is in the rank's log"
