"""The first steps of a run as a measurement: rates for later starts, and with `split = auto` a better split at once.

Nothing is measured apart from training: the rows, the transfers and the other ranks are those that the rates are for,
and what was trained meanwhile is kept.
"""

from __future__ import annotations

import os

from launcher.balance import Balance, best_split, explain_choice, is_clearly_better
from launcher.outcome import SUPERVISED
from launcher.rank import Rank
from launcher.split_choice import ask_for_another_start, save_rates
from launcher.topology import Split

CALIBRATION_STEPS = 16


class Calibration:
    """Looks at the rates once, after enough steps; every drafter sees the same numbers and comes to the same end."""

    def __init__(self, rank: Rank, balance: Balance) -> None:
        self._rank, self._balance, self._done = rank, balance, False

    def better_split(self, steps_left: int) -> Split | None:
        """After a step: the split to start again with, None to go on."""
        rates = self._balance.rates()
        if self._done or rates is None or self._balance.steps < CALIBRATION_STEPS:
            return None
        self._done = True
        rank, split = self._rank, self._rank.topology.split
        if rank.leads_drafters and rank.cache_folder is not None:
            save_rates(rank.cache_folder, rank.config, rank.device.ranks, rank.topology.nodes, rates)
        best = best_split(split.ranks, rates, split.target_tp)
        if not rank.split_is_guess or not is_clearly_better(best, split, rates):
            return None
        restarts = steps_left > 0 and can_start_again(rank.topology.nodes) and self._ask(best)
        then = "saving, then starting again with it" if restarts else "the next start will use it"
        rank.journal.announce(f"topology.split=auto, measured: {explain_choice(best, split, rates)}; {then}")
        return best if restarts else None

    def _ask(self, split: Split) -> bool:
        """Have launch.sh start the run again, once this attempt has ended well; whether the first drafter could.

        Asked before anything is given up: without it the run has to go on as it is.
        """
        rank, limit = self._rank, self._rank.config.runtime.step_timeout
        with rank.lifecycle.phase("step", limit, defer_stop=True):
            if rank.leads_drafters:
                rank.control.set("again", ask_for_another_start(rank.attempt_dir, split))
            return rank.wait_for("again", "the first drafter to ask for another start", limit)


def can_start_again(nodes: int) -> bool:
    """Only launch.sh can, and only where it has started all ranks."""
    return SUPERVISED in os.environ and nodes == 1
