"""What a later start makes of what an earlier one left behind. Losses are compared bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.checkpoint_folder import published
from launcher.trial import Trial
from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check, newest, stop_by


def _flip(folder: Path) -> None:
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _flip_newest_and_cut_the_cache(run_dir: Path) -> None:
    _flip(newest(run_dir))
    (manifest,) = (run_dir.parent / "compile").glob("*/manifest.json")
    manifest.write_text(manifest.read_text()[:40])


def _flip_all(run_dir: Path) -> None:
    for folder in published(run_dir):
        (folder / "extra.json").write_text("{}")


LAST_STEP = 13
# SIGTERM in a step; then SIGUSR1 in a save of the start that goes on from there, with one more target. The third finds
# a cut compile cache and a flipped byte, has more drafters, 2 rows for its 3 ranks and 6 micro-batches a step, a NaN, a
# full disk and no W&B. Then come another model, and nothing usable.
HISTORY = Scenario(
    "history",
    (
        Start("slow=5@step:3:1", act=stop_by(signal.SIGTERM)),
        Start("slow=5@save-shard:6:2", act=stop_by(signal.SIGUSR1), split=(2, 1), steps=60),
        Start(
            "nan@step:9:2;diskfull@save-shard:10:1",
            ("--log.wandb=x", "--data.max_chats=4", "--train.accumulation=3"),
            before=_flip_newest_and_cut_the_cache,
            split=(1, 2),
            steps=LAST_STEP,
        ),
        Start(flags=("--drafter.layers=2",)),
        Start(before=_flip_all),
    ),
)
# A new beginning, and then one restart that must not be another.
RESTART = Scenario("restart", (Start("kill@save-rename:4:1", ("--max-restarts=1", "--resume=none")),))
# Also the run without interruption that others are compared with.
BACKGROUND = Scenario(
    "disk full in the background",
    (
        Start(
            "diskfull@save-shard:1;slow=0.5@step:1",
            ("--checkpoint.asynchronous=true", "--checkpoint.max_failed_saves=1", "--checkpoint.every=6"),
            steps=60,
        ),
    ),
)


def _losses(result: Trial) -> list[float]:
    return [entry["loss"] for entry in result.metrics][:6]


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_sigterm_in_a_step_saves_and_the_next_start_goes_on(results: Results, scenario: Scenario) -> None:
    stopped, resumed, *_ = results(scenario)
    check(stopped, "stopped", 143, ("stopped by SIGTERM at step 4",))
    assert stopped.status.resumable and str(stopped.status.last_checkpoint).endswith("step-4")
    assert "resumed from" in resumed.console and "at step 4" in resumed.console


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_sigusr1_in_a_save_lets_it_finish(results: Results, scenario: Scenario) -> None:
    stopped = results(scenario)[1]
    check(stopped, "stopped", 143, (f"stopped by SIGUSR1 at step {stopped.status.step}",))
    assert stopped.status.step in (6, 7)
    assert str(stopped.status.last_checkpoint).endswith(f"step-{stopped.status.step}")


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_a_run_goes_on_from_an_older_checkpoint_on_more_ranks_than_rows_through_a_nan_and_a_full_disk(
    results: Results, scenario: Scenario
) -> None:
    before, after = results(scenario)[1:3]
    check(after, "finished", 0)
    for words in (
        "compiling anew in a private one",
        "skipped checkpoint",
        "differs from what was written",
        "resumed from",
        "changed since the checkpoint: train.accumulation: 1 -> 3",
        "step 10 skipped: the loss of rank 2 drafter 1 on row",
        "No space left on device",
        "Weights & Biases is off",
    ):
        assert words in after.console, f"{words} is not in\n{after.console}"
    for said in ("step 10 skipped", "saving ", "runs uncompiled and unproved"):
        assert after.console.count(said) == 1, f"two drafters say {said}"
    assert f"at step {before.status.step}\n" not in after.console, "that checkpoint was spoiled"
    assert after.status.step == LAST_STEP == after.metrics[-1]["step"]
    assert str(after.status.last_checkpoint).endswith(f"step-{LAST_STEP}")
    assert after.console.count(f"step {LAST_STEP}/{LAST_STEP}") == 1


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_another_model_is_refused_before_any_rank_starts(results: Results, scenario: Scenario) -> None:
    _refused(results(scenario)[3], "drafter.layers: 1 -> 2")


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_without_a_usable_checkpoint_nothing_starts(results: Results, scenario: Scenario) -> None:
    _refused(results(scenario)[4], "no usable checkpoint", "--resume none")


def _refused(result: Trial, *words: str) -> None:
    assert result.code == 78 and result.left == () and result.logs == ""
    assert all(word in result.console for word in words), result.console
    assert "Traceback" not in result.console


@pytest.mark.parametrize(("scenario", "other"), [(RESTART, BACKGROUND)], ids=str)
def test_a_restart_after_a_kill_in_a_save_equals_an_uninterrupted_run(
    results: Results, scenario: Scenario, other: Scenario
) -> None:
    (restarted,) = results(scenario)
    check(restarted, "finished", 0)
    assert "left by an interrupted save" in restarted.console and "resumed from" in restarted.console
    assert [entry["step"] for entry in restarted.metrics] == [1, 2, 3, 4, 5, 6]
    assert _losses(restarted) == _losses(results(other)[0])


@pytest.mark.parametrize(("scenario", "other"), [(HISTORY, BACKGROUND)], ids=str)
def test_a_run_that_was_stopped_and_resumed_with_more_targets_equals_an_uninterrupted_one(
    results: Results, scenario: Scenario, other: Scenario
) -> None:
    losses = _losses(results(scenario)[1])
    assert len(losses) == 6 and losses == _losses(results(other)[0])


@pytest.mark.parametrize("scenario", [BACKGROUND], ids=str)
def test_a_background_save_that_fails_ends_the_run_at_a_later_step(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, ("No space left on device",))
    assert result.status.step is not None and 6 < result.status.step < 60
