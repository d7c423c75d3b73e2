"""A start that waits for another one's rows or conversion: how long, and what it says in the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from launcher.config import validate
from launcher.data import prepare_rows
from launcher.deadlines import lock_patience
from launcher.errors import RetryableError
from launcher.rank import describe_models
from models import target_files
from tests.small_tokenizer import small_tokenizer
from tests.test_data import options, write_chats


def test_rows_that_another_start_packs_for_too_long_are_a_retry(tmp_path: Path) -> None:
    data, tokenizer, cache = options(write_chats(tmp_path / "chats.jsonl")), small_tokenizer(), tmp_path / "cache"
    prepare_rows(data, tokenizer, cache)
    (folder,) = (path for path in (cache / "data").iterdir() if path.is_dir())
    shutil.rmtree(folder)
    with FileLock(f"{folder}.lock"), pytest.raises(RetryableError) as caught:
        prepare_rows(data, tokenizer, cache, patience=0.1)
    assert caught.value.code == 75 and str(folder) in caught.value.what and "lock" in caught.value.fix


def test_a_target_that_another_start_converts_for_too_long_is_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_files, "_write_and_rename", lambda folder, write: None)
    config = validate({"target": {"model": "random:tiny"}, "runtime": {"load_timeout": 0.2}})
    folder = target_files.resolve_target("random:tiny")
    with FileLock(f"{folder}.lock"), pytest.raises(RetryableError, match="waited 0 s for another process to make"):
        describe_models(config)


def test_the_wait_ends_before_the_phase_around_it() -> None:
    runtime = validate({"target": {"model": "random:tiny"}, "runtime": {"load_timeout": 100}}).runtime
    assert 50 < lock_patience(runtime) < 100
