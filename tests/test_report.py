"""The report: figures and numbers of whole, dry, resumed and damaged runs, and TensorBoard refilled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from launcher.errors import UserError
from launcher.figures import accuracy_figure, throughput_figure, training_figure
from launcher.report import main, summary
from launcher.run_record import RunRecord, Sample, close_gaps, keep_bottleneck, merge_steps, read_run
from launcher.status import Status, write_status
from launcher.timelines import compile_figure, lay_out_turn, memory_figure

PNG = b"\x89PNG\r\n\x1a\n"
FIGURES = {"training.png", "accuracy.png", "throughput.png", "memory.png", "compile.png"}


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {"step": step, "loss": 10 - step / 10, "acceptance_length": 1 + step / 100, "accuracy": [0.5, 0.25, 0.1]}
    rates = {"step_seconds": 0.5, "rows_per_s": 8.0, "tokens_per_s": 1024.0, "data_wait": 0.1, "peak_memory_gb": 12.5}
    return line | rates | changes


def eval_line(step: int, length: float) -> dict[str, Any]:
    return {"step": step, "eval_acceptance_length": length, "eval_prompts": 4}


def sample_line(second: float, rank: int, phase: str = "step", gpu: int | None = None) -> dict[str, Any]:
    line = {"time": 1e9 + second, "rank": rank, "role": "drafter" if rank else "target", "phase": phase, "rss": 10**9}
    return line if gpu is None else line | {"gpu": gpu}


def turn(rank: int, start: float, wait: float = 0.0) -> dict[str, Any]:
    """A turn of 4 s by its start: 3 s of preparing and `wait` seconds before it, 1 s of proof after."""
    parts = {"imports": 2.0, "build": 1.0, "wait": wait, "trace": 0.5, "compile": 3.0, "run": 0.5, "proof": 1.0}
    times = {"start": start, "end": start + 4, "seconds": 4.0, "parts": parts}
    return {"rank": rank, "role": "drafter", **times, "cache_hits": 9, "cache_misses": rank}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def data_of(line: Line2D, axis: str) -> list[float]:
    return np.asarray(line.get_xdata() if axis == "x" else line.get_ydata()).tolist()


def bars_of(axes: Axes) -> list[tuple[float, float]]:
    """(left, width) of every horizontal bar."""
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 20 steps on a target and a drafter with a GPU each."""
    folder = tmp_path / "q8"
    folder.mkdir()
    (folder / "config.toml").touch()
    write_status(folder, Status("finished", 0, "trained to step 20"))
    steps = [step_line(step) for step in range(1, 21)]
    write_lines(folder / "metrics.jsonl", [eval_line(0, 1.0), *steps, eval_line(20, 2.5)])
    samples = [sample_line(second, rank, gpu=(rank + 1) * 10**10) for second in range(9) for rank in (0, 1)]
    write_lines(folder / "memory.jsonl", samples)
    (folder / "compile_report.json").write_text(json.dumps({"turns": [turn(1, 5.0), turn(2, 9.0, wait=4.0)]}))
    return folder


def test_a_whole_run_gives_every_figure_and_the_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    report = run / "report"
    assert {path.name for path in report.iterdir()} == FIGURES | {"summary.md"}
    assert all((report / name).read_bytes().startswith(PNG) for name in FIGURES)
    text = (report / "summary.md").read_text()
    for words in (
        "finished, exit code 0",
        "| steps | 20 |",
        "8.000 at last, 8.050 over the last 2",
        "1.00 (step 0) -> 2.50 (step 20)",
        "| rows | 8.00 per second |",
        "| tokens | 1,024 per second |",
        "10.0% of the time",
        "| target peak, GPU in use | 10.0 GB (rank 0, step) |",
        "| drafter peak, GPU in use | 20.0 GB (rank 1, step) |",
        "| drafter peak, host | 1.0 GB",
        "12.5 GB",
        "2, 8.0 s together, 18 cache hits, 3 misses",
        "| 2 | 2 | 4.0 | imports 2.0, build 1.0, wait 4.0, trace 0.5, compile 3.0, run 0.5, proof 1.0 | 9 | 2 |",
        "![compile.png](compile.png)",
    ):
        assert words in text
    assert f"report: {report}" in capsys.readouterr().out


def test_a_run_without_metrics_gets_what_exists(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "report").mkdir()
    (run / "report" / "training.png").write_text("of an earlier report")
    main([str(run)])
    assert {path.name for path in (run / "report").iterdir()} == {"memory.png", "compile.png", "summary.md"}
    assert "| steps | none yet |" in (run / "report" / "summary.md").read_text()


def test_a_run_that_has_just_begun_gets_a_summary(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["summary.md"]


def test_a_folder_that_is_no_run_and_damaged_files_are_one_line(run: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="is not a run folder -> ") as caught:
            main([str(folder)])
        assert "\n" not in str(caught.value)
    (run / "compile_report.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        main([str(run)])


def test_later_lines_of_a_step_win_and_evaluations_join_their_step() -> None:
    lines = [step_line(2, loss=5.0), step_line(3, loss=4.0), eval_line(3, 1.5), step_line(3, loss=3.0), step_line(1)]
    metrics = merge_steps(lines)
    assert list(metrics) == [1, 2, 3]
    assert (metrics[3]["loss"], metrics[3]["eval_acceptance_length"], metrics[2]["loss"]) == (3.0, 1.5, 5.0)


def test_lines_that_were_cut_off_are_left_out_and_counted(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    record = read_run(run)
    assert max(record.metrics) == 20
    assert record.notices == ["metrics.jsonl: 1 of 23 lines cannot be read and are left out"]


def test_the_figures_show_the_data(run: Path) -> None:
    record = read_run(run)
    training = training_figure(record)
    assert training is not None
    loss, acceptance = training.axes
    assert data_of(loss.lines[0], "y") == record.series("loss")[1]
    assert [data_of(acceptance.lines[1], "x"), data_of(acceptance.lines[1], "y")] == [[0, 20], [1.0, 2.5]]
    accuracy, throughput = accuracy_figure(record), throughput_figure(record)
    assert accuracy is not None and throughput is not None
    assert data_of(accuracy.axes[1].lines[1], "y") == pytest.approx([0.5, 0.25, 0.1])


def test_turns_lie_where_they_were_with_what_came_before_and_after(run: Path) -> None:
    timeline = compile_figure(read_run(run))
    assert timeline is not None
    axes = timeline.axes[0]
    first = [(0, 2), (2, 1), (3, 0), (3, 0.5), (3.5, 3), (6.5, 0.5), (7, 1), (3, 4)]
    second = [(0, 2), (2, 1), (3, 4), (7, 0.5), (7.5, 3), (10.5, 0.5), (11, 1), (7, 4)]
    assert bars_of(axes) == first + second, "preparing | the turn | the proof, and a frame around the turn"
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > 12, "all of it, and room for the words"
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["imports", "build", "wait", "trace", "compile", "run", "proof", "the turn"]
    parts = [bar.get_facecolor() for bar in axes.patches if isinstance(bar, Rectangle)][:7]
    assert len(set(parts)) == 7, "a colour each"


def test_the_turn_of_a_target_begins_after_its_stock_run() -> None:
    parts = {"stock": 2.0, "wait": 1.0, "trace": 1.0, "compile": 2.0, "run": 1.0, "proof": 0.5}
    lane = lay_out_turn({"start": 10.0, "end": 14.0, "parts": parts})
    assert lane[:3] == [("stock", 7.0, 9.0), ("wait", 9.0, 10.0), ("trace", 10.0, 11.0)]
    assert lane[-2:] == [("proof", 14.0, 14.5), ("the turn", 10.0, 14.0)]
    failed = lay_out_turn({"start": 10.0, "end": 14.0, "parts": {"build": 1.0, "wait": 0.0}})
    assert failed == [("build", 9.0, 10.0), ("wait", 10.0, 10.0), ("the turn", 10.0, 14.0)]


def test_skipped_steps_do_not_break_the_figures() -> None:
    nan = float("nan")
    steps = {step: step_line(step, loss=nan if step % 7 == 0 else 1.0, accuracy=[nan, 0.5]) for step in range(1, 200)}
    record = RunRecord(Path("run"), metrics=steps)
    training, accuracy = training_figure(record), accuracy_figure(record)
    assert training is not None and accuracy is not None
    assert set(data_of(training.axes[0].lines[1], "y")) == {1.0}, "the running mean leaves unknown values out"


def test_time_between_attempts_is_cut_out() -> None:
    times = [0, 1, 2, 100, 101]
    samples = [Sample(second, rank, "target", "step", 1, None) for second in times for rank in (0, 1)]
    places, cuts = close_gaps(samples)
    assert places == [0, 0, 1, 1, 2, 2, 4.5, 4.5, 5.5, 5.5]
    assert len(cuts) == 1 and 2 < cuts[0] < 4.5
    assert close_gaps([]) == ([], [])


def test_memory_lanes_follow_the_phases() -> None:
    phases = ["load", "load", "after load", "step", "step"]
    record = RunRecord(
        Path("run"),
        memory=[Sample(second, 0, "target", phase, 10**9, None) for second, phase in enumerate(phases)],
    )
    figure = memory_figure(record)
    assert figure is not None
    host, lanes = figure.axes
    assert data_of(host.lines[0], "y") == [1.0] * 5
    assert bars_of(lanes) == [(0, 2), (2, 1), (3, 3)]


def test_tensorboard_is_refilled_from_the_record(run: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = tmp_path / "board"
    assert main([str(run), "--tensorboard", str(board)]) == 0
    read = events.EventAccumulator(str(board))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == list(range(1, 21))
    assert read.Scalars("accuracy/1")[0].value == 0.25
    assert [(event.step, event.value) for event in read.Scalars("eval_acceptance_length")] == [(0, 1.0), (20, 2.5)]
    assert not (run / "report").exists()
    with pytest.raises(UserError, match="has events already"):
        main([str(run), "--tensorboard", str(board)])
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no metrics yet"):
        main([str(run), "--tensorboard", str(tmp_path / "empty")])


def test_the_summary_says_who_waited_where_that_was_recorded(run: Path) -> None:
    assert "targets waiting" not in summary(read_run(run), [])
    waited = [step_line(step, target_wait=0.5 + step / 100, rows_ready=2) for step in (1, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in waited))
    text = summary(read_run(run), [])
    assert "| targets waiting for drafters | 52.0% of the time |" in text
    assert "| rows on their way when one was asked for | 2.0 |" in text


def test_the_summary_names_the_bottleneck_of_the_last_attempt_that_came_so_far(run: Path) -> None:
    assert "bottleneck" not in summary(read_run(run), [])
    for number in (2, 10, 11):
        (run / "attempts" / str(number)).mkdir(parents=True)
    keep_bottleneck(run / "attempts" / "2", "the targets were the bottleneck")
    keep_bottleneck(run / "attempts" / "10", "the drafters were the bottleneck; 2t+6d would give 8 rows/s")
    text = summary(read_run(run), [])
    assert "| bottleneck | the drafters were the bottleneck; 2t+6d would give 8 rows/s |" in text
    assert "the targets were" not in text
