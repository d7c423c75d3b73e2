"""Deadlines by the size of a run."""

from __future__ import annotations

import pytest

from launcher.config import Config, load_toml, merge, validate
from launcher.config_sections import PRESETS, EvalConfig
from launcher.deadlines import (
    Load,
    collective_patience,
    deadlines,
    default_of,
    first_step,
    load_of,
    row_patience,
    scale_deadlines,
)
from launcher.plan_shapes import run_shape

GROWING = ("load_timeout", "step_timeout", "save_timeout", "eval_timeout", "shutdown_timeout")


def preset(name: str, **runtime: float) -> Config:
    values = merge(load_toml(PRESETS / f"{name}.toml", "--preset"), {"runtime": runtime})
    return validate(merge(values, {"target": {"model": "random:qwen3-8b" if name == "qwen3-8b" else "random:tiny"}}))


def test_small_runs_keep_the_defaults() -> None:
    tiny = preset("tiny")
    assert scale_deadlines(tiny, "cpu") == (tiny, [])
    least = deadlines(Load(0, 0, 0, 0), "cpu")
    assert least == {name: default_of(name) for name in GROWING}


def test_deadlines_grow_with_bytes_and_work_and_more_so_on_a_slower_device() -> None:
    large = Load(weights=140e9, checkpoint=40e9, step=4e15, evaluation=140e12)
    assert deadlines(large, "cuda") == dict(zip(GROWING, (2800, 2000, 2000, 2800, 90), strict=True))
    assert deadlines(large, "cpu")["step_timeout"] == 2_000_000


def test_a_model_of_8b_on_gpus() -> None:
    """Measured on an H200: 131 ms a micro-batch, 42 s to save 12 GB; the deadlines are far above."""
    config = preset("qwen3-8b")
    load = load_of(run_shape(config), EvalConfig(prompts=10))
    assert load.checkpoint == pytest.approx(12.6e9, rel=0.01) and load.weights == pytest.approx(15e9, rel=0.2)
    assert load.evaluation == pytest.approx(640 * load.weights, rel=0.2), "64 tokens for each of ten prompts"
    scaled, lines = scale_deadlines(config, "cuda")
    assert scaled.runtime.save_timeout == pytest.approx(629, abs=1)
    assert scaled.runtime.load_timeout == default_of("load_timeout")
    assert any(line.startswith("runtime.save_timeout: 629 s") for line in lines)


def test_what_was_asked_for_is_kept() -> None:
    scaled, lines = scale_deadlines(preset("qwen3-8b", save_timeout=50.0, step_timeout=7.0), "cpu")
    assert (scaled.runtime.save_timeout, scaled.runtime.step_timeout) == (50.0, 7.0)
    assert not any("save_timeout" in line for line in lines)


def test_the_first_step_has_three_times_as_long_unless_told_otherwise() -> None:
    large, _ = scale_deadlines(preset("qwen3-8b"), "cpu")
    assert first_step(large.runtime) == 3 * large.runtime.step_timeout > 3 * default_of("step_timeout")
    told = preset("tiny", first_step_timeout=7.0, step_timeout=9.0).runtime
    assert first_step(told) == 7.0 and row_patience(told) == 9.0 + told.save_timeout


def test_an_unknown_target_keeps_the_defaults() -> None:
    config = validate({"target": {"model": "nobody/nothing"}})
    assert scale_deadlines(config, "cuda") == (config, [])


def test_torch_gives_up_later_than_any_deadline() -> None:
    """Else a save of 300 s on one rank would end the others after 180 s, with a gloo timeout for an error."""
    assert collective_patience(preset("tiny").runtime) == 1860
    assert collective_patience(preset("tiny", step_timeout=5000.0).runtime) == 15060
