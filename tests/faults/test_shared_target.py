"""A target of two ranks and a drafter: the same losses as with one rank, and an end that names the rank that failed."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

pytestmark = pytest.mark.slow

SHARED = "--topology.target_tp=2"
EVALUATED = ("--eval.prompts=2", "--eval.max_new_tokens=6")
ALONE = Scenario("target of one rank", (Start(),))
# Rows, evaluations and a resume: the second start goes on from the first one's last checkpoint.
BOTH = Scenario(
    "target of two ranks",
    (Start(flags=(SHARED, *EVALUATED)), Start(flags=(SHARED, "--train.max_steps=8"))),
)
STOPPED = Scenario(
    "shared target stopped", (Start("slow=2@step:3:1", (SHARED,), lambda run: run.send(signal.SIGTERM)),)
)
UNEVEN = Scenario("target of three ranks", (Start(flags=("--topology.target_tp=3",)),))
# Ranks 0 and 1 are the target, rank 2 is the drafter.
FAILURES = [
    (Scenario("second rank killed", (Start("kill@step:3:1", (SHARED,)),)), 75, ("1 target 0 step", "SIGKILL")),
    (Scenario("second rank raises", (Start("raise@step:2:1", (SHARED,)),)), 1, ("1 target 0 step", "injected error")),
    (Scenario("first rank killed", (Start("kill@step:3:0", (SHARED,)),)), 75, ("0 target 0 step", "SIGKILL")),
    (
        Scenario("second rank hangs", (Start("hang@step:3:1", (SHARED, "--runtime.step_timeout=4")),)),
        75,
        ("step",),
    ),
]


def _losses(metrics: tuple[dict[str, Any], ...]) -> list[float]:
    return [entry["loss"] for entry in metrics if "loss" in entry]


@pytest.mark.parametrize(("alone", "both"), [(ALONE, BOTH)], ids=str)
def test_two_ranks_give_the_losses_of_one(results: Results, alone: Scenario, both: Scenario) -> None:
    (single,), (shared, resumed) = results(alone), results(both)
    for trial in (single, shared, resumed):
        check(trial, "finished", 0)
    assert "1t(x2)+1d" in shared.console and "acceptance length" in shared.console
    assert len(_losses(shared.metrics)) == 6
    assert _losses(shared.metrics) == pytest.approx(_losses(single.metrics), rel=1e-5)
    assert "resumed from" in resumed.console and len(_losses(resumed.metrics)) == 8


@pytest.mark.parametrize(("scenario", "code", "words"), FAILURES, ids=lambda value: str(value))
def test_a_lost_rank_of_a_target_is_named(
    results: Results, scenario: Scenario, code: int, words: tuple[str, ...]
) -> None:
    (result,) = results(scenario)
    check(result, "failed", code, words)
    assert result.console.count("run failed") == 1


@pytest.mark.parametrize("scenario", [STOPPED], ids=str)
def test_a_stop_reaches_all_ranks_of_a_target(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "stopped", 143)


@pytest.mark.parametrize("scenario", [UNEVEN], ids=str)
def test_heads_that_do_not_divide_are_refused(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 78, ("num_attention_heads 4", "cannot be divided by 3"))
