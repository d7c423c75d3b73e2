"""`compile_report.json`: what each turn at the gate took and proved, written even if one of them failed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol

from launcher.barrier import Turn
from launcher.control import Control
from launcher.errors import RetryableError
from launcher.whole_files import write_whole

log = logging.getLogger("launcher")


class AnyProof(Protocol):
    """What a turn of either role showed: a dataclass, of which these are looked at here."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def peak_bytes(self) -> int: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    def line(self) -> str: ...


@dataclass(frozen=True)
class TurnReport:
    """One rank's entry; `start` and `end` in seconds since the epoch.

    seconds: the serial part, during which ranks after it wait.
    parts: seconds by name, from the first to the last; `imports` and `build` come before the turn, which is `trace`,
        `compile` (or loading from the cache) and `run`, and `proof` after it was passed on.
    verified: nothing is missing from the proof.
    """

    rank: int
    role: str
    start: float
    end: float
    seconds: float
    parts: dict[str, float]
    cache_hits: int
    cache_misses: int
    peak_bytes: int
    proof: dict[str, Any]
    verified: bool

    @classmethod
    def of(
        cls, rank: int, role: str, turn: Turn, parts: Mapping[str, float], cache: tuple[int, int], proof: AnyProof
    ) -> TurnReport:
        """The entry of a turn; `cache`: hits and misses."""
        seconds, verified = round(turn.seconds, 3), not proof.missing
        times = (turn.start, turn.start + seconds, seconds)
        return cls(rank, role, *times, dict(parts), *cache, proof.peak_bytes, asdict(proof), verified)

    def line(self, turn: Turn, proof: AnyProof) -> str:
        """One line for the console."""
        cache = f"{self.cache_hits} cache hits" + (f", {self.cache_misses} misses" if self.cache_misses else "")
        what = "compile" if self.role == "drafter" else f"compile {self.role}"
        return f"{what} {turn.place + 1}/{turn.count} rank {self.rank} {self.seconds:.1f} s ({cache})  {proof.line()}"


class Stopwatch:
    """Named laps, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str, within: Mapping[str, float] | None = None) -> None:
        """End a lap. What is known of some parts `within` it goes under their own names, the rest under `name`."""
        now, within = perf_counter(), within or {}
        rest = now - self._last - sum(within.values())
        self.laps |= {part: round(seconds, 3) for part, seconds in [*within.items(), (name, rest)]}
        self._last = now


class TurnBook:
    """The turns of all ranks, kept in the control store, so that any rank can write the file."""

    def __init__(self, path: Path, control: Control, ranks: Sequence[int], header: Mapping[str, Any]) -> None:
        self._path, self._control, self._ranks, self._header = path, control, list(ranks), dict(header)

    def add(self, report: TurnReport) -> None:
        """Hand in a turn. One that is not proved ends the run, so its rank writes what is known by then."""
        self._control.set(f"report/{report.rank}", asdict(report))
        if not report.verified:
            self.write()

    def write(self, required: bool = False) -> None:
        """Write the turns handed in so far, in rank order.

        A disk that takes them not costs one warning of all ranks: training needs no report, and a turn that is not
        proved ends the run with what was missing. A dry run has nothing else to show.

        Args:
            required: raise instead of the warning.

        Raises:
            RetryableError: the disk does not take a report that is required.
        """
        keys = [f"report/{rank}" for rank in self._ranks]
        turns = [turn for key in keys if (turn := self._control.get(key)) is not None]
        verified = len(turns) == len(keys) and all(turn["verified"] for turn in turns)
        document = _finite({**self._header, "verified": verified, "turns": turns})
        try:
            write_whole(self._path, json.dumps(document, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            problem = f"{self._path} lacks this start's turns: {error.strerror}"
            if required:
                raise RetryableError(problem, "make room there") from error
            if self._control.claim("report/unwritten", problem):
                log.warning("%s (each rank's log has its own)", problem)


def _finite(value: Any) -> Any:
    """The same with null for what is no number in JSON: an error that is infinite, told in words in `missing`."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
