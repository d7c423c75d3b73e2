"""The figures over time: memory of every rank with its phases, and the compile turns. None where there is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import inf, nan
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from launcher.run_record import RunRecord, Sample, close_gaps, sampling_interval

PHASES = {
    "init": "#d9d9d9",
    "load": "#a6bddb",
    "turn": "#f4a582",
    "gate": "#fde0c5",
    "step": "#74c476",
    "eval": "#9e9ac8",
    "save": "#e7cb94",
}
OTHER_PHASE = "#efefef"
# With more ranks the legend names the first and the last of each role.
MOST_NAMED = 16
# What a rank did around and in its turn, by name: see TurnReport.
TURN_PARTS = {
    "imports": "#7fa8d1",
    "build": "#2b6ca3",
    "stock": "#9e9ac8",
    "wait": "#ececec",
    "trace": "#f4a582",
    "compile": "#d9730d",
    "run": "#8c2d04",
    "proof": "#2e8540",
}
BEFORE_TURN, AFTER_TURN = ("imports", "build", "stock", "wait"), ("proof",)
OTHER_PART = "#b0b0b0"
TURN = "the turn"


def memory_figure(record: RunRecord) -> Figure | None:
    """Memory of every rank over time, GPU and host, above what each rank was at."""
    samples = record.memory
    if not samples:
        return None
    ranks = sorted({(sample.rank, sample.role) for sample in samples})
    has_gpu = any(sample.gpu is not None for sample in samples)
    lane = min(0.3, 8 / len(ranks))
    heights = [2.4] * (1 + has_gpu) + [0.5 + lane * len(ranks)]
    figure = Figure((10, sum(heights) + 1.2), layout="constrained")
    figure.suptitle("Memory by rank, and what each rank was at")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    seconds, cuts = close_gaps(samples)
    unit, name = (60.0, "minutes") if seconds[-1] > 600 else (1.0, "seconds")
    placed = [(second / unit, sample) for second, sample in zip(seconds, samples, strict=True)]
    interval = sampling_interval(samples) / unit
    if has_gpu:
        _memory_lines(panels[0], placed, ranks, "gpu", interval)
        panels[0].set_ylabel("GPU in use (GB)")
    _memory_lines(panels[-2], placed, ranks, "rss", interval)
    panels[-2].set_ylabel("host, this rank (GB)")
    panels[0].legend(frameon=False, ncols=1 + len(ranks) // 9, loc="upper left", bbox_to_anchor=(1, 1))
    _phase_lanes(panels[-1], placed, ranks, interval)
    for axes in panels:
        for cut in cuts:
            axes.axvline(cut / unit, color="black", linestyle=":", linewidth=1)
    again = f" (dotted: started again, {len(cuts)} time{'s' * (len(cuts) > 1)})" if cuts else ""
    panels[-1].set_xlabel(f"{name}{again}")
    panels[-1].set_xlim(0, placed[-1][0] + 2 * interval)
    figure.align_ylabels(panels[:-1])
    return figure


def compile_figure(record: RunRecord) -> Figure | None:
    """The compile turns as a timeline: who compiled when, for how long, and what the cache gave."""
    turns = sorted(record.turns, key=lambda turn: turn["start"])
    if not turns:
        return None
    figure = Figure((10, 1.6 + 0.45 * len(turns)), layout="constrained")
    figure.suptitle("Compile turns")
    axes = figure.subplots()
    lanes = [lay_out_turn(turn) for turn in turns]
    begin = min(start for lane in lanes for _, start, _ in lane)
    end = max(end for lane in lanes for _, _, end in lane)
    for place, (turn, lane) in enumerate(zip(turns, lanes, strict=True)):
        for part, start, stop in lane:
            axes.barh(place, stop - start, left=start - begin, height=0.6, **_look(part))
        note = f"  {turn['seconds']:.1f} s, {turn['cache_hits']} hits, {turn['cache_misses']} misses"
        axes.text(max(stop for _, _, stop in lane) - begin, place, note, va="center", fontsize=9)
    axes.set_xlim(0, max(end - begin, 0.1) * 1.3)
    axes.set_yticks(range(len(turns)), [f"{turn['role']}, rank {turn['rank']}" for turn in turns])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first rank prepared for its turn")
    seen = {part for lane in lanes for part, _, _ in lane}
    names = [*(name for name in TURN_PARTS if name in seen), *sorted(seen - TURN_PARTS.keys() - {TURN}), TURN]
    handles = [Patch(**_look(name)) for name in names]
    axes.legend(handles, names, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    tidy(axes, "x")
    return figure


def lay_out_turn(turn: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(part, start, end) of a turn of compile_report.json, seconds since the epoch; the last is the turn itself.

    What came before the turn ends where it starts, its parts begin there, and the proof begins where it ends.
    """
    parts = turn["parts"]
    before = {name: length for name, length in parts.items() if name in BEFORE_TURN}
    after = {name: length for name, length in parts.items() if name in AFTER_TURN}
    within = {name: length for name, length in parts.items() if name not in {*before, *after}}
    return [
        *_in_a_row(before, turn["start"] - sum(before.values())),
        *_in_a_row(within, turn["start"]),
        *_in_a_row(after, turn["end"]),
        (TURN, turn["start"], turn["end"]),
    ]


def _in_a_row(parts: dict[str, float], at: float) -> Iterator[tuple[str, float, float]]:
    for name, length in parts.items():
        yield name, at, at + length
        at += length


def _look(part: str) -> dict[str, Any]:
    """How a part is drawn; the turn itself is a frame around its parts."""
    if part == TURN:
        return {"fill": False, "edgecolor": "black", "linewidth": 1.0}
    return {"color": TURN_PARTS.get(part, OTHER_PART)}


def tidy(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    """A light grid, no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _memory_lines(
    axes: Axes, placed: list[tuple[float, Sample]], ranks: list[tuple[int, str]], kind: str, interval: float
) -> None:
    """One line per rank, broken where it was not sampled: targets in blues, drafters in oranges."""
    for role, palette in (("target", "Blues"), ("drafter", "Oranges")):
        mine = [rank for rank, name in ranks if name == role]
        for place, rank in enumerate(mine):
            named = len(ranks) <= MOST_NAMED or place in {0, len(mine) - 1}
            times, values = _line([(at, getattr(sample, kind)) for at, sample in _of(placed, rank, role)], interval)
            colour = colormaps[palette](0.95 - 0.55 * place / max(1, len(mine) - 1))
            axes.plot(times, values, color=colour, linewidth=1.3, label=f"{role}, rank {rank}" if named else None)
    axes.set_ylim(bottom=0)
    tidy(axes)


def _line(points: list[tuple[float, int | None]], interval: float) -> tuple[list[float], list[float]]:
    """Times and gigabytes, with a nan that breaks the line wherever sampling paused."""
    times: list[float] = []
    values: list[float] = []
    for at, value in points:
        if times and at - times[-1] > 2 * interval:
            times.append(at)
            values.append(nan)
        times.append(at)
        values.append(nan if value is None else value / 1e9)
    return times, values


def _of(placed: list[tuple[float, Sample]], rank: int, role: str) -> list[tuple[float, Sample]]:
    """The samples of one rank while it had one role: another split may give it another."""
    return [(at, sample) for at, sample in placed if sample.rank == rank and sample.role == role]


def _phase_lanes(axes: Axes, placed: list[tuple[float, Sample]], ranks: list[tuple[int, str]], interval: float) -> None:
    """A lane per rank, coloured by phase; the pale rest is the time between phases, mostly waiting."""
    for lane, (rank, role) in enumerate(ranks):
        mine = [(at, sample.phase) for at, sample in _of(placed, rank, role)]
        for phase, start, end in _stretches(mine, interval):
            axes.barh(lane, end - start, left=start, height=0.85, color=PHASES.get(phase, OTHER_PHASE))
    axes.set_yticks(range(len(ranks)), [f"{role}, rank {rank}" for rank, role in ranks], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    seen = [name for name in PHASES if any(sample.phase == name for _, sample in placed)]
    handles = [Patch(color=PHASES[name]) for name in seen] + [Patch(color=OTHER_PHASE)]
    axes.legend(handles, [*seen, "between"], frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _stretches(samples: list[tuple[float, str]], interval: float) -> Iterator[tuple[str, float, float]]:
    """(phase, start, end) of successive samples in one phase; a stretch lasts until the next sample, if it is near."""
    nexts = [at for at, _ in samples[1:]] + [inf]
    cells = [
        (phase, at, min(following, at + 2 * interval)) for (at, phase), following in zip(samples, nexts, strict=True)
    ]
    for phase, group in groupby(cells, key=lambda cell: cell[0]):
        run = list(group)
        yield phase, run[0][1], run[-1][2]
