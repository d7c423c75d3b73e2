"""A start that cannot be is explained once, whichever rank it fails on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.control import Control
from launcher.errors import RetryableError

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
