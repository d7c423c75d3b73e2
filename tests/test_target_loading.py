"""Loading holds no second copy of a model on the host: files are mapped, and go to the device tensor by tensor."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.target import TappedTarget, load_tapped_target
from models.target_slices import TargetShard
from tests.rank_pool import run_ranks

LAYERS = 12
# Allocators and imports move by a few megabytes.
SLACK = 24e6


def own_memory() -> int:
    """Bytes of this process that no other one shares and no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def load(folder: Path, dtype: torch.dtype, shard: TargetShard | None) -> tuple[int, int]:
    """Bytes of the weights, and the most that loading them took."""
    TappedTarget.check_isolation = lambda _self: None  # pyrefly: ignore[bad-assignment]
    done, peak, before = threading.Event(), [0], own_memory()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], own_memory())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    target = load_tapped_target(folder, [LAYERS - 1], dtype, "cpu", shard=shard)
    done.set()
    thread.join()
    return sum(parameter.nbytes for parameter in target.parameters()), max(peak[0], own_memory()) - before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 190 MB in float32, in several files."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "vocab_size": 100}
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=8, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="60MB")
    return folder


@pytest.mark.parametrize("shard", [None, TargetShard(1, 2, "none")], ids=["whole", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_takes_no_more_than_the_weights(dtype: torch.dtype, shard: TargetShard | None, folder: Path) -> None:
    ((size, taken),) = run_ranks(1, load, folder, dtype, shard)
    assert size > 40e6
    # In the files' own format a whole model is the mapped file itself, which all targets of a node share.
    shared = size if shard is None and dtype is torch.float32 else 0
    assert taken < size - shared + SLACK
