"""The drafter against the official package, its configuration, and its cached decoding."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoConfig, DynamicCache, Gemma3Config, LlamaConfig, Qwen3Config

from models.anchors import Anchors
from models.dflash import DFlashConfig, DFlashDrafter, default_layer_ids
from models.drafter_layer import DFlashLayer
from models.masks import dense_mask
from tests.small_drafters import ROPES, fresh_blocks, small_config

official_package = pytest.importorskip("dflash.model", reason="compares with the official dflash package")


def pair(config: DFlashConfig, seed: int = 0) -> tuple[DFlashDrafter, Any]:
    """Our drafter and the official model with the same weights, norms included."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
            assert parameter.dim() == 2 or "norm" in name
    official = official_package.DFlashDraftModel(Qwen3Config(**config.to_dict())).eval()
    official.load_state_dict(drafter.state_dict(), strict=True)
    return drafter, official


@ROPES
def test_training_forward_equals_the_official_model(rope: dict[str, Any] | None) -> None:
    """All blocks of a packed row at once here; there one block at a time, with only its visible context."""
    config = small_config(rope)
    drafter, official = pair(config)
    length, block = 40, config.block_size
    doc_S = (torch.arange(length) >= 15).int()
    positions_S = torch.cat([torch.arange(15), torch.arange(25)])
    anchors = Anchors(torch.tensor([0, 3, 14, 15, 22, 38]), torch.ones(6, dtype=torch.bool))
    features = torch.randn(length, len(config.target_layer_ids) * config.hidden_size)
    embeddings = fresh_blocks(config, 6)
    block_positions = (positions_S[anchors.position_N][:, None] + torch.arange(block)).flatten()
    with torch.no_grad():
        mask = dense_mask(anchors, doc_S, block, length)
        ours = drafter(embeddings, features, positions_S, block_positions, mask, "sdpa")
        for j, anchor in enumerate(anchors.position_N.tolist()):
            rows, first = slice(j * block, (j + 1) * block), 15 if anchor >= 15 else 0
            theirs = official(
                position_ids=torch.cat([positions_S[first:anchor], block_positions[rows]])[None],
                noise_embedding=embeddings[None, rows],
                target_hidden=features[None, first:anchor],
            )
            torch.testing.assert_close(ours[rows], theirs[0], atol=1e-4, rtol=1e-4)


@ROPES
def test_cached_drafting_equals_the_official_decode_step(rope: dict[str, Any] | None) -> None:
    config = small_config(rope)
    drafter, official = pair(config, seed=1)
    ours_cache, their_cache = drafter.new_cache(), DynamicCache(config=official.config)
    start = 0
    for gained in (7, 1, 4, 2):
        features = torch.randn(gained, len(config.target_layer_ids) * config.hidden_size)
        embeddings = fresh_blocks(config, 1)
        with torch.no_grad():
            theirs = official(
                position_ids=torch.arange(start, start + gained + config.block_size)[None],
                noise_embedding=embeddings[None],
                target_hidden=features[None],
                past_key_values=their_cache,
                use_cache=True,
            )
        their_cache.crop(-config.block_size)
        start += gained
        ours = drafter.draft(embeddings, features, ours_cache, start)
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)


def test_multiplying_each_row_of_fresh_blocks_once_changes_nothing() -> None:
    """In value and in every gradient, that of the norm before the first layer's projections included."""
    config = small_config()
    drafter, _ = pair(config)
    anchors, doc_S = Anchors(torch.tensor([2, 5, 9]), torch.ones(3).bool()), torch.zeros(12, dtype=torch.int32)
    mask = dense_mask(anchors, doc_S, config.block_size, 12)
    rows = fresh_blocks(config, 3), torch.randn(12, len(config.target_layer_ids) * config.hidden_size)
    positions = torch.arange(12), (anchors.position_N[:, None] + torch.arange(config.block_size)).flatten()
    attention = cast(DFlashLayer, drafter.layers[0]).self_attn
    toward, results = torch.randn(12, config.hidden_size), []
    for project in (attention.project, linear):
        attention.project = project
        out = drafter(*rows, *positions, mask, "sdpa")
        results.append([out, *torch.autograd.grad(out, list(drafter.parameters()), toward)])
    for once, each in zip(*results, strict=True):
        torch.testing.assert_close(once, each, atol=1e-4, rtol=1e-4)


def test_draft_refuses_features_that_leave_a_gap() -> None:
    config = small_config()
    features = torch.randn(3, len(config.target_layer_ids) * config.hidden_size)
    drafter = DFlashDrafter(config)
    with pytest.raises(ValueError, match="features end at 3"):
        drafter.draft(torch.randn(4, config.hidden_size), features, drafter.new_cache(), start=5)


def test_rope_keeps_float32_when_the_weights_do_not() -> None:
    """SpecForge/Automodel history: rounding inv_freq to bfloat16 makes a phase error that grows with the position."""
    drafter = DFlashDrafter(small_config())
    positions = torch.tensor([0, 1, 30_000])
    before = drafter.rotary.table(positions)
    after = drafter.to(torch.bfloat16).rotary.table(positions)
    assert after.cos.dtype == torch.float32
    torch.testing.assert_close(before.cos, after.cos, atol=0, rtol=0)


def test_a_drafter_built_on_meta_equals_one_built_directly() -> None:
    config = small_config()
    direct = DFlashDrafter(config)
    with torch.device("meta"):
        late = DFlashDrafter(config)
    late.to_empty(device="cpu")
    for drafter in (direct, late):
        torch.manual_seed(6)
        drafter.init_weights()
    for name, tensor in direct.state_dict().items():
        torch.testing.assert_close(late.state_dict()[name], tensor, atol=0, rtol=0)
    positions = torch.arange(9)
    torch.testing.assert_close(late.rotary.table(positions).sin, direct.rotary.table(positions).sin, atol=0, rtol=0)


def test_every_parameter_gets_a_gradient_from_a_block() -> None:
    config = small_config()
    drafter = DFlashDrafter(config)
    anchors, doc_S = Anchors(torch.tensor([5]), torch.tensor([True])), torch.zeros(8, dtype=torch.int32)
    features = torch.randn(8, len(config.target_layer_ids) * config.hidden_size)
    mask = dense_mask(anchors, doc_S, config.block_size, 8)
    out = drafter(fresh_blocks(config, 1), features, torch.arange(8), torch.arange(5, 9), mask, "sdpa")
    out.square().mul(torch.randn_like(out)).sum().backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 1, [15]),
        (4, 2, [1]),
        (6, 3, [1, 2, 3]),
        (2, 2, [0]),
    ],
)
def test_default_layer_ids(depth: int, layers: int, expected: list[int]) -> None:
    assert default_layer_ids(depth, layers) == expected


def test_the_last_target_layer_cannot_be_tapped() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        small_config(layer_ids=[1, 7])
    with pytest.raises(ValueError, match="distinct"):
        small_config(layer_ids=[1, 1])
    with pytest.raises(ValueError, match="mask_token_id"):
        small_config(mask_token_id=97)


def test_partial_and_multimodal_rope_are_dropped() -> None:
    """speculators #613: a drafter that inherits the target's partial rotation is served with the wrong angles."""
    target = LlamaConfig(
        num_hidden_layers=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 2e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 4],
        },
    )
    config = DFlashConfig.from_target(target, layers=2, block_size=8, mask_token_id=1)
    assert (config.rope_theta, config.rope_parameters) == (2e6, None)
    assert "partial_rotary_factor" not in str(config.to_dict())


def test_nested_text_configs_and_per_layer_rope_are_read() -> None:
    outer = Gemma3Config(text_config={"hidden_size": 64, "num_hidden_layers": 8, "head_dim": 24, "vocab_size": 99})
    config = DFlashConfig.from_target(outer, layers=2, block_size=8, mask_token_id=1)
    full = outer.get_text_config().rope_parameters["full_attention"]
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (64, 24, 8)
    assert config.rope_theta == full["rope_theta"]


def test_gpt2_names_are_read() -> None:
    target = AutoConfig.for_model("gpt2", n_embd=64, n_layer=6, n_head=4, vocab_size=50)
    config = DFlashConfig.from_target(target, layers=2, block_size=8, mask_token_id=1)
    assert (config.hidden_size, config.num_kv_heads, config.head_dim, config.intermediate_size) == (64, 4, 16, 256)
