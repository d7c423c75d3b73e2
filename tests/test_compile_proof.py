"""What a proof is made of: the mask's tiles, the kernels that ran, and the bound on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from launcher.compile_proof import Proof, kernel_problems, memory_problems
from launcher.reference_check import mask_problems
from launcher.step_memory import StateBytes, dense_score_bytes, step_bound
from models.anchors import Anchors
from models.dflash import DFlashConfig, DFlashDrafter
from models.masks import block_mask, dense_mask
from tests.training import QWEN3_8B


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
