"""A compile cache carried from one root to another on a GPU: FlexAttention forward and backward, hits only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.cache_bundle import import_bundle
from launcher.cache_files import read_manifest, record, write_manifest
from launcher.compile_cache import ActiveCache, activate
from launcher.config import for_device
from launcher.fingerprint import collect
from tests.small_caches import bundle_of, make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

COMPILE = """
import json, os, sys
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": sys.argv[1], "TRITON_CACHE_DIR": sys.argv[2]}
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256)
torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k, v, block_mask=mask).sum().backward()
torch.cuda.synchronize()
print(json.dumps([counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]]))
"""


def compile_counts(cache: ActiveCache) -> list[int]:
    """[hits, misses] of a fresh process that compiles with this cache."""
    done = subprocess.run([sys.executable, "-c", COMPILE, *cache.environment.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_imported_cache_compiles_nothing_on_a_gpu(tmp_path: Path) -> None:
    here = collect()
    assert here["gpu"]
    assert here["driver"]
    cache = activate(for_device(make_config(tmp_path / "caches"), "cuda"), "cuda", here, str(tmp_path))
    assert compile_counts(cache) == [0, 2], "forward and backward"
    write_manifest(cache.folder, record(cache.folder, read_manifest(cache.folder), settled=0))
    import_bundle(bundle_of(cache, tmp_path / "cache.tar"), tmp_path / "there", here)
    imported = activate(for_device(make_config(tmp_path / "there"), "cuda"), "cuda", here, str(tmp_path))
    assert not imported.private
    kernels = set(imported.folder.rglob("*.cubin"))
    assert kernels
    assert compile_counts(imported) == [2, 0]
    assert set(imported.folder.rglob("*.cubin")) == kernels
