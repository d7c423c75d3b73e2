"""Ranks as processes: failures, signals, deadlines and ends, with real kills."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launcher.errors import ExitCode
from launcher.outcome import failure_code, is_secondary
from launcher.signal_inbox import stop_signals
from launcher.status import Status, read_status
from tests.rank_processes import FileControl, end_ranks, start_ranks, wait_for


def _status(folder: Path) -> Status:
    status = read_status(folder)
    assert status is not None
    return status


def test_all_ranks_finish_and_the_last_one_writes_the_status(tmp_path: Path) -> None:
    ended = end_ranks(start_ranks("steps", tmp_path, 3))
    assert [code for code, _ in ended] == [0, 0, 0]
    status = _status(tmp_path)
    assert (status.state, status.code, status.step) == ("finished", 0, 5)


def test_an_exception_ends_every_rank_and_is_reported_once(tmp_path: Path) -> None:
    ended = end_ranks(start_ranks("long", tmp_path, 3, LAUNCHER_FAULT="raise@step:3:1"))
    assert [code for code, _ in ended] == [1, 1, 1]
    status = _status(tmp_path)
    assert (status.state, status.rank, status.role, status.phase, status.step) == ("failed", 1, "drafter 0", "step", 3)
    assert status.reason == "injected error in phase step" and status.error == "RuntimeError"
    output = "".join(text for _, text in ended)
    assert output.count("run failed (exit code 1)") == 1
    assert "rank 1, drafter 0, phase step, step 3" in output
    assert "Traceback" not in output
    assert "Traceback" in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("kill@step:8:0", "SIGKILL"), ("segv@step:8:0", "SIGSEGV"), ("abort@step:8:0", "SIGABRT")],
)
def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path, fault: str, words: str) -> None:
    started = time.monotonic()
    ended = end_ranks(start_ranks("wait", tmp_path, 2, LAUNCHER_FAULT=fault))
    assert time.monotonic() - started < 20, "torchrun's own 30 s are not waited for"
    assert ended[1][0] == 75
    status = _status(tmp_path)
    assert (status.code, status.rank, status.phase, status.step) == (75, 0, "step", 8)
    assert words in status.reason
    if "segv" in fault:
        assert "Fatal Python error" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_a_hang_ends_at_its_deadline_with_stacks(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = end_ranks(start_ranks("wait", tmp_path, 2, LAUNCHER_FAULT="hang@step:8:0"))
    assert time.monotonic() - started < 25
    assert [code for code, _ in ended] == [75, 75]
    status = _status(tmp_path)
    assert (status.rank, status.phase, status.step) == (0, "step", 8)
    assert "longer than 3 s" in status.reason and "runtime.step_timeout" in status.reason
    assert "_strike" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_the_rank_that_keeps_others_waiting_is_blamed(tmp_path: Path) -> None:
    """Rank 0 runs out of time first, but it waits for rank 1, which sleeps."""
    end_ranks(start_ranks("deadline", tmp_path, 2))
    status = _status(tmp_path)
    assert (status.rank, status.role, status.code) == (1, "drafter 0", 75)
    assert "rank 0 target 0, which waits" in status.reason


@pytest.mark.parametrize(("fault", "words"), [("gil", "keeps the GIL"), ("stop", "SIGSTOP")])
def test_a_silent_rank_is_named_and_removed(tmp_path: Path, fault: str, words: str) -> None:
    started = time.monotonic()
    ended = end_ranks(start_ranks("wait", tmp_path, 2, LAUNCHER_FAULT=f"{fault}@step:8:0", HEARTBEAT="3"))
    assert time.monotonic() - started < 25
    assert [code for code, _ in ended] == [-signal.SIGKILL, 75]
    status = _status(tmp_path)
    assert (status.rank, status.code) == (0, 75)
    assert words in status.reason
    if fault == "gil":
        assert "_strike" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_a_wait_that_runs_out_names_what_it_waited_for(tmp_path: Path) -> None:
    end_ranks(start_ranks("mutual-wait", tmp_path, 2))
    status = _status(tmp_path)
    assert (status.rank, status.code, status.error) == (0, 75, "DeadlineError")
    assert "rank 1" in status.reason


def test_a_wait_that_runs_out_blames_the_rank_that_works_on(tmp_path: Path) -> None:
    end_ranks(start_ranks("long-wait", tmp_path, 2))
    status = _status(tmp_path)
    assert (status.rank, status.phase, status.code, status.error) == (1, "step", 75, "DeadlineError")
    assert "rank 0 target 0 waited 3 s for row 3 from rank 1; rank 1 keeps it waiting" in status.reason
    assert status.log is not None and "rank_1" in status.log


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)],
    ids=lambda v: str(int(v)),
)
def test_one_signal_to_one_rank_stops_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    ranks = start_ranks("long", tmp_path, 2)
    wait_for(tmp_path / "step-2-rank-1")
    ranks[1].send_signal(number)
    ended = end_ranks(ranks)
    assert [code for code, _ in ended] == [0, 0], "torchrun must not take a stopped rank for a failed one"
    status = _status(tmp_path)
    assert (status.state, status.code) == ("stopped", code)
    assert status.reason.startswith(f"stopped by {'Ctrl-C' if code == 130 else number.name} at step")
    assert "--resume auto" in (status.next_command or "")
    assert "Traceback" not in "".join(text for _, text in ended)


def test_sighup_stops_nothing_where_nohup_ignores_it() -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals() and signal.SIGUSR1 in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert signal.SIGHUP in stop_signals()


def test_a_store_that_hangs_ends_every_rank_with_stacks(tmp_path: Path) -> None:
    """Its host is stopped, or gone without closing its connections: no call returns, on no thread."""
    ranks = start_ranks("long", tmp_path, 2, HEARTBEAT="1")
    wait_for(tmp_path / "step-2-rank-1")
    FileControl(tmp_path / "control").stop()
    started = time.monotonic()
    assert [code for code, _ in end_ranks(ranks)] == [75, 75]
    assert time.monotonic() - started < 15
    status = _status(tmp_path)
    assert (status.state, status.code, status.error) == ("failed", 75, "StoreSilent")
    assert "has not answered for 5 s" in status.reason
    assert "stacks of all threads" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_a_second_signal_leaves_at_once_though_the_store_hangs(tmp_path: Path) -> None:
    ranks = start_ranks("long", tmp_path, 1)
    wait_for(tmp_path / "step-2-rank-0")
    FileControl(tmp_path / "control").stop()
    ranks[0].send_signal(signal.SIGINT)
    time.sleep(1.5)
    ranks[0].send_signal(signal.SIGINT)
    assert ranks[0].wait(10) == 0  # the heartbeat's limit is 60 s
    end_ranks(ranks)
    assert _status(tmp_path).code == 130


def test_a_stop_waits_for_a_phase_that_defers_it_but_not_longer_than_grace(tmp_path: Path) -> None:
    """Rank 1, the drafter, hangs in its save at step 4; rank 0, the target, is at step 9 and then cut off as well."""
    ranks = start_ranks("save", tmp_path, 2, GRACE="4")
    wait_for(tmp_path / "saving-rank-1")
    wait_for(tmp_path / "saving-rank-0")
    asked = time.monotonic()
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    assert [code for code, _ in end_ranks(ranks)] == [0, 0]
    assert 2 < time.monotonic() - asked < 4, "everything is over within runtime.grace"
    status = _status(tmp_path)
    assert (status.state, status.code, status.phase, status.step) == ("stopped", 143, "save", 4)
    assert status.reason == "stopped by SIGUSR1 at step 4, before it could save: runtime.grace of 4 s was over"


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    ranks = start_ranks("save", tmp_path, 2)
    wait_for(tmp_path / "saving-rank-1")
    ranks[1].send_signal(signal.SIGTERM)
    time.sleep(2)
    ranks[1].send_signal(signal.SIGTERM)
    ranks[1].wait(10)  # runtime.grace would be 30 s
    end_ranks(ranks, timeout=0.0)
    assert _status(tmp_path).code == 143 and "second signal" in _status(tmp_path).reason


def test_sigterm_after_a_peers_death_is_not_taken_for_a_wish(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the survivors when a rank dies; that is not a user's stop."""
    ranks = start_ranks("long", tmp_path, 3)
    wait_for(tmp_path / "step-2-rank-2")
    ranks[2].kill()
    for rank in ranks[:2]:
        rank.send_signal(signal.SIGTERM)
    end_ranks(ranks)
    status = _status(tmp_path)
    assert (status.state, status.code, status.rank) == ("failed", 75, 2)


def test_a_rank_that_hangs_after_its_goodbye_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = end_ranks(start_ranks("hanging-exit", tmp_path, 1), timeout=40)
    assert time.monotonic() - started < 30
    assert ended[0][0] == 0
    assert _status(tmp_path).state == "finished"


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        start_ranks("long", tmp_path, 1)
        time.sleep(60)
        os._exit(0)
    wait_for(tmp_path / "step-2-rank-0")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    time.sleep(0.3)
    count = len(list(tmp_path.glob("step-*")))
    time.sleep(0.5)
    assert len(list(tmp_path.glob("step-*"))) == count


def test_error_classes_and_their_codes() -> None:
    disk, closed = OSError(28, "No space left on device"), RuntimeError("gloo: Connection closed by peer")
    assert failure_code(disk) is ExitCode.RETRY and not is_secondary(disk)
    assert failure_code(closed) is ExitCode.RETRY and is_secondary(closed)
    assert failure_code(ValueError("shape")) is ExitCode.UNCLASSIFIED


def test_a_run_may_last_longer_than_its_first_deadline(tmp_path: Path) -> None:
    """Time outside phases has no deadline: `init_timeout` here is shorter than the run."""
    ended = end_ranks(start_ranks("steps", tmp_path, 1, INIT_TIMEOUT="0.1"))
    assert ended[0][0] == 0 and _status(tmp_path).state == "finished"
