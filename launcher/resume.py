"""Where training begins: the number of steps, the checkpoint to go on from, and the schedule that follows from both."""

from __future__ import annotations

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
from launcher.schedule import Schedule, total_steps


def count_steps(rank: Rank) -> int:
    """Optimizer steps of the run, once the targets know how many rows there are."""
    rows = rank.wait_for("rows/0", "the targets to pack the rows", rank.config.runtime.load_timeout)
    return total_steps(rank.config.train, rows, rank.topology.drafter_count)


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


def resume(rank: Rank, step: DrafterStep, checkpoints: Checkpointer | NoCheckpoints, steps: int) -> Schedule:
    """Load the newest usable checkpoint, if any; the first drafter tells all ranks where the run starts."""
    start, position = 0, 0
    path = _choose_checkpoint(rank)
    if path is not None:
        state = step.state()
        if isinstance(checkpoints, Checkpointer):
            extra = checkpoints.load(path, state)
            rank.control.set("resumed", [extra["step"], extra["micro_batches"]])
        if rank.groups.copies is not None:
            copy_from_first_node(state, rank.groups.copies, rank.torch_device)
        step.load_state(state)
        what = "the first node to load the checkpoint"
        start, position = rank.wait_for("resumed", what, rank.config.runtime.load_timeout)
        rank.lifecycle.step = start
        rank.journal.announce(f"resumed from {path} at step {start}")
    schedule = {"last_step": max(steps, start), "start_step": start, "start_micro_batch": position}
    if rank.leads_drafters:
        rank.control.set("schedule", schedule)
    return Schedule(rank.topology, rank.config.train.accumulation, **schedule)


def copy_from_first_node(state: dict[str, Any], copies: dist.ProcessGroup, device: torch.device) -> None:
    """Fill the tensors of a state from the rank that holds the same shards on the first node."""
    first = dist.get_global_rank(copies, 0)
    for tensor in split_state(state)[0].values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        carried = local.detach().to(device)  # step counts lie on the host, where NCCL does not reach
        dist.broadcast(carried, first, group=copies)
        local.detach().copy_(carried)


def _choose_checkpoint(rank: Rank) -> Path | None:
    """The checkpoint to resume from; one rank chooses, because choosing also tidies the folder."""
    runtime = rank.config.runtime
    if rank.leads_drafters:
        found = find_checkpoint(runtime.run_dir, runtime.resume)
        changes = check_resumed_config(read_extra(found.path)["config"], rank.config) if found.path else []
        for notice in [*found.notices, *(f"changed since the checkpoint: {change}" for change in changes)]:
            rank.journal.announce(notice)
        rank.control.set("resume", {"path": None if found.path is None else str(found.path)})
    chosen = rank.wait_for("resume", "the first drafter to choose a checkpoint", runtime.load_timeout)["path"]
    return None if chosen is None else Path(chosen)
