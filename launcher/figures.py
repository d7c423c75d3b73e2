"""The figures of a run: each function draws one from a RunRecord, or returns None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from launcher.run_record import RunRecord
from launcher.timelines import compile_figure, memory_figure, tidy

BLUE, ORANGE, RED, GREY = "#2166ac", "#d9730d", "#b2182b", "#9a9a9a"
MOST_OFFSETS = 6


def draw_all(record: RunRecord, folder: Path) -> list[Path]:
    """Write the figures as PNG files, remove those of which nothing is left to draw; returns what was written."""
    written = []
    for name, draw in FIGURES.items():
        path, figure = folder / f"{name}.png", draw(record)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, dpi=130)
        written.append(path)
    return written


def training_figure(record: RunRecord) -> Figure | None:
    """Loss, and acceptance length on training rows and on held-out prompts, by step."""
    steps, losses = record.series("loss")
    eval_steps, eval_lengths = record.series("eval_acceptance_length")
    if not steps and not eval_steps:
        return None
    figure, (loss, acceptance) = _panels(2, "Loss and acceptance length")
    _curve(loss, steps, losses, BLUE)
    loss.set_ylabel("loss")
    acceptance.set_ylabel("tokens per target step")
    acceptance.set_xlabel("finished steps")
    _curve(acceptance, *record.series("acceptance_length"), BLUE, "training rows (given the true prefix)")
    acceptance.plot(eval_steps, eval_lengths, "o-", color=RED, label="held-out prompts (speculative decoding)")
    for step, length in _ends(list(zip(eval_steps, eval_lengths, strict=True))):
        acceptance.annotate(f"{length:.2f}", (step, length), (0, 7), textcoords="offset points", ha="center", color=RED)
    acceptance.margins(y=0.18)
    acceptance.legend(loc="best", frameon=False)
    figure.align_ylabels()
    return figure


def accuracy_figure(record: RunRecord) -> Figure | None:
    """Accuracy of the predicted tokens: by step for some offsets, by offset for the first and the last steps."""
    steps, rows = record.series("accuracy")
    if not steps:
        return None
    accuracy = np.array(rows, dtype=float)  # [steps, B - 1]
    offsets = accuracy.shape[1]
    figure = Figure((10, 4.2), layout="constrained")
    figure.suptitle("Accuracy by offset from the anchor (training rows)")
    by_step, by_offset = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    shown = sorted({round(place) for place in np.linspace(0, offsets - 1, min(offsets, MOST_OFFSETS))})
    for offset in shown:
        colour = colormaps["viridis"](0.9 * offset / max(1, offsets - 1))
        _curve(by_step, steps, accuracy[:, offset].tolist(), colour, f"+{offset + 1}")
    by_step.legend(title="offset", frameon=False, ncols=2)
    by_step.set_xlabel("finished steps")
    by_step.set_ylabel("correct")
    tenth = max(1, len(steps) // 10)
    for part, label, colour in (
        (slice(0, tenth), f"steps {steps[0]}-{steps[tenth - 1]}", GREY),
        (slice(-tenth, None), f"steps {steps[-tenth]}-{steps[-1]}", BLUE),
    ):
        by_offset.plot(range(1, offsets + 1), _mean(accuracy[part]), "o-", color=colour, label=label)
    by_offset.legend(frameon=False)
    by_offset.set_xlabel("offset")
    by_offset.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_step.set_ylim(bottom=0)
    for axes in (by_step, by_offset):
        tidy(axes)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def throughput_figure(record: RunRecord) -> Figure | None:
    """Trained context tokens per second, and the share of a step's time spent waiting for rows."""
    steps, rates = record.series("tokens_per_s")
    if not steps:
        return None
    figure, (tokens, wait) = _panels(2, "Throughput and data wait")
    _curve(tokens, steps, rates, BLUE)
    middle = float(np.median(rates))
    tokens.axhline(middle, color=GREY, linestyle="--", linewidth=1, label=f"median {middle:,.0f}")
    tokens.set_ylabel("tokens per second")
    tokens.set_ylim(bottom=0)
    tokens.yaxis.set_major_formatter("{x:,.0f}")
    tokens.legend(frameon=False, loc="lower right")
    _curve(wait, *record.series("data_wait"), ORANGE)
    wait.set_ylabel("waiting for rows")
    wait.set_ylim(0, max(0.05, *record.series("data_wait")[1]) * 1.05)
    wait.yaxis.set_major_formatter(PercentFormatter(1.0))
    wait.set_xlabel("finished steps")
    figure.align_ylabels()
    return figure


FIGURES = {
    "training": training_figure,
    "accuracy": accuracy_figure,
    "throughput": throughput_figure,
    "memory": memory_figure,
    "compile": compile_figure,
}


def _panels(count: int, title: str) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure((10, 3 * count), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(count, 1, sharex=True)
    for axes in panels:
        tidy(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, panels


def _curve(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: object, label: str | None = None) -> None:
    """A curve; a long one as its running mean over 2 % of the steps, with the values themselves pale behind it."""
    window = len(steps) // 50
    if window < 2:
        axes.plot(steps, values, ".-" if len(steps) < 30 else "-", color=colour, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.7)
    known = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
    axes.plot(steps, sums / np.maximum(np.convolve(known, kernel, "same"), 1), color=colour, label=label)


def _ends(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """All of a few points, else the first and the last."""
    return points if len(points) <= 8 else [points[0], points[-1]]


def _mean(rows: np.ndarray) -> np.ndarray:
    """Means of the columns over the rows that know them; nan where none does."""
    known = np.isfinite(rows)
    return np.where(known, rows, 0.0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)
