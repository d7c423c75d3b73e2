"""The compile cache: where it is, when it is refused, what it costs, and how it travels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import cache_command as commands
from launcher import compile_cache
from launcher.cache_bundle import export_caches, import_bundle
from launcher.cache_files import Manifest, damage, network_file_system, read_manifest, record, write_manifest
from launcher.compile_cache import ActiveCache, activate, folder_name, shape_fields
from launcher.config import Config, validate
from launcher.errors import RetryableError, UserError
from launcher.fingerprint import Fingerprint

HERE: Fingerprint = {"torch": "2.11.0+cu130", "torch.git": "7" * 40, "gpu": "NVIDIA H200 sm_90", "kernels": "a" * 64}
REBUILT = HERE | {"torch.git": "8" * 40}
FILES = {"inductor/fxgraph/ab/key/entry": b"graph" * 100, "triton/XYZ/kernel.cubin": b"\x7fELF" * 50}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "caches")


def make_config(root: Path, **drafter: object) -> Config:
    return validate({"compile": {"cache_dir": str(root)}, "target": {"model": "random:tiny"}, "drafter": drafter})


def start(config: Config, tmp_path: Path, fingerprint: Fingerprint = HERE) -> ActiveCache:
    return activate(config, fingerprint, str(tmp_path))


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


def test_both_compilers_write_into_one_private_folder_per_build_and_shape(config: Config, tmp_path: Path) -> None:
    cache = start(config, tmp_path)
    assert not cache.private
    assert cache.notices == []
    assert cache.folder.parent == tmp_path / "caches"
    assert cache.environment == {
        "TORCHINDUCTOR_CACHE_DIR": str(cache.folder / "inductor"),
        "TRITON_CACHE_DIR": str(cache.folder / "triton"),
    }
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert start(config, tmp_path, REBUILT).folder != cache.folder
    assert start(make_config(tmp_path / "caches", block_size=8), tmp_path).folder != cache.folder
    assert start(config, tmp_path, HERE | {"kernels": "b" * 64}).folder == cache.folder


def test_the_shape_ignores_what_does_not_change_a_graph() -> None:
    base = {"target": {"model": "demo"}}
    same = validate(base | {"train": {"lr": 1e-3, "max_steps": 3}, "runtime": {"run_dir": "elsewhere"}})
    assert shape_fields(same) == shape_fields(validate(base))
    assert shape_fields(validate(base | {"train": {"anchors": 7}})) != shape_fields(validate(base))


def test_a_finished_run_leaves_a_manifest_that_the_next_start_accepts(config: Config, tmp_path: Path) -> None:
    cache = filled(config, tmp_path)
    manifest = read_manifest(cache.folder)
    assert set(manifest.files) == set(FILES)
    assert manifest.size == sum(map(len, FILES.values()))
    assert manifest.fingerprint == HERE
    again = start(config, tmp_path)
    assert (again.folder, again.private, again.notices) == (cache.folder, False, [])


def test_scratch_and_unfinished_files_are_not_listed(config: Config, tmp_path: Path) -> None:
    cache = start(config, tmp_path)
    for name in (
        "inductor/locks/a.lock",
        "inductor/.1.2.tmp",
        "triton/tmp.pid_1/x",
        "inductor/ab/k.best_config",
        "triton/new",
    ):
        (cache.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.folder / name).write_bytes(b"x")
        if name != "triton/new":
            os.utime(cache.folder / name, (0, 0))
    cache.close()
    assert read_manifest(cache.folder).files == {}


def truncate(folder: Path) -> None:
    with (folder / "triton/XYZ/kernel.cubin").open("r+b") as file:
        file.truncate(3)


def flip(folder: Path) -> None:
    path = folder / "inductor/fxgraph/ab/key/entry"
    path.write_bytes(b"Graph" + path.read_bytes()[5:])


def lose_file(folder: Path) -> None:
    (folder / "triton/XYZ/kernel.cubin").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": [1, 2')


def open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def claim_other_build(folder: Path) -> None:
    write_manifest(folder, read_manifest(folder).model_copy(update={"fingerprint": REBUILT}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (truncate, "kernel.cubin has 3 bytes instead of 200"),
        (flip, "entry has other contents"),
        (lose_file, "kernel.cubin: No such file"),
        (lose_manifest, "has files but no manifest"),
        (spoil_manifest, "manifest.json is damaged"),
        (open_to_others, "others may write to it"),
        (claim_other_build, "torch 2.11.0 is another build"),
    ],
)
def test_a_bad_cache_costs_one_warning_and_a_private_cold_one(
    config: Config, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    shared = filled(config, tmp_path)
    spoil(shared.folder)
    before = sorted(path for path in shared.folder.rglob("*"))
    cache = start(config, tmp_path)
    assert cache.private
    assert len(cache.notices) == 1
    assert str(shared.folder) in cache.notices[0]
    assert said in cache.notices[0]
    assert start(config, tmp_path).folder == cache.folder, "all ranks of a start share the private cache"
    cache.close()
    assert not cache.folder.exists()
    assert sorted(path for path in shared.folder.rglob("*")) == before, "the bad cache is left as it was found"


def test_a_root_that_cannot_hold_folders_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = start(make_config(tmp_path / "file/caches"), tmp_path)
    assert cache.private
    assert "Not a directory" in cache.notices[0]
    cache.close()


def test_a_full_disk_costs_one_warning(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MIN_FREE_BYTES", 1 << 60)
    cache = start(config, tmp_path)
    assert cache.private
    assert "are free on its disk" in cache.notices[0]
    cache.close()


def test_without_any_room_the_run_says_so(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compile_cache, "private_folder", lambda session: tmp_path / "file/private")
    with pytest.raises(RetryableError, match="compile.cache_dir"):
        start(make_config(tmp_path / "file/caches"), tmp_path)


def test_a_cold_cache_after_a_rebuilt_wheel_names_the_build(config: Config, tmp_path: Path) -> None:
    filled(config, tmp_path)
    assert "torch 2.11.0 is another build than last time" in start(config, tmp_path, REBUILT).notices[0]


def test_network_file_systems_are_told_from_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/", "ext4"), Mount(str(tmp_path / "home"), "nfs4"), Mount(str(tmp_path / "home/scratch"), "xfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    (tmp_path / "home/scratch").mkdir(parents=True)
    assert network_file_system(tmp_path) is None
    assert network_file_system(tmp_path / "home") == f"nfs4 ({tmp_path / 'home'})"
    assert network_file_system(tmp_path / "home/scratch") is None
    assert "is slow" in start(make_config(tmp_path / "home"), tmp_path).notices[0]


def test_two_runs_may_close_one_cache_at_once(config: Config, tmp_path: Path) -> None:
    first = filled(config, tmp_path)
    second = start(config, tmp_path)
    (first.folder / "triton/second").write_bytes(b"s")
    os.utime(first.folder / "triton/second", (0, 0))
    second.close()
    first.close()
    assert set(read_manifest(first.folder).files) == {*FILES, "triton/second"}
    assert damage(first.folder, read_manifest(first.folder)) == []


def bundle_of(cache: ActiveCache, out: Path) -> Path:
    export_caches({cache.folder: read_manifest(cache.folder)}, out)
    return out


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
    manifest = Manifest(fingerprint=HERE, shape={"target.model": "m"}, built_by="x")
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


def cache_cli(*args: str, root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = commands.main(["--cache-dir", str(root), *args])
    return code, capsys.readouterr().out


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a cache of this build and an older one of another build, used 10 days ago."""
    monkeypatch.setattr(commands, "collect", lambda: HERE)
    filled(make_config(tmp_path / "caches"), tmp_path)
    old = start(make_config(tmp_path / "caches"), tmp_path, REBUILT)
    old.close()
    past = time.time() - 10 * 86400
    write_manifest(old.folder, read_manifest(old.folder).model_copy(update={"last_use": past}))
    os.utime(old.folder / "in-use.lock", (past, past))
    return tmp_path / "caches"


def test_ls_marks_the_caches_of_this_build(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = cache_cli("ls", root=root, capsys=capsys)
    lines = out.splitlines()
    assert code == 0
    assert "2 caches" in lines[0]
    assert sum(line.startswith("* ") and "2 files" in line and "torch 2.11.0+cu130" in line for line in lines) == 1


def test_verify_names_the_damage_and_prune_damaged_removes_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_cli("verify", root=root, capsys=capsys)[0] == 0
    bad = next(path for path in root.iterdir() if read_manifest(path).files)
    flip(bad)
    code, out = cache_cli("verify", root=root, capsys=capsys)
    assert code == 78
    assert "entry has other contents" in out
    with pytest.raises(UserError, match="damaged"):
        cache_cli("export", str(root / "x.tar"), bad.name, root=root, capsys=capsys)
    assert "removed" in cache_cli("prune", "--damaged", root=root, capsys=capsys)[1]
    assert not bad.exists()
    assert len(list(root.iterdir())) == 1


@pytest.mark.parametrize(
    ("args", "left"), [(("--keep", "1"), 1), (("--older-than", "5"), 1), (("--older-than", "30"), 2)]
)
def test_prune_keeps_the_most_recently_used(
    root: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], left: int
) -> None:
    (root / "not a cache").mkdir()
    assert cache_cli("prune", *args, root=root, capsys=capsys)[0] == 0
    kept = [path for path in root.iterdir() if path.name != "not a cache"]
    assert len(kept) == left
    assert any(read_manifest(path).fingerprint == HERE for path in kept)


def test_prune_spares_a_cache_in_use(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = start(make_config(root), tmp_path)
    assert (
        f"kept {running.folder.name}: a run uses it" in cache_cli("prune", "--keep", "0", root=root, capsys=capsys)[1]
    )
    running.close()
    assert "removed" in cache_cli("prune", "--keep", "0", root=root, capsys=capsys)[1]


def test_export_and_import_by_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(tmp_path / "b.tar")
    assert cache_cli("export", bundle, root=root, capsys=capsys)[0] == 0
    assert "2 files" in cache_cli("import", bundle, root=tmp_path / "there", capsys=capsys)[1]
    assert len(list((tmp_path / "there").iterdir())) == 1, "the other build's cache stays at home"
    with pytest.raises(UserError, match="no cache of this environment"):
        cache_cli("export", bundle, root=tmp_path / "empty", capsys=capsys)


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
