"""Exported folders: read by the official package and by us, exact in tensors and names, never half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models.export as export_module
from models.dflash import DFlashConfig, DFlashDrafter
from models.export import expected_shapes, export_drafter, load_drafter
from tests.small_drafters import LLAMA3, ROPES, YARN, fresh_blocks, small_config
from tests.training import QWEN3_8B


def exported(out: Path, rope: dict[str, Any] | None = None) -> tuple[DFlashDrafter, Path]:
    torch.manual_seed(0)
    drafter = DFlashDrafter(small_config(rope)).to(torch.bfloat16).eval()
    export_drafter(drafter.state_dict(), drafter.config, out)
    return drafter, out


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@ROPES
def test_the_official_package_loads_it_and_computes_the_same(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    drafter, out = exported(tmp_path / "draft", rope)
    package = pytest.importorskip("dflash.model", reason="loads the folder with the official dflash package")
    official, loading = package.DFlashDraftModel.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    config, length = drafter.config, 120  # beyond the 64 positions that llama3 and yarn count as original
    assert (official.block_size, official.mask_token_id) == (config.block_size, config.mask_token_id)
    assert tuple(official.target_layer_ids) == config.target_layer_ids
    features = torch.randn(length, len(config.target_layer_ids) * config.hidden_size)
    embeddings = fresh_blocks(config, 1)
    with torch.no_grad():
        positions = torch.arange(length + config.block_size)[None]
        theirs = official.eval()(positions, noise_embedding=embeddings[None], target_hidden=features[None])[0]
        loaded = load_drafter(out, torch.float32, "cpu")
        torch.testing.assert_close(loaded.draft(embeddings, features, loaded.new_cache(), length), theirs)


def test_names_dtype_and_values_are_exact(tmp_path: Path) -> None:
    drafter, out = exported(tmp_path / "draft")
    tensors = load_file(out / "model.safetensors")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert set(tensors) == {
        *("fc.weight", "hidden_norm.weight", "norm.weight"),
        *(
            f"layers.{layer}.{name}.weight"
            for layer in range(3)
            for name in (
                *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
                *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            )
        ),
    }
    for name, tensor in drafter.state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        torch.testing.assert_close(tensors[name], tensor, atol=0, rtol=0)


def test_qwen3_8b_has_the_published_tensor_set() -> None:
    shapes = expected_shapes(QWEN3_8B)
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (4096, 20480)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 4096)
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9, 4) == 1.0486


@pytest.mark.parametrize("rope", [None, LLAMA3, YARN])
def test_both_rope_forms_are_written(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    drafter, out = exported(tmp_path / "draft", rope)
    raw = json.loads((out / "config.json").read_text())
    assert raw["rope_parameters"]["rope_theta"] == raw["rope_theta"]
    if rope is None:
        assert raw["rope_scaling"] is None
    else:
        assert raw["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    del raw["rope_parameters"]  # a reader of the older form finds the same
    assert DFlashConfig.from_dict(raw) == drafter.config


def test_a_wrong_tensor_set_is_refused_with_its_names(tmp_path: Path) -> None:
    drafter = DFlashDrafter(small_config())
    state = drafter.state_dict() | {"layers.0.extra": torch.zeros(1), "norm.weight": torch.ones(3)}
    del state["fc.weight"]
    with pytest.raises(ValueError, match=r"missing fc.weight; unknown layers.0.extra; norm.weight is \[3\]"):
        export_drafter(state, drafter.config, tmp_path / "draft")
    state = drafter.state_dict() | {"norm.weight": torch.full((48,), torch.nan)}
    with pytest.raises(ValueError, match="not finite.*norm.weight"):
        export_drafter(state, drafter.config, tmp_path / "draft")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_older_export_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, out = exported(tmp_path / "draft")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(export_module, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        export_drafter(drafter.state_dict(), drafter.config, out)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    load_drafter(out, torch.float32, "cpu")


def test_an_older_export_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    drafter, out = exported(tmp_path / "draft")
    changed = {name: tensor + 1 for name, tensor in drafter.state_dict().items()}
    export_drafter(changed, drafter.config, out)
    torch.testing.assert_close(load_drafter(out, torch.bfloat16, "cpu").norm.weight.data, changed["norm.weight"])
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another folder"):
        export_drafter(changed, drafter.config, out)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json is missing"):
        load_drafter(tmp_path, torch.float32, "cpu")
    _, out = exported(tmp_path / "draft")
    tensors = load_file(out / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(2, 2)}, out / "model.safetensors")
    with pytest.raises(ValueError, match="unknown lm_head.weight"):
        load_drafter(out, torch.float32, "cpu")
    (out / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="damaged"):
        load_drafter(out, torch.float32, "cpu")


def test_architectures_it_does_not_implement_are_refused(tmp_path: Path) -> None:
    _, out = exported(tmp_path / "draft")
    edit(out / "config.json", layer_types=["sliding_attention"] * 3, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act 'gelu', sliding_attention layers"):
        load_drafter(out, torch.float32, "cpu")
