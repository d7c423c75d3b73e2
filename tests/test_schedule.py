"""Every rank's view of the schedule adds up to the same micro-batches."""

from __future__ import annotations

from itertools import chain

import pytest

from launcher.acceptance import evaluation_steps
from launcher.config_sections import EvalConfig, TrainConfig
from launcher.schedule import Schedule, is_due, rate_span, total_steps
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
    assert total_steps(TrainConfig(epochs=2), rows=10, per_step=6) == 4
    assert total_steps(TrainConfig(epochs=1), rows=1, per_step=3) == 1
    assert total_steps(TrainConfig(epochs=0.1), rows=30, per_step=3) == 1
    assert total_steps(TrainConfig(max_steps=7), rows=10, per_step=3) == 7


@pytest.mark.parametrize("per_step", [1, 4, 7])
def test_a_resume_with_the_same_layout_has_the_same_last_step_and_rates(per_step: int) -> None:
    config = TrainConfig(epochs=2.5)
    last = total_steps(config, 41, per_step)
    for start in range(last + 1):
        assert total_steps(config, 41, per_step, start, start * per_step) == last
        schedule = Schedule(build_topology(Split(1, per_step)), 1, last, start, start * per_step)
        assert rate_span(config, schedule) == (0, last)


@pytest.mark.parametrize("before", [1, 3, 8])
@pytest.mark.parametrize("after", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_resume_with_another_layout_trains_on_what_is_left_of_the_epochs(
    before: int, after: int, share: float
) -> None:
    config, rows = TrainConfig(epochs=6, schedule="wsd"), 100
    start = round(share * total_steps(config, rows, before))
    position = start * before
    schedule = Schedule(
        build_topology(Split(2, after)), 1, total_steps(config, rows, after, start, position), start, position
    )
    end = schedule.position(schedule.last_step)
    assert max(600, position) <= end < max(600, position) + after
    shift, total = rate_span(config, schedule)
    done = (start + shift) / total
    assert abs(done - min(1.0, position / 600)) <= after / 600, "the learning rate goes on from the share that is done"
    assert schedule.last_step + shift == total


def test_max_steps_are_steps_of_any_size_and_a_run_past_them_does_no_more() -> None:
    config = TrainConfig(max_steps=100)
    assert total_steps(config, 10, 3, start=50, position=50) == 100
    assert total_steps(config, 10, 3, start=120, position=120) == 120
    assert rate_span(config, Schedule(build_topology(Split(1, 3)), 1, 100, 50, 50)) == (0, 100)


def test_acceptance_is_measured_at_the_end_whoever_gets_there() -> None:
    def steps(start: int, last: int, prompts: int = 1) -> list[int]:
        schedule = Schedule(build_topology(Split(1, 1)), 1, last, start, start)
        return sorted(evaluation_steps(EvalConfig(every=4, prompts=prompts), schedule))

    assert steps(0, 10) == [0, 4, 8, 10] and steps(4, 10) == [8, 10]
    assert steps(10, 10) == [10], "saved at its end, and lost before or while it was measured"
    assert steps(0, 10, prompts=0) == steps(10, 10, prompts=0) == []


def test_due() -> None:
    assert [step for step in range(1, 8) if is_due(step, 3, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if is_due(step, 0, 7)] == [7]
