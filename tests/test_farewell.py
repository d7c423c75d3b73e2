"""How a rank ends where its last words cannot be said or kept: no store any more, no room on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from launcher import farewell, outcome
from launcher.errors import ExitCode, StopRequested, UserError
from launcher.farewell import Farewell
from launcher.outcome import SUPERVISED, failure_code, record, report
from launcher.rank_log import RankLog
from launcher.rank_state import Phase, RankState, Stop
from launcher.status import Status, read_status, write_status
from launcher.topology import Role
from tests.rank_processes import FileControl

# torch is not needed to be told apart by the name of its class.
DistNetworkError = type("DistNetworkError", (RuntimeError,), {})
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class GoneControl:
    """The store of a node that has gone: every call fails."""

    def __getattr__(self, name: str) -> NoReturn:
        raise DistNetworkError("failed to recv, got 0 bytes")


def make(folder: Path, control: Any = None, local_rank: int = 0) -> Farewell:
    role = Role(4 + local_rank, "drafter", 0, node=1, local_rank=local_rank)
    state = RankState([Phase("step", 0.0, 60.0, True)], step=7)
    return Farewell(cast(Any, control or GoneControl()), role, 8, folder, folder / "rank.log", state, snapshot=False)


def fail(rank: Farewell, error: BaseException) -> ExitCode:
    return rank.fail(error, RankLog(rank.log_path), has_wish=lambda: False)


def told(folder: Path) -> tuple[str, int | None, int | None]:
    status = read_status(folder)
    assert status is not None
    return status.state, status.code, status.rank


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "ECHO_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (DistNetworkError("failed to recv, got 0 bytes"), "failed", 75),
        (UserError("no such file"), "failed", 78),
        (StopRequested(ExitCode.TERMINATED), "stopped", 143),
    ],
)
def test_a_rank_that_lost_the_store_leaves_with_its_code_and_tells_its_node(
    tmp_path: Path, error: BaseException, state: str, code: int
) -> None:
    write_status(tmp_path, Status(state="running"))
    assert fail(make(tmp_path, local_rank=1), error) == code
    assert told(tmp_path)[0] == "running", "one rank of a node speaks"
    rank = make(tmp_path)
    assert fail(rank, error) == code and rank.state.left
    assert told(tmp_path) == (state, code, 4 if state == "failed" else None)


def test_a_stop_stays_one_when_the_store_goes_meanwhile(tmp_path: Path) -> None:
    rank = make(tmp_path)
    rank.state.stop = Stop(ExitCode.INTERRUPTED, "Ctrl-C", 0.0)
    assert fail(rank, DistNetworkError("connection closed")) == 130
    assert told(tmp_path)[:2] == ("stopped", 130)


def test_what_the_node_was_told_first_stays(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="failed", code=1, rank=5))
    assert fail(make(tmp_path), DistNetworkError("connection closed")) == 75
    assert told(tmp_path) == ("failed", 1, 5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_the_log_keeps_no_failure_from_the_others(tmp_path: Path) -> None:
    rank, control = make(tmp_path, FileControl(tmp_path / "control")), FileControl(tmp_path / "control")
    log = RankLog(Path("/dev/full"))
    assert log.write("lost\n") == 0 and log.fileno() >= 0
    assert rank.fail(FULL, log, has_wish=lambda: False) == 75
    failure = control.claimed("failure")
    assert failure is not None and failure["reason"] == str(FULL) and control.get("left/4") == "failed"
    assert told(tmp_path) == ("failed", 75, 4)


def test_out_of_memory_is_told_even_if_nobody_can_look_at_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(snapshot: Path | None) -> NoReturn:
        raise FULL

    monkeypatch.setattr(farewell, "memory_report", look)
    rank = make(tmp_path, FileControl(tmp_path / "control"))
    assert fail(rank, MemoryError()) == 75 and told(tmp_path) == ("failed", 75, 4)
    words = rank.log_path.read_text()
    assert "MemoryError" in words and "no report on memory: OSError" in words


def test_a_status_that_cannot_be_written_is_still_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run_dir: Path, status: Status) -> NoReturn:
        raise FULL

    monkeypatch.setenv(SUPERVISED, "1")
    failed = Status(state="failed", code=75, reason="rank 3 lost")
    report(failed, tmp_path)
    assert not caplog.records, "launch.sh reads the status and shows the box"
    monkeypatch.setattr(outcome, "write_status", full)
    assert not record(failed, tmp_path)
    report(failed, tmp_path)
    assert "No space left" in caplog.messages[0] and "rank 3 lost" in caplog.messages[-1]


def test_a_full_disk_is_known_by_its_words_too() -> None:
    assert failure_code(RuntimeError("I/O error: No space left on device (os error 28)")) is ExitCode.RETRY
