"""The word `cache`: ls, verify, prune, export, import."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launcher import cache_command as commands
from launcher.cache_files import read_manifest, write_manifest
from launcher.errors import UserError
from tests.small_caches import HERE, REBUILT, filled, flip, make_config, start


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


@pytest.mark.parametrize("args", [("--keep", "-1"), ("--older-than", "-1"), ("--older-than", "nan")])
def test_prune_refuses_less_than_nothing(root: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"argument {args[0]}: {args[1]} is ") as refused:
        cache_cli("prune", *args, root=root, capsys=capsys)
    assert refused.value.code == 78 and "\n" not in str(refused.value)
    assert len(list(root.iterdir())) == 2


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
