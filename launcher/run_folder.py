"""The folder of a run: its lock, its numbered attempts, and the config that it goes on with. No torch."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from launcher.config import Config, to_toml
from launcher.environment import copy_lock
from launcher.errors import RetryableError, UserError
from launcher.status import CONFIG_NAME
from launcher.whole_files import sync

# launch.sh sets it; under a bare torchrun the first rank of each node chooses.
ATTEMPT_VARIABLE = "LAUNCHER_ATTEMPT_DIR"


def lock_run(run_dir: Path) -> IO[str]:
    """Keep other starts out of the folder for as long as this process lives or the returned file is open.

    Raises:
        UserError: another start holds it; names its host and pid.
    """
    make_run_dir(run_dir)
    file = (run_dir / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"{run_dir} is in use by {owner}", "wait for it, stop it, or choose another --run-dir"
        ) from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def make_run_dir(run_dir: Path) -> None:
    """Create the folder; a path that cannot be one is the user's to mend."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"runtime.run_dir: cannot make {run_dir}: {error.strerror}", "choose another --run-dir"
        ) from None


def open_attempt(run_dir: Path, config: Config) -> Path:
    """Make the folder of the next attempt, point `logs` at it, and record the config there.

    Raises:
        RetryableError: the disk does not take it.
    """
    attempts = run_dir / "attempts"
    try:
        attempts.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in attempts.iterdir() if path.name.isdigit()]
        folder = attempts / str(max(numbers, default=0) + 1)
        folder.mkdir()
        link = run_dir / "logs"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(run_dir))
        (folder / CONFIG_NAME).write_text(to_toml(config))
    except OSError as error:
        raise _disk_error(run_dir, error) from None
    return folder


def keep_config(run_dir: Path, config: Config, config_file: Path | None) -> None:
    """Record what goes on with this run from its folder: the config, and the lock beside the file that it came from.

    For starts that have passed their checks. A dry run is no part of the run: it changes no config that is there.

    Raises:
        RetryableError: the disk does not take it; the former config stays.
    """
    kept = run_dir / CONFIG_NAME
    if config.dry_run and kept.exists():
        return
    temporary = kept.with_name(f".{CONFIG_NAME}.tmp")
    try:
        temporary.write_text(to_toml(config.model_copy(update={"dry_run": False})))
        sync(temporary)
        copy_lock(config_file, run_dir)
        temporary.replace(kept)
        sync(run_dir)
    except OSError as error:
        raise _disk_error(run_dir, error) from None


def _disk_error(run_dir: Path, error: OSError) -> RetryableError:
    return RetryableError(
        f"cannot write to {run_dir}: {error.strerror}", "make room there, or choose another --run-dir"
    )
