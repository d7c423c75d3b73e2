"""A supervised run in a process of its own, with a small script in place of torchrun or of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import json, os, sys, time
from pathlib import Path
from launcher import main, supervisor, watched_torchrun  # main has the handlers of stop signals that no attempt takes
from launcher.cli import Command
from launcher.config import merge, validate
from launcher.errors import LauncherError

run_dir, worker, under, restarts = sys.argv[1:5]
if under == "plain":  # the script itself stands in for torchrun, which takes seconds to start
    supervisor.torchrun_command = lambda command, ranks, worker, errors: [sys.executable, "-u", str(worker)]
watched_torchrun.TORCHRUN_SECONDS = watched_torchrun.LAST_SECONDS = 0.5
def wait_for_gpus(*_):  # between two attempts for as long as the test says
    if (Path(run_dir) / "logs").exists() and (gap := float(os.environ["GAP"])):
        (Path(run_dir) / "gap").touch()
        time.sleep(gap)
supervisor.wait_for_gpus = wait_for_gpus
runtime = {"run_dir": run_dir, "device": "cpu", "grace": 3, "shutdown_timeout": 2}
options = {"runtime": runtime, "target": {"model": "random:tiny"}}
config = validate(merge(options, json.loads(os.environ.get("OPTIONS", "{}"))))
command = Command("train", ["--nproc", "2", "--flag=x"], config, nproc=2, max_restarts=int(restarts))
try:
    sys.exit(supervisor.supervise(command, Path(worker)))
except LauncherError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
"""
# Names for the fake ranks and agents below.
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["ROOT"])
from launcher.status import Status, write_status
run_dir, rank = Path(os.environ["RUN_DIR"]), int(os.environ.get("RANK", 0))
def end(state, code, **more): write_status(run_dir, Status(state=state, code=code, **more))
def child(text):
    return subprocess.Popen([sys.executable, "-c", "import os, signal, time\\n" + text], start_new_session=True)
"""


class Run:
    """A supervised run in its own process, with a mark by which all its processes are found."""

    def __init__(
        self,
        folder: Path,
        body: str,
        under: str = "plain",
        restarts: int = 0,
        gap: float = 0.0,
        stderr: int = subprocess.PIPE,
        **options: object,
    ) -> None:
        self.dir, self.worker = folder / "run", folder / "worker.py"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.worker.write_text(HEAD + body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.dir), str(self.worker), under, str(restarts)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"ROOT": str(ROOT), "RUN_DIR": str(self.dir), "MARK": self.mark, "OPTIONS": json.dumps(options)}
            | {"GAP": str(gap)},
        )

    def wait_for(self, name: str, timeout: float = 20.0) -> None:
        """Wait until the fake rank has made a file of this name in the run folder."""
        deadline = time.monotonic() + timeout
        while not (self.dir / name).exists():
            assert time.monotonic() < deadline, f"no {name} within {timeout} s"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self, timeout: float = 30.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; fails if any process of the run is left."""
        out, err = self.process.communicate(timeout=timeout)
        assert self.left() == []
        return self.process.returncode, out, err

    def left(self) -> list[int]:
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == self.mark
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            return False

    @property
    def status(self) -> dict[str, object]:
        return json.loads((self.dir / "status.json").read_text())


@pytest.fixture(name="run")
def start_runs(tmp_path: Path) -> Callable[..., Run]:
    """Starts runs, one after another, on the run folder of the test. A test file has it by importing this name."""
    return lambda *args, **kwargs: Run(tmp_path, *args, **kwargs)
