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
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launcher.checkpoint_folder import newest_published, step_of
from launcher.command_parser import CommandParser
from launcher.errors import ExitCode
from launcher.signal_inbox import Wishes
from launcher.soak_rounds import cache_of, draw_round, play_round

# Rounds on one run folder before a fresh one is begun.
ROUNDS_PER_RUN = 10
STOP_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


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
        if drawn.kind == "cache":  # it stays damaged until someone removes it
            shutil.rmtree(cache_of(run_dir), ignore_errors=True)
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
