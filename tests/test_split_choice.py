"""`topology.split = auto`: what is chosen from what is known, agreed on by all ranks, and started again if wrong."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from launcher.balance import WARM_UP_STEPS, Balance, Rates, best_split
from launcher.calibration import CALIBRATION_STEPS, Calibration
from launcher.cli import parse
from launcher.config import Config, for_device
from launcher.control import Control
from launcher.errors import ConfigError, RetryableError, UserError
from launcher.outcome import SUPERVISED
from launcher.runtime import Device
from launcher.split_choice import (
    RATES_FILE,
    Choice,
    agree_on_split,
    ask_for_another_start,
    choose_split,
    flags_of_another_start,
    guess_rates,
    load_rates,
    save_rates,
)
from launcher.topology import Split, default_split
from launcher.trial import run_trial

RATES = Rates(0.035, 0.118)


def auto(*flags: str) -> Config:
    return for_device(parse(["--preset=tiny", "--topology.split=auto", *flags]).config, "cpu")


@pytest.mark.parametrize("ranks", range(2, 18))
def test_measured_rates_decide_for_any_number_of_ranks(ranks: int) -> None:
    choice = choose_split(auto(), ranks, RATES, None)
    assert choice.split == best_split(ranks, RATES) and not choice.guessed
    assert choice.why.startswith("topology.split=auto, measured: target 35 ms/row, drafter 118 ms/row: ")
    guess = choose_split(auto(), ranks, None, None)
    assert guess.guessed and guess.split.ranks == ranks and "nothing measured yet" in guess.why


def test_the_reason_names_the_usual_split_too() -> None:
    assert choose_split(auto(), 8, RATES, None).why.endswith("2t+6d gives 50.8 rows/s, 5t+3d would give 25.4")


def test_without_auto_the_flags_decide() -> None:
    config = parse(["--preset=tiny", "--topology.targets=6"]).config
    assert choose_split(config, 8, RATES, None) == Choice(Split(6, 2))
    with pytest.raises(UserError, match="5t"):
        choose_split(parse(["--preset=tiny", "--topology.targets=5", "--topology.drafters=5"]).config, 8, RATES, None)


@pytest.mark.parametrize("flag", ["--topology.targets=1", "--topology.drafters=1"])
def test_auto_and_a_number_are_refused_together(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        auto(flag)
    assert len(caught.value.problems) == 1 and "auto chooses targets and drafters" in caught.value.problems[0]


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="1 rank cannot hold"):
        choose_split(auto(), 1, RATES, None)
    with pytest.raises(UserError, match="start at least 5 ranks"):
        choose_split(auto("--topology.target_tp=4"), 4, None, None)


def test_the_guess_is_the_cost_models_and_needs_a_known_shape(tmp_path: Path) -> None:
    big = guess_rates(parse(["--preset=qwen3-8b", "--target.model=random:qwen3-8b"]).config, "NVIDIA H200 sm_90")
    assert big is not None and big.target == pytest.approx(0.071, rel=0.02)
    (tmp_path / "unknown").mkdir()
    unknown = auto(f"--target.model={tmp_path / 'unknown'}")
    assert guess_rates(unknown, None) is None
    choice = choose_split(unknown, 8, None, None)
    assert choice.split == default_split(8) and choice.guessed and "not known yet" in choice.why


def test_rates_are_kept_by_what_they_depend_on(tmp_path: Path) -> None:
    places = [(sharing, nodes) for sharing in (1, 2) for nodes in (1, 4)]
    for number, (sharing, nodes) in enumerate(places, 1):
        save_rates(tmp_path, auto(), sharing, nodes, Rates(number, 2))
    save_rates(tmp_path, auto("--train.draws_per_row=4"), 1, 1, Rates(9, 2))
    assert [load_rates(tmp_path, auto(), *place) for place in places] == [Rates(number, 2) for number in (1, 2, 3, 4)]
    assert load_rates(tmp_path, auto("--train.draws_per_row=4"), 1, 1) == Rates(9, 2)
    assert load_rates(tmp_path, auto("--train.accumulation=2"), 1, 1) is None
    assert load_rates(tmp_path, auto(), 3, 1) is None and load_rates(tmp_path, auto(), 1, 2) is None
    assert load_rates(None, auto(), 1, 1) is None and load_rates(tmp_path / "absent", auto(), 1, 1) is None


def test_rates_that_cannot_be_read_are_measured_again(tmp_path: Path) -> None:
    save_rates(tmp_path, auto(), 1, 1, RATES)
    (key,) = json.loads((tmp_path / RATES_FILE).read_text())
    for spoiled in ("{", "[]", json.dumps({key: 3}), json.dumps({key: {"target": 1}})):
        (tmp_path / RATES_FILE).write_text(spoiled)
        assert load_rates(tmp_path, auto(), 1, 1) is None
    save_rates(tmp_path, auto(), 1, 1, RATES)
    assert load_rates(tmp_path, auto(), 1, 1) == RATES


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)


@pytest.mark.usefixtures("full_disk")
def test_rates_that_cannot_be_kept_cost_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_rates(tmp_path, auto(), 1, 1, RATES)
    assert caplog.messages == [f"measured rates are not kept in {tmp_path}: No space left on device"]


def test_all_ranks_take_the_first_ones_choice() -> None:
    control = Control("127.0.0.1", 0, "test", serve=True)
    first, other = Choice(Split(2, 6), "measured: ...", False), Choice(Split(5, 3), "guessed", True)
    with pytest.raises(RetryableError, match="first rank to choose a split"):
        agree_on_split(other, control, rank=8, node=1, timeout=0.1)
    assert agree_on_split(first, control, rank=0, node=0, timeout=1) == first
    assert agree_on_split(other, control, rank=8, node=1, timeout=1) == first
    with pytest.raises(UserError, match="node 1 was started as 5t.3d, the first one as 2t.6d"):
        agree_on_split(Choice(Split(5, 3)), control, rank=8, node=1, timeout=1)


def test_another_start_is_asked_for_in_flags(tmp_path: Path) -> None:
    assert flags_of_another_start(tmp_path) == []
    assert ask_for_another_start(tmp_path, Split(2, 6))
    again = parse(["--preset=tiny", "--topology.split=auto", "--resume=none", *flags_of_another_start(tmp_path)]).config
    assert choose_split(again, 8, RATES, None) == Choice(Split(2, 6)) and again.runtime.resume == "auto"


class Rank(SimpleNamespace):
    """What a calibration sees of its rank; ranks that are given one `told` are of one run."""

    def __init__(self, folder: Path, guess: bool, leads: bool = True, told: dict[str, Any] | None = None) -> None:
        self.lines: list[str] = []
        split, told = Split(5, 3), {} if told is None else told
        super().__init__(
            config=auto(),
            topology=SimpleNamespace(split=split, nodes=1),
            device=Device("cuda", "GPU-0", ranks=2),
            leads_drafters=leads,
            cache_folder=folder,
            split_is_guess=guess,
            attempt_dir=folder,
            journal=SimpleNamespace(announce=self.lines.append),
            lifecycle=SimpleNamespace(phase=lambda *_, defer_stop: nullcontext()),
            control=SimpleNamespace(set=told.__setitem__),
            wait_for=lambda key, what, timeout: told[key],
        )


LAP = {"target_row_seconds": 0.035, "drafter_row_seconds": 0.118, "data_wait": 0.0, "target_wait": 0.5}


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("guess", [True, False])
def test_calibration_looks_once_and_only_launch_sh_can_start_again(
    guess: bool, supervised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUPERVISED, "1") if supervised else monkeypatch.delenv(SUPERVISED, raising=False)
    rank, balance = Rank(tmp_path, guess), Balance(Split(5, 3))
    calibration = Calibration(cast(Any, rank), balance)
    found = []
    for _ in range(WARM_UP_STEPS + CALIBRATION_STEPS + 3):
        balance.add(LAP)
        found.append(calibration.better_split(steps_left=10))
    looked = WARM_UP_STEPS + CALIBRATION_STEPS - 1
    assert found[looked] == (Split(2, 6) if guess and supervised else None)
    assert found[:looked] + found[looked + 1 :] == [None] * (looked + 3)
    assert load_rates(tmp_path, rank.config, sharing=2, nodes=1) == RATES
    assert [line.rpartition("; ")[2] for line in rank.lines] == (
        [] if not guess else ["saving, then starting again with it" if supervised else "the next start will use it"]
    )
    assert bool(flags_of_another_start(tmp_path)) == (guess and supervised)


@pytest.mark.parametrize("room", [True, False])
def test_a_disk_that_takes_no_word_of_a_better_split_costs_that_split_on_every_drafter(
    room: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv(SUPERVISED, "1")
    if not room:
        request.getfixturevalue("full_disk")
    told: dict[str, Any] = {}
    ranks = [Rank(tmp_path, guess=True, leads=leads, told=told) for leads in (True, False)]
    balance = Balance(Split(5, 3))
    for _ in range(WARM_UP_STEPS + CALIBRATION_STEPS):
        balance.add(LAP)
    found = [Calibration(cast(Any, rank), balance).better_split(steps_left=10) for rank in ranks]
    assert found == [Split(2, 6) if room else None] * 2
    then = "saving, then starting again with it" if room else "the next start will use it"
    assert all(rank.lines[0].endswith(f"; {then}") for rank in ranks)
    lost = f"the run keeps its split: {tmp_path / 'again.json'} cannot be written: No space left on device"
    assert [line for line in caplog.messages if "again.json" in line] == ([] if room else [lost])


@pytest.mark.slow
def test_a_wrong_guess_is_measured_and_the_run_goes_on_with_a_better_split(tmp_path: Path) -> None:
    """The guess is 2t+1d; the fault makes every step of rank 2, the drafter, ten times as long."""
    flags = ["--preset=tiny", "--device=cpu", "--data.row_length=512", "--train.anchors=4", "--nproc=3"]
    flags += ["--topology.split=auto", "--max-steps=22", "--log-every=50", "--checkpoint.every=0"]
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    slow = {"LAUNCHER_FAULT": "slow=0.4@step:2"}
    trial = run_trial(flags, tmp_path / "run", environment | slow, limit=240)
    assert trial.code == 0 and trial.broken() == [], trial.console
    for words in ("nothing measured yet", "2t+1d on cpu", "going on as 1t+2d", "1t+2d on cpu", "resumed from"):
        assert words in trial.console, f"{words} is not in\n{trial.console}"
    assert [entry["step"] for entry in trial.metrics] == list(range(1, 23))
    again = run_trial([*flags, "--dry-run"], tmp_path / "other", environment, limit=120)
    assert "topology.split=auto, measured: target" in again.console and "1t+2d on cpu" in again.console
