"""After the gate, what compiles is an error or a warning that names what changed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from launcher.errors import LauncherError
from launcher.recompiles import REASONS, graphs_compiled, recompile_reason
from models.draft_step import RowBatch
from tests.gates import compile_traced, lone_group, watch_recompiles
from tests.training import make_batch, make_step


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with lone_group() as group:
        yield group


def shorten(batch: RowBatch) -> RowBatch:
    names = ("features", "ids", "loss_mask", "doc", "positions")
    return replace(batch, **{name: getattr(batch, name)[:-1] for name in names})


@pytest.fixture
def console(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the launcher warns of; afterwards torch neither forbids recompiles nor tells of them."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    torch._logging.set_logs()
    torch_log = logging.getLogger(REASONS)
    torch_log.handlers = [handler for handler in torch_log.handlers if type(handler).__name__ != "_Warner"]


def test_a_recompile_is_an_error_or_a_warning_that_names_what_changed(
    group: dist.ProcessGroup, console: Callable[[], list[str]]
) -> None:
    step, other = make_step(group, sharded=False), shorten(make_batch(0))
    compile_traced(step.drafter)
    step.accumulate(make_batch(0), last=True)
    compiled, recompiles = graphs_compiled(), watch_recompiles("error")
    with recompiles.watch("the step"):
        step.accumulate(make_batch(1, supervised=9), last=True)
    said = "the step would compile again.*expected 64, actual 63"
    with pytest.raises(LauncherError, match=said) as raised, recompiles.watch("the step"):
        step.accumulate(other, last=True)
    assert "\n" not in str(raised.value) and recompile_reason(ValueError("no")) is None
    assert (graphs_compiled(), recompiles.total()) == (compiled, 0)
    torch._dynamo.config.error_on_recompile = False
    recompiles = watch_recompiles("warn")
    with recompiles.watch("the step"):
        step.accumulate(other, last=True)
    (warning,) = console()
    assert "compiles again after the gate" in warning and "expected 64, actual 63" in warning
    assert recompiles.total() == graphs_compiled() - compiled > 0


@pytest.mark.parametrize("on_recompile", ["error", "warn"])
def test_code_that_the_gate_never_compiled_counts_as_a_recompile(
    on_recompile: str, console: Callable[[], list[str]]
) -> None:
    """No guard fails then, and torch says nothing."""

    def late(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    compiled, recompiles = torch.compile(late, backend="aot_eager", fullgraph=True), watch_recompiles(on_recompile)
    said = r"the step compiled what the gate had not: late \(test_recompiles.py:\d+\)"
    refused = pytest.raises(LauncherError, match=said) if on_recompile == "error" else nullcontext()
    with refused, recompiles.watch("the step"):
        compiled(torch.ones(3))
    with recompiles.watch("the step"):
        compiled(torch.ones(3))
    assert recompiles.total() == 1
    assert [bool(re.search(said, warning)) for warning in console()] == [True] * (on_recompile == "warn")
