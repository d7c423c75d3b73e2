"""Helpers: compile caches of two files, as runs leave them, and what spoils or carries them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from launcher.cache_bundle import export_caches
from launcher.cache_files import read_manifest
from launcher.compile_cache import ActiveCache, activate
from launcher.config import Config, for_device, validate
from launcher.fingerprint import Fingerprint

HERE: Fingerprint = {"torch": "2.11.0+cu130", "torch.git": "7" * 40, "gpu": "NVIDIA H200 sm_90", "kernels": "a" * 64}
REBUILT = HERE | {"torch.git": "8" * 40}
FILES = {"inductor/fxgraph/ab/key/entry": b"graph" * 100, "triton/XYZ/kernel.cubin": b"\x7fELF" * 50}


def make_config(root: Path, **drafter: object) -> Config:
    return validate({"compile": {"cache_dir": str(root)}, "target": {"model": "random:tiny"}, "drafter": drafter})


def start(config: Config, tmp_path: Path, fingerprint: Fingerprint = HERE) -> ActiveCache:
    return activate(for_device(config, "cpu"), "cpu", fingerprint, str(tmp_path))


def filled(config: Config, tmp_path: Path) -> ActiveCache:
    """A cache as one finished run leaves it."""
    cache = start(config, tmp_path)
    for path, content in FILES.items():
        target = cache.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        os.utime(target, (time.time() - 60,) * 2)
    cache.close()
    return cache


def flip(folder: Path) -> None:
    path = folder / "inductor/fxgraph/ab/key/entry"
    path.write_bytes(b"Graph" + path.read_bytes()[5:])


def bundle_of(cache: ActiveCache, out: Path) -> Path:
    export_caches({cache.folder: read_manifest(cache.folder)}, out)
    return out
