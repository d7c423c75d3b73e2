"""Fault injection for tests and soak runs: `LAUNCHER_FAULT=kind@phase[:step]:rank`, a no-op without it.

Several faults are separated by `;`, a rank of `*` is every rank, and a kind may carry seconds (`slow=5@turn:1`).
With a step (from 0; saves and exports by the number of steps done) the fault strikes at that step of the first start
only, so that a restart gets past it; without one it strikes whenever the phase is entered.

Kinds of ACTIVE strike whoever comes to the phase: `save-*` and `export` are the drafters', `export`, `save-manifest`,
`save-rename` and `save-pointer` the first one's alone. Those of PASSIVE spoil one thing each, for good: `nan` a
drafter's features, `recompile` the length of its row, `header` that of a target's row, `shard` the largest file of the
checkpoint that the first drafter has just published, `cache` a file of the compile cache of a node's first rank.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import UserError

ENVIRONMENT = "LAUNCHER_FAULT"
# Struck by `trip`.
ACTIVE = ("raise", "kill", "segv", "abort", "hang", "gil", "stop", "slow", "oom", "diskfull")
# Asked for with `armed` by the code that can spoil the thing in question, in the one phase where it comes by.
PASSIVE = {"nan": "step", "header": "step", "recompile": "step", "shard": "save", "cache": "start"}
# In the first of these no step has been taken yet. The others are a training step's, or a part of a save.
EARLY_PHASES = ("start", "init", "load", "turn", "gate")
STEP_PHASES = ("step", "save", "save-shard", "save-manifest", "save-rename", "save-pointer", "export", "eval")
FOREVER = 10**6
# Restarts by launch.sh and by torchrun itself.
RESTART_COUNTS = ("LAUNCHER_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
_PATTERN = re.compile(r"(?P<kind>[a-z]+)(=(?P<seconds>[0-9.]+))?@(?P<phase>[a-z-]+)(:(?P<step>\d+))?:(?P<rank>\d+|\*)")
_TEXT = os.environ.get(ENVIRONMENT, "")


@dataclass(frozen=True)
class Fault:
    """One planned fault; `step` and `rank` None mean any."""

    kind: str
    phase: str
    step: int | None
    rank: int | None
    seconds: float = 5.0

    def strikes(self, phase: str, step: int | None, rank: int, restarts: int = 0) -> bool:
        here = self.phase == phase and self.rank in (None, rank)
        return here and (self.step is None or (self.step == (step or 0) and restarts == 0))


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read the value of LAUNCHER_FAULT.

    Raises:
        UserError: not of the form above, an unknown kind, or one that cannot strike in that phase.
    """
    return tuple(_parse(part.strip()) for part in text.split(";") if part.strip())


def problems() -> list[str]:
    """What is wrong with the faults that were asked for, a line; for the command line."""
    try:
        parse_faults(_TEXT)
    except UserError as error:
        return [str(error)]
    return []


def trip(phase: str, step: int | None = None) -> None:
    """Strike if an active fault is planned for this rank here; costs one comparison otherwise."""
    if _TEXT:
        for fault in _here(phase, step, ACTIVE):
            _strike(fault)


def armed(kind: str, phase: str, step: int | None = None) -> bool:
    """Whether a passive fault of this kind is planned for this rank here."""
    faults = _here(phase, step, (kind,)) if _TEXT else []
    for fault in faults:
        _tell(fault)
    return bool(faults)


def spoil_features(features: Any, step: int) -> None:
    """Make a micro-batch's features NaN, where a `nan` fault is planned for the phase `step`."""
    if armed("nan", "step", step):
        features.fill_(float("nan"))


def spoil_shape(batch: Any, step: int) -> Any:
    """A row batch, or one without its last token where a `recompile` fault is planned for the phase `step`."""
    if not armed("recompile", "step", step):
        return batch
    names = ("features", "ids", "loss_mask", "doc", "positions")
    return replace(batch, **{name: getattr(batch, name)[:-1] for name in names})


def spoil_header(header: dict[str, Any], step: int) -> dict[str, Any]:
    """The header of a row, or one of another row length, where a `header` fault is planned for the phase `step`."""
    return header | {"row_length": -1} if armed("header", "step", step) else header


def spoil_shard(folder: Path, step: int) -> None:
    """Cut the largest file of a published checkpoint, where a `shard` fault is planned for the phase `save`."""
    if armed("shard", "save", step):
        cut(max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size))


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def _here(phase: str, step: int | None, kinds: tuple[str, ...]) -> list[Fault]:
    rank = int(os.environ.get("RANK", 0))
    restarts = sum(int(os.environ.get(name, 0)) for name in RESTART_COUNTS)
    faults = [fault for fault in parse_faults(_TEXT) if fault.kind in kinds]
    return [fault for fault in faults if fault.strikes(phase, step, rank, restarts)]


def _parse(text: str) -> Fault:
    match = _PATTERN.fullmatch(text)
    if match is None or match["kind"] not in (*ACTIVE, *PASSIVE):
        raise UserError(
            f"{ENVIRONMENT}={text}: not a fault",
            f"give kind@phase[:step]:rank with a kind of {', '.join((*ACTIVE, *PASSIVE))}",
        )
    kind, phase = match["kind"], match["phase"]
    places = (PASSIVE[kind],) if kind in PASSIVE else (*EARLY_PHASES, *STEP_PHASES)
    if phase not in places:
        raise UserError(
            f"{ENVIRONMENT}={text}: {kind} strikes nobody in the phase {phase}", f"give {' or '.join(places)}"
        )
    if phase in EARLY_PHASES and int(match["step"] or 0):
        raise UserError(f"{ENVIRONMENT}={text}: the phase {phase} comes before all steps", "give step 0, or none")
    return Fault(
        kind,
        phase,
        int(match["step"]) if match["step"] else None,
        None if match["rank"] == "*" else int(match["rank"]),
        float(match["seconds"] or Fault.seconds),
    )


def _tell(fault: Fault) -> None:
    print(f"injected fault: {fault}", flush=True)


def _strike(fault: Fault) -> None:
    _tell(fault)
    match fault.kind:
        case "raise":
            raise RuntimeError(f"injected error in phase {fault.phase}")
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        case "segv":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "hang":
            time.sleep(FOREVER)
        case "gil":
            # PyDLL keeps the GIL during the call, as a stuck extension would.
            ctypes.PyDLL(None).sleep(FOREVER)
        case "slow":
            time.sleep(fault.seconds)
        case "oom":
            _out_of_memory()
        case "diskfull":
            raise OSError(errno.ENOSPC, "No space left on device (injected)")


def _out_of_memory() -> None:
    import torch  # this module is imported where torch is not

    if torch.cuda.is_available():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")
