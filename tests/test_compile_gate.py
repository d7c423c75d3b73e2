"""The gate proves what it compiled, and is not fooled by a step that ran without being compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import RecompileError

import models.draft_step
from launcher.compile_proof import Proof, ProofError, kernel_problems, memory_problems
from launcher.recompiles import forbid_recompiles, graphs_compiled, recompile_reason
from launcher.reference_check import mask_problems
from launcher.step_memory import StateBytes, dense_score_bytes, step_bound
from models.anchors import Anchors
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import RowBatch
from models.masks import block_mask, dense_mask
from tests.gates import pass_alone
from tests.training import CONFIG, make_batch, make_step

GIGABYTE = 1e9
QWEN3_8B = replace(
    CONFIG,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    block_size=16,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One rank, and a compiler that has seen nothing yet."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    torch._dynamo.reset()


def compile_traced(drafter: DFlashDrafter) -> None:
    """Compile for real as far as this is about: tracing and guards, without the wait for kernels."""
    drafter.compile_layers(backend="aot_eager")


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
    assert list(passed.turn.parts) == ["wait", "compile", "proof"]
    assert passed.turn.seconds == pytest.approx(passed.turn.parts["compile"], abs=0.2), "the proof is not serial"
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


def make_masks() -> tuple[Any, torch.Tensor]:
    """46 blocks, the last two padding, over two documents; the row is no multiple of a tile."""
    doc_S = (torch.arange(1400) >= 300).int()
    anchors = Anchors(torch.arange(0, 1380, 30), torch.arange(46) < 44)
    return block_mask(anchors, doc_S, 16, 1400), dense_mask(anchors, doc_S, 16, 1400)


def test_a_right_mask_has_no_problem() -> None:
    assert mask_problems(*make_masks()) == []


@pytest.mark.parametrize(
    ("table", "spoil", "problem"),
    [
        ("kv_num_blocks", lambda t: t - (torch.arange(t.shape[-1]) == 4).int(), "1 of 102 tiles lost in forward"),
        ("q_num_blocks", lambda t: t.clamp(max=1), "lost in backward"),
        ("full_kv_num_blocks", lambda t: t * 0, "lost in forward"),
        ("full_kv_num_blocks", lambda t: t + 1, "tiles not masked in forward"),
        ("kv_indices", lambda t: t * 0, "visited twice in forward"),
        ("mask_mod", lambda mod: lambda b, h, q, k: mod(b, h, q, k) | (q == 5), "the predicate differs for"),
    ],
)
def test_a_mask_that_lost_its_blocks_is_seen(table: str, spoil: Callable[[Any], Any], problem: str) -> None:
    mask, dense = make_masks()
    setattr(mask, table, spoil(getattr(mask, table)))
    assert problem in "; ".join(mask_problems(mask, dense))


def test_every_layer_must_run_a_fused_kernel_in_both_directions() -> None:
    forward, backward = "triton_tem_fused_flex_attention_1", "triton_tem_fused_flex_attention_backward_0"
    assert kernel_problems({forward: 1, f"{forward}b": 4, backward: 5}, 5) == []
    (problem,) = kernel_problems({forward: 4, backward: 5}, 5)
    assert "ran 4 times instead of 5 in forward" in problem
    assert len(kernel_problems({}, 5)) == 2


def bound_at_qwen3_8b(held: int, gradients: int) -> int:
    """The bound at 512 anchors and 3,072-token rows, from the bytes per parameter of a step's own state."""
    count = sum(param.numel() for param in _on_meta(QWEN3_8B).parameters())
    return step_bound(QWEN3_8B, 512, 3072, 2, StateBytes(held * count, gradients * count), QWEN3_8B.vocab_size)


def test_the_bound_at_qwen3_8b_lets_the_step_pass_and_one_dense_layer_not() -> None:
    """An H200 measured 9.2 GB above what was there before the step, sharded over one rank."""
    measured, dense = int(9.2e9), dense_score_bytes(QWEN3_8B, 512, 3072)
    bound = bound_at_qwen3_8b(2, 4)
    assert measured < bound < 1.5 * measured
    assert dense == pytest.approx(23.6e9, rel=0.01) and measured + dense > 2 * bound
    assert memory_problems(measured, bound, dense) == []
    assert "over the block-sparse bound" in memory_problems(measured + dense, bound, dense)[0]


def test_the_bound_follows_the_steps_own_state() -> None:
    whole, accumulated, sharded = (bound_at_qwen3_8b(*state) for state in ((0, 2), (4, 2), (2, 4)))
    assert whole < sharded < accumulated
    assert accumulated - whole == pytest.approx(4 * 1.05e9, rel=0.2), "float32 sums of earlier micro-batches"
    assert whole < 0.45 * dense_score_bytes(QWEN3_8B, 512, 3072)


def _on_meta(config: DFlashConfig) -> DFlashDrafter:
    with torch.device("meta"):
        return DFlashDrafter(config)


def test_the_line_names_memory_and_kernels() -> None:
    kernels = {"triton_tem_fused_flex_attention": 5, "triton_tem_fused_flex_attention_backward": 5}
    line = Proof("flex", 5, 0, kernels, int(9.2e9), int(12e9), int(23.6e9), 5.7e-3, 1.4e-2).line()
    assert "9.2 GB of at most 12.0; dense would need 23.6 GB more a layer" in line
    assert "5 forward and 5 backward flex kernels" in line and "5.7e-03" in line


def shorten(batch: RowBatch) -> RowBatch:
    names = ("features", "ids", "loss_mask", "doc", "positions")
    return replace(batch, **{name: getattr(batch, name)[:-1] for name in names})


def test_a_recompile_is_an_error_or_a_warning_that_names_what_changed(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    step, other = make_step(group, sharded=False), shorten(make_batch(0))
    compile_traced(step.drafter)
    step.accumulate(make_batch(0), last=True)
    compiled = graphs_compiled()
    with torch._dynamo.config.patch(error_on_recompile=False):
        forbid_recompiles("error")
        step.accumulate(make_batch(1, supervised=9), last=True)
        with pytest.raises(RecompileError) as raised:
            step.accumulate(other, last=True)
    reason = recompile_reason(raised.value)
    assert reason is not None and "expected 64, actual 63" in reason and "\n" not in reason
    assert recompile_reason(ValueError("no")) is None
    assert graphs_compiled() == compiled
    forbid_recompiles("warn")
    try:
        step.accumulate(other, last=True)
    finally:
        torch._logging.set_logs()
    warnings = [record.getMessage() for record in caplog.records if record.name == "launcher"]
    assert any("compiles again after the gate" in text and "expected 64, actual 63" in text for text in warnings)
