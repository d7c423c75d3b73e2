"""What the compiler did, by its own count; after the gate, compiling again is an error that names what changed."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import compilation_time_metrics, counters

from launcher.errors import LauncherError

log = logging.getLogger("launcher")

# Where torch says why it compiles again, once asked to.
REASONS = "torch._dynamo.guards.__recompiles"


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


def forbid_recompiles(on_recompile: str) -> None:
    """After the gate: a recompile raises ("error"), or warns on the console with its reason ("warn")."""
    if on_recompile == "error":
        torch._dynamo.config.error_on_recompile = True
        return
    torch._logging.set_logs(recompiles=True)
    logging.getLogger(REASONS).addHandler(_Warner())


@contextmanager
def explain_recompiles(what: str) -> Generator[None]:
    """Turn the compiler's error that `what` would compile again after the gate into one line.

    Raises:
        LauncherError: says what changed.
    """
    try:
        yield
    except Exception as error:
        reason = recompile_reason(error)
        if reason is None:
            raise
        raise LauncherError(
            f"{what} would compile again after the gate: {reason}",
            "keep shapes fixed, or allow it with --compile.on_recompile=warn",
        ) from error


def recompile_reason(error: BaseException) -> str | None:
    """What changed, if `error` says that the compiler was about to compile again after the gate."""
    if not isinstance(error, RecompileError):
        return None
    return " ".join(str(error).split())


class _Warner(logging.Handler):
    """Hands torch's reasons to the launcher's own log: the first to the console, all of them, counted, to the file."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        reason = " ".join(record.getMessage().split())
        if self._count == 1:
            log.warning("this rank compiles again after the gate (more such go to the log): %s", reason)
        else:
            log.info("recompile %d after the gate: %s", self._count, reason)
