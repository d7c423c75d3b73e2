"""A target's turn: what is compiled is compared with stock transformers, and what is missing ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from launcher.barrier import OrderedTurns
from launcher.compile_proof import ProofError
from launcher.compile_report import TurnReport
from launcher.control import Control
from launcher.target_gate import graph_problems, kernel_problems, number_problems, pass_target_gate
from models.draft_step import RowBatch
from models.target import TappedTarget, load_tapped_target
from tests.gates import StandIn
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
    assert 0 < report.proof["worst_error"] < 1e-3
    assert console[0].startswith("compile target 1/1 rank 0") and "flex, features differ from stock by" in console[0]


def test_other_features_than_stock_end_the_run(target: TappedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.target_attention.attention_starts", lambda doc, _window: torch.zeros_like(doc).long())
    console: list[str] = []
    with pytest.raises(ProofError, match="features differ from stock transformers'"):
        take_turn(target, console)
    assert "NOT PROVED" in console[0] and not RECORDED[-1].verified


def test_a_target_that_does_not_compile_ends_the_run_with_a_way_out(target: TappedTarget) -> None:
    def broken(*_: object) -> None:
        raise NotImplementedError("heads of 3")

    compile_layers = TappedTarget.compile_layers
    target.compile_layers = lambda **_: compile_layers(target, backend=broken)  # pyrefly: ignore[bad-assignment]
    with pytest.raises(ProofError, match="do not compile") as caught:
        take_turn(target, [])
    assert "heads of 3" in str(caught.value) and "target.attention=sdpa" in str(caught.value)


def test_problems_are_named() -> None:
    assert number_problems(0.01, 0.3, 0.05, 0.5) == []
    assert "worst token" in number_problems(0.01, 0.6, 0.05, 0.5)[0]
    assert number_problems(0.06, 0.3, 0.05, 0.5) and number_problems(float("nan"), float("nan"), 0.05, 0.5)
    assert kernel_problems({"triton_tem_fused_flex_attention_0": 34}, 34) == []
    assert "0 times instead of 34" in kernel_problems({}, 34)[0]
    assert graph_problems(2, 2) == [] and "1 more graphs" in graph_problems(2, 3)[0] and graph_problems(0, 0)
