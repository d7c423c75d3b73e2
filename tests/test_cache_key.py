"""What names a compile cache: the same for all spellings of the same kernels, another for other kernels."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cache_bundle import import_bundle
from launcher.cache_files import read_manifest
from launcher.cache_key import folder_name, shape_fields
from launcher.config import for_device, validate
from models.shapes import SHAPES
from tests.small_caches import FILES, HERE, bundle_of, filled, make_config, start


def key(device: str = "cpu", model: str = "random:tiny", **sections: dict[str, Any]) -> str:
    """The folder of a run on `device`."""
    sections["target"] = {"model": model} | sections.get("target", {})
    return folder_name(HERE, shape_fields(for_device(validate(sections), device), device))


def put_model(folder: Path, **changes: object) -> Path:
    """A folder with the config.json of the tiny shape as transformers writes it, with more than the sizes."""
    folder.mkdir(parents=True)
    values = SHAPES["tiny"] | {"transformers_version": "5.0", "num_experts": None, "eos_token_id": 0} | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "spelled",
    [
        {"runtime": {"device": "cpu", "run_dir": "elsewhere"}},
        {"drafter": {"attention": "sdpa"}},
        {"target": {"layer_ids": [1, 2, 3, 4, 5]}},
        {"target": {"dtype": "float32", "attention": "sdpa", "compile": False}},
        {"train": {"precision": "float32", "lr": 1e-3, "max_steps": 3}},
    ],
    ids=str,
)
def test_the_spelling_of_an_option_does_not_count(spelled: dict[str, Any]) -> None:
    assert key(**spelled) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"drafter": {"block_size": 8}},
        {"drafter": {"layers": 4}},
        {"train": {"anchors": 7}},
        {"target": {"layer_ids": [1, 2, 3, 4, 6]}},
        {"target": {"compile": True}},
        {"drafter": {"attention": "flex"}},
        {"model": "random:qwen3-8b"},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_what_decides_the_kernels_counts(other: dict[str, Any]) -> None:
    assert key(**other) != key()


def test_a_target_counts_by_its_sizes_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = put_model(tmp_path / "here/m"), put_model(tmp_path / "there/n", _name_or_path="/old")
    monkeypatch.chdir(here.parent)
    assert {key(model=name) for name in ("./m", str(here), str(there), f"random:{here}/config.json")} == {key()}
    assert "-qwen3-64x8-" in key()
    assert key(model=str(put_model(tmp_path / "wider", intermediate_size=256))) != key()
    experts = put_model(tmp_path / "experts", num_experts=8, moe_intermediate_size=32)
    assert key(model=str(experts)) != key()


def test_a_target_of_unknown_shape_counts_by_its_bare_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.gguf").write_bytes(b"GGUF")
    assert key(model=str(tmp_path / "a/m.gguf")) == key(model=str(tmp_path / "b/m.gguf"))
    assert "-m.gguf-" in key(model=str(tmp_path / "a/m.gguf"))


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has one model."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/someone/small/resolve/v1/config.json" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(SHAPES["tiny"]).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
    yield
    server.shutdown()
    server.server_close()


def test_a_hub_name_has_its_shape_before_it_is_fetched(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first start would fill another folder than all later ones."""
    small = {"model": "someone/small", "revision": "v1"}
    assert key(target=small) == key()
    assert "-small-" in key(target=small | {"revision": "v2"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "-small-" in key(target=small)


def test_a_node_that_keeps_the_model_elsewhere_uses_an_imported_cache(tmp_path: Path) -> None:
    config = make_config(tmp_path / "caches")
    target = config.target.model_copy(update={"model": str(put_model(tmp_path / "models/m"))})
    cache = filled(config.model_copy(update={"target": target}), tmp_path)
    import_bundle(bundle_of(cache, tmp_path / "cache.tar"), tmp_path / "there", HERE)
    elsewhere = target.model_copy(update={"model": str(put_model(tmp_path / "elsewhere/m-copy"))})
    other = start(make_config(tmp_path / "there").model_copy(update={"target": elsewhere}), tmp_path)
    assert set(read_manifest(other.folder).files) == set(FILES)
