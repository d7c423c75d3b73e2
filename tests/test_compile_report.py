"""compile_report.json on a disk without room: training goes on, a dry run says that it has nothing to show."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.compile_report import TurnBook, TurnReport
from launcher.control import Control
from launcher.errors import RetryableError


def turn(rank: int, verified: bool = True) -> TurnReport:
    return TurnReport(rank, "drafter", 1.0, 2.0, 1.0, {}, 0, 1, 0, {"missing": []}, verified)


@pytest.fixture
def books(tmp_path: Path) -> list[TurnBook]:
    """Those of two ranks."""
    control = Control("127.0.0.1", 0, "test", serve=True)
    return [TurnBook(tmp_path / "compile_report.json", control, [0, 1], {"attention": "sdpa"}) for _ in range(2)]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)


def test_the_turns_of_all_ranks_are_in_the_report(books: list[TurnBook], tmp_path: Path) -> None:
    for rank, book in enumerate(books):
        book.add(turn(rank))
    books[0].write(required=True)
    report = json.loads((tmp_path / "compile_report.json").read_text())
    assert report["verified"] and [entry["rank"] for entry in report["turns"]] == [0, 1]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_costs_one_warning_of_all_ranks(
    books: list[TurnBook], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn that is not proved raises by itself, after it was handed in: the disk must not speak for it."""
    for rank, book in enumerate(books):
        book.add(turn(rank, verified=False))
    books[0].write()
    report = tmp_path / "compile_report.json"
    assert caplog.messages == [
        f"{report} lacks this start's turns: No space left on device (each rank's log has its own)"
    ]
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("full_disk")
def test_a_dry_run_that_cannot_write_its_report_has_failed(books: list[TurnBook], tmp_path: Path) -> None:
    books[0].add(turn(0))
    with pytest.raises(RetryableError, match="compile_report.json lacks .*: No space left on device -> make room"):
        books[0].write(required=True)
