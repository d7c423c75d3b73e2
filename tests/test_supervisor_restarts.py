"""What an attempt leaves to the next one: restarts, other splits, dry runs, and the command that goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from launcher.config import validate
from tests.full_pipes import fill
from tests.supervised import Run
from tests.supervised import start_runs as start_runs
from tests.test_preflight import saved


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


@pytest.mark.parametrize(
    ("restarts", "attempts", "words"),
    [
        (9, 3, "3 attempts in a row came no further than step 4"),
        (1, 2, "this was the last of --max-restarts 1"),
        (0, 1, ""),
    ],
)
def test_restarting_is_given_up_with_a_word(run: Callable[..., Run], restarts: int, attempts: int, words: str) -> None:
    offer = "next_command=os.environ['LAUNCHER_STARTED_AS']"
    started = run(f"end('failed', 75, step=4, {offer})\nsys.exit(1)", restarts=restarts)
    code, out, _ = started.end()
    assert code == 75 and len(list((started.dir / "attempts").iterdir())) == attempts
    assert out.count("not started again") == bool(words) and words in out
    assert out.rstrip().splitlines()[-1].startswith("to try again: ./launch.sh"), "the box stays last"
    if words:
        assert words in (started.dir / f"attempts/{attempts}/console.log").read_text()


FAILS_WHEN_ASKED = """
def stop(number, frame):
    end('failed', 75, step=4, reason='lost while stopping')
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
(run_dir / 'up').touch()
time.sleep(60)
"""


def test_no_restart_for_a_run_that_fails_while_it_is_asked_to_stop(run: Callable[..., Run]) -> None:
    started = run(FAILS_WHEN_ASKED, restarts=5)
    started.wait_for("up")
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 75
    assert [path.name for path in (started.dir / "attempts").iterdir()] == ["1"]


def test_a_stop_between_two_attempts_is_what_the_run_ended_with(run: Callable[..., Run]) -> None:
    started = run("end('failed', 75, step=4)\nsys.exit(1)", restarts=5, gap=60)
    started.wait_for("gap")
    started.process.send_signal(signal.SIGUSR1)
    code, _, err = started.end()
    assert code == 143 and "run stopped (exit code 143)" in err
    assert (started.status["state"], started.status["code"], started.status["step"]) == ("stopped", 143, 4)
    assert started.status["reason"] == "stopped by SIGUSR1 at step 4"


def test_a_caller_that_does_not_read_stderr_holds_nothing_up(run: Callable[..., Run]) -> None:
    reading, writing = os.pipe()
    fill(writing)
    started = run("end('failed', 75, step=4)\nsys.exit(1)", restarts=5, gap=60, stderr=writing)
    started.wait_for("gap")
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 143
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_no_other_split_is_tried_for_a_run_that_was_asked_to_stop(run: Callable[..., Run], state: str) -> None:
    ask = "Path(os.environ['LAUNCHER_ATTEMPT_DIR'], 'again.json').write_text('{\"targets\": 1, \"drafters\": 2}')\n"
    stop = "signal.signal(signal.SIGTERM, lambda *_: (end(STATE, CODE), os._exit(0)))\n"
    body = stop.replace("STATE", repr(state)).replace("CODE", "143" if state == "stopped" else "0")
    started = run(f"{ask}{body}(run_dir / 'up').touch()\ntime.sleep(60)")
    started.wait_for("up")
    started.process.send_signal(signal.SIGTERM)
    code, out, _ = started.end()
    assert code == 143 and "run stopped" in out
    assert started.status["state"] == "stopped"
    assert [path.name for path in (started.dir / "attempts").iterdir()] == ["1"]


def test_the_command_that_goes_on_has_the_flags_of_this_start(run: Callable[..., Run]) -> None:
    started = run("end('failed', 75, next_command=os.environ['LAUNCHER_STARTED_AS'])", restarts=1)
    started.end()
    assert started.status["next_command"] == "./launch.sh --nproc 2 --max-restarts 1"
    silent = run("sys.exit(1)", restarts=1)
    silent.end()
    assert str(silent.status["next_command"]).startswith("./launch.sh --nproc 2 --max-restarts 1 --config ")


def test_a_refused_start_leaves_the_run_as_it_stood(run: Callable[..., Run]) -> None:
    first = run("end('finished', 0, step=7)")
    first.end()
    refused = run("end('finished', 0, step=8)", runtime={"resume": "nowhere/step-3"})
    code, _, err = refused.end()
    assert code == 78 and "nowhere/step-3" in err
    assert (refused.status["state"], refused.status["code"], refused.status["step"]) == ("finished", 0, 7)
    assert [path.name for path in (refused.dir / "attempts").iterdir()] == ["1"]


def test_a_dry_run_leaves_the_run_as_it_stood(run: Callable[..., Run]) -> None:
    real = run("end('stopped', 143, step=7)")
    real.end()
    before = (real.dir / "config.toml").read_text()
    assert run("end('finished', 0, step=0)", dry_run=True).end()[0] == 0
    assert real.status["step"] == 0, "there is no run to go on with yet"
    run("end('stopped', 143, step=7)").end()
    saved(real.dir, 7, validate({"target": {"model": "random:tiny"}}))
    dry = run("end('finished', 0, reason='dry run')", dry_run=True, train={"lr": 1.0})
    assert dry.end()[0] == 0
    assert (dry.status["state"], dry.status["step"]) == ("stopped", 7)
    assert (dry.dir / "config.toml").read_text() == before
    (attempt,) = dry.dir.glob("logs/config.toml")
    assert "dry_run = true" in attempt.read_text() and "dry_run = true" not in before
    assert "dry run" in (dry.dir / "logs/status.json").read_text()
