"""`report [RUN]`: figures and a summary of a run, from what its folder holds, while it runs or afterwards.

./launch.sh report                              the demo's run, into runs/demo/report/
./launch.sh report runs/q8
./launch.sh report runs/q8 --tensorboard DIR    fill a TensorBoard folder from metrics.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from launcher.command_parser import CommandParser
from launcher.config_sections import RuntimeConfig
from launcher.errors import UserError
from launcher.run_record import RunRecord, read_run
from launcher.sinks import TensorBoardSink

SUMMARY = "summary.md"


def main(args: list[str]) -> int:
    """Write the report, or refill TensorBoard; returns 0."""
    parser = CommandParser(prog="./launch.sh report", description="Draw the figures of a run and sum it up.")
    parser.add_argument("run", nargs="?", type=Path, default=RuntimeConfig().run_dir, help="run folder")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="only fill DIR from metrics.jsonl")
    flags = parser.parse_args(args)
    record = read_run(flags.run)
    for notice in record.notices:
        print(notice, file=sys.stderr)
    if flags.tensorboard is not None:
        refill_tensorboard(record, flags.tensorboard)
        print(f"{len(record.metrics)} steps written: tensorboard --logdir {flags.tensorboard}")
    else:
        print(write_report(record))
    return 0


def write_report(record: RunRecord) -> str:
    """RUN/report/: a PNG per figure that the run has data for, and summary.md; returns the summary."""
    from launcher.figures import draw_all

    folder = record.folder / "report"
    try:
        folder.mkdir(exist_ok=True)
        figures = draw_all(record, folder)
        text = summary(record, [path.name for path in figures])
        (folder / SUMMARY).write_text(text)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}", "free space, or check permissions") from error
    return f"{text}\nreport: {folder}"


def refill_tensorboard(record: RunRecord, folder: Path) -> None:
    """Write all steps of metrics.jsonl as TensorBoard events, under the names that a run writes itself.

    Raises:
        UserError: there are no metrics, or the folder has events that these would mix with.
    """
    if not record.metrics:
        raise UserError(f"{record.folder} has no metrics yet", "wait for the first step")
    if any(folder.glob("events.out.tfevents.*")):
        raise UserError(f"--tensorboard: {folder} has events already", "give another folder, or empty this one")
    try:
        sink = TensorBoardSink(folder)
    except ImportError as error:
        raise UserError(f"--tensorboard: {error}", "pip install tensorboard") from error
    for step, values in record.metrics.items():
        sink.write(step, values)
    sink.close()


def summary(record: RunRecord, figures: list[str]) -> str:
    """The run in numbers, as Markdown."""
    rows = [*_outcome(record), *_training(record), *_rates(record), *_peaks(record), *_compiling(record)]
    lines = [f"# Run {record.folder.resolve().name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if record.turns:
        lines += ["", "| turn | rank | seconds | parts | cache hits | misses |", "|---|---|---|---|---|---|"]
        lines += [_turn_row(place, turn) for place, turn in enumerate(record.turns, 1)]
    lines += ["", *(f"![{name}]({name})" for name in figures)]
    return "\n".join(lines).rstrip() + "\n"


def _outcome(record: RunRecord) -> list[tuple[str, str]]:
    status = record.status
    if status is None:
        return []
    code = "" if status.code is None else f", exit code {status.code}"
    found = [("state", f"{status.state}{code}"), ("reason", status.reason), ("checkpoint", status.last_checkpoint)]
    return [(name, " ".join(value.split()).replace("|", "\\|")) for name, value in found if value]


def _training(record: RunRecord) -> list[tuple[str, str]]:
    steps, losses = record.series("loss")
    if not steps:
        return [("steps", "none yet")]
    tenth = max(1, len(steps) // 10)
    lengths = record.series("acceptance_length")[1]
    rows = [
        ("steps", str(steps[-1])),
        (
            "loss",
            f"{losses[0]:.3f} at first, {losses[-1]:.3f} at last, {mean(losses[-tenth:]):.3f} over the last {tenth}",
        ),
        ("acceptance length, training rows", f"{lengths[0]:.2f} -> {mean(lengths[-tenth:]):.2f}"),
    ]
    eval_steps, eval_lengths = record.series("eval_acceptance_length")
    if eval_steps:
        places = dict.fromkeys([0, len(eval_steps) - 1])
        change = " -> ".join(f"{eval_lengths[place]:.2f} (step {eval_steps[place]})" for place in places)
        rows.append(("acceptance length, held-out prompts", change))
    return rows


def _rates(record: RunRecord) -> list[tuple[str, str]]:
    seconds, tokens = record.series("step_seconds")[1], record.series("tokens_per_s")[1]
    if not seconds:
        return []
    rows, waits = record.series("rows_per_s")[1], record.series("data_wait")[1]
    waited = sum(wait * length for wait, length in zip(waits, seconds, strict=True)) / sum(seconds)
    return [
        ("step", f"{median(seconds):.3f} s median"),
        ("rows", f"{median(rows):.2f} per second"),
        ("tokens", f"{median(tokens):,.0f} per second"),
        ("waiting for rows", f"{waited:.1%} of the time"),
        *_target_side(record),
        *([("bottleneck", record.bottleneck)] if record.bottleneck else []),
    ]


def _target_side(record: RunRecord) -> list[tuple[str, str]]:
    """What the targets did; runs of earlier versions did not record it."""
    waits, ready = record.series("target_wait")[1], record.series("rows_ready")[1]
    if not waits:
        return []
    return [
        ("targets waiting for drafters", f"{mean(waits):.1%} of the time"),
        ("rows on their way when one was asked for", f"{mean(ready):.1f}"),
    ]


def _peaks(record: RunRecord) -> list[tuple[str, str]]:
    rows = []
    for role in ("target", "drafter"):
        mine = [sample for sample in record.memory if sample.role == role]
        cards = [(sample.gpu, sample.rank, sample.phase) for sample in mine if sample.gpu is not None]
        hosts = [(sample.rss, sample.rank, sample.phase) for sample in mine]
        for label, found in ((f"{role} peak, GPU in use", cards), (f"{role} peak, host", hosts)):
            if found:
                value, rank, phase = max(found)
                rows.append((label, f"{value / 1e9:.1f} GB (rank {rank}, {phase})"))
    allocated = max(record.series("peak_memory_gb")[1], default=0)
    return [*rows, ("drafter peak, allocated by torch", f"{allocated:.1f} GB")] if allocated else rows


def _compiling(record: RunRecord) -> list[tuple[str, str]]:
    if not record.turns:
        return []
    total, hits, misses = (sum(turn[key] for turn in record.turns) for key in ("seconds", "cache_hits", "cache_misses"))
    return [("compile turns", f"{len(record.turns)}, {total:.1f} s together, {hits} cache hits, {misses} misses")]


def _turn_row(place: int, turn: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in turn["parts"].items())
    cells = (place, turn["rank"], f"{turn['seconds']:.1f}", parts, turn["cache_hits"], turn["cache_misses"])
    return f"| {' | '.join(map(str, cells))} |"
