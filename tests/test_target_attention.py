"""The target's packed attention: tiles against the dense predicate, FlexAttention against SDPA, whole families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from models.masks import TILE, Tiles
from models.target import load_tapped_target
from models.target_attention import attention_starts, causal_mask, causal_tiles
from tests.small_targets import FAMILIES, LAYER_IDS, packed_row, save_small

# Documents by length, then padding.
ROWS = [([300], 0), ([128, 128], 0), ([1, 127, 129, 3], 40), ([200, 56], 128), ([10], 118), ([7], 1)]
WINDOWS = [None, 1, 4, 128, 150]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Every family compiles transformers' one method anew; without this they would share its recompile limit."""
    torch.compiler.reset()
    torch.set_num_threads(1)


def make_doc(lengths: list[int], padding: int) -> Tensor:
    numbers = torch.tensor([*range(len(lengths)), -1])
    return torch.repeat_interleave(numbers, torch.tensor([*lengths, padding])).int()


def visible(doc: Tensor, window: int | None) -> Tensor:
    """The predicate itself, bool [S, S]."""
    index = torch.arange(len(doc))
    behind = index[:, None] - index[None, :]
    allowed = (behind >= 0) & (doc[:, None] == doc[None, :]) & ((doc[:, None] >= 0) | (behind == 0))
    return allowed if window is None else allowed & (behind < window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("lengths", "padding"), ROWS)
def test_tiles_are_those_of_the_predicate(lengths: list[int], padding: int, window: int | None) -> None:
    doc = make_doc(lengths, padding)
    wanted, size = visible(doc, window), -len(doc) % TILE
    grid = torch.nn.functional.pad(wanted, (0, size, 0, size)).unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    some, whole = grid.any(1).any(-1), grid.all(1).all(-1)
    tables, first = causal_tiles(doc, window)
    tiles = Tiles(*map(torch.stack, tables))
    by_row, by_column = (tiles.kv_count, tiles.kv_index), (tiles.q_count, tiles.q_index)
    for (counts, indices), turned in ((by_row, False), (by_column, True)):
        for kind, expected in enumerate((some & ~whole, whole)):
            found = torch.zeros_like(some)
            for row, count in enumerate(counts[kind]):
                listed = indices[kind, row, :count].long()
                assert torch.equal(listed, listed.unique()), "a tile comes twice, or out of order"
                found[row, listed] = True
            assert torch.equal(found.mT if turned else found, expected)
        assert int(indices.min()) >= 0 and int(indices.max()) < len(some)
    assert torch.equal(wanted.int().argmax(1), attention_starts(doc, window))
    assert len(first) % TILE == 0 and int(first[len(doc) :].sum()) == len(first[len(doc) :]) * len(first)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "softcap", "window"),
    [(4, 4, None, None), (6, 2, None, 100), (4, 1, 2.0, None), (4, 1, 2.0, 100)],
)
@torch.no_grad()
def test_compiled_flex_equals_the_dense_reference(
    heads: int, kv_heads: int, softcap: float | None, window: int | None
) -> None:
    doc = make_doc([150, 30, 70], 20)
    q, k, v = (2 * torch.randn(1, count, len(doc), 16) for count in (heads, kv_heads, kv_heads))

    def cap(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    out = compiled(q, k, v, score_mod=cap, block_mask=causal_mask(doc, window), enable_gqa=heads != kv_heads)
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).mT / 4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible(doc, window), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(heads // kv_heads, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_gives_stock_features(family: str, tmp_path: Path) -> None:
    """Compiled down to ATen; Inductor's kernels are compared above, where they take seconds and not minutes."""
    model = save_small(family, tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    target.use_packed_attention()
    target.compile_layers(backend="aot_eager")
    ids, doc, positions = packed_row(padding=7)
    features = torch.full((36, 3 * 32), torch.nan)
    assert target(ids, doc, positions, out=features) is features
    for document in range(3):
        own = model(ids[doc == document][None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([own[layer_id + 1][0] for layer_id in LAYER_IDS], dim=-1)
        torch.testing.assert_close(features[doc == document], expected, rtol=1e-4, atol=1e-4)
    assert bool(features.isfinite().all())


def test_another_row_compiles_nothing(tmp_path: Path) -> None:
    save_small("gemma2", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    target.use_packed_attention()
    target.compile_layers(backend="aot_eager")
    ids, doc, positions = packed_row(padding=7)
    target(ids, doc, positions)
    with torch._dynamo.config.patch(error_on_recompile=True):
        target(ids.flip(0), torch.zeros_like(doc), torch.arange(36))


def test_uncompiled_flex_is_refused(tmp_path: Path) -> None:
    save_small("llama", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    target.use_packed_attention()
    with pytest.raises(RuntimeError, match="must run compiled"):
        target(*packed_row(padding=0))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {"state_size": 4, "time_step_rank": 4}, "does not run FlexAttention"),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    ("llama4_text", {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2}, "in chunks"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_what_flex_cannot_serve_is_refused_with_a_way_out(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.target.TappedTarget.check_isolation", lambda _self: None)
    monkeypatch.setitem(FAMILIES, family, changes)
    save_small(family, tmp_path)
    target = load_tapped_target(tmp_path, [1], torch.float32, "cpu")
    with pytest.raises(ValueError, match=reason) as caught:
        target.use_packed_attention()
    assert "target.attention=sdpa" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_wrong_mask_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small("llama", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    monkeypatch.setattr("models.target_attention.attention_starts", lambda doc, _window: torch.zeros_like(doc).long())
    with pytest.raises(ValueError, match="other features"):
        target.use_packed_attention()
