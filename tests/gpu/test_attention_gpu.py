"""Compiled FlexAttention on a GPU against SDPA with the dense predicate: values, gradients, no recompiles."""

from __future__ import annotations

import pytest
import torch

from models.anchors import Anchors
from models.dflash import DFlashConfig, DFlashDrafter
from models.masks import block_mask, dense_mask
from tests.small_drafters import fresh_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def make_config(head_dim: int) -> DFlashConfig:
    return DFlashConfig(
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_parameters=None,
        vocab_size=128,
        max_position_embeddings=4096,
        block_size=16,
        mask_token_id=127,
        target_layer_ids=(1, 3),
        num_target_layers=8,
    )


def make_row(config: DFlashConfig, length: int, blocks: int, seed: int) -> tuple[Anchors, torch.Tensor, tuple]:
    generator = torch.Generator("cuda").manual_seed(seed)
    random = {"generator": generator, "device": "cuda"}
    doc_S = (torch.arange(length, device="cuda") >= length // 3).int()
    position_N = torch.randint(0, length - 2, (blocks,), **random).sort().values
    anchors = Anchors(position_N, torch.arange(blocks, device="cuda") < blocks - 3)
    positions_S = torch.arange(length, device="cuda") - doc_S * (length // 3)
    block_positions = (positions_S[position_N][:, None] + torch.arange(config.block_size, device="cuda")).flatten()
    embeddings = fresh_blocks(config, blocks, **random)
    features = torch.randn(length, 2 * config.hidden_size, **random)
    return anchors, doc_S, (embeddings, features, positions_S, block_positions)


def run(drafter: DFlashDrafter, rows: tuple, mask: object, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states, and the gradients of all parameters under a fixed loss."""
    embeddings, features, *positions = rows
    out = drafter(embeddings.to(dtype), features.to(dtype), *positions, mask, backend)
    weight = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    drafter.zero_grad()
    (out.float() * weight).mean().backward()
    return [out.detach().float(), *(p.grad.float() for p in drafter.parameters() if p.grad is not None)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("length", "blocks"), [(512, 32), (1000, 21)])
def test_flex_equals_sdpa_in_value_and_gradient(head_dim: int, length: int, blocks: int) -> None:
    """bfloat16 flex must be as near to float32 SDPA as bfloat16 SDPA is (within a factor)."""
    torch._dynamo.reset()
    config = make_config(head_dim)
    torch.manual_seed(0)
    exact = DFlashDrafter(config).cuda()
    drafters = {}
    for backend in ("flex", "sdpa"):
        drafters[backend] = DFlashDrafter(config).cuda().to(torch.bfloat16)
        drafters[backend].load_state_dict(exact.state_dict())
    drafters["flex"].compile_layers()
    for seed in range(3):
        anchors, doc_S, rows = make_row(config, length, blocks, seed)
        dense = dense_mask(anchors, doc_S, config.block_size, length)
        want = run(exact, rows, dense, "sdpa", torch.float32)
        near = run(drafters["sdpa"], rows, dense, "sdpa", torch.bfloat16)
        tiles = block_mask(anchors, doc_S, config.block_size, length)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = run(drafters["flex"], rows, tiles, "flex", torch.bfloat16)
        for reference, plain, flex in zip(want, near, got, strict=True):
            allowed = 2.0 * (plain - reference).norm() + 1e-3 * reference.norm()
            assert (flex - reference).norm() <= allowed


def test_a_forward_and_backward_do_not_wait_for_the_device() -> None:
    torch._dynamo.reset()
    config = make_config(64)
    drafter = DFlashDrafter(config).cuda().to(torch.bfloat16)
    drafter.compile_layers()
    anchors, doc_S, rows = make_row(config, 512, 32, 0)
    run(drafter, rows, block_mask(anchors, doc_S, config.block_size, 512), "flex", torch.bfloat16)
    embeddings, features = rows[0].bfloat16(), rows[1].bfloat16()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = block_mask(anchors, doc_S, config.block_size, 512)
        drafter(embeddings, features, *rows[2:], mask, "flex").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
