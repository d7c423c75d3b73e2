"""The roll call of several nodes over real sockets: who meets, refuses, is missing, calls again, is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import roll_call as roll_call_module
from launcher.errors import RetryableError, UserError
from launcher.roll_call import take
from launcher.roll_call_desk import open_port
from launcher.roll_call_verdict import RollCallError
from tests.node_calls import LONG, call, connect, node, together
from tests.node_calls import eager as eager
from tests.node_calls import free_address as free_address

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody is missing anyway, a start that cannot be ends soon."""
    monkeypatch.setattr(roll_call_module, "TELL_SECONDS", 1.0)


def after(seconds: float, part: Callable[[], Any]) -> Any:
    time.sleep(seconds)
    return part()


@pytest.mark.parametrize("late", [0, 2])
def test_nodes_meet_and_the_port_is_free_again(master: str, late: int) -> None:
    waits = [0.6 if number == late else 0.0 for number in range(3)]
    first, *others = together(*(lambda n=n: after(waits[n], lambda: node(n, master, 3)) for n in range(3)))
    assert first == [f"[launch] waiting for nodes 1, 2 of 3 at {master}"]
    assert others == [[f"[launch] waiting for node 0 of 3 at {master}"]] * 2
    open_port(int(master.rpartition(":")[2])).close()


def test_both_nodes_list_another_build(master: str) -> None:
    line = "[launch] node 1 ({}) has torch 2.11.0, node 0 ({}) 2.12.0+cu130".format(*[socket.gethostname()] * 2)
    said = together(lambda: node(0, master), lambda: node(1, master, build={"torch": "2.11.0"}))
    assert [line in lines for lines in said] == [True, True]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_ends_the_other_node_with_its_code_and_line(master: str, refusing: int) -> None:
    own = UserError("runs/x is in use by pid 7", "wait for it")
    parts = [lambda n=n: node(n, master, refusal=own if n == refusing else None) for n in range(2)]
    outcomes = together(*parts)
    assert outcomes[refusing] is own
    other = outcomes[1 - refusing]
    assert isinstance(other, RollCallError) and other.code == 78
    assert str(other) == f"node {refusing} ({socket.gethostname()}) refused to start: {own}"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("number", [0, 1])
def test_a_refusal_that_nobody_hears_keeps_its_error(master: str, number: int) -> None:
    own = RetryableError("GPUs are in use")
    assert together(lambda: node(number, master, refusal=own)) == [own]


@pytest.mark.usefixtures("hasty")
def test_a_node_that_refused_and_left_is_still_the_reason(master: str) -> None:
    gone = call(1, 3, refusal="no GPU", code=78)

    def leave() -> None:
        with connect(master) as link:
            link.sendall(gone.model_dump_json().encode() + b"\n")

    verdict, _ = together(lambda: take(call(0, 3), master, LONG), leave)
    assert (verdict.code, verdict.line) == (78, "node 1 (host1) refused to start: no GPU")


def test_missing_nodes_are_named(master: str) -> None:
    (first,) = together(lambda: node(0, master, patience=0.3))
    assert first.code == 75 and str(first).startswith(f"node 1 did not call at {master} within 0 s")
    (other,) = together(lambda: node(1, master, patience=0.3))
    assert other.code == 75 and str(other).startswith(f"node 0 did not answer at {master} within 0 s")


@pytest.mark.usefixtures("hasty")
def test_two_nodes_with_one_number_end_all(master: str) -> None:
    numbers = (0, 1, 1)
    outcomes = together(*(lambda n=n: node(n, master, 3) for n in numbers))
    for outcome in outcomes:
        assert isinstance(outcome, RollCallError) and outcome.code == 78
        assert str(outcome).startswith("--node-rank 1 was given on ")


def test_a_node_that_hangs_up_may_call_again(master: str) -> None:
    def call_again() -> list[Any]:
        with connect(master) as link:
            link.sendall(call(1, 3).model_dump_json().encode() + b"\n")
        return together(lambda: node(1, master, 3), lambda: node(2, master, 3))

    first, others = together(lambda: node(0, master, 3), call_again)
    assert all(isinstance(said, list) for said in (first, *others))


def test_one_node_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call_module, "take", None)
    assert node(0, "", nodes=1) == []
    with pytest.raises(UserError, match="no GPU"):
        node(0, "", nodes=1, refusal=UserError("no GPU"))


@pytest.mark.parametrize(("number", "sent", "code"), [(0, signal.SIGINT, 130), (1, signal.SIGTERM, 143)])
def test_a_signal_ends_the_wait(tmp_path: Path, master: str, number: int, sent: signal.Signals, code: int) -> None:
    flags = ["--preset=tiny", "--device=cpu", "--nproc=2", f"--run-dir={tmp_path}", "--nnodes=2", f"--master={master}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launcher" / "main.py"), *flags, f"--node-rank={number}"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"[launch] waiting for node {1 - number} of 2 at {master}\n"
        process.send_signal(sent)
        _, rest = process.communicate(timeout=LONG)
    assert (process.returncode, rest) == (code, "")
