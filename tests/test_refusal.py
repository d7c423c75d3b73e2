"""A start that cannot be is explained once, whichever rank it fails on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from launcher.control import Control
from launcher.errors import DeadlineError, RetryableError
from launcher.outcome import FAILURE_KEY, SUPERVISED
from launcher.refusal import blame_first_rank
from launcher.runtime import RankEnv
from launcher.split_choice import Choice, agree_on_split
from launcher.status import read_status
from launcher.topology import Split
from tests.rank_processes import FileControl

ROOT = Path(__file__).resolve().parent.parent
REFUSE = """
import sys
from launcher import refusal
from launcher.errors import UserError
from launcher.signal_inbox import catch_signals
refusal.QUIET_SECONDS = float(sys.argv[2])
catch_signals()
print("there", flush=True)
refusal.refuse(UserError("no such GPU", "choose another"), int(sys.argv[1]))
"""


def start(local_rank: int, quiet: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", REFUSE, str(local_rank), str(quiet)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize(("local_rank", "quiet"), [(0, 60.0), (1, 0.1)])
def test_a_rank_says_why_unless_one_before_it_did(local_rank: int, quiet: float) -> None:
    process = start(local_rank, quiet)
    assert process.communicate(timeout=30)[1] == "no such GPU -> choose another\n"
    assert process.returncode == 78


def test_a_rank_that_torchrun_stops_stays_quiet() -> None:
    process = start(1, 60.0)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 78


def test_a_wait_for_another_rank_that_runs_out_may_be_tried_again() -> None:
    control = Control("127.0.0.1", 0, "test", serve=True)
    with pytest.raises(RetryableError, match=r"waited 0 s for the first rank of node 1 to open the run folder"):
        control.wait("attempt/1", "the first rank of node 1 to open the run folder", 0.05)
    control.set("attempt/1", None)
    assert control.wait("attempt/1", "it", 0.05) is None


def rank_of_node(node: int) -> RankEnv:
    """The second of two ranks of a node, of two nodes."""
    return RankEnv(2 * node + 1, 1, 4, 2, "127.0.0.1", 0, 0, True)


def test_a_wait_for_another_node_in_vain_blames_that_one(tmp_path: Path) -> None:
    store = Control("127.0.0.1", 0, "test", serve=True)
    with pytest.raises(DeadlineError, match="waited 0 s for the first rank to choose a split") as caught:
        agree_on_split(Choice(Split(1, 1)), store, rank=3, node=1, timeout=0.05)
    control = cast("Control", FileControl(tmp_path / "control"))
    blame_first_rank(control, rank_of_node(1), caught.value, tmp_path)
    status = read_status(tmp_path)
    assert status is not None and (status.rank, status.role, status.code) == (0, "target 0", 75)
    assert "its node may be slow, or down" in status.reason


def test_a_first_rank_that_is_gone_is_left_to_launch_sh_which_knows_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, error = cast("Control", FileControl(tmp_path / "control")), DeadlineError("waited 1 s for the first rank")
    monkeypatch.setenv(SUPERVISED, "1")
    blame_first_rank(control, rank_of_node(0), error, tmp_path)
    assert control.claimed(FAILURE_KEY) is None and read_status(tmp_path) is None
    monkeypatch.delenv(SUPERVISED)  # under a bare torchrun nobody else could write the status
    blame_first_rank(control, rank_of_node(0), error, tmp_path)
    status = read_status(tmp_path)
    assert status is not None and status.rank == 0 and "it is gone" in status.reason
