"""What a later start makes of what an earlier one left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.checkpoint_folder import published
from launcher.trial import Trial
from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check, newest


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


# Every start after the first finds something wrong: a cut compile cache, a flipped byte, more drafters, a NaN, a full
# disk and no W&B; then another model; then nothing usable.
HISTORY = Scenario(
    "history",
    (
        Start(),
        Start(
            "nan@step:5:2;diskfull@save-shard:6:1",
            ("--train.max_steps=8", "--log.wandb=x"),
            before=_flip_newest_and_cut_the_cache,
            split=(1, 2),
        ),
        Start(flags=("--drafter.layers=2",)),
        Start(before=_flip_all),
    ),
)
RESTART = Scenario("restart", (Start("kill@save-rename:4:1", ("--max-restarts=1",)),))
BACKGROUND = Scenario(
    "disk full in the background",
    (
        Start(
            "diskfull@save-shard:1;slow=1@step:1",
            ("--checkpoint.asynchronous=true", "--checkpoint.max_failed_saves=1", "--train.max_steps=60"),
        ),
    ),
)


def _losses(result: Trial) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in result.metrics}


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_an_undisturbed_run_finishes(results: Results, scenario: Scenario) -> None:
    first = results(scenario)[0]
    check(first, "finished", 0)
    assert first.status.step == 6


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_a_run_goes_on_from_an_older_checkpoint_on_more_ranks_through_a_nan_and_a_full_disk(
    results: Results, scenario: Scenario
) -> None:
    second = results(scenario)[1]
    check(second, "finished", 0)
    for words in (
        "compiling anew in a private one",
        "skipped checkpoint",
        "differs from what was written",
        "at step 4",
        "step 5 skipped: its gradient is not finite",
        "No space left on device",
        "Weights & Biases is off",
    ):
        assert words in second.console, f"{words} is not in\n{second.console}"
    assert second.status.step == 8 and str(second.status.last_checkpoint).endswith("step-8")


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_another_model_is_refused(results: Results, scenario: Scenario) -> None:
    check(results(scenario)[2], "failed", 78, ("drafter.layers: 1 -> 2",))


@pytest.mark.parametrize("scenario", [HISTORY], ids=str)
def test_without_a_usable_checkpoint_nothing_starts(results: Results, scenario: Scenario) -> None:
    last = results(scenario)[3]
    check(last, "failed", 78, ("no usable checkpoint", "--resume none"))


@pytest.mark.parametrize(("scenario", "other"), [(RESTART, HISTORY)], ids=str)
def test_a_restart_after_a_kill_in_a_save_equals_an_uninterrupted_run(
    results: Results, scenario: Scenario, other: Scenario
) -> None:
    (restarted,) = results(scenario)
    check(restarted, "finished", 0)
    assert "left by an interrupted save" in restarted.console and "resumed from" in restarted.console
    uninterrupted = results(other)[0]
    assert _losses(restarted) == _losses(uninterrupted)
    assert sorted(_losses(restarted)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("scenario", [BACKGROUND], ids=str)
def test_a_background_save_that_fails_ends_the_run_at_a_later_step(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, ("No space left on device",))
    assert result.status.step is not None and result.status.step < 60
