"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases as copies that may fail without harm."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from launcher.config import Config
from launcher.whole_files import aside_of, write_whole

log = logging.getLogger("launcher")
# Weights & Biases asks for a key where it has none; nobody sees the question in a rank's log.
LOGIN_SECONDS = 30.0


class Sink(Protocol):
    """Takes the metrics of one step."""

    def write(self, step: int, metrics: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line, flushed at once: the record that every other sink can be refilled from.

    A disk that takes no line costs a warning; what the file object still holds is written once there is room.

    Args:
        start_step: where this run goes on; what an earlier attempt recorded beyond it is set aside, since those steps
            are done again.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        _keep_until(path, start_step)
        self._file = path.open("a")
        self._warned = False

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._warned:
                log.warning("metrics.jsonl lacks steps from step %d on: %s", step, error.strerror)
            self._warned = True

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars under their metric names; per-offset lists as name/offset."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A rank that fails leaves without closing: what was written 10 seconds before is on disk.
        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            values = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            for tag, scalar in values.items():
                if isinstance(scalar, (int, float)):
                    self._writer.add_scalar(tag, scalar, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, an optional package."""

    def __init__(self, project: str, config: Config) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self._run = wandb.init(
            project=project,
            config=config.model_dump(mode="json"),
            dir=config.runtime.run_dir,
            settings=wandb.Settings(login_timeout=LOGIN_SECONDS),
        )

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MetricsWriter:
    """Fans one step's metrics out. A copy that fails is dropped with one warning; the JSONL file goes on."""

    def __init__(self, config: Config, attempt_dir: Path, start_step: int = 0) -> None:
        run_dir = config.runtime.run_dir
        self._record = JsonlSink(run_dir / "metrics.jsonl", start_step)
        self._copies: dict[str, Sink] = {}
        if config.log.tensorboard:
            self._open("TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard" / attempt_dir.name))
        if config.log.wandb:
            self._open("Weights & Biases", lambda: WandbSink(config.log.wandb or "", config))

    def _open(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._copies[name] = make()
        except Exception as error:  # any backend, any error: metrics.jsonl is the record
            log.warning("%s is off: %s (metrics.jsonl has everything)", name, error)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self._record.write(step, metrics)
        for name, sink in list(self._copies.items()):
            try:
                sink.write(step, metrics)
            except Exception as error:  # as above
                log.warning("%s stopped: %s (metrics.jsonl has everything)", name, error)
                del self._copies[name]

    def close(self) -> None:
        for name, sink in {"metrics.jsonl": self._record, **self._copies}.items():
            try:
                sink.close()
            except Exception as error:  # a copy that cannot close must not turn a finished run into a failed one
                log.warning("%s did not close: %s", name, error)


def parse_line(line: str) -> dict[str, Any] | None:
    """The object on a line of a .jsonl file; None where the line was cut off or spoiled."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _keep_until(path: Path, step: int) -> None:
    """Move the lines of later steps to `metrics.jsonl.old-N`, and drop those that were cut off or spoiled."""
    if not path.exists():
        return
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    steps = [(parse_line(line) or {}).get("step") if line.endswith("\n") else None for line in lines]
    kept = [line for line, done in zip(lines, steps, strict=True) if done is not None and done <= step]
    later = [line for line, done in zip(lines, steps, strict=True) if done is not None and done > step]
    if later:
        aside = aside_of(path)
        write_whole(aside, "".join(later))
        log.info("%s has %d lines of steps that are done again", aside, len(later))
    if len(kept) < len(lines):
        write_whole(path, "".join(kept))


class NoMetrics:
    """The writer of every rank but one."""

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Nothing to write: another rank does."""

    def close(self) -> None:
        """Nothing is open."""
