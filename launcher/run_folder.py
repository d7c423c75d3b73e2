"""The folder of a run: its lock, its numbered attempts, and the config it was started with. No torch."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from launcher.config import Config, to_toml
from launcher.errors import UserError

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
    """Make the folder of the next attempt, point `logs` at it, and record the config."""
    attempts = run_dir / "attempts"
    attempts.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in attempts.iterdir() if path.name.isdigit()]
    folder = attempts / str(max(numbers, default=0) + 1)
    folder.mkdir()
    link = run_dir / "logs"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(run_dir))
    for place in (folder, run_dir):
        (place / "config.toml").write_text(to_toml(config))
    return folder
