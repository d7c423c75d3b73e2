"""What a downloaded model may not do. Checkpoints, caches and sockets are in their own tests: `test_checkpoint`
(private files, no pickles), `test_compile_cache` (private folders), `test_cache_bundle` (bundles that reach outside),
`faults/test_stops` (a whole run on one node listens on the loopback address alone)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.config import Config
from models.target_files import load_tokenizer, resolve_target
from models.target_weights import load_config

ROOT = Path(__file__).resolve().parent.parent
CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def model_with_code(folder: Path) -> Path:
    """A model whose config and tokenizer come with Python code, which leaves a file when it runs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "own.py").write_text(CODE.format(marker=str(folder / "marker")))
    return folder


def test_code_that_comes_with_a_model_runs_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = model_with_code(tmp_path / "model")
    trust = Config().target.trust_remote_code
    assert trust is False
    with pytest.raises(ValueError, match="target.model"):
        load_config(folder, trust)
    with pytest.raises(ValueError, match="target.model"):
        load_tokenizer(folder, trust)
    assert not (folder / "marker").exists()
    assert type(load_config(folder, trust_remote_code=True)).__name__ == "OwnConfig"
    assert (folder / "marker").exists(), "the test's code does run where it may"


def test_weights_as_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    torch.save({"weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*.safetensors .* other weight formats are not read"):
        resolve_target(str(tmp_path))


LISTEN = """
import psutil
from launcher.agent import BACKEND, make_rendezvous
from torch.distributed.elastic.rendezvous import RendezvousParameters
rendezvous = make_rendezvous(RendezvousParameters(BACKEND, "", "run", 1, 1))
rendezvous.next_rendezvous()
sockets = [socket for socket in psutil.Process().net_connections("inet") if socket.status == psutil.CONN_LISTEN]
print(*{(socket.laddr.ip, socket.laddr.port == rendezvous.master_port) for socket in sockets})
"""


def test_the_store_of_one_node_listens_to_that_node_alone() -> None:
    words = [sys.executable, "-c", LISTEN]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "('127.0.0.1', True)\n", ended.stderr
