"""The compile cache: where it is, when it is refused, and what a refusal costs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import compile_cache
from launcher.cache_files import damage, network_file_system, read_manifest, write_manifest
from launcher.compile_cache import ActiveCache, share_cache
from launcher.config import Config
from launcher.control import Control
from launcher.errors import RetryableError
from tests.small_caches import FILES, HERE, REBUILT, filled, flip, make_config, start


@pytest.fixture(autouse=True)
def private_caches_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "caches")


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
    cache.close()
    assert not cache.folder.exists()
    assert sorted(path for path in shared.folder.rglob("*")) == before, "the bad cache is left as it was found"


def test_the_first_rank_of_a_node_checks_for_all_of_them(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(config, tmp_path)
    control, cache = Control("127.0.0.1", 0, "test", serve=True), start(config, tmp_path)
    with pytest.raises(RetryableError, match="waited 0 s for the first rank of node 1 to check the compile cache"):
        share_cache(None, control, 1, 0.1)
    monkeypatch.setattr(compile_cache, "activate", lambda *_: pytest.fail("checked once more"))
    assert share_cache(cache, control, 1, 10.0) is cache
    told = share_cache(None, control, 1, 10.0)
    assert (told.environment, told.shared_folder, told.notices) == (cache.environment, cache.folder, [])
    private = ActiveCache(tmp_path / "private", ["compile cache is not used"], private=True)
    share_cache(private, control, 0, 10.0)
    told = share_cache(None, control, 0, 10.0)
    assert told.environment == private.environment and told.shared_folder is None


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


def test_a_large_cache_is_compared_as_well(config: Config, tmp_path: Path) -> None:
    """A flipped byte in 300 MB."""
    cache = start(config, tmp_path)
    large = cache.folder / "triton/large"
    with large.open("wb") as file:
        file.truncate(300 << 20)
    os.utime(large, (0, 0))
    cache.close()
    with large.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"x")
    assert "triton/large has other contents" in start(config, tmp_path).notices[0]


def test_a_run_that_is_killed_after_the_gate_leaves_a_true_manifest(config: Config, tmp_path: Path) -> None:
    """With what was written right before it."""
    folder = start(config, tmp_path).folder
    (folder / "triton/new").write_bytes(b"kernel")
    compile_cache.list_files_soon(folder).join(10)
    assert set(read_manifest(folder).files) == {"triton/new"}
    (folder / "triton/new").write_bytes(b"kern")
    assert "triton/new has 4 bytes instead of 6" in start(config, tmp_path).notices[0]


def test_two_runs_may_close_one_cache_at_once(config: Config, tmp_path: Path) -> None:
    first = filled(config, tmp_path)
    second = start(config, tmp_path)
    (first.folder / "triton/second").write_bytes(b"s")
    os.utime(first.folder / "triton/second", (0, 0))
    second.close()
    first.close()
    assert set(read_manifest(first.folder).files) == {*FILES, "triton/second"}
    assert damage(first.folder, read_manifest(first.folder)) == []
