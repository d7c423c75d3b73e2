"""Who is watched, who is blamed, who is gone or silent: the decisions of the watchdog, without threads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn, cast

import pytest

from launcher.enforcer import STORE_LOST_SECONDS, Enforcer
from launcher.members import Beat, Member, lost_at_start, watches
from launcher.overdue import blame
from launcher.peers import PeerTable
from launcher.processes import crash_in, describe_exit, is_alive, read_process
from launcher.rank_log import RankLog
from launcher.rank_state import Limits, Phase, RankState
from launcher.siblings import Siblings, rank_of
from launcher.signal_inbox import SignalInbox
from launcher.stacks import is_in_collective
from launcher.status import read_status
from launcher.stop_wish import StopWish
from launcher.topology import Split, build_topology
from launcher.watchdog import Watchdog
from tests.rank_processes import FileControl

if TYPE_CHECKING:
    from launcher.control import Control


ROLES = build_topology(Split(1, 1)).roles


def _beat(rank: int, step: int, waiting: bool, seconds: float = 1.0) -> Beat:
    return Beat(rank, f"drafter {rank}", 1, "step", step, waiting, seconds)


def _member(rank: int, node: int = 0, local_rank: int | None = None, pid: int = 1, start: int = 0) -> Member:
    return Member(
        rank, f"drafter {rank}", node, rank if local_rank is None else local_rank, pid, start, f"rank_{rank}.log"
    )


def test_a_working_rank_blames_itself() -> None:
    own = _beat(0, 3, waiting=False)
    assert blame(own, [_beat(1, 2, waiting=False)]) is own


def test_a_waiting_rank_blames_the_working_rank_furthest_behind() -> None:
    own = _beat(0, 3, waiting=True)
    others = [_beat(1, 3, waiting=False), _beat(2, 2, waiting=False, seconds=5), _beat(3, 2, waiting=False, seconds=9)]
    assert blame(own, others).rank == 3
    assert blame(own, [_beat(1, 1, waiting=True)]) is own, "nobody works: a deadlock is reported by who found it"


def test_grace_counts_from_the_signal_and_a_repetition_from_when_that_was_read() -> None:
    inbox = cast("SignalInbox", SimpleNamespace(asked=10.0, drain=lambda: [signal.SIGUSR1]))
    wish = StopWish(inbox, frozenset(), lambda text: None)
    assert wish.read(18.0) is None
    stop = wish.take(18.0)
    assert stop is not None and (stop.since, stop.cause) == (10.0, "SIGUSR1")
    assert wish.read(18.5) is None, "the same wish, delivered twice"
    assert wish.read(19.5) is stop


def test_who_watches_whom() -> None:
    """All of the own node; between nodes only the first ranks, so that the load grows slowly."""
    assert watches(_member(1), _member(2)) and not watches(_member(1), _member(1))
    other_first, other_second = _member(8, node=1, local_rank=0), _member(9, node=1, local_rank=1)
    assert watches(_member(0), other_first) and not watches(_member(0), other_second)
    assert not watches(_member(1), other_first)


@pytest.fixture
def table(tmp_path: Path) -> tuple[PeerTable, Control]:
    me = Member.this_process(ROLES[0], "rank_0.log")
    return PeerTable(me, ROLES), cast("Control", FileControl(tmp_path))


def _join(control: Control, process: subprocess.Popen[bytes]) -> None:
    state = read_process(process.pid)
    assert state is not None
    control.set("member/1", vars(_member(1, pid=process.pid, start=state.start_ticks)))
    control.set("phase/1", ["save", 7])


def test_a_dead_peer_is_found_with_its_signal(table: tuple[PeerTable, Control]) -> None:
    peers, control = table
    with subprocess.Popen(["sleep", "60"]) as process:
        _join(control, process)
        peers.refresh(control, 0.0)
        assert peers.find_gone(control) is None and len(peers.descriptors()) == 1
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        failure = peers.find_gone(control)
    assert failure is not None
    assert (failure.rank, failure.phase, failure.step, failure.code) == (1, "save", 7, 75)
    assert "SIGKILL" in failure.reason and "out of memory" in failure.reason
    assert peers.find_gone(control) is None, "reported once"
    peers.close()


def test_a_peer_that_said_goodbye_may_go(table: tuple[PeerTable, Control]) -> None:
    peers, control = table
    with subprocess.Popen(["sleep", "60"]) as process:
        _join(control, process)
        peers.refresh(control, 0.0)
        control.set("left/1", "done")
        process.kill()
    assert peers.find_gone(control) is None
    assert peers.find_silent(control, 1000.0, 5.0) is None
    peers.close()


def test_silence_is_measured_on_the_own_clock_and_forgiven_after_an_own_pause(
    table: tuple[PeerTable, Control],
) -> None:
    peers, control = table
    with subprocess.Popen(["sleep", "60"]) as process:
        _join(control, process)
        for now in range(0, 12, 2):
            control.set("beat/1", vars(_beat(1, 7, False)) | {"sequence": now})
            peers.refresh(control, float(now))
            assert peers.find_silent(control, float(now), 5.0) is None
        for now in range(12, 18, 2):
            peers.refresh(control, float(now))
        failure = peers.find_silent(control, 16.0, 5.0)
        assert failure is not None and failure.rank == 1 and "keeps the GIL" in failure.reason
        assert peers.is_mute(1, 5.0)
        peers.refresh(control, 100.0)
        assert peers.find_silent(control, 100.0, 5.0) is None, "the machine slept, not the peer"
        process.kill()
    peers.close()


def test_who_is_missing_among_the_children_of_the_parent() -> None:
    """Nobody, as long as a child whose environment is not ours to read may be the one."""
    me, expected = os.getpid(), frozenset({0, 1, 2})
    assert Siblings({0: me, 2: 7}).missing(expected) == {1}
    assert Siblings({0: me, 2: 7}, unreadable=1).missing(expected) == frozenset()
    assert Siblings({0: me}, unreadable=1).missing(expected) == {1, 2}
    assert Siblings({1: 7}).missing(expected) == frozenset(), "this process is no child of torchrun's"
    with subprocess.Popen(["sleep", "60"], env={"RANK": "5"}) as process:
        time.sleep(0.2)
        assert rank_of(process.pid) == 5
        process.kill()
    assert rank_of(process.pid) is None


def test_a_used_again_pid_is_not_the_same_process() -> None:
    state = read_process(os.getpid())
    assert state is not None
    assert is_alive(os.getpid(), state.start_ticks) and not is_alive(os.getpid(), state.start_ticks + 1)


def test_how_a_process_ended_in_words(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    assert "SIGSEGV" in describe_exit(11, log) and "exit code 3" in describe_exit(3 << 8, log)
    assert "probably killed" in describe_exit(None, log)
    log.write_text("step 3\nFatal Python error: Segmentation fault\n\nThread 0x1:\n")
    assert crash_in(log) == "Segmentation fault" and "Segmentation fault" in describe_exit(None, log)


def test_a_rank_lost_at_the_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text("Traceback (most recent call last):\n  File x\nImportError: no y\n")
    member = Member.unreported(ROLES[1], str(tmp_path / "torchrun.log"))
    failure = lost_at_start(member, 1 << 8)
    assert failure.reason.startswith("left with exit code 1, before it reported -> see ")
    assert failure.reason.endswith(", where the last words are: ImportError: no y")
    assert (failure.rank, failure.code) == (1, 1)
    assert "ImportError: no y" in lost_at_start(member, None).reason, "its parent was faster"
    assert "ImportError" not in lost_at_start(member, signal.SIGKILL).reason


def test_a_watchdog_that_lost_the_store_tells_its_node_and_ends_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    state, log = RankState([Phase("step", 0.0, 60.0, True)]), RankLog(tmp_path / "rank.log")
    dog = Watchdog(
        cast("Control", None),
        _member(8, local_rank=0),
        ROLES,
        state,
        cast(SignalInbox, None),
        Limits(60, 30, 10),
        tmp_path,
        log,
    )
    dog._on_store_error(RuntimeError("recv"), now=STORE_LOST_SECONDS - 1)
    with pytest.raises(SystemExit) as left:
        dog._on_store_error(RuntimeError("recv"), now=STORE_LOST_SECONDS + 1)
    status = read_status(tmp_path)
    assert status is not None and left.value.code == 75
    assert (status.state, status.code, status.rank) == ("failed", 75, 8) and "torchrun's store" in status.reason


def test_a_deadline_holds_though_the_store_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the store counts as lost; and not for the time in which this process itself stood still."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    control = FileControl(tmp_path / "control")
    control.asked_at = 0.0
    log, state = RankLog(tmp_path / "rank.log"), RankState([Phase("step", 0.0, 10.0, True)])
    inbox, me = SignalInbox(), _member(0)
    enforcer = Enforcer(cast("Control", control), me, frozenset({0}), state, inbox, Limits(600, 30, 10), tmp_path, log)
    enforcer._tick(100.0)
    enforcer._tick(101.0)
    with pytest.raises(SystemExit) as left:
        for now in range(102, 110):
            enforcer._tick(float(now))
    status = read_status(tmp_path)
    assert left.value.code == 75 and now == 106
    assert status is not None and "step took longer than 10 s" in status.reason and "store" in status.reason


def test_no_thread_of_this_test_sits_in_a_collective() -> None:
    assert not is_in_collective(own_thread=-1)
