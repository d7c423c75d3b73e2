"""The gate proves what it compiled, and is not fooled by a step that ran without being compiled."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import launcher.compile_proof
import models.draft_step
from launcher.compile_proof import ProofError
from launcher.outcome import failure_code
from models.anchors import Anchors
from models.dflash import DFlashDrafter
from models.masks import dense_mask
from tests.gates import compile_traced, lone_group, pass_alone
from tests.training import make_batch, make_step


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with lone_group() as group:
        yield group


def fail(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("no kernel for this graph")


@pytest.mark.parametrize(("sharded", "accumulation"), [(False, 1), (True, 2)])
def test_a_good_turn_is_proved(group: dist.ProcessGroup, tmp_path: Path, sharded: bool, accumulation: int) -> None:
    step = make_step(group, sharded=sharded)
    compile_traced(step.drafter)
    passed = pass_alone(step, make_batch(0), tmp_path, accumulation)
    assert passed.error is None and passed.turn is not None and passed.turn.verified
    assert passed.report["verified"] and passed.report["attention"] == "sdpa"
    assert passed.proof["graphs"] == 4 and passed.proof["missing"] == []
    assert 0 < passed.proof["output_error"] < 2e-3 and passed.proof["graph_breaks"] == 0
    assert list(passed.turn.parts) == ["wait", "trace", "compile", "run", "proof"]
    serial = [passed.turn.parts[part] for part in ("trace", "compile", "run")]
    assert passed.turn.seconds == pytest.approx(sum(serial), abs=0.2), "the proof is not serial"
    assert all(seconds > 0 for seconds in serial)
    assert len(passed.console) == 1 and "0 graph breaks" in passed.console[0]


def _uncompiled(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compiled anything."""


def _suppressed(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling fails, and the error is suppressed."""
    drafter.compile_layers(backend=fail)  # pyrefly: ignore


def _suppressed_in_one_layer(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where graph breaks are allowed, which is where torch goes on without a word."""
    compile_traced(drafter)
    layer = drafter.layers[1]
    layer.forward = torch.compile(type(layer).forward.__get__(layer), backend=fail)


def _nested_trace(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread traces, and torch is told not to mind."""
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    compile_traced(drafter)


def _recompile_limit(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of two layers' graphs may be compiled."""
    compile_traced(drafter)


def _lost_context(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask lets no block see its context."""

    def own_block_only(anchors: Anchors, doc_S: torch.Tensor, block_size: int, row_length: int) -> torch.Tensor:
        mask = dense_mask(anchors, doc_S, block_size, row_length)
        mask[:, :row_length] = False
        return mask

    monkeypatch.setattr(models.draft_step, "dense_mask", own_block_only)
    compile_traced(drafter)


@pytest.mark.parametrize(
    ("trick", "settings", "missing"),
    [
        (_uncompiled, {}, "0 graphs were compiled instead of 4"),
        (_suppressed, {"suppress_errors": True}, "no kernel for this graph"),
        # Newer versions of torch notice this themselves.
        (_suppressed_in_one_layer, {"suppress_errors": True}, "graphs were compiled instead of 4|no compiled frames"),
        (_nested_trace, {"error_on_nested_fx_trace": False}, "0 graphs were compiled instead of 4"),
        (_recompile_limit, {"recompile_limit": 1}, "FailOnRecompileLimitHit"),
        (_lost_context, {}, "differs from the dense float32 reference"),
    ],
)
def test_the_gate_is_not_fooled(
    group: dist.ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trick: Callable[[DFlashDrafter, pytest.MonkeyPatch], None],
    settings: dict[str, Any],
    missing: str,
) -> None:
    """`settings` are torch._dynamo's."""
    step = make_step(group, sharded=False)
    trick(step.drafter, monkeypatch)
    with torch._dynamo.config.patch(settings):
        passed = pass_alone(step, make_batch(0), tmp_path)
    assert re.search(missing, str(passed.error) if isinstance(passed.error, ProofError | RuntimeError) else "")
    assert not passed.report["verified"] and re.search(missing, "; ".join(passed.proof["missing"]))
    assert "NOT PROVED" in passed.console[0] and re.search(missing, passed.console[0])


@pytest.mark.parametrize(
    "trouble",
    [torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))],
    ids=repr,
)
def test_a_compiler_without_memory_or_disk_is_no_unproved_step(
    group: dist.ProcessGroup, tmp_path: Path, trouble: Exception
) -> None:
    """torch wraps what a backend raises; a run that may be tried again must end as one."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise trouble

    step = make_step(group, sharded=False)
    step.drafter.compile_layers(backend=backend)  # pyrefly: ignore
    passed = pass_alone(step, make_batch(0), tmp_path)
    assert passed.error is trouble and failure_code(passed.error) == 75
    (missing,) = passed.proof["missing"]
    assert missing == f"the step did not run: {type(trouble).__name__}: {trouble}"


def test_a_gradient_that_is_not_finite_is_no_proof(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the step compared with the reference: NaN must not pass as the smaller of two numbers."""
    step = make_step(group, sharded=False)
    compile_traced(step.drafter)
    spoil = spoil_last_gradient(step.drafter)
    monkeypatch.setattr(launcher.compile_proof, "reference_errors", spoil(launcher.compile_proof.reference_errors))
    passed = pass_alone(step, make_batch(0), tmp_path)
    assert isinstance(passed.error, ProofError) and "gradients by inf" in str(passed.error)
    assert passed.proof["gradient_error"] is None, "JSON knows no infinity"


def spoil_last_gradient(drafter: DFlashDrafter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper that makes one gradient NaN while the wrapped function runs."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with drafter.fc.weight.register_hook(lambda grad: grad * torch.nan):
                return function(*args)

        return run

    return wrap


def test_switching_the_compiler_off_excuses_nothing_else(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    step = make_step(group, sharded=False)
    passed = pass_alone(step, make_batch(0), tmp_path)
    assert passed.error is None and passed.turn is not None and not passed.turn.verified
    (warning,) = [record for record in caplog.records if "uncompiled and unproved" in record.getMessage()]
    assert warning.__dict__["shared"], "every drafter says it"
    _lost_context(step.drafter, monkeypatch)
    passed = pass_alone(make_step(group, sharded=False), make_batch(0), tmp_path)
    assert isinstance(passed.error, ProofError) and "dense float32 reference" in str(passed.error)


def test_an_error_of_the_step_itself_keeps_its_type_and_is_in_the_report(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    step = make_step(group, sharded=False)
    monkeypatch.setattr(step, "accumulate", out_of_memory)
    passed = pass_alone(step, make_batch(0), tmp_path)
    assert isinstance(passed.error, torch.OutOfMemoryError)
    assert "OutOfMemoryError" in passed.proof["missing"][0]
