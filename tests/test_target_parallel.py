"""A target shared by two ranks gives the features of one; what cannot be shared is refused before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel

from models import target_files
from models.target import load_full_target, load_tapped_target
from models.target_slices import TargetShard, narrow_config, plan_styles, slice_styles, take_slice
from tests.rank_pool import run_ranks
from tests.small_targets import FAMILIES, LAYER_IDS, SMALL, packed_row, save_small, save_with_a_gap

SHARED = ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "mixtral"]
FAMILIES["llama-biased"] = {"attention_bias": True, "mlp_bias": True}


def shard_here() -> TargetShard:
    assert dist.group.WORLD is not None
    return TargetShard(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name)


@torch.no_grad()
def run_shared(folders: list[Path], flex: bool) -> list[tuple[Any, int, Any]]:
    """This rank's features, number of weights and logits, for each model; as arrays, which pass between processes."""
    found = []
    for folder in folders:
        torch.compiler.reset()
        target = load_tapped_target(folder, LAYER_IDS, torch.float32, "cpu", shard=shard_here())
        if flex:
            target.use_packed_attention()
            target.compile_layers(backend="aot_eager")
        size = sum(parameter.numel() for parameter in target.layers.parameters())
        full = load_full_target(folder, torch.float32, "cpu", shard=shard_here())
        features, logits = target(*packed_row(padding=7)), full(packed_row(padding=0)[0][None]).logits
        found.append((features.numpy(), size, logits.numpy()))
    return found


@pytest.mark.parametrize(("families", "flex"), [(SHARED, False), (["gemma2"], True)])
@torch.no_grad()
def test_two_ranks_give_the_features_of_one(families: list[str], flex: bool, tmp_path: Path) -> None:
    folders = [tmp_path / family for family in families]
    for family, folder in zip(families, folders, strict=True):
        save_small(family, folder)
    ranks = run_ranks(2, run_shared, folders, flex)
    assert all(isinstance(rank, list) for rank in ranks), ranks
    for number, folder in enumerate(folders):
        alone = load_tapped_target(folder, LAYER_IDS, torch.float32, "cpu")
        logits = load_full_target(folder, torch.float32, "cpu")(packed_row(padding=0)[0][None]).logits
        for features, size, own_logits in (rank[number] for rank in ranks):
            expected = alone(*packed_row(padding=7))
            torch.testing.assert_close(torch.from_numpy(features), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.from_numpy(own_logits), logits, rtol=1e-3, atol=1e-3)
            assert size < 0.6 * sum(parameter.numel() for parameter in alone.layers.parameters())
        assert (ranks[0][number][0] == ranks[1][number][0]).all()


@torch.no_grad()
def test_random_weights_are_shared_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_files, "_gguf_tokenizer", lambda _gguf: FakeTokenizer())
    folder = target_files.resolve_target("random:tiny")
    ranks = run_ranks(2, run_shared, [folder], False)
    alone = load_tapped_target(folder, LAYER_IDS, torch.float32, "cpu")(*packed_row(padding=7))
    for rank in ranks:
        torch.testing.assert_close(torch.from_numpy(rank[0][0]), alone, rtol=1e-4, atol=1e-4)


class FakeTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("qwen3", {"num_key_value_heads": 1}, 2, "num_key_value_heads 1 of qwen3 cannot be divided by 2 -> one of 1"),
    (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        2,
        "num_key_value_heads 3 .* -> one of 1, 3",
    ),
    ("phi3", {}, 2, "phi3 has a plan with colwise_gather_output"),
    ("mamba", {"state_size": 4, "time_step_rank": 4}, 2, "mamba has no tensor-parallel plan"),
    ("gpt_neox", {"num_key_value_heads": None}, 2, "plan does not fit its weight"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, 2, "wrapped or quantised"),
    ("gemma3", {}, 2, "wrapped or quantised|no tensor-parallel plan"),
]


@pytest.mark.parametrize(("family", "changes", "size", "reason"), REFUSED)
def test_what_cannot_be_shared_is_refused_in_a_line(
    family: str, changes: dict[str, Any], size: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(family, **({} if family == "gemma3" else SMALL) | changes)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("models.target_parallel.read_shard", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=reason) as caught:
        load_tapped_target(tmp_path, [1], torch.float32, "cpu", shard=TargetShard(0, size, "none"))
    assert "topology.target_tp" in str(caught.value) and " -> " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save_with_a_gap(tmp_path)
    with pytest.raises(ValueError, match=r"1 weights are not in .*layers.1.mlp.up_proj"):
        load_tapped_target(tmp_path, [2], torch.float32, "cpu", shard=TargetShard(1, 2, "none"))


def test_slices_of_all_ranks_make_the_whole() -> None:
    tensor = torch.arange(4 * 8 * 6).reshape(4, 8, 6)
    for style, dim in (("colwise", 1), ("rowwise", 2)):
        parts = [take_slice(tensor, [4, 8, 6], style, TargetShard(rank, 2, "")) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), tensor)
    gates, ups = zip(
        *(take_slice(tensor, [4, 8, 6], "packed_colwise", TargetShard(r, 2, "")).chunk(2, 1) for r in (0, 1)),
        strict=True,
    )
    assert torch.equal(torch.cat([*gates, *ups], 1), tensor)


def test_every_sliced_weight_of_a_family_is_in_its_plan() -> None:
    config = AutoConfig.for_model("qwen3_moe", **SMALL | FAMILIES["qwen3_moe"])
    with torch.device("meta"):
        full, narrow = AutoModel.from_config(config), AutoModel.from_config(narrow_config(config, 2))
    sliced = slice_styles(full, narrow, plan_styles(config), 2)
    assert len(sliced) == 6 * config.num_hidden_layers
    assert sliced["layers.0.mlp.experts.gate_up_proj"] == "packed_colwise"
