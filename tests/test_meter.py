"""Rates belong to the step they are of, however late they are read."""

from __future__ import annotations

import time

import pytest
import torch

from launcher.meter import Meter


def test_a_step_is_timed_from_the_last_end_to_its_own() -> None:
    meter = Meter(row_length=100, rows_per_step=2, device=torch.device("cpu"))
    for seconds in (0.05, 0.15):
        with meter.waiting():
            time.sleep(seconds / 2)
        time.sleep(seconds / 2)
        meter.end_step()
    time.sleep(0.1)  # read late
    laps = [meter.lap(), meter.lap()]
    assert [lap["step_seconds"] for lap in laps] == pytest.approx([0.05, 0.15], abs=0.04)
    assert laps[1]["tokens_per_s"] == pytest.approx(100 * laps[1]["rows_per_s"])
    assert all(0.3 < lap["data_wait"] < 0.7 for lap in laps)


def test_skipped_time_belongs_to_no_step() -> None:
    meter = Meter(row_length=1, rows_per_step=1, device=torch.device("cpu"))
    time.sleep(0.3)
    meter.skip()
    meter.end_step()
    assert meter.lap()["step_seconds"] < 0.2
