"""Deadlines that grow with the model: what a healthy but slow machine takes, so that only a hang runs into them.

No torch. An option that was given another value than its default keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config import Config
from launcher.config_sections import EvalConfig, RuntimeConfig
from launcher.errors import UserError
from launcher.plan_shapes import RunShape, run_shape

# Bytes per second of a slow network disk, reading and writing.
READ_RATE, WRITE_RATE = 50e6, 20e6
# Bytes per second of memory that a process gives back.
RELEASE_RATE = 2e9
# Of a step: the first one meets buffers, kernels and connections that are not there yet.
FIRST_STEP = 3.0
# A deadline takes a moment to be noticed and told.
MARGIN = 60.0
# Of `runtime.load_timeout`: an error within the phase says more than the end of the phase.
LOCK_SHARE = 0.9
# Operations per second of a rank that runs far below its best.
COMPUTE_RATE = {"cuda": 2e12, "cpu": 2e9}
# Bytes per second at which such a rank reads weights while it decodes one token after another.
MEMORY_RATE = {"cuda": 5e10, "cpu": 1e9}
# float32 masters and two moments; bf16 weights.
CHECKPOINT_BYTES, WEIGHT_BYTES = 12, 2


@dataclass(frozen=True)
class Load:
    """What a run moves and computes."""

    weights: float
    """Bytes of the target."""
    checkpoint: float
    """Bytes."""
    step: float
    """Operations of one rank."""
    evaluation: float
    """Bytes that one evaluation reads, with one target: its weights for every token."""


def load_of(shape: RunShape, evaluation: EvalConfig) -> Load:
    work = shape.work
    target = shape.target.operations(shape.context, shape.visible)
    step = max(work.total * shape.draws, target) * shape.accumulation
    tokens = evaluation.prompts * evaluation.max_new_tokens
    return Load(
        WEIGHT_BYTES * shape.target.parameters,
        CHECKPOINT_BYTES * work.parameters,
        step,
        tokens * WEIGHT_BYTES * shape.whole_target.parameters,
    )


def deadlines(load: Load, kind: str) -> dict[str, float]:
    """Seconds by option of `runtime`, at least the defaults; a pure function.

    Args:
        kind: `cuda` or `cpu`.
    """
    wanted = {
        "load_timeout": load.weights / READ_RATE,
        "step_timeout": load.step / COMPUTE_RATE[kind],
        "save_timeout": load.checkpoint / WRITE_RATE,
        "eval_timeout": load.evaluation / MEMORY_RATE[kind],
        "shutdown_timeout": (load.weights + load.checkpoint) / RELEASE_RATE,
    }
    return {name: max(default_of(name), float(round(seconds))) for name, seconds in wanted.items()}


def first_step(runtime: RuntimeConfig) -> float:
    """Seconds for the first step of a start."""
    return FIRST_STEP * runtime.step_timeout if runtime.first_step_timeout is None else runtime.first_step_timeout


def row_patience(runtime: RuntimeConfig) -> float:
    """Seconds in which a drafter asks for a row again: it takes a step, maybe its first one, and may save."""
    return max(first_step(runtime), runtime.step_timeout) + runtime.save_timeout


def collective_patience(runtime: RuntimeConfig) -> float:
    """Seconds after which torch may give a collective up by itself: later than any deadline of ours would."""
    longest = (
        runtime.init_timeout,
        first_step(runtime),
        runtime.step_timeout,
        runtime.save_timeout,
        runtime.eval_timeout,
    )
    return max(longest) + MARGIN


def lock_patience(runtime: RuntimeConfig) -> float:
    """Seconds to wait for another start that converts the same target or packs the same rows."""
    return LOCK_SHARE * runtime.load_timeout


def default_of(name: str) -> float:
    return RuntimeConfig.model_fields[name].default


def scale_deadlines(config: Config, kind: str) -> tuple[Config, list[str]]:
    """The config with its deadlines scaled, and a line for each that grew; unchanged where the shape is unknown."""
    try:
        scaled = deadlines(load_of(run_shape(config), config.eval), kind)
    except UserError:
        return config, []
    runtime = config.runtime
    grown = {
        name: seconds
        for name, seconds in scaled.items()
        if getattr(runtime, name) == default_of(name) and seconds > default_of(name)
    }
    lines = [f"runtime.{name}: {seconds:.0f} s for a model of this size" for name, seconds in grown.items()]
    return config.model_copy(update={"runtime": runtime.model_copy(update=grown)}), lines
