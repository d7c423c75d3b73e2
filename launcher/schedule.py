"""Which micro-batch belongs to which step, target and drafter. Pure, so that every rank agrees without a word.

A step of D drafters with accumulation A takes the next A*D micro-batches. A resumed run goes on at the micro-batch its
checkpoint names, whatever the numbers of targets and drafters are now. `epochs` are counted in rows, so a run whose
steps have become larger or smaller still trains on as many; `max_steps` are steps of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config_sections import TrainConfig
from launcher.topology import Topology


def total_steps(config: TrainConfig, rows: int, per_step: int, start: int = 0, position: int = 0) -> int:
    """The last step of a run: `max_steps`, or `epochs` passes over the rows; the next pass fills the last step.

    Args:
        per_step: micro-batches of one step, from here on.
        start: steps that are done; a run that is already past its end does no more.
        position: micro-batches that are done, in steps of whatever size.
    """
    if config.max_steps is not None:
        return max(config.max_steps, start)
    wanted = max(1, math.ceil(round(config.epochs * rows, 6)))  # 0.1 * 30 is a little more than 3
    return start + math.ceil(max(0, wanted - position) / per_step)


@dataclass(frozen=True)
class Schedule:
    """Steps `start_step` .. `last_step` - 1, the first of which begins at `start_micro_batch`."""

    topology: Topology
    accumulation: int
    last_step: int
    start_step: int = 0
    start_micro_batch: int = 0

    @property
    def per_step(self) -> int:
        """Micro-batches of one step, over all drafters."""
        return self.accumulation * self.topology.drafter_count

    def position(self, step: int) -> int:
        """The first micro-batch of `step`; what a checkpoint of `step` finished steps records."""
        return self.start_micro_batch + (step - self.start_step) * self.per_step

    def of_drafter(self, step: int, drafter: int) -> list[int]:
        """The micro-batches of one drafter in one step, in order."""
        drafters = self.topology.drafter_count
        return [self.position(step) + a * drafters + drafter for a in range(self.accumulation)]

    def source(self, micro_batch: int) -> int:
        """The rank that sends a micro-batch: the first of its target's group."""
        target, _ = self.topology.route(micro_batch - self.start_micro_batch)
        return self.topology.target_group(target)[0]

    def of_target(self, target: int, step: int) -> Iterator[tuple[int, int]]:
        """(micro-batch, drafter rank) of one target in one step, in order."""
        for micro_batch in range(self.position(step), self.position(step + 1)):
            producer, drafter = self.topology.route(micro_batch - self.start_micro_batch)
            if producer == target:
                yield micro_batch, self.topology.drafter_rank(drafter)


def rate_span(config: TrainConfig, schedule: Schedule) -> tuple[int, int]:
    """(shift, total): step s of this start has the learning rate of step s + shift out of total.

    The shift is 0 unless steps have changed their size since the run began. Then steps count for the learning rate as
    if all of them had been of the present size, so that it goes on from the share of the epochs that is done and not
    from another place of its curve. With `max_steps` it follows the steps alone.
    """
    if config.max_steps is not None:
        return 0, config.max_steps
    shift = schedule.start_micro_batch // schedule.per_step - schedule.start_step
    return shift, schedule.last_step + shift


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether something that happens `every` steps (0: only at the end) happens after `step` finished steps."""
    return step == last_step or (every > 0 and step % every == 0)
