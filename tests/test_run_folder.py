"""What a run folder keeps for the next start: the config, the lock beside it, and the command that uses both."""

from __future__ import annotations

import errno
import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.cli import Command, parse
from launcher.config import Config
from launcher.control import Control
from launcher.environment import LOCK_NAME, check_lock, read_fingerprint, write_fingerprint
from launcher.errors import RetryableError, UserError
from launcher.outcome import STATUS_VARIABLE, finished_status, report, report_alone
from launcher.run_folder import ATTEMPT_VARIABLE, keep_config, open_attempt
from launcher.runtime import RankEnv
from launcher.started_as import STARTED_AS, as_launched, under_torchrun
from launcher.status import Status, read_status, resume_command, write_status
from launcher.worker import Start, find_attempt
from tests.test_preflight import config_of, saved

CONFIG = parse(["--preset=tiny"]).config


def test_a_dry_run_is_no_part_of_the_run(tmp_path: Path) -> None:
    keep_config(tmp_path, parse(["--preset=tiny", "--dry-run", "--seed=1"]).config, None)
    kept = parse(["--config", str(tmp_path / "config.toml")]).config
    assert kept.train.seed == 1 and not kept.dry_run, "a folder without a config takes it, and will train by it"
    keep_config(tmp_path, parse(["--preset=tiny", "--dry-run", "--seed=2"]).config, None)
    assert parse(["--config", str(tmp_path / "config.toml")]).config == kept
    attempt = open_attempt(tmp_path, parse(["--preset=tiny", "--dry-run", "--seed=2"]).config)
    copy = parse(["--config", str(attempt / "config.toml")]).config
    assert copy.dry_run and copy.train.seed == 2, "the attempt's own copy is what was started"


@pytest.mark.parametrize("dry_run", [True, False])
def test_under_torchrun_a_dry_run_leaves_the_environment_of_the_run(
    dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    write_fingerprint(tmp_path / "environment.json", {"torch": "1"})
    config = config_of(tmp_path).model_copy(update={"dry_run": dry_run})
    attempt = open_with(config, Control("127.0.0.1", 0, "test", serve=True))
    assert read_fingerprint(tmp_path) == ({"torch": "1"} if dry_run else {})
    assert read_fingerprint(attempt) == {}, "of the start itself"


def test_opening_an_attempt_leaves_the_runs_config_alone(tmp_path: Path) -> None:
    open_attempt(tmp_path, CONFIG)
    assert not (tmp_path / "config.toml").exists(), "a start that is refused later has changed nothing"


def open_with(config: Config, control: Control) -> Path:
    """The attempt of the first rank under a bare torchrun."""
    command = Command("train", config=config)
    start = Start(command, env(1), cast(Any, None), cast(Any, None), {}, (), cast(Any, None), None)
    with ExitStack() as stack:
        return find_attempt(stack, start, control)


@pytest.mark.parametrize(("dry_run", "checkpoint", "stays"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_under_torchrun_a_dry_run_leaves_the_status_of_the_run(
    dry_run: int, checkpoint: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    monkeypatch.setenv(STATUS_VARIABLE, "")  # so that what the start sets goes with the test
    config = config_of(tmp_path)
    if checkpoint:
        saved(tmp_path, 7, config)
    stood = Status(state="stopped", code=143, step=7)
    write_status(tmp_path, stood)
    control = Control("127.0.0.1", 0, "test", serve=True)
    attempt = open_with(config.model_copy(update={"dry_run": bool(dry_run)}), control)
    done = finished_status("dry run: compiled and proved", 0, tmp_path)
    report(done, tmp_path)
    assert read_status(tmp_path) == (stood if stays else done)
    assert read_status(attempt if stays else tmp_path) == done
    report_alone(Status(state="failed", code=75), tmp_path, 0)
    assert read_status(attempt if stays else tmp_path) == done, "the ranks know where their own end is written"


def test_under_torchrun_a_start_that_is_refused_changes_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    control = Control("127.0.0.1", 0, "test", serve=True)
    saved(tmp_path, 5, config_of(tmp_path))
    assert open_with(config_of(tmp_path), control) == tmp_path / "attempts/1"
    kept = (tmp_path / "config.toml").read_text()
    with pytest.raises(UserError, match="drafter.layers: 1 -> 2"):
        open_with(config_of(tmp_path, layers=2), control)
    assert (tmp_path / "config.toml").read_text() == kept and "layers = 1" in kept
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["1"]
    assert control.has("attempt/0") and control.get("attempt/0") is None, (
        "the other ranks of the node do not wait in vain"
    )


def test_a_full_disk_ends_a_start_with_75_and_the_former_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_config(tmp_path, CONFIG, None)

    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RetryableError, match="No space left"):
        keep_config(tmp_path, parse(["--preset=tiny", "--seed=9"]).config, None)
    with pytest.raises(RetryableError, match="No space left"):
        open_attempt(tmp_path, CONFIG)
    monkeypatch.undo()
    assert parse(["--config", str(tmp_path / "config.toml")]).config == CONFIG


def test_the_lock_of_a_start_holds_for_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine, run_dir = tmp_path / "mine", tmp_path / "run"
    for folder in (mine, run_dir):
        folder.mkdir()
    write_fingerprint(mine / LOCK_NAME, {"torch": "1"})
    keep_config(run_dir, CONFIG, mine / "my.toml")
    with pytest.raises(UserError, match="torch: 1 -> 2"):
        check_lock(run_dir / "config.toml", {"torch": "2"})
    keep_config(run_dir, CONFIG, run_dir / "config.toml")
    assert (run_dir / LOCK_NAME).exists(), "going on keeps it"
    keep_config(run_dir, CONFIG, None)
    check_lock(run_dir / "config.toml", {"torch": "2"})
    monkeypatch.chdir(mine)
    keep_config(run_dir, CONFIG, None)
    with pytest.raises(UserError, match="torch: 1 -> 2"):
        check_lock(run_dir / "config.toml", {"torch": "2"})


def env(nodes: int) -> RankEnv:
    return RankEnv(4 * (nodes - 1), 0, 4 * nodes, 4, "10.0.0.1", 29500, 0, True)


def test_the_command_that_goes_on_is_the_one_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--nproc=4", "--max-restarts=2", "--strict-environment"]
    monkeypatch.setenv(STARTED_AS, as_launched(parse(["--preset=tiny", *flags])))
    words = shlex.split(resume_command(tmp_path))
    assert words[0] == "./launch.sh"
    (tmp_path / "config.toml").write_text("")
    again = parse(words[1:])
    assert (again.nproc, again.max_restarts, again.strict_environment) == (4, 2, True)
    assert again.config_file == tmp_path / "config.toml" and again.config.runtime.resume == "auto"


def test_several_nodes_and_dry_runs_are_started_so_again() -> None:
    flags = ["--preset=tiny", "--nnodes=2", "--node-rank=1", "--master=a:1", "--dry-run"]
    again = parse(["--preset=tiny", *shlex.split(as_launched(parse(flags)))[1:]])
    assert (again.nnodes, again.node_rank, again.master, again.config.dry_run) == (2, 1, "a:1", True)
    assert as_launched(parse(["--preset=tiny"])) == "./launch.sh"


def test_torchrun_is_started_as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    command = parse(["--preset=tiny", "--strict-environment"])
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    alone = under_torchrun(command, env(1), {})
    assert alone == "torchrun --standalone --nproc_per_node=4 launcher/main.py --strict-environment"
    assert under_torchrun(command, env(2), {"TORCHELASTIC_MAX_RESTARTS": "3"}) == (
        "torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 --nproc_per_node=4"
        " --max_restarts=3 launcher/main.py --strict-environment"
    )


@pytest.mark.parametrize(("told", "then"), [("none", "auto"), ("a/step-3", "a/step-3")])
def test_a_run_that_has_saved_nothing_begins_where_it_was_told_to(told: str, then: str, tmp_path: Path) -> None:
    keep_config(tmp_path, parse(["--preset=tiny", f"--resume={told}"]).config, None)
    assert resume_command(tmp_path).endswith(f"--resume {then}")
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "checkpoints/step-2/manifest.json").touch()
    assert resume_command(tmp_path).endswith("--resume auto")
