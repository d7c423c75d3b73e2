"""What a run folder holds about a run, read for the report: metrics, memory, compile turns, status. No torch."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from launcher.errors import UserError
from launcher.sinks import parse_line
from launcher.status import Status, read_status
from launcher.whole_files import write_whole

log = logging.getLogger("launcher")
Metrics = dict[int, dict[str, Any]]
BOTTLENECK = "bottleneck.txt"
MARKS = ("config.toml", "metrics.jsonl", "status.json")
# Silence of all ranks that is longer than this many sampling intervals lies between two attempts.
GAP_INTERVALS, GAP_SECONDS = 5.0, 3.0


class Sample(NamedTuple):
    """One rank's memory at one time; bytes, seconds since the epoch. `gpu` is the whole card's."""

    time: float
    rank: int
    role: str
    phase: str
    rss: int
    gpu: int | None


@dataclass(frozen=True)
class RunRecord:
    """A run as far as it got; everything may be empty. `turns` are those of compile_report.json, in rank order;
    `bottleneck` is what the last attempt that came far enough said of its two sides."""

    folder: Path
    status: Status | None = None
    metrics: Metrics = field(default_factory=dict)
    memory: list[Sample] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    bottleneck: str | None = None

    def series(self, name: str) -> tuple[list[int], list[Any]]:
        """Steps and values of one metric, where it was recorded."""
        found = [(step, values[name]) for step, values in self.metrics.items() if values.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        UserError: the folder is no run's, or its status or compile report is damaged.
    """
    if not any((folder / mark).exists() for mark in MARKS):
        raise UserError(f"{folder} is not a run folder", f"give a folder that holds {' or '.join(MARKS)}")
    notices: list[str] = []
    metrics = merge_steps(_read_lines(folder / "metrics.jsonl", {"step"}, notices))
    wanted = {"time", "rank", "role", "phase", "rss"}
    samples = [
        Sample(line["time"], line["rank"], line["role"], line["phase"], line["rss"], line.get("gpu"))
        for line in _read_lines(folder / "memory.jsonl", wanted, notices)
    ]
    try:
        status, turns = read_status(folder), _read_turns(folder / "compile_report.json")
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder} is damaged: {error}", "remove the file and start the run again") from error
    return RunRecord(folder, status, metrics, sorted(samples), turns, notices, _read_bottleneck(folder))


def keep_bottleneck(attempt_dir: Path, verdict: str) -> None:
    """Leave the verdict of a run's end to the report. A disk that does not take it costs a warning."""
    try:
        write_whole(attempt_dir / BOTTLENECK, verdict + "\n")
    except OSError as error:
        log.warning("the report will not name the bottleneck: %s: %s", attempt_dir / BOTTLENECK, error.strerror)


def merge_steps(lines: list[dict[str, Any]]) -> Metrics:
    """Metrics by step, ascending; of several lines of a step (training, evaluation, a resumed run) later ones win."""
    metrics: Metrics = {}
    for line in lines:
        values = {name: value for name, value in line.items() if name != "step"}
        metrics.setdefault(line["step"], {}).update(values)
    return dict(sorted(metrics.items()))


def close_gaps(samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Seconds of every sample since the first with the time between attempts cut out, and where it was cut.

    Args:
        samples: of all ranks, by time.
    """
    limit = max(GAP_SECONDS, GAP_INTERVALS * sampling_interval(samples))
    places: list[float] = []
    cuts: list[float] = []
    shift = previous = samples[0].time if samples else 0.0
    for sample in samples:
        if sample.time - previous > limit:
            shift += sample.time - previous - limit / 2
            cuts.append(sample.time - shift - limit / 4)
        places.append(sample.time - shift)
        previous = sample.time
    return places, cuts


def sampling_interval(samples: list[Sample]) -> float:
    """Typical seconds between two samples of one rank; 1 where nothing was sampled twice."""
    last: dict[int, float] = {}
    steps = []
    for sample in samples:
        if sample.rank in last:
            steps.append(sample.time - last[sample.rank])
        last[sample.rank] = sample.time
    return median(steps) if steps else 1.0


def _read_lines(path: Path, wanted: set[str], notices: list[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file that have the wanted keys; a missing file has none."""
    if not path.exists():
        return []
    parsed = [parse_line(line) for line in path.read_text(errors="replace").splitlines()]
    good = [line for line in parsed if line is not None and wanted <= line.keys()]
    if len(good) < len(parsed):
        notices.append(f"{path.name}: {len(parsed) - len(good)} of {len(parsed)} lines cannot be read and are left out")
    return good


def _read_turns(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["turns"] if path.exists() else []


def _read_bottleneck(folder: Path) -> str | None:
    found = [path for path in folder.glob(f"attempts/*/{BOTTLENECK}") if path.parent.name.isdigit()]
    last = max(found, key=lambda path: int(path.parent.name), default=None)
    return last.read_text(errors="replace").strip() if last else None
