"""Where training begins: the checkpoint to go on from, and the schedule that follows from it and from the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.checkpoint import Checkpointer
from launcher.checkpoint_folder import find_checkpoint, read_extra
from launcher.checkpoint_io import split_state
from launcher.config_changes import check_resumed_config
from launcher.drafter_step import DrafterStep
from launcher.rank import Rank
from launcher.same_rows import count_rows
from launcher.schedule import Schedule, rate_span, total_steps


@dataclass(frozen=True)
class Beginning:
    """The checkpoint to go on from, None for a new run, with the steps and micro-batches that are done by then."""

    path: str | None = None
    step: int = 0
    micro_batch: int = 0


class NoCheckpoints:
    """The checkpoints of every node but the first, whose drafters hold all that is saved."""

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any], required: bool = False) -> None:
        """The first node saves."""

    def poll(self) -> None:
        """Nothing is being written here."""

    def rate(self, step: int, score: float) -> None:
        """Nothing is kept here."""


def open_checkpoints(rank: Rank) -> Checkpointer | NoCheckpoints:
    """What saves this drafter's part of the state."""
    if rank.role.node:
        return NoCheckpoints()
    runtime = rank.config.runtime
    return Checkpointer(
        runtime.run_dir,
        rank.config.checkpoint,
        rank.groups.saves,
        rank.lifecycle.wait_until,
        runtime.save_timeout,
    )


def resume(
    rank: Rank, build: Callable[[int, int], DrafterStep]
) -> tuple[DrafterStep, Checkpointer | NoCheckpoints, Schedule]:
    """Build the step and load the newest usable checkpoint into it, if any; then the targets learn the schedule.

    Args:
        build: makes the step from the shift and the total of `rate_span`.
    """
    beginning = agree_beginning(rank)
    schedule = plan(rank, beginning)
    step, checkpoints = build(*rate_span(rank.config.train, schedule)), open_checkpoints(rank)
    if beginning.path is not None:
        load(rank, Path(beginning.path), step, checkpoints)
        rank.lifecycle.step = beginning.step
        rank.journal.announce(f"resumed from {beginning.path} at step {beginning.step}")
    if rank.leads_drafters:
        numbers = {name: getattr(schedule, name) for name in ("last_step", "start_step", "start_micro_batch")}
        rank.control.set("schedule", numbers)
    return step, checkpoints, schedule


def plan(rank: Rank, beginning: Beginning) -> Schedule:
    """The steps from a beginning to the end of the run, once the targets know how many rows there are."""
    rows, train, start, position = count_rows(rank), rank.config.train, beginning.step, beginning.micro_batch
    per_step = train.accumulation * rank.topology.drafter_count
    last_step = total_steps(train, rows, per_step, start, position)
    return Schedule(rank.topology, train.accumulation, last_step, start, position)


def load(rank: Rank, path: Path, step: DrafterStep, checkpoints: Checkpointer | NoCheckpoints) -> None:
    """Take over the weights and moments of a checkpoint; the first node reads it, the others copy from there."""
    state = step.state()
    if isinstance(checkpoints, Checkpointer):
        checkpoints.load(path, state)
    if rank.groups.copies is not None:
        copy_from_first_node(state, rank.groups.copies, rank.torch_device)
    step.load_state(state)


def copy_from_first_node(state: dict[str, Any], copies: dist.ProcessGroup, device: torch.device) -> None:
    """Fill the tensors of a state from the rank that holds the same shards on the first node."""
    first = dist.get_global_rank(copies, 0)
    for tensor in split_state(state)[0].values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        carried = local.detach().to(device)  # step counts lie on the host, where NCCL does not reach
        dist.broadcast(carried, first, group=copies)
        local.detach().copy_(carried)


def agree_beginning(rank: Rank) -> Beginning:
    """Where the run begins; one rank chooses, because choosing also tidies the folder."""
    if rank.leads_drafters:
        rank.control.set("beginning", asdict(_choose_beginning(rank)))
    what = "the first drafter to choose a checkpoint"
    return Beginning(**rank.wait_for("beginning", what, rank.config.runtime.load_timeout))


def _choose_beginning(rank: Rank) -> Beginning:
    found = find_checkpoint(rank.config.runtime.run_dir, rank.config.runtime.resume)
    extra = read_extra(found.path) if found.path else None
    changes = check_resumed_config(extra["config"], rank.config) if extra else []
    for notice in [*found.notices, *(f"changed since the checkpoint: {change}" for change in changes)]:
        rank.journal.announce(notice)
    return Beginning(str(found.path), extra["step"], extra["micro_batches"]) if extra else Beginning()
