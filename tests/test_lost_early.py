"""Ranks that are lost before they report: the others name them, with real kills of real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from launcher.status import Status, read_status
from tests.rank_processes import end_ranks, start_ranks, wait_for

# Long enough for the others to have found its process.
LATE = "slow=1.5@start:1"


def status_of(folder: Path) -> Status:
    status = read_status(folder)
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        (f"{LATE};kill@start:1", "was killed by SIGKILL", -signal.SIGKILL),
        (f"{LATE};raise@start:1", "left with exit code 1, before it reported", 1),
        ("stop@start:1", "no heartbeat for 4 s: it is stopped (SIGSTOP)", -signal.SIGKILL),
    ],
)
def test_a_rank_lost_before_it_reports_is_named_by_the_others(
    tmp_path: Path, fault: str, words: str, code: int
) -> None:
    started = time.monotonic()
    heartbeat = "4" if "stop" in fault else "60"
    ended = end_ranks(start_ranks("steps", tmp_path, 3, LAUNCHER_FAULT=fault, HEARTBEAT=heartbeat))
    assert time.monotonic() - started < 20
    status = status_of(tmp_path)
    assert [code for code, _ in ended] == [status.code, code, status.code]
    assert (status.rank, status.role, status.phase) == (1, "drafter 0", "start")
    assert words in status.reason and status.log is None
    assert (
        f"rank 1 drafter 0 failed in phase start at step 0: {status.reason}"
        in (tmp_path / "logs" / "rank_2.log").read_text()
    )


def test_a_rank_lost_before_any_other_reports_is_named(tmp_path: Path) -> None:
    """torchrun reaps it and sends SIGTERM to the others, which find it missing among their parent's children."""
    ranks = start_ranks("steps", tmp_path, 3, LAUNCHER_FAULT="kill@start:1;slow=1.5@start:0;slow=1.5@start:2")
    ranks[1].wait(20)
    for number in (0, 2):
        wait_for(tmp_path / f"caught-rank-{number}")
        ranks[number].send_signal(signal.SIGTERM)
    assert [code for code, _ in end_ranks(ranks)] == [75, -signal.SIGKILL, 75]
    status = status_of(tmp_path)
    assert (status.state, status.code, status.rank, status.role) == ("failed", 75, 1, "drafter 0")
    assert "before it reported" in status.reason


def test_a_wait_for_a_rank_that_never_reports_names_it(tmp_path: Path) -> None:
    ranks = start_ranks("steps", tmp_path, 2, LAUNCHER_FAULT="hang@start:1", MEET="1")
    assert ranks[0].wait(30) == 75
    end_ranks(ranks, timeout=0.0)
    status = status_of(tmp_path)
    assert (status.rank, status.role, status.phase) == (1, "drafter 0", "start")
    assert "waited 1 s for all ranks; rank 1, which has not reported yet, keeps it waiting" in status.reason
