"""Where training begins: the number of steps, the checkpoint to go on from, and the schedule that follows from both."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint import Checkpointer
from launcher.checkpoint_folder import find_checkpoint, read_extra
from launcher.config_changes import check_resumed_config
from launcher.drafter_step import DrafterStep
from launcher.rank import Rank
from launcher.schedule import Schedule, total_steps


def count_steps(rank: Rank) -> int:
    """Optimizer steps of the run, once the targets know how many rows there are."""
    rows = rank.wait_for("rows/0", "the targets to pack the rows", rank.config.runtime.load_timeout)
    return total_steps(rank.config.train, rows, rank.topology.drafter_count)


def resume(rank: Rank, step: DrafterStep, checkpointer: Checkpointer, steps: int) -> Schedule:
    """Load the newest usable checkpoint, if any; the first drafter tells all ranks where the run starts."""
    start, position = 0, 0
    path = _choose_checkpoint(rank)
    if path is not None:
        state = step.state()
        extra = checkpointer.load(path, state)
        step.load_state(state)
        start, position = extra["step"], extra["micro_batches"]
        rank.lifecycle.step = start
        rank.journal.announce(f"resumed from {path} at step {start}")
    schedule = {"last_step": max(steps, start), "start_step": start, "start_micro_batch": position}
    if rank.leads_drafters:
        rank.control.set("schedule", schedule)
    return Schedule(rank.topology, rank.config.train.accumulation, **schedule)


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
