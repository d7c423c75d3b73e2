"""Soak: many short runs with seeded random faults, one after another in the same run folders, checked by invariants.

./launch.sh soak --rounds 200 --seed 1 [--jobs 4] [--minutes 60]

A round starts the launcher on a run that earlier rounds left in some state, lets one fault strike or one signal come,
and checks only what must hold after any of them: the run ends in time, its status tells the truth, no process is left,
the newest checkpoint is whole, and no step is lost or counted twice. A first Ctrl-C or SIGTERM lets the rounds under
way end and gives the summary of those played.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launcher.checkpoint_folder import newest_published, step_of
from launcher.command_parser import CommandParser
from launcher.errors import ExitCode
from launcher.faults import ENVIRONMENT, parse_faults
from launcher.signal_inbox import Wishes
from launcher.trial import Running, Trial, run_trial

# Generous, because several runs may share few cores; the faults' own deadlines are below.
ROUND_SECONDS = 300.0
# Rounds on one run folder before a fresh one is begun.
ROUNDS_PER_RUN = 10
STEPS = 6
PHASES = ("init", "load", "turn", "step", "save")
SAVE_STAGES = ("save-shard", "save-manifest", "save-rename", "save-pointer")
# Exit codes a fault may end with once it has struck; a NaN or a full disk is survived, unless the last save fails.
CODES = {
    "raise": {1},
    "header": {1},
    "kill": {75},
    "segv": {75},
    "abort": {75},
    "hang": {75},
    "gil": {75},
    "stop": {75},
    "oom": {75},
    "nan": {0},
    "diskfull": {0, 75},
    "slow": {0},
    "SIGTERM": {143, 0},
    "SIGINT": {130, 0},
    "second SIGTERM": {143, 0},
    "kill torchrun": {75, 0},
}
STOP_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
# Of these the status must name the very rank that was struck.
BLAMED = {"raise", "kill", "segv", "abort", "hang", "gil", "stop", "oom"}
FLAGS = [
    "--preset=tiny",
    "--device=cpu",
    "--data.max_chats=24",
    "--data.row_length=64",
    "--data.holdout=2",
    "--train.anchors=4",
    "--checkpoint.every=2",
    "--compile.turn_timeout=20",
    "--runtime.init_timeout=120",
    "--runtime.load_timeout=120",
    "--runtime.step_timeout=15",
    "--runtime.save_timeout=20",
    "--runtime.heartbeat_timeout=15",
]


@dataclass(frozen=True)
class Round:
    """What one round does, drawn from the seed alone."""

    number: int
    kind: str
    fault: str
    targets: int
    drafters: int
    asynchronous: bool

    @property
    def flags(self) -> list[str]:
        return [
            f"--topology.targets={self.targets}",
            f"--topology.drafters={self.drafters}",
            f"--checkpoint.asynchronous={str(self.asynchronous).lower()}",
        ]


def draw_round(number: int, seed: int, start_step: int) -> Round:
    """The round of this number: a pure function of its arguments. `start_step` is where its run goes on."""
    dice = random.Random(f"{seed}/{number}")
    kind = dice.choice(sorted(CODES))
    targets, drafters = dice.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    rank, step = dice.randrange(targets + drafters), start_step + dice.randrange(STEPS)
    saved = dice.choice([done for done in range(start_step + 1, start_step + STEPS + 1) if done % 2 == 0])
    if kind == "nan":
        phase, rank = "step", targets + dice.randrange(drafters)
    elif kind == "header":
        phase, rank = "step", dice.randrange(targets)
    elif kind == "diskfull":
        phase, rank = dice.choice(SAVE_STAGES), targets
    else:
        phase = dice.choice(PHASES if kind not in {"kill", "hang"} else PHASES + SAVE_STAGES)
    if phase.startswith(("save", "turn")):
        rank = targets if phase in SAVE_STAGES else targets + dice.randrange(drafters)
    steps = {"step": step} | dict.fromkeys(("save", *SAVE_STAGES), saved)
    place = f"{phase}:{steps[phase]}" if phase in steps else phase
    name, seconds = (kind, "") if not kind.startswith(("SIG", "second", "kill torchrun", "slow")) else ("slow", "=3")
    return Round(number, kind, f"{name}{seconds}@{place}:{rank}", targets, drafters, dice.random() < 0.5)


def play_round(drawn: Round, run_dir: Path, start_step: int, environment: dict[str, str]) -> tuple[Trial, list[str]]:
    """Run a round; returns how it ended and the invariants it broke."""
    flags = [*FLAGS, *drawn.flags, f"--train.max_steps={start_step + STEPS}"]
    trial = run_trial(flags, run_dir, environment | {ENVIRONMENT: drawn.fault}, ROUND_SECONDS, _act(drawn.kind))
    broken = trial.broken()
    # A fault planned for a phase that the run did not come to, such as a save at an odd step, strikes nobody.
    allowed = CODES[drawn.kind] if trial.struck else {0}
    if trial.code not in allowed:
        broken.append(
            f"exit code {trial.code} after {drawn.kind}, allowed are {sorted(allowed)}: {trial.status.reason}"
        )
    if trial.struck and drawn.kind in BLAMED and trial.status.rank != (struck := parse_faults(drawn.fault)[0].rank):
        broken.append(f"rank {struck} was struck, rank {trial.status.rank} is named: {trial.status.reason}")
    return trial, broken


def main(args: list[str]) -> int:
    """Run the rounds; 0 if every invariant held in all of them."""
    options = _parser().parse_args(args)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "0" if options.compiled else "1"}
    chains = [
        range(first, min(first + ROUNDS_PER_RUN, options.rounds)) for first in range(0, options.rounds, ROUNDS_PER_RUN)
    ]
    end, stopped = time.monotonic() + 60 * options.minutes, first_signal()

    def ended() -> bool:
        return bool(stopped) or time.monotonic() > end

    with ThreadPoolExecutor(options.jobs) as pool:
        played = pool.map(lambda chain: play_chain(chain, options.seed, folder, environment, ended), chains)
        reports = [report for chain in played for report in chain]
    (folder / "soak.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    failed = [report for report in reports if report["broken"]]
    print(summary(reports, options.seed))
    if not failed and options.folder is None:
        shutil.rmtree(folder)
    elif failed:
        print(f"kept {folder}")
    return ExitCode.UNCLASSIFIED if failed else STOP_CODES[stopped[0]] if stopped else ExitCode.FINISHED


def first_signal() -> list[signal.Signals]:
    """Where the first Ctrl-C or SIGTERM will be noted; a second one ends the rounds under way and this process."""
    noted = Wishes()

    def note(number: int, frame: FrameType | None) -> None:
        if not noted.add(number):
            return
        if len(noted) > 1:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os._exit(STOP_CODES[noted[0]])
        print("soak: begins no more rounds; once more to leave at once", file=sys.stderr, flush=True)

    for number in STOP_CODES:
        signal.signal(number, note)
    return noted


def summary(reports: list[dict[str, Any]], seed: int) -> str:
    """What the rounds came to, in a few lines."""
    struck, codes = (Counter(report[key] for report in reports) for key in ("struck", "code"))
    seconds = [report["seconds"] for report in reports] or [0.0]
    broken = [f"  round {r['number']} {r['fault']}: {problem}" for r in reports for problem in r["broken"]]
    ended = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items()))
    head = (
        f"soak: {len(reports)} rounds, seed {seed}: {struck[True]} faults struck; ended: {ended};"
        f" longest {max(seconds):.0f} s, mean {sum(seconds) / len(seconds):.0f} s; {len(broken)} invariants broken"
    )
    return "\n".join([head, *broken])


def play_chain(
    chain: range, seed: int, folder: Path, environment: dict[str, str], ended: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Rounds on one run folder, each going on from what the one before left; none begins once `ended()`."""
    reports = []
    run_dir = folder / f"run-{chain.start // ROUNDS_PER_RUN}" / "run"
    for number in chain:
        if ended():
            break
        newest = newest_published(run_dir)
        start_step = 0 if newest is None else step_of(newest)
        drawn = draw_round(number, seed, start_step)
        trial, broken = play_round(drawn, run_dir, start_step, environment)
        report = asdict(drawn) | {"struck": trial.struck, "code": trial.code, "seconds": round(trial.seconds, 1)}
        reports.append(report | {"reason": trial.status.reason, "broken": broken})
        verdict = "; ".join(broken) or "ok"
        print(
            f"round {number}: {drawn.kind} ({drawn.fault}) -> {trial.code} in {trial.seconds:.0f} s: {verdict}",
            flush=True,
        )
    return reports


def _parser() -> CommandParser:
    parser = CommandParser(prog="./launch.sh soak", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own folder")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round after this time")
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one, kept if a round fails")
    parser.add_argument("--compiled", action="store_true", help="compile in every round (slower)")
    return parser


def _act(kind: str) -> Callable[[Running], None] | None:
    """What is done to the run when its `slow` fault has struck."""
    signals = {"SIGTERM": [signal.SIGTERM], "SIGINT": [signal.SIGINT], "second SIGTERM": [signal.SIGTERM] * 2}

    def act(running: Running) -> None:
        if not running.wait_for("injected fault", ROUND_SECONDS):
            return
        if kind == "kill torchrun":
            running.kill_torchrun()
        else:
            running.send(*signals[kind])

    return act if kind in signals or kind == "kill torchrun" else None
