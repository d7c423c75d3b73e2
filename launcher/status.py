"""`status.json`: how a run stands or how it ended, and the box that the console ends with. No torch."""

from __future__ import annotations

import json
import os
import shlex
import time
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Literal

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from launcher.checkpoint_folder import newest_published
from launcher.started_as import STARTED_AS, short_path
from launcher.whole_files import overwrite, write_whole

State = Literal["running", "finished", "stopped", "failed"]
FILE_NAME, CONFIG_NAME = "status.json", "config.toml"
BOX_WIDTH = 110
SPOKEN = "[launch] status that the disk does not take: "


@dataclass(frozen=True)
class Status:
    """State of a run; `code` is what `launch.sh` returns (errors.ExitCode), None while it runs."""

    state: State
    code: int | None = None
    reason: str = ""
    error: str | None = None
    """Class of the error, for machines."""
    rank: int | None = None
    role: str | None = None
    phase: str | None = None
    step: int | None = None
    log: str | None = None
    last_checkpoint: str | None = None
    resumable: bool = False
    next_command: str | None = None
    time: float = field(default_factory=time.time)
    """Seconds since the epoch when this was written."""


def resume_command(run_dir: Path) -> str:
    """The command that goes on with the run of this folder, started as this start was."""
    config = short_path(run_dir / CONFIG_NAME)
    started = os.environ.get(STARTED_AS, "./launch.sh")
    return f"{started} {shlex.join(['--config', config, '--resume', _resume_from(run_dir)])}"


def _resume_from(run_dir: Path) -> str:
    """`auto`; as long as the run has no checkpoint of its own, the one that it was told to begin with."""
    try:
        told = tomllib.loads((run_dir / CONFIG_NAME).read_text())["runtime"]["resume"]
    except (OSError, ValueError, KeyError):
        return "auto"
    return "auto" if told == "none" or newest_published(run_dir) is not None else str(told)


def write_status(run_dir: Path, status: Status) -> Path:
    """Write `status.json` whole or not at all, readable while another process writes it.

    Raises:
        OSError: the disk does not take it, not even in the place of the one before.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, text = run_dir / FILE_NAME, json.dumps(asdict(status), indent=2) + "\n"
    try:
        write_whole(path, text, readers_first=True)
    except OSError:
        if not overwrite(path, text):
            raise
    return path


def read_status(run_dir: Path) -> Status | None:
    """The status of a run folder, None where there is none; keys of other versions are left out.

    Raises:
        ValueError: the file is not what `write_status` writes.
    """
    try:
        values = json.loads((run_dir / FILE_NAME).read_text())
    except FileNotFoundError:
        return None
    known = {entry.name for entry in fields(Status)}
    if not isinstance(values, dict) or "state" not in values:
        raise ValueError(f"{run_dir / FILE_NAME} is not a status file; remove it")
    return Status(**{key: value for key, value in values.items() if key in known})


def spoken(status: Status) -> str:
    """A status in one line, for a console whose reader shall have it where the disk takes none."""
    return SPOKEN + json.dumps(asdict(status))


def heard(line: str) -> Status | None:
    """The status that a line of `spoken` holds; None for any other line."""
    if not line.startswith(SPOKEN):
        return None
    try:
        return Status(**json.loads(line.removeprefix(SPOKEN)))
    except (ValueError, TypeError):  # cut short
        return None


def final_box(status: Status, file: IO[str] | None = None) -> str:
    """The last lines of a run: what happened, where, and how to go on. Colour only on a terminal.

    Args:
        file: the stream it will be written to, which decides colour and width; None renders plain text.
    """
    terminal = file is not None and file.isatty()
    console = Console(file=file, force_terminal=None if terminal else False, width=None if terminal else BOX_WIDTH)
    rows = Text("\n").join(Text.assemble((f"{name:<11}", "bold"), value) for name, value in _rows(status) if value)
    colour = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "red"}[status.state]
    with console.capture() as capture:
        console.print(Panel(rows, title=_title(status), border_style=colour, title_align="left"))
        if status.next_command:
            # Below the box and unwrapped, so that it can be copied.
            console.print(Text(f"{_next_word(status)}: {status.next_command}"), soft_wrap=True)
    return capture.get()


def _title(status: Status) -> str:
    code = "" if status.code is None else f" (exit code {status.code})"
    return f"run {status.state}{code}"


def _rows(status: Status) -> list[tuple[str, str | None]]:
    where = [
        f"rank {status.rank}" if status.rank is not None else None,
        status.role,
        f"phase {status.phase}" if status.phase else None,
        f"step {status.step}" if status.step is not None else None,
    ]
    checkpoint = status.last_checkpoint or ("none" if status.state in {"failed", "stopped"} else None)
    return [
        ("what", status.reason or None),
        ("where", ", ".join(part for part in where if part) or None),
        ("log", status.log and short_path(status.log)),
        ("traces", _traces(status)),
        ("checkpoint", checkpoint and short_path(checkpoint)),
    ]


def _traces(status: Status) -> str | None:
    """Where the flight recorder and the allocator left something, if they did."""
    folder = None if status.log is None else Path(status.log).parent / "traces"
    return short_path(folder) if folder is not None and any(folder.glob("*")) else None


def _next_word(status: Status) -> str:
    return "to resume" if status.resumable else "to try again"
