"""Helpers: small rank processes on a control plane of files, so that tests of their life need no torch.

Run as a script, it is one rank: `rank_processes.py SCENARIO FOLDER`, with RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from launcher import faults  # noqa: E402
from launcher.config_sections import RuntimeConfig  # noqa: E402
from launcher.lifecycle import Lifecycle  # noqa: E402
from launcher.signal_inbox import catch_signals  # noqa: E402
from launcher.topology import Role, Split, build_topology  # noqa: E402

if TYPE_CHECKING:
    from launcher.control import Control


class FileControl:
    """`launcher.control.Control` with a folder in place of the store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked_at: float | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """From now on no call of any rank returns."""
        (self.folder / ".stopped").touch()

    def clone(self) -> FileControl:
        return FileControl(self.folder)

    def set(self, key: str, value: Any) -> None:
        temporary = self.folder / f".{key.replace('/', '%')}.{os.getpid()}.{time.monotonic_ns()}"
        temporary.write_text(json.dumps(value))
        temporary.rename(self._path(key))

    def get(self, key: str) -> Any | None:
        try:
            return json.loads(self._path(key).read_text())
        except FileNotFoundError:
            return None

    def add(self, key: str, amount: int = 1) -> int:
        with self._lock():
            value = (self.get(key) or 0) + amount
            self.set(key, value)
        return value

    def claim(self, key: str, value: Any) -> bool:
        with self._lock():
            if self.get(key) is not None:
                return False
            self.set(key, {"value": value})
        return True

    def claimed(self, key: str) -> Any | None:
        claim = self.get(key)
        return None if claim is None else claim["value"]

    def _path(self, key: str) -> Path:
        self.asked_at = time.monotonic()
        while (self.folder / ".stopped").exists():
            time.sleep(0.1)
        self.asked_at = None
        return self.folder / key.replace("/", "%")

    @contextmanager
    def _lock(self) -> Generator[None]:
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def start_ranks(scenario: str, folder: Path, world_size: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """Start `world_size` ranks of a scenario, as torchrun would: a session each."""
    return [
        subprocess.Popen(
            [sys.executable, __file__, scenario, str(folder)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]


def end_ranks(ranks: list[subprocess.Popen[str]], timeout: float = 40.0) -> list[tuple[int, str]]:
    """(exit code, output) of each rank; kills what is left after `timeout` seconds and says so."""
    deadline = time.monotonic() + timeout
    # Polled as torchrun's agent does, which leaves a dead rank unreaped for up to 0.1 s.
    while any([rank.poll() is None for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(0.1)
    late = [rank.poll() is None for rank in ranks]
    for rank in ranks:
        rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    return [
        (rank.returncode, output + "\nSTILL THERE" * is_late)
        for rank, output, is_late in zip(ranks, outputs, late, strict=True)
    ]


def wait_for(path: Path, timeout: float = 40.0) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def _steps(life: Lifecycle, folder: Path, count: int, seconds: float = 0.05) -> None:
    """Training in miniature: agreed steps, then a last save when a stop is asked for."""
    for step in range(1, count + 1):
        life.step = step
        with life.phase("step", 3.0, defer_stop=True):
            time.sleep(seconds)
        (folder / f"step-{step}-rank-{life.role.rank}").touch()
        life.check()


def _scenario(name: str, life: Lifecycle, folder: Path) -> str:
    rank = life.role.rank
    if name == "steps":
        _steps(life, folder, 5)
    elif name == "long":
        _steps(life, folder, 400)
    elif name == "wait":
        with life.phase("load", 60.0):
            if rank == 0:
                _steps(life, folder, 400)
            life.wait_until(lambda: False, "features of micro-batch 0 from target 0", 60.0)
    elif name == "deadline":
        with life.phase("step", 2.0 if rank == 0 else 60.0):
            life.step = 1 if rank == 0 else 0
            if rank == 0:
                life.wait_until(lambda: False, "features of micro-batch 0 from target 0", 60.0)
            time.sleep(60.0)
    elif name == "mutual-wait":
        # Long enough for a heartbeat that says that rank 1 waits too.
        life.wait_until(lambda: rank == 1, "rank 1", 3.0)
        life.wait_until(lambda: False, "nothing", 60.0)
    elif name == "long-wait":
        if rank == 0:
            life.wait_until(lambda: False, "row 3 from rank 1", 3.0)
        with life.phase("step", 60.0):
            time.sleep(60.0)
    elif name == "save":
        life.step = 9 if rank == 0 else 4
        with life.phase("save", 60.0, defer_stop=True):
            (folder / f"saving-rank-{rank}").touch()
            time.sleep(60.0)
    elif name == "hanging-exit":
        life.finish("done")
        time.sleep(60.0)
    return f"scenario {name} done"


def _main(name: str, folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    catch_signals()
    (folder / f"caught-rank-{rank}").touch()
    faults.trip("start")
    roles = build_topology(Split(1, world_size - 1)).roles if world_size > 1 else (Role(0, "target", 0, 0, 0),)
    runtime = RuntimeConfig(
        heartbeat_timeout=float(os.environ.get("HEARTBEAT", 60)),
        grace=float(os.environ.get("GRACE", 30)),
        init_timeout=float(os.environ.get("INIT_TIMEOUT", 180)),
    )
    meet = float(os.environ.get("MEET", 20))
    log = folder / "logs" / f"rank_{rank}.log"
    control = cast("Control", FileControl(folder / "control"))
    life = Lifecycle(control, roles[rank], roles, folder, log, runtime)
    life.start()
    try:
        life.wait_until(lambda: all(life.control.get(f"member/{r}") for r in range(world_size)), "all ranks", meet)
        code = life.finish(_scenario(name, life, folder))
    except BaseException as error:
        code = life.fail(error)
    life.leave(code)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
