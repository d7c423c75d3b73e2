"""Load this rank's part of a target, once it is known to fit."""

from __future__ import annotations

import torch

from launcher.errors import UserError
from launcher.rank import Models, Rank, user_input
from launcher.target_team import TargetTeam
from launcher.warm_up import compiled_or_not
from models.target import TappedTarget, load_tapped_target
from models.target_bytes import TargetBytes
from models.target_memory import count_target, ranks_needed
from models.target_weights import load_config


def load_target(rank: Rank, models: Models, team: TargetTeam) -> TappedTarget:
    """The tapped layers with the attention that was chosen, checked on a small row.

    Raises:
        UserError: a target that does not fit, cannot be shared or cannot run packed rows; before weights are read
            where that shows it.
    """
    chosen = rank.config.target
    how = "not compiled"
    if chosen.compile:
        how = compiled_or_not("target.compile=true", "target.compile=false")
    if rank.torch_device.type == "cuda":
        check_memory(rank, models)
    target = user_input(lambda: _load(rank, models, team))
    rank.journal.announce(
        f"target attention: {chosen.attention} on {rank.torch_device.type}, {how}",
        every_rank=rank.role.rank == rank.topology.target_ranks[0],
    )
    return target


def _load(rank: Rank, models: Models, team: TargetTeam) -> TappedTarget:
    target = load_tapped_target(
        models.folder,
        models.drafter.target_layer_ids,
        models.layout.dtype,
        rank.torch_device,
        rank.config.target.trust_remote_code,
        team.shard,
        lambda: team.meet("load their weights", rank.config.runtime.load_timeout),
    )
    if rank.config.target.attention == "flex":
        target.use_packed_attention()
    return target


def check_memory(rank: Rank, models: Models) -> None:
    """Refuse a target whose ranks are too few for their GPUs.

    Raises:
        UserError: names the number of ranks that would do.
    """
    config = user_input(lambda: load_config(models.folder, rank.config.target.trust_remote_code))
    layout, size = models.layout, rank.topology.split.target_tp
    need = count_target(
        config,
        models.drafter.target_layer_ids,
        layout.row_length,
        layout.nbytes,
        rank.config.topology.rows_in_flight,
        layout.dtype,
        evaluated=rank.config.eval.prompts > 0,
    )
    memory = torch.cuda.mem_get_info()[1]
    refuse_too_few(need, size, memory, ranks_needed(config, need, memory))


def refuse_too_few(need: TargetBytes, size: int, memory: int, fewest: int | None) -> None:
    """Raise if a rank of `size` needs more than `memory` bytes; `fewest` ranks would fit, None where no number does."""
    if need.of_rank(size) <= memory:
        return
    raise UserError(
        f"topology.target_tp={size}: a rank of the target needs {need.of_rank(size) / 1e9:.0f} GB, its GPU has"
        f" {memory / 1e9:.0f} GB",
        "choose a smaller target, shorter rows, or eval.prompts=0" if fewest is None else f"set it to {fewest}",
    )
