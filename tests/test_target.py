"""The tapped target equals separate forwards of the whole model, and is refused where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.target import decoder_layers, load_tapped_target
from tests.small_targets import DOCUMENTS, FAMILIES, LAYER_IDS, SMALL, packed_row, save_small, save_with_a_gap


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_features_equal_separate_forwards(family: str, tmp_path: Path) -> None:
    model = save_small(family, tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    ids, doc, positions = packed_row(padding=7)
    features = target(ids, doc, positions)
    assert features.shape == (36, 3 * 32)
    for document in range(len(DOCUMENTS)):
        own = model(ids[doc == document][None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([own[layer_id + 1][0] for layer_id in LAYER_IDS], dim=-1)
        torch.testing.assert_close(features[doc == document], expected, rtol=1e-4, atol=1e-4)


def test_last_layer_is_tapped_before_the_final_norm(tmp_path: Path) -> None:
    model = save_small("llama", tmp_path)
    seen = []
    decoder_layers(model.get_decoder())[5].register_forward_hook(lambda _m, _i, output: seen.append(output))
    ids, doc, positions = packed_row(padding=0)
    model(ids[doc == 0][None], use_cache=False)
    features = load_tapped_target(tmp_path, [5], torch.float32, "cpu")(ids, doc, positions)
    torch.testing.assert_close(features[doc == 0], seen[0][0], rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    save_small("qwen3", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    ids, doc, positions = packed_row(padding=20)
    once = target(ids, doc, positions)
    again = target(torch.where(doc < 0, 0, ids), doc, torch.where(doc < 0, 0, positions))
    assert bool(once.isfinite().all())
    torch.testing.assert_close(once[doc >= 0], again[doc >= 0], rtol=0, atol=0)


def test_only_layers_up_to_the_last_tap_are_loaded(tmp_path: Path) -> None:
    save_small("gemma3_text", tmp_path)
    target = load_tapped_target(tmp_path, [1, 3], torch.bfloat16, "cpu")
    assert len(target.layers) == 4
    names = [name for name, _ in target.named_parameters()]
    assert not any("lm_head" in name or ".4." in name for name in names)
    for parameter in target.parameters():
        assert not parameter.requires_grad and not parameter.is_meta and parameter.dtype is torch.bfloat16


def test_composite_model_is_tapped_in_its_text_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {**SMALL, "head_dim": 8, "sliding_window": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    ids, doc, positions = packed_row(padding=3)
    features = load_tapped_target(tmp_path, [2], torch.float32, "cpu")(ids, doc, positions)
    expected = model(ids[doc == 1][None], output_hidden_states=True, use_cache=False).hidden_states[3][0]
    torch.testing.assert_close(features[doc == 1], expected, rtol=1e-4, atol=1e-4)


def test_model_that_leaks_between_documents_is_refused(tmp_path: Path) -> None:
    # A recurrent layer carries its state from one packed document into the next.
    config = AutoConfig.for_model("mamba", **{**SMALL, "state_size": 4, "time_step_rank": 4})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="see each other"):
        load_tapped_target(tmp_path, [2], torch.float32, "cpu")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save_with_a_gap(tmp_path)
    with pytest.raises(ValueError, match=r"1 weights are not in .*layers.1.mlp.up_proj"):
        load_tapped_target(tmp_path, [2], torch.float32, "cpu")
    load_tapped_target(tmp_path, [0], torch.float32, "cpu")  # the gap lies above the last tap


def test_cut_off_weights_are_refused(tmp_path: Path) -> None:
    save_small("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot load the weights in") as caught:
        load_tapped_target(tmp_path, [2], torch.float32, "cpu")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("layer_ids", [[6], [-1], [1, 1]])
def test_impossible_layer_ids(layer_ids: list[int], tmp_path: Path) -> None:
    save_small("llama", tmp_path)
    with pytest.raises(ValueError, match=r"target.layer_ids: .* distinct layers out of 0..5"):
        load_tapped_target(tmp_path, layer_ids, torch.float32, "cpu")


def test_compiled_layers_give_the_same_features(tmp_path: Path) -> None:
    save_small("qwen3", tmp_path)
    target = load_tapped_target(tmp_path, LAYER_IDS, torch.float32, "cpu")
    row = packed_row(padding=7)
    eager = target(*row)
    target.compile_layers(backend="aot_eager")
    torch.testing.assert_close(target(*row), eager)
