"""The training step over real gloo ranks: global normalisation, the vote against bad numbers, no second compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.compile_gate import cache_counts
from launcher.config_sections import TrainConfig
from launcher.drafter_step import DrafterStep, learning_rate
from tests.gates import watch_recompiles
from tests.training import make_batch, make_step

# Rows of very different supervision: a mean of means would differ from the global mean.
SUPERVISED = (64, 5, 20, 9)


def _rank_main(rank: int, world_size: int, store: str, body: Callable[[int, dist.ProcessGroup], Any], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    torch.save(body(rank, dist.group.WORLD), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def run_ranks(world_size: int, folder: Path, body: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """Run `body(rank, world group)` in real processes; returns what each returned."""
    out = folder / f"{body.__name__}-{world_size}"
    out.mkdir()
    mp.spawn(_rank_main, (world_size, str(out / "store"), body, str(out)), nprocs=world_size)
    return [torch.load(out / f"{rank}.pt") for rank in range(world_size)]


def _whole_weights(step: DrafterStep) -> dict[str, torch.Tensor]:
    return {
        name: getattr(weight, "full_tensor", lambda weight=weight: weight)().clone()
        for name, weight in step.drafter.state_dict().items()
    }


def train_two_steps(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Four rows a step, split over the ranks; the weights and numbers after two steps."""
    step, world_size = make_step(group), group.size()
    mine = range(rank, len(SUPERVISED), world_size)
    metrics = []
    for number in range(2):
        for index in mine:
            batch = make_batch(number * 4 + index, SUPERVISED[index])
            step.accumulate(batch, last=index == mine[-1])
        metrics.append(step.update(number).read())
    return {"weights": _whole_weights(step), "metrics": metrics}


def test_ranks_and_accumulation_do_not_change_the_step(tmp_path: Path) -> None:
    (alone,), two = run_ranks(1, tmp_path, train_two_steps), run_ranks(2, tmp_path, train_two_steps)
    for rank in two:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=2e-6)
        for ours, theirs in zip(rank["metrics"], alone["metrics"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert ours["supervised_tokens"] == theirs["supervised_tokens"]


def train_whole_and_resume_sharded(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Two steps without FSDP2; then a sharded step takes over the first one's state and runs the second."""
    whole, sharded = make_step(group, sharded=False), make_step(group)
    for number in range(2):
        for index, supervised in enumerate(SUPERVISED):
            batch = make_batch(number * 4 + index, supervised)
            whole.accumulate(batch, last=index == 3)
            if number:
                sharded.accumulate(batch, last=index == 3)
        metrics = whole.update(number).read()
        if not number:
            state = sharded.state()
            for part, values in whole.state().items():
                for name, value in values.items():
                    getattr(state[part][name], "_local_tensor", state[part][name]).copy_(value)
            sharded.load_state(state)
    sharded.update(1)
    return {"weights": _whole_weights(whole), "resumed": _whole_weights(sharded), "metrics": metrics}


def test_one_rank_without_sharding_takes_the_same_steps_and_checkpoints(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, tmp_path, train_two_steps)
    (whole,) = run_ranks(1, tmp_path, train_whole_and_resume_sharded)
    assert whole["metrics"]["loss"] == pytest.approx(alone["metrics"][1]["loss"], rel=1e-5)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(whole["weights"][name], weight, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(whole["resumed"][name], weight, rtol=1e-4, atol=2e-6)


def skip_bad_step(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """A NaN in one rank's features, between two good steps."""
    step = make_step(group)
    step.accumulate(make_batch(rank), last=True)
    good = step.update(0).read()
    before = _whole_weights(step)
    batch = make_batch(10 + rank)
    if rank == 1:
        batch = replace(batch, features=batch.features.index_fill(0, torch.tensor([3]), math.nan))
    step.accumulate(batch, last=True)
    bad = step.update(1).read()
    after = _whole_weights(step)
    step.accumulate(make_batch(20 + rank), last=True)
    again = step.update(2).read()
    counts = {float(value) for name, value in step.state()["optimizer"].items() if name.endswith(".step")}
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return {
        "finite": [m["finite"] for m in (good, bad, again)],
        "own": bad["own_loss_finite"],
        "unchanged": unchanged,
        "counts": counts,
    }


def test_a_bad_number_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(2, tmp_path, skip_bad_step)):
        own = result.pop("own")
        assert own == (rank == 0), "the rank at fault knows that it is"
        assert result == {"finite": [True, False, True], "unchanged": True, "counts": {2.0}}


def gate_then_train(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Compile on a mesh of one rank, as the gate does, then train on the mesh of all with recompiles forbidden."""
    solo = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(solo, dist.ProcessGroup)
    if rank == 1:  # finds in the cache what rank 0 compiled
        dist.barrier(group)
    scratch = make_step(solo, compiled=True)
    scratch.accumulate(make_batch(0), last=False)
    scratch.accumulate(make_batch(0), last=True)
    scratch.update(0)
    if rank == 0:
        dist.barrier(group)
    compiled = sum(cache_counts())
    recompiles = watch_recompiles("error")
    step = make_step(group, compiled=True)
    losses = []
    for number in range(3):
        with recompiles.watch("the step"):
            step.accumulate(make_batch(100 + 2 * number + rank, supervised=20 + number), last=True)
            losses.append(step.update(number).read()["loss"])
    recompiled = sum(cache_counts()) - compiled + recompiles.total()
    return {"compiled": compiled, "recompiled": recompiled, "finite": all(map(math.isfinite, losses))}


@pytest.mark.slow  # whole runs show the same (faults/test_turns.py), by code that takes two minutes to compile
def test_code_compiled_on_one_rank_serves_the_mesh_of_all(tmp_path: Path) -> None:
    for result in run_ranks(2, tmp_path, gate_then_train):
        assert result["compiled"] > 0 and result["recompiled"] == 0 and result["finite"]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rate_warms_up_and_ends_where_it_should(schedule: str) -> None:
    config = TrainConfig.model_validate({"schedule": schedule, "lr": 1.0, "warmup_ratio": 0.1, "min_lr_ratio": 0.2})
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    assert rates[50] == pytest.approx(1.0) or schedule == "cosine"
    assert all(a >= b - 1e-12 for a, b in zip(rates[10:], rates[11:], strict=False))


def test_a_shift_moves_the_learning_rate_and_not_the_number_of_a_step() -> None:
    step = DrafterStep.__new__(DrafterStep)
    step._config, step._total, step._shift = TrainConfig(lr=1.0), 100, -30
    step._sums, step._groups, step._scale = torch.zeros(8), [], 1.0
    step._optimizer = cast(Any, SimpleNamespace(step=lambda lr, weight, clip_norm: torch.tensor(0.0)))
    step.drafter = cast(Any, SimpleNamespace(config=SimpleNamespace(block_size=2)))
    result = step.update(80)
    assert result.step == 80 and result.lr == learning_rate(50, 100, step._config)
