"""The command line: precedence, all problems at once, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import ALIASES, COMMANDS, SWITCHES, parse, parse_overrides
from launcher.config import Config, for_device, load_toml, to_toml, validate
from launcher.config_errors import walk_fields
from launcher.errors import ConfigError, ExitCode

ROOT = Path(__file__).resolve().parents[1]


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv))
    assert caught.value.code is ExitCode.DO_NOT_RETRY
    return caught.value.problems


def test_flags_beat_the_file_and_the_file_beats_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nlr = 0.5\nmax_steps = 7\n")
    config = parse(["--preset", "tiny", "--config", str(file), "--train.max-steps=9", "--seed", "3"]).config
    assert (config.train.lr, config.train.max_steps, config.train.seed) == (0.5, 9, 3)
    assert config.target.model == "random:tiny"


def test_values_of_all_kinds() -> None:
    argv = ["--preset=tiny", "--target.layer_ids=[1, 2]", "--train.max_steps=none", "--resume", "none", "--dry_run"]
    config = parse([*argv, "--runtime.share_gpus=true", "--train.betas=[0.9, 0.99]"]).config
    assert config.target.layer_ids == [1, 2] and config.train.max_steps is None
    assert config.runtime.resume == "none" and config.dry_run and config.runtime.share_gpus
    assert config.train.betas == (0.9, 0.99)


def test_every_problem_is_reported_at_once() -> None:
    found = problems(
        "--preset=tiny", "--trian.lr=1", "--train.lr=abc", "--data.path=absent.jsonl", "--config=absent.toml", "stray"
    )
    text = "\n".join(found)
    assert len(found) == 5
    assert "--trian.lr: unknown option; did you mean train.lr" in text
    assert "train.lr: input should be a valid number" in text and "(got 'abc')" in text
    assert "data.path: no file absent.jsonl" in text
    assert "--config: no file absent.toml" in text
    assert "stray: not an option" in text


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--preset=tinny"], "--preset: no preset tinny; did you mean tiny?"),
        (["--preset=tiny", "--max-stpes=3"], "--max-stpes: unknown option; did you mean --max-steps"),
        (["--preset=tiny", "--train.lr"], "--train.lr: a value is missing"),
        (["--preset=tiny", "--data.row_length=40", "--drafter.block_size=32"], "data.row_length: 40 tokens are fewer"),
        (["--preset=tiny", "--target.model=./absent"], "target.model: no file or folder ./absent"),
        (["exprot"], "exprot: unknown command; did you mean export?"),
    ],
)
def test_one_problem_has_one_line(argv: list[str], line: str) -> None:
    found = problems(*argv)
    assert len(found) == 1 and found[0].startswith(line)


def test_unknown_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nlearning_rat = 1\n[trian]\nlr = 1\n")
    found = problems("--preset=tiny", f"--config={file}")
    assert any(line.startswith("train.learning_rat: unknown option") for line in found)
    assert any(line.startswith("trian: unknown option; did you mean train?") for line in found)


def test_written_config_reads_back_the_same(tmp_path: Path) -> None:
    config = parse(["--preset=tiny", "--target.layer_ids=[1,2]", "--run-dir", str(tmp_path)]).config
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert validate(load_toml(file, "test")) == config
    assert parse(["--config", str(file)]).config == config


def test_auto_is_settled_by_the_device_and_nothing_else_is_touched() -> None:
    config = parse(["--preset=demo", "--train.precision=float32"]).config
    gpu, cpu = for_device(config, "cuda"), for_device(config, "cpu")
    assert (gpu.target.dtype, gpu.train.precision) == ("bfloat16", "float32")
    assert (cpu.target.dtype, cpu.train.precision) == ("float32", "float32")
    assert (gpu.target.compile, gpu.target.attention) == (True, "flex")
    assert (cpu.target.compile, cpu.target.attention) == (False, "sdpa")
    assert for_device(gpu, "cpu") == gpu and gpu.data == config.data


def test_flex_attention_of_the_target_is_compiled() -> None:
    chosen = parse(["--preset=tiny", "--target.attention=flex"]).config
    assert for_device(chosen, "cpu").target.compile is True
    assert for_device(parse(["--preset=tiny", "--target.compile=false"]).config, "cuda").target.attention == "sdpa"
    with pytest.raises(ConfigError, match="target.compile=true"):
        parse(["--preset=tiny", "--target.attention=flex", "--target.compile=false"])


def test_bad_option_answers_in_a_second_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['main.py', '--preset=tiny', '--nope=1']\n"
        "import runpy, time\n"
        "try: runpy.run_path('launcher/main.py', run_name='__main__')\n"
        "except SystemExit as end: print(int(end.code), 'torch' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    ended, torch_is_there, seconds = done.stdout.split()
    assert (ended, torch_is_there) == ("78", "False")
    assert float(seconds) < 2, "of a core; usually 0.4 s, and twice as much on a busy machine"
    assert done.stderr.count("--nope: unknown option") == 1


def test_every_option_is_documented() -> None:
    assert [key for key, field in walk_fields(Config) if not field.description] == []
    (shared,) = (field.description or "" for key, field in walk_fields(Config) if key == "runtime.share_gpus")
    assert "CUDA IPC" in shared and "gloo" not in shared  # make_transport takes it wherever ranks share a GPU


def test_short_flags_name_real_options() -> None:
    keys = {key for key, _ in walk_fields(Config)}
    assert set(ALIASES.values()) <= keys
    assert {key for key, _ in SWITCHES.values()} <= keys
    assert parse_overrides([f"{flag}={value}" for flag, value in zip(ALIASES, "abcdefghi", strict=True)])[1] == []


def test_the_list_of_words_and_short_flags_is_frozen() -> None:
    """A flag is a promise: change this list on purpose, and the README with it."""
    assert list(COMMANDS) == ["export", "status", "report", "doctor", "fingerprint", "cache", "bench", "plan", "soak"]
    assert list(ALIASES) == [
        "--run-dir",
        "--resume",
        "--device",
        "--max-steps",
        "--seed",
        "--log-every",
        "--save-every",
        "--keep",
        "--wandb",
    ]
    assert list(SWITCHES) == ["--dry-run", "--tensorboard", "--no-tensorboard", "--strict-compile"]
