"""The analytic block mask on a GPU: compiled FlexAttention against SDPA, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

from models.anchors import anchor_generator, sample_anchors
from models.masks import block_mask, compiled_on, dense_mask, tile_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def packed_row(lengths: tuple[int, ...], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    doc = [index for index, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    doc_S = torch.tensor(doc, dtype=torch.int32, device="cuda")
    return (torch.rand(len(doc), device="cuda") < 0.8) & (doc_S >= 0), doc_S


@pytest.mark.parametrize(
    ("lengths", "padding", "slots", "block_size"),
    [((300, 200, 140), 0, 40, 16), ((513, 87), 37, 33, 7), ((150,), 10, 200, 16)],
)
def test_compiled_flex_equals_sdpa(lengths: tuple[int, ...], padding: int, slots: int, block_size: int) -> None:
    mask_S, doc_S = packed_row(lengths, padding)
    anchors = sample_anchors(mask_S, doc_S, slots, anchor_generator(0, 0, "cuda"))
    rows, row_length = slots * block_size, len(doc_S)
    shapes = ((1, 4, rows, 64), (1, 2, row_length + rows, 64), (1, 2, row_length + rows, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    tiles = block_mask(anchors, doc_S, block_size, row_length)
    dense = dense_mask(anchors, doc_S, block_size, row_length)
    toward = torch.randn(shapes[0], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attend(*inputs)
        return [tensor.double() for tensor in (out, *torch.autograd.grad(out, inputs, toward.to(dtype)))]

    def sdpa(*inputs: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*inputs, attn_mask=dense, enable_gqa=True)

    found = run(lambda *inputs: compiled(*inputs, block_mask=tiles, enable_gqa=True), torch.bfloat16)
    for got, near, want in zip(found, run(sdpa, torch.bfloat16), run(sdpa, torch.float32), strict=True):
        assert (got - want).norm() < 2 * (near - want).norm() + 1e-3 * want.norm()


def test_a_row_of_more_than_128_tiles_has_the_tiles_of_a_short_one() -> None:
    """Where Inductor of torch 2.11 and 2.12 breaks on a scan (pytorch #180221)."""
    mask_S, doc_S = packed_row((9000, 7000), 384)
    anchors = sample_anchors(mask_S, doc_S, 1024, anchor_generator(0, 0, "cuda"))
    arguments = (anchors.position_N, anchors.keep_N, doc_S, 16)
    compiled, eager = compiled_on("cuda", tile_tables)(*arguments), tile_tables(*arguments)
    for found, wanted in zip(tree_leaves(compiled), tree_leaves(eager), strict=True):
        assert torch.equal(found, wanted)


def test_anchors_and_mask_never_wait_and_take_little_memory() -> None:
    mask_S, doc_S = packed_row((1500, 1000), 572)
    block_mask(sample_anchors(mask_S, doc_S, 512, anchor_generator(0, 0, "cuda")), doc_S, 16, len(doc_S))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        anchors = sample_anchors(mask_S, doc_S, 512, anchor_generator(0, 1, "cuda"))
        block_mask(anchors, doc_S, 16, len(doc_S))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 10e6
