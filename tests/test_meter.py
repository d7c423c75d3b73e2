"""Rates belong to the step they are of, however late they are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from launcher import meter as meter_module
from launcher.meter import Meter, RowPace, over_drafters
from tests.rank_pool import run_ranks

ROWS = [RowPace(busy=0.3, idle=0.1, ready=2), RowPace(busy=0.5, idle=0.1, ready=0)]


class Watch:
    """A clock that only its own sleep moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


def test_a_step_is_timed_from_the_last_end_to_its_own(watch: Watch) -> None:
    meter = Meter(row_length=100, rows_per_step=2, device=torch.device("cpu"))
    for seconds in (0.05, 0.15):
        with meter.waiting():
            watch.sleep(seconds / 2)
        watch.sleep(seconds / 2)
        meter.end_step(ROWS)
    watch.sleep(0.1)  # read late
    laps = [meter.lap(), meter.lap()]
    assert [lap["step_seconds"] for lap in laps] == pytest.approx([0.05, 0.15])
    assert laps[1]["tokens_per_s"] == pytest.approx(100 * laps[1]["rows_per_s"])
    assert [lap["data_wait"] for lap in laps] == pytest.approx([0.5, 0.5])


def test_skipped_time_belongs_to_no_step(watch: Watch) -> None:
    meter = Meter(row_length=1, rows_per_step=1, device=torch.device("cpu"))
    watch.sleep(0.3)
    meter.skip()
    meter.end_step(ROWS)
    assert meter.lap()["step_seconds"] == 0.0


def test_a_lap_tells_what_both_sides_did(watch: Watch) -> None:
    meter = Meter(row_length=1, rows_per_step=2, device=torch.device("cpu"))
    with meter.waiting():
        watch.sleep(0.05)
    watch.sleep(0.1)
    meter.end_step(ROWS)
    lap = meter.lap()
    assert lap["target_wait"] == pytest.approx(0.2) and lap["target_row_seconds"] == pytest.approx(0.4)
    assert lap["rows_ready"] == 1.0
    assert lap["drafter_row_seconds"] == pytest.approx(0.05)


def gather(laps: list[dict[str, float]]) -> dict[str, float]:
    return over_drafters(laps[torch.distributed.get_rank()], None)


def test_all_drafters_see_the_one_that_waits() -> None:
    same = {"target_wait": 0.2, "target_row_seconds": 1.0, "drafter_row_seconds": 2.0}
    laps = [same | {"data_wait": 0.0, "rows_ready": 2.0, "loss": 1.0}, same | {"data_wait": 0.4, "rows_ready": 0.0}]
    first, second = run_ranks(2, gather, laps)
    assert first == {**same, "data_wait": 0.4, "rows_ready": 1.0, "loss": 1.0}
    assert second == {**same, "data_wait": 0.4, "rows_ready": 1.0}
