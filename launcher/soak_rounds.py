"""One round of a soak: what it does, drawn from the seed, and what must hold after it whatever it did."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint_folder import newest_published
from launcher.faults import ENVIRONMENT, parse_faults
from launcher.manifest import problems_of
from launcher.trial import Running, Trial, run_trial

# Generous, because several runs may share few cores; the faults' own deadlines are below.
ROUND_SECONDS = 300.0
STEPS = 6
PHASES = ("init", "load", "turn", "step", "save")
SAVE_STAGES = ("save-shard", "save-manifest", "save-rename", "save-pointer")
# Exit codes a fault may end with once it has struck; a NaN, a spoiled file or a full disk is survived, unless it is the
# last save that fails.
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
    "cache": {0},
    "shard": {0},
    "diskfull": {0, 75},
    "slow": {0},
    "SIGTERM": {143, 0},
    "SIGINT": {130, 0},
    "second SIGTERM": {143, 0},
    "kill torchrun": {75, 0},
}
# Of these the status must name the very rank that was struck.
BLAMED = {"raise", "kill", "segv", "abort", "hang", "gil", "stop", "oom"}
# From the strike, or from the deadline that a hang runs into, to the end of all; several runs may share few cores.
FAILURE_SECONDS = 30.0
# From a stop signal to the end of all: `runtime.grace`, and a little for a busy machine.
STOP_SECONDS = 35.0
# Seconds that a rank may hang by phase, and be silent in any; of steps it may be the first, and a save that is written
# in the background is waited for by the next one.
DEADLINES, SILENCE = {"init": 120.0, "load": 120.0, "step": 45.0, "save": 40.0}, 15.0
FLAGS = [
    "--preset=tiny",
    "--device=cpu",
    "--data.max_chats=24",
    "--data.row_length=64",
    "--data.holdout=2",
    "--train.anchors=4",
    "--checkpoint.every=2",
    f"--runtime.init_timeout={DEADLINES['init']}",
    f"--runtime.load_timeout={DEADLINES['load']}",
    f"--runtime.step_timeout={DEADLINES['step'] / 3}",
    f"--runtime.save_timeout={DEADLINES['save'] / 2}",
    f"--runtime.heartbeat_timeout={SILENCE}",
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
    elif kind == "cache":
        phase, rank = "start", 0
    elif kind == "shard":
        phase = "save"
    elif kind == "diskfull":
        phase, rank = dice.choice(SAVE_STAGES), targets
    else:
        phase = dice.choice(PHASES if kind not in {"kill", "hang"} else PHASES + SAVE_STAGES)
    if phase.startswith(("save", "turn")):
        rank = targets if phase in SAVE_STAGES or kind == "shard" else targets + dice.randrange(drafters)
    steps = {"step": step} | dict.fromkeys(("save", *SAVE_STAGES), saved)
    place = f"{phase}:{steps[phase]}" if phase in steps else phase
    name, seconds = (kind, "") if not kind.startswith(("SIG", "second", "kill torchrun", "slow")) else ("slow", "=3")
    return Round(number, kind, f"{name}{seconds}@{place}:{rank}", targets, drafters, dice.random() < 0.5)


def play_round(drawn: Round, run_dir: Path, start_step: int, environment: dict[str, str]) -> tuple[Trial, list[str]]:
    """Run a round; returns how it ended and the invariants it broke."""
    flags = [*FLAGS, *drawn.flags, f"--train.max_steps={start_step + STEPS}"]
    flags += [f"--compile.cache_dir={cache_of(run_dir)}", f"--compile.turn_timeout={turn_seconds(environment)}"]
    newest = newest_published(run_dir)
    spoiled = str(newest) if newest is not None and problems_of(newest) else None
    act = _act(drawn, turn_seconds(environment))
    trial = run_trial(flags, run_dir, environment | {ENVIRONMENT: drawn.fault}, ROUND_SECONDS, act)
    return trial, broken_by(drawn, trial, spoiled)


def broken_by(drawn: Round, trial: Trial, spoiled: str | None) -> list[str]:
    """The invariants that a round broke.

    Args:
        spoiled: the newest checkpoint before it, if an earlier round had spoiled that. A run that ends before it loads
            any may name it still.
    """
    named = spoiled is not None and trial.code != 0 and trial.status.last_checkpoint == spoiled
    broken = trial.broken(damage_is_known=named or (trial.struck and drawn.kind == "shard"))
    # A fault planned for a phase that the run did not come to, such as a save at an odd step, strikes nobody.
    allowed = CODES[drawn.kind] if trial.struck else {0}
    if trial.code not in allowed:
        broken.append(
            f"exit code {trial.code} after {drawn.kind}, allowed are {sorted(allowed)}: {trial.status.reason}"
        )
    if trial.struck and drawn.kind in BLAMED and trial.status.rank != (struck := parse_faults(drawn.fault)[0].rank):
        broken.append(f"rank {struck} was struck, rank {trial.status.rank} is named: {trial.status.reason}")
    told = trial.console.count("is not used, compiling anew in a private one")
    if told != (trial.struck and drawn.kind == "cache"):
        broken.append(f"{told} warnings of a compile cache that is not used")
    if spoiled is not None and trial.code == 0 and f"skipped checkpoint {spoiled}" not in trial.console:
        broken.append(f"nothing was said of {spoiled}, which is damaged")
    return broken


def cache_of(run_dir: Path) -> Path:
    """The compile cache of the runs on one folder: what spoils it shall not spoil the user's."""
    return run_dir.parent / "compile"


def turn_seconds(environment: dict[str, str]) -> int:
    """Seconds of a turn; one that compiles for real, on few cores, takes longer."""
    return 20 if environment.get("TORCHDYNAMO_DISABLE") == "1" else 120


def seconds_left(drawn: Round, turn: float) -> float:
    """Seconds from the strike of a fault that ends the run to its end.

    Args:
        turn: seconds of a turn.
    """
    if drawn.kind in {"stop", "gil"}:
        return SILENCE + FAILURE_SECONDS
    if drawn.kind != "hang":
        return FAILURE_SECONDS
    phase = parse_faults(drawn.fault)[0].phase.partition("-")[0]
    return (DEADLINES | {"turn": turn})[phase] + FAILURE_SECONDS


def _act(drawn: Round, turn: float) -> Callable[[Running], None] | None:
    """What is done to the run when its `slow` fault has struck, or for how long it may go on after another one."""
    kind = drawn.kind
    signals = {"SIGTERM": [signal.SIGTERM], "SIGINT": [signal.SIGINT], "second SIGTERM": [signal.SIGTERM] * 2}

    def act(running: Running) -> None:
        if not running.wait_for("injected fault", ROUND_SECONDS):
            return
        if kind == "kill torchrun":
            running.kill_torchrun()
        elif kind in BLAMED:
            running.process.wait(seconds_left(drawn, turn))  # or it counts as one that never ends
        else:
            running.send(*signals[kind])
            running.process.wait(STOP_SECONDS)

    return act if kind in {*signals, *BLAMED, "kill torchrun"} else None
