"""Helpers: a gate for one rank in this process, over a real control store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from launcher.barrier import OrderedTurns
from launcher.compile_gate import pass_gate
from launcher.compile_report import Stopwatch, TurnBook, TurnReport
from launcher.control import Control
from launcher.drafter_step import DrafterStep
from launcher.errors import DeadlineError, PeerFailed
from launcher.recompiles import Recompiles
from models.dflash import DFlashDrafter
from models.draft_step import RowBatch


@contextmanager
def lone_group(backend: str = "gloo") -> Iterator[dist.ProcessGroup]:
    """One rank, and a compiler that has seen nothing yet."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    torch._dynamo.reset()


def compile_traced(drafter: DFlashDrafter) -> None:
    """Compile for real as far as this is about: tracing and guards, without the wait for kernels."""
    drafter.compile_layers(backend="aot_eager")


class StandIn:
    """The parts of Lifecycle that turns use, with the failure of any rank as a shared key."""

    def __init__(self, control: Control) -> None:
        self._control = control

    @contextmanager
    def phase(self, name: str, timeout: float, defer_stop: bool = False) -> Iterator[None]:
        yield

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, interval: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if (failure := self._control.claimed("failure")) is not None:
                raise PeerFailed(failure)
            if time.monotonic() > deadline:
                raise DeadlineError(what)
            time.sleep(interval)


class Tally:
    """The part of Control that counts recompiles."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, key: str, amount: int = 1) -> int:
        assert key == "recompiles"
        self.count += amount
        return self.count


def watch_recompiles(on_recompile: str) -> Recompiles:
    return Recompiles(on_recompile, cast(Any, Tally()))


@dataclass
class Passed:
    """What passing the gate gave: the turn, or the error, with what is in the report and on the console either way."""

    turn: TurnReport | None
    error: Exception | None
    report: dict[str, Any]
    console: list[str]

    @property
    def proof(self) -> dict[str, Any]:
        return self.report["turns"][0]["proof"]


def pass_alone(step: DrafterStep, batch: RowBatch, folder: Path, accumulation: int = 1) -> Passed:
    """One rank's turn at the gate."""
    control = Control("127.0.0.1", 0, "test", serve=True)
    turns = OrderedTurns("drafter", [[0]], "ordered", 300.0, control, cast(Any, StandIn(control)))
    path, console = folder / "compile_report.json", list[str]()
    book = TurnBook(path, control, [0], {"attention": step.forward.backend})
    turn = error = None
    try:
        turn = pass_gate(0, turns, step, batch, accumulation, book, console.append, Stopwatch())
        turns.join()
        book.write()
    except Exception as raised:
        error = raised
    return Passed(turn, error, json.loads(path.read_text()), console)
