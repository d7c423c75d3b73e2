"""A file is written whole or not at all, and what makes room takes nobody's place."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from launcher.whole_files import aside_of, write_whole


def test_a_file_that_the_disk_does_not_take_leaves_the_former_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "status.json"
    write_whole(file, "old")

    def half(path: Path, text: str) -> None:
        with path.open("w") as opened:
            opened.write(text[:1])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", half)
        write_whole(file, "new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["status.json"])
    write_whole(file, "new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("new", ["status.json"])


@pytest.mark.parametrize("readers_first", [False, True])
def test_a_file_and_its_name_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers_first: bool) -> None:
    done, fsync, replace = list[str](), os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix or "folder")
        fsync(descriptor)

    def replaced(source: Path, to: Path) -> None:
        done.append("renamed")
        replace(source, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_whole(tmp_path / "status.json", "text", readers_first)
    assert done == (["renamed", ".json", "folder"] if readers_first else [".tmp", "renamed", "folder"])


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", lambda descriptor: refuse(errno.EINVAL))
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    monkeypatch.setattr(os, "fsync", lambda descriptor: refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        write_whole(tmp_path / "file", "other")
    assert ((tmp_path / "file").read_text(), os.listdir(tmp_path)) == ("text", ["file"])


def test_a_name_that_is_taken_by_a_folder_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "taken", "text")
    assert os.listdir(tmp_path) == ["taken"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing/file", "text")


def test_readers_and_other_writers_see_whole_files_alone(tmp_path: Path) -> None:
    file, texts = tmp_path / "file", ["a" * 50_000, "b" * 70_000, "c" * 90_000]
    write_whole(file, texts[0])
    writers = [
        threading.Thread(target=lambda text=text: [write_whole(file, text) for _ in range(100)]) for text in texts
    ]
    for writer in writers:
        writer.start()
    seen = [file.read_text() for _ in range(100)]
    for writer in writers:
        writer.join()
    assert {*seen, file.read_text()} <= set(texts)
    assert os.listdir(tmp_path) == ["file"]


def test_what_makes_room_takes_the_first_free_name(tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    assert aside_of(path).name == "step-2.old-1"
    (tmp_path / "step-2.old-1").mkdir()
    (tmp_path / "step-2.old-2").touch()
    (tmp_path / "step-2.old-4").touch()
    assert aside_of(path) == tmp_path / "step-2.old-3"
