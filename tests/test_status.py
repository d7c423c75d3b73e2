"""status.json and the final box."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.errors import ExitCode
from launcher.outcome import Failure, failed_status, finished_status, stopped_status
from launcher.status import FILE_NAME, Status, final_box, heard, read_status, spoken, write_status

FAILURE = Failure(6, "drafter 1", "step", 42, 75, "OutOfMemoryError", "CUDA out of memory", "runs/x/logs/rank_6.log")


def test_a_status_survives_the_file(tmp_path: Path) -> None:
    status = failed_status(FAILURE, tmp_path)
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME], "no temporary file is left"


def test_no_status_and_a_newer_status(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / FILE_NAME).write_text(json.dumps({"state": "running", "colour": "blue"}))
    status = read_status(tmp_path)
    assert status is not None and status.state == "running"
    (tmp_path / FILE_NAME).write_text("[]")
    with pytest.raises(ValueError, match="not a status file"):
        read_status(tmp_path)


def test_the_box_names_everything_a_user_needs(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-40").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-40" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "latest").write_text("step-40")
    box = final_box(failed_status(FAILURE, tmp_path))
    for words in ("exit code 75", "CUDA out of memory", "rank 6", "drafter 1", "phase step", "step 42", "rank_6.log"):
        assert words in box
    flat = "".join(line.strip("│ ") for line in box.splitlines())
    assert "step-40" in flat
    assert box.splitlines()[-1] == f"to resume: ./launch.sh --config {tmp_path}/config.toml --resume auto"
    assert "\x1b" not in box, "plain text when it is not a terminal"


def test_a_configuration_error_offers_no_resume(tmp_path: Path) -> None:
    failure = Failure(0, "target 0", "load", 0, ExitCode.DO_NOT_RETRY, "UserError", "no file x", "log")
    status = failed_status(failure, tmp_path)
    assert not status.resumable and status.next_command is None


def test_a_stop_says_by_what_and_how_to_go_on(tmp_path: Path) -> None:
    status = stopped_status(ExitCode.INTERRUPTED, "Ctrl-C", "step", 7, tmp_path)
    assert status.state == "stopped" and status.code == 130 and "Ctrl-C at step 7" in status.reason
    assert "--resume auto" in final_box(status)


def test_a_markup_like_reason_is_printed_as_it_is() -> None:
    assert "[bold]x[/bold] [0]" in final_box(Status(state="failed", code=1, reason="[bold]x[/bold] [0]"))


def test_finished_has_no_next_command(tmp_path: Path) -> None:
    status = finished_status("trained 10 steps", 10, tmp_path)
    assert (status.code, status.next_command) == (0, None)


def test_the_box_says_where_the_flight_recorder_wrote(tmp_path: Path) -> None:
    failure = replace(FAILURE, log=str(tmp_path / "attempts/1/rank_6.log"))
    traces = tmp_path / "attempts/1/traces"
    traces.mkdir(parents=True)
    assert "traces" not in final_box(failed_status(failure, tmp_path))
    (traces / "nccl_rank_6.json").touch()
    box = final_box(failed_status(failure, tmp_path))
    assert str(traces) in "".join(box.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", "").split())


def test_on_a_full_disk_an_end_takes_the_place_of_the_status_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_status(tmp_path, Status(state="running", reason="x" * 1000))
    monkeypatch.setattr(Path, "write_text", full)
    ended = failed_status(FAILURE, tmp_path)
    write_status(tmp_path, ended)
    assert read_status(tmp_path) == ended
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path, replace(ended, reason="x" * (1 << 20)))
    assert read_status(tmp_path) == ended, "what does not fit into its blocks leaves it alone"
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path / "other", ended)


def test_a_status_survives_being_said() -> None:
    status = Status(state="failed", code=75, reason="two\nlines \N{BOX DRAWINGS LIGHT VERTICAL}")
    assert "\n" not in spoken(status) and heard(spoken(status) + "\n") == status
    assert heard(spoken(status)[:-9]) is None and heard("step 1") is None
