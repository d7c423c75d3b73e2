"""Ctrl-C, SIGTERM twice, and a killed torchrun. SIGTERM in a step and in a save is in test_resume, in a turn in
test_soak."""

from __future__ import annotations

import signal

import psutil
import pytest

from launcher.trial import Running
from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

# Addresses that processes of a run listened on while it trained.
LISTENED: set[str] = set()


def _look_at_its_sockets_and_interrupt(run: Running) -> None:
    processes = psutil.Process(run.process.pid).children(recursive=True)
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    LISTENED.update(socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN)
    run.send(signal.SIGINT)


def _terminate_twice(run: Running) -> None:
    run.send(signal.SIGTERM, signal.SIGTERM)


# Compiled for once: the turn proves itself, and the step that compiles again later says so. The target is some rows
# ahead of the drafter, which waits in a receive when that is used up.
RECOMPILE = Scenario(
    "recompile",
    (
        Start(
            "recompile@step:1:1;slow=8@step:9:0",
            ("--compile.on_recompile=warn", "--runtime.grace=200", "--runtime.step_timeout=200"),
            act=_look_at_its_sockets_and_interrupt,
            struck="kind='slow'",
            compiled=True,
            steps=12,
        ),
        Start("recompile@step:1", compiled=True, steps=14),
    ),
)
SECOND = Scenario("second sigterm", (Start("slow=60@init:1", act=_terminate_twice),))
AGENT = Scenario("torchrun killed", (Start("slow=60@init:1", act=lambda run: run.kill_torchrun()),))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [RECOMPILE], ids=str)
def test_a_recompile_after_the_gate_warns_once_and_ctrl_c_in_a_receive_stops_in_good_order(
    results: Results, scenario: Scenario
) -> None:
    result = results(scenario)[0]
    check(result, "stopped", 130)
    assert result.console.count("compiles again after the gate") == 1, result.console
    assert "0 graph breaks" in result.console and result.status.resumable


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [RECOMPILE], ids=str)
def test_a_run_on_one_node_listens_to_that_node_alone(results: Results, scenario: Scenario) -> None:
    results(scenario)
    assert {"127.0.0.1"} == LISTENED


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [RECOMPILE], ids=str)
def test_a_recompile_after_the_gate_is_an_error_that_names_what_changed(results: Results, scenario: Scenario) -> None:
    result = results(scenario)[1]
    words = ("1 drafter 0 step", "would compile again after the gate", "size mismatch", "expected 64, actual 63")
    check(result, "failed", 1, (*words, "--compile.on_recompile=warn"))


@pytest.mark.parametrize("scenario", [SECOND], ids=str)
def test_a_second_sigterm_leaves_at_once(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "stopped", 143)
    assert "second signal" in result.status.reason


@pytest.mark.parametrize("scenario", [AGENT], ids=str)
def test_a_killed_torchrun_takes_the_ranks_along(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, ("torchrun", "SIGKILL"))
