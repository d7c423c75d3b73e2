"""Helpers: calls of nodes as the first one hears them, and whole nodes that call over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from launcher import roll_call as roll_call_module
from launcher.cli import Command
from launcher.config import validate
from launcher.errors import LauncherError
from launcher.roll_call import roll_call
from launcher.roll_call_verdict import Call

BUILD = {"torch": "2.12.0+cu130", "torch.git": "a" * 40, "torch.record": "b" * 64}
# What a wait may take on a busy machine; tests that pass take a small part of it.
LONG = 60.0


def call(node: int, nodes: int = 2, **fields: Any) -> Call:
    known: dict[str, Any] = {"protocol": 1, "host": f"host{node}", "pid": node, "ranks": 8, "build": BUILD}
    return Call(node=node, nodes=nodes, **(known | fields))


@pytest.fixture(name="master")
def free_address() -> str:
    """Of this machine, host:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that nobody answers yet calls again at once."""
    monkeypatch.setattr(roll_call_module, "RETRY_SECONDS", 0.05)


def together(*parts: Callable[[], Any]) -> list[Any]:
    """What each part returns or raises, all at once."""

    def outcome(part: Callable[[], Any]) -> Any:
        try:
            return part()
        except LauncherError as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(outcome, parts))


def node(number: int, master: str, nodes: int = 2, refusal: LauncherError | None = None, **flags: Any) -> list[str]:
    """One node's checks and call; returns what it said on its console."""
    said: list[str] = []
    config = validate({"runtime": {"init_timeout": flags.pop("patience", LONG)}})
    command = Command("train", [], config, nnodes=nodes, node_rank=number, master=master)
    with roll_call(command, said.append) as ready:
        if refusal is not None:
            raise refusal
        ready(flags.get("ranks", 2), False, flags.get("build", BUILD))
    return said


def connect(master: str) -> socket.socket:
    """A stranger's connection, as soon as somebody listens."""
    host, _, port = master.rpartition(":")
    deadline = time.monotonic() + LONG
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=LONG)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.05)
