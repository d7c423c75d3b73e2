"""metrics.jsonl is complete whatever happens to its copies."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from launcher import sinks
from launcher.config import Config
from launcher.sinks import JsonlSink, MetricsWriter, parse_line


class Copy:
    """A sink that takes `good` steps and then fails."""

    def __init__(self, good: int) -> None:
        self.good, self.steps, self.closed = good, [], False

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        if len(self.steps) == self.good:
            raise ConnectionError("offline")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        raise OSError("cannot close")


def make_config(run_dir: Path, **log: Any) -> Config:
    return Config.model_validate({"runtime": {"run_dir": run_dir}, "log": {"tensorboard": False, **log}})


def make_writer(config: Config) -> MetricsWriter:
    return MetricsWriter(config, config.runtime.run_dir / "attempts" / "1")


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_failing_copy_is_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Copy(1), Copy(99)
    monkeypatch.setattr(sinks, "TensorBoardSink", lambda folder: bad)
    monkeypatch.setattr(sinks, "WandbSink", lambda project, config: good)
    writer = make_writer(make_config(tmp_path, tensorboard=True, wandb="project"))
    for step in range(1, 5):
        writer.write(step, {"loss": step / 2, "accuracy": [0.5, 0.25]})
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard stopped: offline (metrics.jsonl has everything)"
    ]
    assert (bad.steps, good.steps) == ([1], [1, 2, 3, 4])
    assert recorded(tmp_path)[-1] == {"step": 4, "loss": 2.0, "accuracy": [0.5, 0.25]}
    assert len(recorded(tmp_path)) == 4
    writer.close()
    assert good.closed and not bad.closed, "a dropped copy is left alone; one that cannot close fails nothing"


def test_a_missing_backend_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    writer = make_writer(make_config(tmp_path, wandb="project"))
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].getMessage().startswith("Weights & Biases is off")
    assert recorded(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_the_record_goes_on_where_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n\x00\x00\n[]\n{"loss": 1}\n{"step": 3}\n{"step": 4, "lo')
    sink = JsonlSink(path, 2)
    sink.write(3, {"again": True})
    assert recorded(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    sink.close()
    assert [path.name for path in tmp_path.glob("*.old-*")] == ["metrics.jsonl.old-1"]
    assert (tmp_path / "metrics.jsonl.old-1").read_text() == '{"step": 3}\n', "no step is lost"
    JsonlSink(path, 3).close()
    JsonlSink(path, 0).close()
    assert path.read_text() == "" and len((tmp_path / "metrics.jsonl.old-2").read_text().splitlines()) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_a_warning_and_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = make_writer(make_config(tmp_path))
    room, writer._record._file = writer._record._file, open("/dev/full", "a")  # noqa: SIM115
    for step in (1, 2, 3):
        writer.write(step, {"loss": 1.0})
    assert caplog.messages == ["metrics.jsonl lacks steps from step 1 on: No space left on device"]
    writer._record._file = room
    writer.write(4, {"loss": 1.0})
    writer.close()
    assert recorded(tmp_path) == [{"step": 4, "loss": 1.0}]


def test_a_line_that_was_cut_off_is_no_line() -> None:
    assert parse_line('{"step": 1}') == {"step": 1}
    assert parse_line('{"step": 1, "lo') is None and parse_line("3") is None and parse_line("") is None
