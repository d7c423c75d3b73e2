"""The parent of a run, with small scripts in place of torchrun or of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launcher.config import Config, validate
from launcher.errors import UserError
from launcher.fallback_status import first_failure, own_lines
from launcher.status import Status
from launcher.supervisor import choose_ranks, may_restart, rank_environment

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import sys
from pathlib import Path
from launcher import supervisor
from launcher.cli import Command
from launcher.config import validate
from launcher.errors import LauncherError

run_dir, worker, under, restarts = sys.argv[1:5]
if under == "plain":  # the script itself stands in for torchrun, which takes seconds to start
    supervisor.torchrun_command = lambda command, ranks, worker: [sys.executable, "-u", str(worker)]
supervisor.TORCHRUN_SECONDS = 1.0
runtime = {"run_dir": run_dir, "device": "cpu", "grace": 1}
config = validate({"runtime": runtime, "target": {"model": "random:tiny"}})
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

    def __init__(self, folder: Path, body: str, under: str = "plain", restarts: int = 0) -> None:
        self.dir, self.worker = folder / "run", folder / "worker.py"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.worker.write_text(HEAD + body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.dir), str(self.worker), under, str(restarts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"ROOT": str(ROOT), "RUN_DIR": str(self.dir), "MARK": self.mark},
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


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return lambda *args, **kwargs: Run(tmp_path, *args, **kwargs)


def test_the_code_is_the_one_of_the_status_and_the_console_is_kept(run: Callable[..., Run]) -> None:
    started = run(
        "print('\\x1b[32mstep 1\\x1b[0m', sys.argv, os.environ['LAUNCHER_SUPERVISED'], flush=True)\n"
        "print('noise', file=sys.stderr)\nend('finished', 0, step=1)\nsys.exit(3)"
    )
    code, out, err = started.end()
    assert (code, err) == (0, "")
    assert "\x1b[32mstep 1" in out
    assert "noise" not in out
    attempt = started.dir / "attempts/1"
    assert (started.dir / "logs").resolve() == attempt.resolve()
    assert "noise" in (attempt / "torchrun.log").read_text()
    assert "step 1" in (attempt / "console.log").read_text()
    assert "\x1b" not in (attempt / "console.log").read_text()
    assert json.loads((attempt / "status.json").read_text())["step"] == 1


def test_a_failure_ends_with_the_box_and_an_old_status_is_not_believed(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(json.dumps({"state": "finished", "code": 0}))
    code, out, _ = run("end('failed', 75, reason='rank 1 lost', rank=1, phase='step')\nsys.exit(1)").end()
    assert code == 75
    assert "rank 1 lost" in out
    assert out.rstrip().endswith("\N{BOX DRAWINGS LIGHT ARC UP AND LEFT}")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise RuntimeError('nobody caught me')", 1, "RuntimeError: nobody caught me"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 75, "torchrun was killed by SIGKILL"),
        ("sys.exit(0)", 0, "none wrote a status"),
    ],
)
def test_a_run_that_ends_without_a_word_gets_a_status(run: Callable[..., Run], body: str, code: int, said: str) -> None:
    started = run(body)
    assert started.end()[0] == code
    assert started.status["code"] == code
    assert said in str(started.status["reason"])


STOPPABLE = """
def stop(number, frame):
    end('stopped', {signal.SIGINT: 130, signal.SIGTERM: 143}[number], step=4)
    sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)
(run_dir / 'up').touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)]
)
def test_a_stop_signal_is_passed_on_once(run: Callable[..., Run], sent: signal.Signals, code: int) -> None:
    started = run(STOPPABLE)
    started.wait_for("up")
    started.process.send_signal(sent)
    assert started.end()[0] == code
    assert started.status["step"] == 4


STUBBORN = """
deaf = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]\\n"
exec(deaf)
child(deaf + "os.setsid() if os.getpgid(0) != os.getpid() else 0\\ntime.sleep(60)")
time.sleep(0.5)
(run_dir / 'up').touch()
time.sleep(60)
"""


def test_a_second_signal_kills_everything_at_once(run: Callable[..., Run]) -> None:
    started = run(STUBBORN)
    started.wait_for("up")
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    sent = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.end()[0] == 130
    assert time.monotonic() - sent < 5
    assert "second signal" in str(started.status["reason"])


def test_a_run_that_ignores_the_first_signal_is_given_up_after_its_grace(run: Callable[..., Run]) -> None:
    started = run(STUBBORN)
    started.wait_for("up")
    started.process.send_signal(signal.SIGTERM)
    assert started.end(timeout=15)[0] == 143


def test_an_agent_that_hangs_after_the_end_is_given_up(run: Callable[..., Run]) -> None:
    assert run("end('finished', 0)\ntime.sleep(60)").end(timeout=20)[0] == 0


def test_orphans_in_other_sessions_do_not_outlive_the_run(run: Callable[..., Run]) -> None:
    child = "child('os.fork() and os._exit(0)\\ntime.sleep(60)').wait()"
    assert run(f"{child}\nend('finished', 0)").end(timeout=20)[0] == 0


def test_ranks_end_when_the_supervisor_is_killed(run: Callable[..., Run]) -> None:
    started = run(STOPPABLE)
    started.wait_for("up")
    started.process.kill()
    started.process.wait()
    deadline = time.monotonic() + 10
    while started.left():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert started.status["code"] == 143, "it was asked to stop in good order"


def test_a_closed_pipe_does_not_stop_the_run(run: Callable[..., Run]) -> None:
    started = run("(run_dir / 'up').touch()\ntime.sleep(0.5)\nprint('late', flush=True)\nend('finished', 0)")
    started.wait_for("up")
    assert started.process.stdout is not None
    started.process.stdout.close()
    assert started.process.wait(timeout=20) == 0
    assert "late" in (started.dir / "attempts/1/console.log").read_text()


def test_a_run_folder_has_one_run(run: Callable[..., Run]) -> None:
    first = run(STOPPABLE)
    first.wait_for("up")
    second = subprocess.run(
        [sys.executable, "-c", DRIVER, str(first.dir), str(first.worker), "plain", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
    )
    assert second.returncode == 78
    assert f"pid {first.process.pid}" in second.stderr
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143


def test_restarts_go_on_with_a_new_attempt(run: Callable[..., Run]) -> None:
    started = run(
        "restarts = int(os.environ['LAUNCHER_RESTARTS'])\nprint('start', restarts, flush=True)\n"
        "end('failed', 75, step=restarts) if restarts < 2 else end('finished', 0)",
        restarts=5,
    )
    code, out, _ = started.end()
    assert code == 0
    assert [path.name for path in sorted((started.dir / "attempts").iterdir())] == ["1", "2", "3"]
    assert "start 2" in out
    assert json.loads((started.dir / "attempts/1/status.json").read_text())["code"] == 75


def test_under_torchrun_a_killed_rank_is_named(run: Callable[..., Run]) -> None:
    started = run(
        "time.sleep(0.5)\nrank == 1 and os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", under="torchrun"
    )
    code, out, _ = started.end(timeout=60)
    assert code == 75
    assert started.status["rank"] == 1
    assert "rank 1 was killed by SIGKILL" in out
    assert "W0" not in out, "torchrun's own log stays out of the console"


def test_under_torchrun_a_refusal_keeps_its_code_and_its_words(run: Callable[..., Run]) -> None:
    words = "rank or print('topology: no -> yes', *sys.argv[1:], file=sys.stderr)"
    started = run(f"{words}\ntime.sleep(5 * rank)\nsys.exit(78)", under="torchrun")
    code, out, _ = started.end(timeout=60)
    assert code == 78
    assert "topology: no -> yes --nproc 2 --flag=x" in out
    assert started.status["next_command"] is None


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
    assert may_restart([Status("failed", code, step=step) for code, step in ends], limit) is again


def test_ranks_keep_the_environment_and_learn_of_the_terminal(tmp_path: Path) -> None:
    told = rank_environment({"HOME": "/h"}, tmp_path, 1, 30.0, terminal=True)
    assert told["HOME"] == "/h"
    assert told["LAUNCHER_ATTEMPT_DIR"] == str(tmp_path)
    assert told["FORCE_COLOR"] == "1"
    assert "FORCE_COLOR" not in rank_environment({}, tmp_path, 1, 30.0, terminal=False)
