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

import pytest

from launcher.signal_inbox import SAME_WISH_SECONDS
from tests.supervised import DRIVER, ROOT, Run
from tests.supervised import start_runs as start_runs


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
    end('stopped', 130 if number == signal.SIGINT else 143, step=4, reason=signal.Signals(number).name)
    sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP): signal.signal(number, stop)
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
    assert started.status["step"] == 4 and started.status["reason"] == sent.name


def test_one_wish_that_comes_twice_stops_in_good_order(run: Callable[..., Run]) -> None:
    """GNU timeout signals its child and then the group of both; Slurm signals every process of a job."""
    started = run(STOPPABLE.replace("    end(", "    time.sleep(0.5)\n    end("))
    started.wait_for("up")
    for _ in range(2):
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert started.end()[0] == 143
    assert started.status["step"] == 4, "it had the time to save"


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
    time.sleep(SAME_WISH_SECONDS + 1)
    started.process.send_signal(signal.SIGINT)
    assert started.end()[0] == 130
    assert "second signal" in str(started.status["reason"])


def test_a_run_that_ignores_the_first_signal_is_given_up_after_its_grace(run: Callable[..., Run]) -> None:
    started = run(STUBBORN)
    started.wait_for("up")
    started.process.send_signal(signal.SIGTERM)
    assert started.end(timeout=8)[0] == 143  # runtime.grace is 3 s here


def test_an_agent_that_hangs_after_the_end_is_given_up(run: Callable[..., Run]) -> None:
    assert run("end('finished', 0)\ntime.sleep(60)").end(timeout=20)[0] == 0


STUCK = """
ranks = [subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
ranks[1].send_signal(signal.SIGSTOP)
time.sleep(60)
"""


def test_a_start_in_which_no_rank_reports_is_given_up_and_the_stopped_one_named(run: Callable[..., Run]) -> None:
    started = run(STUCK, runtime={"init_timeout": 0.5})
    assert started.end(timeout=15)[0] == 75
    assert (started.status["rank"], started.status["phase"]) == (1, "start")
    assert "no rank has reported for 2 s: it is stopped (SIGSTOP)" in str(started.status["reason"])


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


def test_a_console_that_nobody_empties_stops_neither_the_ranks_nor_the_end(run: Callable[..., Run]) -> None:
    lines = "for step in range(30000): print('step', step, 'of a run whose user pressed Ctrl-S', flush=True)\n"
    started = run(f"{lines}end('failed', 75, reason='rank 1 lost')\nsys.exit(1)")
    assert started.process.wait(timeout=60) == 75
    console = (started.dir / "attempts/1/console.log").read_text()
    assert "step 29999" in console and "rank 1 lost" in console
    assert started.status["code"] == 75


def test_a_run_folder_has_one_run(run: Callable[..., Run]) -> None:
    first = run(STOPPABLE)
    first.wait_for("up")
    second = subprocess.run(
        [sys.executable, "-c", DRIVER, str(first.dir), str(first.worker), "plain", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"GAP": "0"},
        timeout=30,
    )
    assert second.returncode == 78
    assert f"pid {first.process.pid}" in second.stderr
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143


def test_a_status_that_the_disk_does_not_take_costs_neither_the_box_nor_the_code(run: Callable[..., Run]) -> None:
    taken = "(run_dir / 'status.json').unlink()\n(run_dir / 'status.json').mkdir()\n"
    code, out, err = run(f"{taken}(run_dir / 'status.json/x').touch()\nsys.exit(1)").end()
    assert code == 75 and "run failed (exit code 75)" in out
    assert "Traceback" not in out + err and "status.json" in err


def test_a_full_disk_is_why_even_if_the_former_status_makes_room_for_the_end(run: Callable[..., Run]) -> None:
    full = (
        "attempt = Path(os.environ['LAUNCHER_ATTEMPT_DIR'], 'status.json')\nattempt.mkdir()\n(attempt / 'x').touch()\n"
    )
    started = run(f"{full}sys.exit(1)")
    assert started.end()[0] == 75
    assert started.status["code"] == 75 and "takes no status" in str(started.status["reason"])


def test_what_a_rank_could_only_say_is_the_end_of_the_run(run: Callable[..., Run]) -> None:
    said = "Status(state='failed', code=75, reason='No space left on device', rank=1, step=6)"
    started = run(f"from launcher.status import spoken\nprint(spoken({said}), flush=True)\nsys.exit(1)")
    code, out, _ = started.end()
    assert code == 75 and out.count("exit code") == 1 and "No space left" in out
    assert "without a word" not in out and "{" not in out
    assert (started.status["code"], started.status["rank"]) == (75, 1), "there was room again at the end"


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
