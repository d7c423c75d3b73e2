"""What the compiler did, by its own count; after the gate, compiling again is an error that names what changed."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import compilation_time_metrics, counters, get_compilation_metrics

from launcher.control import Control
from launcher.errors import LauncherError

log = logging.getLogger("launcher")

# Where torch says why it compiles again, once asked to.
REASONS = "torch._dynamo.guards.__recompiles"
ADVICE = "keep shapes fixed, or allow it with --compile.on_recompile=warn"


def graphs_compiled() -> int:
    """Graphs that this process has compiled or loaded from the cache since its counters were cleared."""
    return counters["stats"]["unique_graphs"]


def compiler_seconds() -> dict[str, float]:
    """Seconds that this process has spent on tracing, and on compiling what was traced or loading it from the cache."""
    whole, backend, backward = (
        sum(compilation_time_metrics.get(name, []))
        for name in ("_compile.compile_inner", "OutputGraph.call_user_compiler", "backward._backward_impl")
    )
    return {"trace": whole - backend, "compile": backend + backward}


class Recompiles:
    """From the gate on: what this process compiles is an error ("error"), or a warning on the console ("warn").

    A guard that fails stops the compiler before it starts, which knows what changed. Code that never was compiled
    before is found by the count of graphs, and is named.

    Args:
        control: adds up what all ranks compile.
    """

    def __init__(self, on_recompile: str, control: Control) -> None:
        self._strict, self._control, self._warner = on_recompile == "error", control, _Warner()
        if self._strict:
            torch._dynamo.config.error_on_recompile = True
        else:
            torch._logging.set_logs(recompiles=True)
            logging.getLogger(REASONS).addHandler(self._warner)

    @contextmanager
    def watch(self, what: str) -> Generator[None]:
        """Run `what`, which the gate has compiled.

        Raises:
            LauncherError: it was about to compile again, or has compiled what it did not before; says what changed.
        """
        graphs, explained = graphs_compiled(), self._warner.count
        try:
            yield
        except Exception as error:
            if (reason := recompile_reason(error)) is None:
                raise
            raise LauncherError(f"{what} would compile again after the gate: {reason}", ADVICE) from error
        if (new := graphs_compiled() - graphs) > 0:
            self._count(what, new, new - (self._warner.count - explained))

    def total(self) -> int:
        """Graphs that watched work of all ranks has compiled after the gate."""
        return self._control.add("recompiles", 0)

    def _count(self, what: str, new: int, unexplained: int) -> None:
        self._control.add("recompiles", new)
        if unexplained <= 0:
            return
        names = ", ".join(dict.fromkeys(last_compiled(unexplained)))
        if self._strict:
            raise LauncherError(f"{what} compiled what the gate had not: {names}", ADVICE)
        self._warner.warn(f"{what} compiled what the gate had not: {names}")


def last_compiled(count: int) -> list[str]:
    """The functions of the `count` newest graphs, as name (file:line)."""
    frames = [metrics for metrics in get_compilation_metrics() if metrics.co_name is not None]
    return [f"{of.co_name} ({Path(of.co_filename or '').name}:{of.co_firstlineno})" for of in frames[-count:]]


def recompile_reason(error: BaseException) -> str | None:
    """What changed, if `error` says that the compiler was about to compile again after the gate."""
    if not isinstance(error, RecompileError):
        return None
    return " ".join(str(error).split())


class _Warner(logging.Handler):
    """Hands reasons, torch's own first of all, to the launcher's log: the first to the console, all of them, counted,
    to the file."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.warn(" ".join(record.getMessage().split()))

    def warn(self, reason: str) -> None:
        self.count += 1
        if self.count == 1:
            log.warning("this rank compiles again after the gate (more such go to the log): %s", reason)
        else:
            log.info("recompile %d after the gate: %s", self.count, reason)
