"""Every rank's view of the schedule adds up to the same micro-batches."""

from __future__ import annotations

from itertools import chain

import pytest

from launcher.config_sections import TrainConfig
from launcher.schedule import Schedule, is_due, total_steps
from launcher.topology import Split, build_topology


@pytest.mark.parametrize("start", [(0, 0), (4, 36), (3, 17)])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("split", [Split(1, 1), Split(5, 3), Split(2, 3), Split(3, 2), Split(1, 4)], ids=str)
def test_producers_and_consumers_agree(split: Split, accumulation: int, start: tuple[int, int]) -> None:
    topology = build_topology(split)
    schedule = Schedule(topology, accumulation, start[0] + 5, *start)
    for step in range(schedule.start_step, schedule.last_step):
        wanted = {m: rank for d, rank in enumerate(topology.drafter_ranks) for m in schedule.of_drafter(step, d)}
        made = dict(chain.from_iterable(schedule.of_target(t, step) for t in range(split.targets)))
        assert made == wanted
        assert sorted(wanted) == list(range(schedule.position(step), schedule.position(step + 1)))
        for target in range(split.targets):
            for micro_batch, _ in schedule.of_target(target, step):
                assert schedule.source(micro_batch) == topology.target_group(target)[0]


def test_resume_on_another_split_skips_and_repeats_nothing() -> None:
    first = Schedule(build_topology(Split(5, 3)), 2, 10)
    second = Schedule(build_topology(Split(2, 1)), 4, 10, start_step=4, start_micro_batch=first.position(4))
    seen = [m for step in range(4) for d in range(3) for m in first.of_drafter(step, d)]
    seen += [m for step in range(4, 10) for m in second.of_drafter(step, 0)]
    assert sorted(seen) == list(range(len(seen)))


def test_steps_cover_the_epochs() -> None:
    assert total_steps(TrainConfig(epochs=2, accumulation=2), rows=10, drafters=3) == 4
    assert total_steps(TrainConfig(epochs=1), rows=1, drafters=3) == 1
    assert total_steps(TrainConfig(max_steps=7), rows=10, drafters=3) == 7


def test_due() -> None:
    assert [step for step in range(1, 8) if is_due(step, 3, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if is_due(step, 0, 7)] == [7]
