"""Bundles of compile caches: what they bring, what is refused, and that nothing compiles again."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.cache_bundle import import_bundle
from launcher.cache_files import Manifest, read_manifest, record, write_manifest
from launcher.cache_key import folder_name
from launcher.compile_cache import ActiveCache
from launcher.config import Config
from launcher.errors import UserError
from tests.small_caches import FILES, HERE, REBUILT, bundle_of, filled, make_config, start


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "caches")


def test_a_bundle_brings_every_file_and_is_for_its_owner_only(config: Config, tmp_path: Path) -> None:
    cache = filled(config, tmp_path)
    bundle = bundle_of(cache, tmp_path / "cache.tar")
    assert bundle.stat().st_mode & 0o777 == 0o600
    import_bundle(bundle, tmp_path / "there", HERE)
    imported = start(make_config(tmp_path / "there"), tmp_path)
    assert (imported.private, imported.notices) == (False, [])
    assert {path: (imported.folder / path).read_bytes() for path in FILES} == FILES
    import_bundle(bundle, tmp_path / "there", HERE)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [imported.folder.name], "no staging folder is left"


def test_a_bundle_of_another_build_is_refused_with_the_fields(config: Config, tmp_path: Path) -> None:
    bundle = bundle_of(filled(config, tmp_path), tmp_path / "cache.tar")
    with pytest.raises(UserError, match="torch 2.11.0 is another build") as refused:
        import_bundle(bundle, tmp_path / "there", REBUILT)
    assert refused.value.code == 78
    assert list((tmp_path / "there").iterdir()) == []


def hostile(
    path: str = "triton/k", kind: bytes = tarfile.REGTYPE, stored: str | None = None, listed: bool = True
) -> bytes:
    """A bundle with one file of content b"evil", listed and stored as asked."""
    manifest = Manifest(fingerprint=HERE, shape={"model": "m"}, built_by="x")
    name = folder_name(HERE, manifest.shape)
    entry = {"size": 4, "mtime_ns": 0, "sha256": "fc6b2a1fdbbd9ba85bdd4e4a0ab9ff0ff3d6d6dd1ee3ef8d7c1bf3a8ee7dbb91"}
    index = {"caches": {name: manifest.model_dump() | {"files": {path: entry} if listed else {}}}}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member_name, content, member_kind in (
            ("bundle.json", json.dumps(index).encode(), tarfile.REGTYPE),
            (stored or f"{name}/{path}", b"evil", kind),
        ):
            member = tarfile.TarInfo(member_name)
            member.size, member.type, member.linkname = len(content), member_kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (hostile("../../escape"), "leaves its cache"),
        (hostile("/etc/cron.d/x"), "leaves its cache"),
        (hostile("triton/../../x"), "leaves its cache"),
        (hostile("elsewhere/x"), "leaves its cache"),
        (hostile(kind=tarfile.SYMTYPE), "does not belong"),
        (hostile(kind=tarfile.LNKTYPE), "does not belong"),
        (hostile(kind=tarfile.CHRTYPE), "does not belong"),
        (hostile(stored="../escape"), "does not belong"),
        (hostile(listed=False), "does not belong"),
        (hostile(), "other contents"),
        (hostile()[: hostile().index(b"evil") - 512], "lacks 1 files|not a whole"),
        (b"no tar file at all", "not a whole cache bundle"),
    ],
)
def test_a_hostile_or_broken_bundle_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bundle").write_bytes(content)
    with pytest.raises(UserError, match=said):
        import_bundle(tmp_path / "bundle", tmp_path / "root/there", HERE)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["there"]
    assert list((tmp_path / "root/there").iterdir()) == []


COMPILE = """
import json, os, sys
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": sys.argv[1], "TRITON_CACHE_DIR": sys.argv[2]}
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import torch
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.compile(lambda x: (x.sin() * 2).cos(), fullgraph=True, dynamic=False)(torch.ones(8))
print(json.dumps([counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]]))
"""


def compile_counts(cache: ActiveCache) -> list[int]:
    """[hits, misses] of a fresh process that compiles with this cache."""
    done = subprocess.run([sys.executable, "-c", COMPILE, *cache.environment.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_imported_cache_compiles_nothing(config: Config, tmp_path: Path) -> None:
    cache = start(config, tmp_path)
    assert compile_counts(cache) == [0, 1]
    write_manifest(cache.folder, record(cache.folder, read_manifest(cache.folder), settled=0))
    import_bundle(bundle_of(cache, tmp_path / "cache.tar"), tmp_path / "there", HERE)
    imported = start(make_config(tmp_path / "there"), tmp_path)
    files = set(imported.folder.rglob("*.so"))
    assert files
    assert compile_counts(imported) == [1, 0]
    assert set(imported.folder.rglob("*.so")) == files, "no C++ compiler ran"
