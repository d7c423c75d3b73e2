"""What the parent of a run decides: ranks, restarts, environment, and what torchrun's report says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checkpoint_folder import checkpoints_of
from launcher.cli import Command, parse
from launcher.config import Config, validate
from launcher.errors import UserError
from launcher.fallback_status import first_failure, own_lines
from launcher.restarts import Ended, going_on, may_restart, newest_checkpoint
from launcher.status import Status
from launcher.supervisor import (
    choose_ranks,
    rank_environment,
    torchrun_command,
)

REPORT = """W1129 14:00:00.000000 1 torch/distributed/run.py:852]
launcher: data.path: no file x
Traceback (most recent call last):
  File "x.py", line 1
ValueError: bad
============================================================
launcher/main.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 77)
============================================================
"""


def test_reads_torchruns_report(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(REPORT)
    failure = first_failure(REPORT)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (3, -9)
    assert own_lines(tmp_path / "log") == ["launcher: data.path: no file x", "ValueError: bad"]
    assert own_lines(tmp_path / "none") == []


def test_a_rank_that_is_stopped_amid_its_imports_says_nothing_about_the_cause(tmp_path: Path) -> None:
    stopped = "Exception ignored in: 'Path'\nTraceback (most recent call last):\n  File \"main.py\", line 22\n"
    (tmp_path / "log").write_text(f"ValueError: bad\n{stopped}launcher.signal_inbox.StoppedBy: 143\n")
    assert own_lines(tmp_path / "log") == ["ValueError: bad"]


@pytest.mark.parametrize("nodes", [[], ["--nnodes", "2", "--node-rank", "1", "--master", "10.0.0.1:29500"]], ids=len)
def test_torchrun_keeps_nothing_outside_the_run_folder(nodes: list[str], tmp_path: Path) -> None:
    """By itself it makes a folder in the system's temporary one at every start, and leaves it there."""
    words = torchrun_command(parse(["--preset=tiny", *nodes]), 2, tmp_path / "main.py", tmp_path / "errors")
    assert words[words.index("--log-dir") + 1] == str(tmp_path / "errors")
    assert words.index("--log-dir") < words.index("--"), "it is torchrun's option"


def config(device: str = "auto", share: bool = False, **topology: int) -> Config:
    return validate({"runtime": {"device": device, "share_gpus": share}, "topology": topology})


@pytest.mark.parametrize(
    ("made", "asked", "gpus", "ranks"),
    [
        (config(), None, 0, 8),
        (config(), None, 8, 8),
        (config(), None, 2, 2),
        (config(device="cpu"), None, 4, 8),
        (config(), 4, 0, 4),
        (config(targets=2, drafters=1), None, 0, 3),
        (config(targets=2, drafters=1, target_tp=2), None, 8, 5),
        (config(share=True), None, 2, 2),
        (config(share=True, targets=5, drafters=3), None, 2, 8),
    ],
)
def test_ranks_by_gpus_or_as_asked(made: Config, asked: int | None, gpus: int, ranks: int) -> None:
    assert choose_ranks(made, asked, [f"GPU-{i}" for i in range(gpus)]) == ranks


@pytest.mark.parametrize(
    ("made", "asked", "gpus", "said"),
    [
        (config(), None, 1, "cannot hold a target"),
        (config(targets=5, drafters=3), None, 2, "share_gpus"),
        (config(device="cuda"), None, 0, "NVML finds no GPU"),
        (config(targets=3, drafters=2), 4, 0, "needs 5 ranks"),
    ],
)
def test_what_cannot_fit_is_refused_before_torchrun(made: Config, asked: int | None, gpus: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_ranks(made, asked, [f"GPU-{i}" for i in range(gpus)])


@pytest.mark.parametrize(
    ("ends", "limit", "again"),
    [
        ([(75, 10)], 1, True),
        ([(75, 10)], 0, False),
        ([(1, 10)], 3, False),
        ([(78, None)], 3, False),
        ([(75, 10), (75, 10)], 5, True),
        ([(75, 10), (75, 10), (75, 10)], 5, False),
        ([(75, None)] * 3, 5, False),
        ([(75, 10), (75, 10), (75, 10), (75, 11)], 9, True),
        ([(75, 10), (75, 20), (75, 30)], 5, True),
    ],
)
def test_restarts_only_while_they_help(ends: list[tuple[int, int | None]], limit: int, again: bool) -> None:
    ended = [Ended(Status("failed", code, step=step)) for code, step in ends]
    assert may_restart(ended, limit) is again
    assert not may_restart([*ended[:-1], replace(ended[-1], stop_asked=True)], limit)


def test_a_run_begins_where_it_was_told_to_once(tmp_path: Path) -> None:
    def command(resume: str) -> Command:
        return parse(["--preset=tiny", f"--run-dir={tmp_path}", f"--resume={resume}", "--max-restarts=3"])

    def publish(step: int) -> None:
        folder = checkpoints_of(tmp_path) / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    for anew in ("none", "elsewhere/step-7"):
        assert going_on(command(anew), None).config.runtime.resume == anew, "no checkpoint of its own yet"
    publish(5)
    before = newest_checkpoint(command("none").config)
    assert going_on(command("none"), before).config.runtime.resume == "none", "that one is of an earlier run"
    checkpoints_of(tmp_path).rename(tmp_path / "checkpoints.old-1")
    assert going_on(command("none"), before).config.runtime.resume == "none"
    publish(5)
    for anew in ("none", "elsewhere/step-7"):
        again = going_on(command(anew), before)
        assert again.config.runtime.resume == "auto" and again.max_restarts == 3
    assert going_on(command("auto"), before) == command("auto")


def test_ranks_keep_the_environment_and_learn_of_the_terminal(tmp_path: Path) -> None:
    told = rank_environment({"HOME": "/h"}, tmp_path, 1, 30.0, terminal=True)
    assert told["HOME"] == "/h"
    assert told["LAUNCHER_ATTEMPT_DIR"] == str(tmp_path)
    assert told["FORCE_COLOR"] == "1"
    assert "FORCE_COLOR" not in rank_environment({}, tmp_path, 1, 30.0, terminal=False)
