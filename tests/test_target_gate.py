"""A target's turn: what is compiled is compared with stock transformers, and what is missing ends the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

import launcher.target_gate
from launcher.barrier import OrderedTurns
from launcher.compile_proof import ProofError
from launcher.compile_report import TurnReport
from launcher.config import validate
from launcher.control import Control
from launcher.errors import LauncherError
from launcher.outcome import failure_code
from launcher.target_gate import TargetProof, graph_problems, kernel_problems, number_problems, pass_target_gate
from launcher.target_role import RowProducer
from models.draft_step import RowBatch
from models.target import TappedTarget, load_tapped_target
from tests.gates import StandIn, watch_recompiles
from tests.small_targets import LAYER_IDS, packed_row, save_small

RECORDED: list[TurnReport] = []


@pytest.fixture
def target(tmp_path: Path) -> TappedTarget:
    torch.compiler.reset()
    torch.set_num_threads(1)
    save_small("qwen3", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    target.use_packed_attention()
    compile_layers = target.compile_layers
    target.compile_layers = lambda **_: compile_layers(backend="aot_eager")  # pyrefly: ignore[bad-assignment]
    return target


def take_turn(target: TappedTarget, console: list[str]) -> TurnReport:
    control = Control("127.0.0.1", 0, "test", serve=True)
    turns = OrderedTurns("target", [[0]], "ordered", 300.0, control, cast(Any, StandIn(control)))
    ids, doc, positions = packed_row(padding=5)

    def run_row() -> RowBatch:
        return RowBatch(0, target(ids, doc, positions), ids, torch.ones_like(ids).bool(), doc, positions)

    return pass_target_gate(0, turns.turn(0), target, run_row, console.append, RECORDED.append)


def test_a_good_turn_is_proved(target: TappedTarget) -> None:
    console: list[str] = []
    report = take_turn(target, console)
    assert not target.mixes_experts
    assert report.verified and report.role == "target" and report.proof["graphs"] >= 1
    assert 0 < report.proof["worst_error"] < 1e-3 and report.proof["graph_breaks"] == 0
    assert console[0].startswith("compile target 1/1 rank 0") and "flex, features differ from stock by" in console[0]
    assert console[0].endswith("0 graph breaks")


def test_other_features_than_stock_end_the_run(target: TappedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.target_attention.attention_starts", lambda doc, _window: torch.zeros_like(doc).long())
    console: list[str] = []
    with pytest.raises(ProofError, match="features differ from stock transformers'"):
        take_turn(target, console)
    assert "NOT PROVED" in console[0] and not RECORDED[-1].verified


def spoil(target: TappedTarget, error: Exception) -> None:
    """Compile with a backend that raises."""

    def broken(*_: object) -> None:
        raise error

    compile_layers = TappedTarget.compile_layers
    target.compile_layers = lambda **_: compile_layers(target, backend=broken)  # pyrefly: ignore[bad-assignment]


def fail_turn(target: TappedTarget, expected: type[Exception]) -> tuple[Exception, str]:
    """A turn that raises; its error, and what the report that was recorded for it lacks."""
    console: list[str] = []
    RECORDED.clear()
    with pytest.raises(expected) as caught:
        take_turn(target, console)
    (report,) = RECORDED
    (missing,) = report.proof["missing"]
    assert not report.verified and report.seconds > 0
    assert f"NOT PROVED: {missing}" in console[0]
    return caught.value, missing


def test_a_target_that_does_not_compile_ends_the_run_with_a_way_out(target: TappedTarget) -> None:
    spoil(target, NotImplementedError("heads of 3"))
    error, missing = fail_turn(target, ProofError)
    assert "do not compile: NotImplementedError: heads of 3" in str(error) and "target.attention=sdpa" in str(error)
    assert missing == "the target's layers did not run: NotImplementedError: heads of 3"


def test_a_turn_without_memory_is_recorded_and_may_be_tried_again(target: TappedTarget) -> None:
    spoil(target, trouble := torch.OutOfMemoryError("CUDA out of memory"))
    error, missing = fail_turn(target, torch.OutOfMemoryError)
    assert error is trouble and failure_code(error) == 75 and "OutOfMemoryError" in missing


def test_a_proof_that_does_not_end_is_recorded(target: TappedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("launcher.target_gate.token_errors", out_of_memory)
    assert fail_turn(target, torch.OutOfMemoryError)[1].startswith("the proof did not end: OutOfMemoryError")


def test_a_recompile_limit_is_a_target_that_does_not_compile(
    target: TappedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two lengths, where only one graph is allowed."""
    forward = TappedTarget.forward

    def forward_twice(self: TappedTarget, *row: torch.Tensor) -> torch.Tensor:
        forward(self, *(tensor[:-3] for tensor in row))
        return forward(self, *row)

    monkeypatch.setattr(TappedTarget, "forward", forward_twice)
    with torch._dynamo.config.patch(recompile_limit=1):
        error, missing = fail_turn(target, ProofError)
    assert "FailOnRecompileLimitHit" in missing and "target.attention=sdpa" in str(error)


def test_graph_breaks_and_the_peak_of_memory_are_in_the_report(
    target: TappedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launcher.target_gate.examine

    def broken(*row: Any) -> TargetProof:
        counters["graph_break"]["print"] += 2
        return replace(real(*row), peak_bytes=3 << 30)

    monkeypatch.setattr("launcher.target_gate.examine", broken)
    console: list[str] = []
    with pytest.raises(ProofError, match="2 graph breaks: print"):
        take_turn(target, console)
    assert RECORDED[-1].proof["graph_breaks"] == 2 and RECORDED[-1].peak_bytes == 3 << 30
    assert "flex, 3.2 GB a row, " in replace(TargetProof(**RECORDED[-1].proof), missing=()).line()


class OneRow(list[torch.Tensor]):
    """Packed rows."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__([ids])

    def row(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(ids=self[index])


def test_a_row_that_compiles_anything_after_the_gate_is_refused() -> None:
    """The producer as it is once its gate is passed, with a target that compiles late."""

    def late(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(late, backend="aot_eager", fullgraph=True)
    ids, doc, positions = packed_row(padding=5)
    batch = RowBatch(0, torch.empty(len(ids), 1), ids, torch.ones_like(ids).bool(), doc, positions)
    producer = RowProducer.__new__(RowProducer)
    producer._rank = cast(Any, SimpleNamespace(config=validate({}), lifecycle=SimpleNamespace(step=0)))
    producer._rows = cast(Any, OneRow(ids))
    producer._layout = cast(Any, SimpleNamespace(write=lambda *_: None, batch=lambda *_: batch, header=lambda *_: {}))
    producer._target = cast(Any, lambda ids, *_, out: out.copy_(compiled(ids)[:, None]))
    with torch._dynamo.config.patch(error_on_recompile=False):
        producer._recompiles = watch_recompiles("error")
        with pytest.raises(LauncherError, match="the target compiled what the gate had not: late"):
            producer._fill(batch.features, 0)
    assert producer._fill(batch.features, 0) == {}


def test_problems_are_named() -> None:
    assert number_problems(0.01, 0.3, 0.05, 0.5) == []
    assert "worst token" in number_problems(0.01, 0.6, 0.05, 0.5)[0]
    assert number_problems(0.06, 0.3, 0.05, 0.5) and number_problems(float("nan"), float("nan"), 0.05, 0.5)
    assert kernel_problems({"triton_tem_fused_flex_attention_0": 34}, 34) == []
    assert "0 times instead of 34" in kernel_problems({}, 34)[0]
    assert graph_problems(2, 2) == [] and "1 more graphs" in graph_problems(2, 3)[0] and graph_problems(0, 0)
