"""Ctrl-C and SIGTERM in every phase, and a killed torchrun."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from launcher.trial import Running
from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

TERM, INT = signal.SIGTERM, signal.SIGINT


def _stop(name: str, fault: str, *numbers: signal.Signals) -> Scenario:
    act: Callable[[Running], None] = lambda running: running.send(*numbers)  # noqa: E731
    return Scenario(name, (Start(fault, act=act),))


# The second start goes on from the first one's last save, and is stopped in a save of its own.
TWICE = Scenario(
    "sigterm twice",
    (
        Start("slow=2@step:3:1", act=lambda run: run.send(TERM)),
        Start("slow=2@save-shard:6:1", ("--train.max_steps=60",), act=lambda run: run.send(TERM)),
    ),
)
SECOND = _stop("second sigterm", "slow=60@init:1", TERM, TERM)
RECEIVE = _stop("ctrl-c in receive", "slow=4@step:3:0", INT)
TURN = _stop("sigterm in turn", "slow=3@turn:1", TERM)
AGENT = Scenario("torchrun killed", (Start("slow=60@init:1", act=lambda run: run.kill_torchrun()),))


@pytest.mark.parametrize("scenario", [TWICE], ids=str)
def test_sigterm_in_a_step_saves_and_the_next_start_goes_on(results: Results, scenario: Scenario) -> None:
    stopped, resumed = results(scenario)
    check(stopped, "stopped", 143, ("stopped by SIGTERM at step 4",))
    assert stopped.status.resumable and str(stopped.status.last_checkpoint).endswith("step-4")
    assert "resumed from" in resumed.console and "at step 4" in resumed.console


@pytest.mark.parametrize("scenario", [TWICE], ids=str)
def test_sigterm_in_a_save_lets_it_finish(results: Results, scenario: Scenario) -> None:
    result = results(scenario)[1]
    check(result, "stopped", 143)
    assert result.status.step is not None and result.status.step >= 6
    assert str(result.status.last_checkpoint).endswith(f"step-{result.status.step}")


@pytest.mark.parametrize("scenario", [SECOND], ids=str)
def test_a_second_sigterm_leaves_at_once(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "stopped", 143)
    assert "second signal" in result.status.reason


@pytest.mark.parametrize(("scenario", "code"), [(RECEIVE, 130), (TURN, 143)], ids=lambda value: str(value))
def test_a_stop_while_waiting(results: Results, scenario: Scenario, code: int) -> None:
    (result,) = results(scenario)
    check(result, "stopped", code)


@pytest.mark.parametrize("scenario", [AGENT], ids=str)
def test_a_killed_torchrun_takes_the_ranks_along(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, ("torchrun", "SIGKILL"))
