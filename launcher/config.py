"""The configuration: all sections of options, TOML presets, `--section.key=value` on top.

No torch here: `--help`, `--print-config` and a bad option answer at once. All problems are reported together.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from launcher.config_errors import describe_problems
from launcher.config_sections import (
    PRESETS,
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    DrafterConfig,
    EvalConfig,
    LogConfig,
    RuntimeConfig,
    Section,
    TargetConfig,
    TopologyConfig,
    TrainConfig,
)
from launcher.errors import ConfigError, UserError


class Config(Section):
    """Everything a run is made of."""

    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = DrafterConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    topology: TopologyConfig = TopologyConfig()
    compile: CompileConfig = CompileConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    dry_run: bool = False
    """Only start, compile and prove; no training, no checkpoint."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.data.row_length < 2 * self.drafter.block_size:
            raise ValueError(
                f"data.row_length: {self.data.row_length} tokens are fewer than two blocks of {self.drafter.block_size}"
            )
        if self.target.attention == "flex" and self.target.compile is False:
            raise ValueError("target.attention: flex must be compiled; set target.compile=true, or attention to sdpa")
        if self.topology.split == "auto" and (self.topology.targets or self.topology.drafters):
            raise ValueError("topology.split: auto chooses targets and drafters -> leave both out, or leave auto out")
        return self


def load_toml(path: Path, source: str) -> dict[str, Any]:
    """Read a TOML file; `source` names the option in the error."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{source}: no file {path}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{source}: cannot read {path}: {error}", "mend the file") from None


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def validate(values: dict[str, Any]) -> Config:
    """Build the config, or report every problem at once.

    Raises:
        ConfigError: one line per problem, with a did-you-mean for unknown keys.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_problems(error, Config)) from None


def for_device(config: Config, kind: str) -> Config:
    """The config with what `auto` leaves to the device (`cuda` or `cpu`) settled.

    On CPU float32 is the fast one: without AVX-512 a bf16 matrix product takes ten times as long.
    """
    on_gpu = kind == "cuda"
    target, train = config.target, config.train
    if target.dtype == "auto":
        target = target.model_copy(update={"dtype": "bfloat16" if on_gpu else "float32"})
    if target.compile == "auto":
        target = target.model_copy(update={"compile": on_gpu or target.attention == "flex"})
    if target.attention == "auto":
        target = target.model_copy(update={"attention": "flex" if on_gpu and target.compile else "sdpa"})
    if train.precision == "auto":
        train = train.model_copy(update={"precision": "bf16" if on_gpu else "float32"})
    return config.model_copy(update={"target": target, "train": train})


def to_toml(config: Config) -> str:
    """The whole config as TOML; an option that is none is left out, as TOML has no word for it."""
    values = config.model_dump(mode="json", exclude_none=True)
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if name not in tables]
    for table, options in tables.items():
        lines += ["", f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
    return "\n".join(lines) + "\n"
