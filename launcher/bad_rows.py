"""Which rank and which rows gave a loss that is not finite, agreed by all drafters. Rare, so it may take seconds."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from launcher.data import prepare_rows, row_order
from launcher.rank import Rank, describe_models
from models.target_files import user_cache

SHOWN_CHATS = 4


@dataclass(frozen=True)
class BadLoss:
    """A drafter whose own loss was not finite, and the rows it came from."""

    rank: int
    drafter: int
    rows: str

    def __str__(self) -> str:
        return f"the loss of rank {self.rank} drafter {self.drafter} on {self.rows}"


def find_bad_losses(rank: Rank, finite: bool, micro_batches: list[int]) -> list[BadLoss]:
    """Every drafter tells the others of its own loss in a step; called by all of them, at the same step.

    Args:
        finite: whether this rank's loss was.
        micro_batches: what this rank trained on in that step.

    Returns:
        The drafters with a bad loss; none where only the gradient was bad.
    """
    own = None if finite else BadLoss(rank.role.rank, rank.role.index, _describe(rank, micro_batches))
    told: list[BadLoss | None] = [None] * dist.get_world_size(rank.groups.votes)
    dist.all_gather_object(told, own, group=rank.groups.votes)
    return [bad for bad in told if bad is not None]


def _describe(rank: Rank, micro_batches: list[int]) -> str:
    """The rows of some micro-batches, with the chats in them as `file:line`."""
    config = rank.config
    packed = prepare_rows(config.data, describe_models(config).tokenizer, user_cache())
    rows = [row_order(len(packed), config.train.seed, index) for index in micro_batches]
    chats = [where for row in dict.fromkeys(rows) for where in packed.chats(row)]
    more = f" and {len(chats) - SHOWN_CHATS} more" if len(chats) > SHOWN_CHATS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} ({', '.join(chats[:SHOWN_CHATS])}{more})"
