"""Scenarios of injected faults: starts of the real launcher in one run folder, and what must hold after each.

A scenario is played by the first test that looks at it (conftest.py); its other tests look at the same results.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint_folder import published
from launcher.faults import ENVIRONMENT
from launcher.trial import STRUCK, Running, Trial, run_trial

# No start may take longer, the fault's own deadline included; generous because runs share few cores.
LIMIT = 500.0
# From a failure to the end of all; from a stop signal, `runtime.grace`.
FAILURE_SECONDS, GRACE_SECONDS = 15.0, 30.0
FLAGS = [
    "--preset=tiny",
    "--device=cpu",
    "--data.row_length=64",
    "--data.holdout=2",
    "--train.anchors=4",
    # Losses do not depend on the length of a run, so that runs of different lengths can be compared.
    "--train.schedule=constant",
    "--train.warmup_ratio=0",
    "--checkpoint.every=2",
    "--checkpoint.asynchronous=false",
    "--runtime.step_timeout=40",
]


def ends_within(seconds: float = FAILURE_SECONDS) -> Callable[[Running], None]:
    """From the moment when the fault strikes; a run that takes longer counts as one that never ends."""

    def wait(running: Running) -> None:
        running.process.wait(seconds)

    return wait


def stop_by(number: signal.Signals) -> Callable[[Running], None]:
    """Ask for a stop, which must be over within `runtime.grace`."""

    def stop(running: Running) -> None:
        running.send(number)
        running.process.wait(GRACE_SECONDS)

    return stop


@dataclass(frozen=True)
class Start:
    """One `launch.sh` of a scenario.

    Args:
        fault: value of LAUNCHER_FAULT.
        act: called with the running start once the fault has struck, e.g. to send a signal.
        struck: what a log says when it has.
        before: called with the run folder before the start, e.g. to spoil a checkpoint.
        split: targets and drafters.
        compiled: compile for real, which takes most of a start's time.
        steps: last step.
    """

    fault: str = ""
    flags: tuple[str, ...] = ()
    act: Callable[[Running], None] | None = None
    struck: str = STRUCK
    before: Callable[[Path], None] | None = None
    split: tuple[int, int] = (1, 1)
    compiled: bool = False
    steps: int = 6


@dataclass(frozen=True)
class Scenario:
    """Starts of one run, one after another."""

    name: str
    starts: tuple[Start, ...]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Soak:
    """Consecutive rounds of a soak, on one run folder."""

    seed: int
    numbers: range

    def __str__(self) -> str:
        return f"rounds {self.numbers.start}-{self.numbers.stop - 1}"


def environment(cache: Path) -> dict[str, str]:
    """What every start is told: one thread, no compiler, and where packed rows and byte code may be kept."""
    return {
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def play(scenario: Scenario, folder: Path, cache: Path, chats: Path) -> list[Trial]:
    """Run all starts of a scenario."""
    run_dir = folder / scenario.name.replace(" ", "-") / "run"
    return [_play_start(start, run_dir, cache, chats) for start in scenario.starts]


def check(trial: Trial, state: str, code: int, words: tuple[str, ...] = ()) -> None:
    """What must hold after every start, whatever happened in it."""
    status = trial.status
    assert (status.state, status.code, trial.code) == (state, code, code), f"{status}\n{trial.console}"
    # A refused checkpoint is still the newest one there is.
    broken = [problem for problem in trial.broken() if code != 78 or not problem.startswith("checkpoint")]
    assert broken == [], trial.console
    assert trial.seconds < LIMIT
    for word in words:
        assert word in f"{status.rank} {status.role} {status.phase} {status.reason}", f"{word} is not in {status}"
    last_lines = "\n".join(trial.console.rstrip().splitlines()[-16:])
    if state != "finished":
        assert f"run {state} (exit code {code})" in last_lines, trial.console
    if state in {"failed", "stopped"} and code != 78:
        assert "--resume auto" in last_lines
    assert "Traceback" not in trial.console, trial.console


def check_logs(trial: Trial, culprit: int, words: str, silent: bool = False) -> None:
    """The log of every rank names the one at fault and its error; not its own if it had no time to."""
    logs = {path.stem: path.read_text() for path in trial.run_dir.glob("attempts/1/rank_*.log")}
    if silent:
        del logs[f"rank_{culprit}"]
    assert logs
    for name, text in logs.items():
        assert words in text and (f"rank {culprit}" in text or name == f"rank_{culprit}"), f"{name}:\n{text}"


def newest(run_dir: Path) -> Path:
    return published(run_dir)[0]


def _play_start(start: Start, run_dir: Path, cache: Path, chats: Path) -> Trial:
    if start.before is not None:
        start.before(run_dir)
    targets, drafters = start.split
    split = [f"--topology.targets={targets}", f"--topology.drafters={drafters}"]
    data = [f"--data.path={chats}", f"--compile.cache_dir={run_dir.parent / 'compile'}"]
    told = environment(cache) | {ENVIRONMENT: start.fault, "TORCHDYNAMO_DISABLE": "0" if start.compiled else "1"}

    def act(running: Running) -> None:
        if start.act is not None and running.wait_for(start.struck, LIMIT):
            start.act(running)

    return run_trial(
        [*FLAGS, f"--train.max_steps={start.steps}", *split, *data, *start.flags], run_dir, told, LIMIT, act
    )
