"""The two attention backends agree, refuse what they cannot do, and take a fresh mask without recompiling."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from models import attention
from models.anchors import Anchors
from models.attention import attend, choose_backend
from models.dflash import DFlashConfig, DFlashDrafter
from models.masks import block_mask, dense_mask
from tests.small_drafters import fresh_blocks

CONFIG = DFlashConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_parameters=None,
    vocab_size=64,
    max_position_embeddings=512,
    block_size=8,
    mask_token_id=63,
    target_layer_ids=(1, 2),
    num_target_layers=6,
)
ROW_LENGTH, BLOCKS = 200, 20  # neither S nor N * B is a multiple of a tile


def layout(seed: int) -> tuple[Anchors, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cut = int(torch.randint(40, 120, (), generator=generator))
    doc_S = (torch.arange(ROW_LENGTH) >= cut).int()
    position_N = torch.randint(0, ROW_LENGTH - 2, (BLOCKS,), generator=generator).sort().values
    return Anchors(position_N, torch.arange(BLOCKS) < BLOCKS - 2), doc_S


def inputs(anchors: Anchors, doc_S: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    positions_S = torch.arange(ROW_LENGTH) - (doc_S * (doc_S == 0).sum()).long()
    block_positions = (positions_S[anchors.position_N][:, None] + torch.arange(CONFIG.block_size)).flatten()
    features = torch.randn(ROW_LENGTH, 2 * CONFIG.hidden_size)
    return fresh_blocks(CONFIG, BLOCKS), features, positions_S, block_positions


def test_auto_is_flex_on_cuda_only() -> None:
    assert choose_backend("auto", "cuda") == "flex"
    assert choose_backend("auto", "cpu") == "sdpa"
    assert choose_backend("sdpa", "cuda") == "sdpa"


@pytest.mark.parametrize("requested", ["flex", "eager"])
def test_impossible_backends_are_refused(requested: str) -> None:
    with pytest.raises(ValueError, match="sdpa"):
        choose_backend(requested, "cpu")  # type: ignore[arg-type]


def test_flex_never_runs_uncompiled() -> None:
    anchors, doc_S = layout(0)
    mask = block_mask(anchors, doc_S, CONFIG.block_size, ROW_LENGTH)
    with pytest.raises(RuntimeError, match="compile_layers"):
        DFlashDrafter(CONFIG)(*inputs(anchors, doc_S), mask, "flex")


@pytest.mark.parametrize("hopper", [False, True])
def test_few_queries_do_not_take_the_kernel_for_decoding(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "on_hopper", lambda: hopper)
    options = []

    def record(graph: torch.fx.GraphModule, _inputs: object) -> object:
        calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention]
        options.extend(next(arg for arg in node.args if isinstance(arg, dict)) for node in calls)
        return graph.forward

    x = torch.randn(1, 2, CONFIG.block_size, 128)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, CONFIG.block_size, CONFIG.block_size, "cpu")
    torch.compile(attend, backend=record, fullgraph=True)(x, x, x, mask, "flex")
    (chosen,) = options
    assert chosen["BACKEND"] == "TRITON" and ("fwd_BLOCK_M" in chosen) == hopper


def test_a_mask_of_the_wrong_kind_is_refused() -> None:
    anchors, doc_S = layout(0)
    x = torch.randn(1, 2, 4, 16)
    with pytest.raises(TypeError, match="dense"):
        attend(x, x, x, block_mask(anchors, doc_S, CONFIG.block_size, ROW_LENGTH), "sdpa")


def test_grouped_queries_equal_repeated_keys() -> None:
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    mask = torch.rand(6, 9) > 0.4
    mask[:, 0] = True
    repeated = attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), mask, "sdpa")
    torch.testing.assert_close(attend(q, k, v, mask, "sdpa"), repeated)


def test_flex_equals_sdpa_and_fresh_masks_do_not_recompile() -> None:
    """Uses the eager compiler backend: the trace and its guards are real, the kernels are PyTorch's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    drafter = DFlashDrafter(CONFIG)
    compiled = DFlashDrafter(CONFIG)
    compiled.load_state_dict(drafter.state_dict())
    compiled.compile_layers(backend="eager")
    for seed in range(4):
        anchors, doc_S = layout(seed)
        rows = inputs(anchors, doc_S)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=seed > 0):
            flex = compiled(*rows, block_mask(anchors, doc_S, CONFIG.block_size, ROW_LENGTH), "flex")
            sdpa = drafter(*rows, dense_mask(anchors, doc_S, CONFIG.block_size, ROW_LENGTH), "sdpa")
        torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=1e-5)
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    )  # context, first layer, one for all others, final norm
