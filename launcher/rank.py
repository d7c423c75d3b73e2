"""What every rank holds while it runs, and the agreements that all roles share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from launcher.config import Config
from launcher.control import Control
from launcher.deadlines import lock_patience
from launcher.errors import RetryableError, UserError
from launcher.groups import Groups
from launcher.journal import Journal
from launcher.lifecycle import Lifecycle
from launcher.memory import MemoryWatcher
from launcher.row_layout import RowLayout
from launcher.runtime import Device
from launcher.schedule import Schedule
from launcher.step_optimizers import DTYPES
from launcher.topology import Role, Topology
from models.dflash import DFlashConfig, default_layer_ids
from models.draft_step import RowBatch
from models.target_ends import default_mask_token_id
from models.target_files import load_tokenizer, resolve_target
from models.target_weights import load_config

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """One rank of a run: who it is, and its links to the others."""

    config: Config
    role: Role
    topology: Topology
    device: Device
    attempt_dir: Path
    control: Control
    lifecycle: Lifecycle
    groups: Groups
    journal: Journal
    memory: MemoryWatcher
    cache_folder: Path | None
    """The compile cache, where measured rates are kept too; None if it is private."""
    split_is_guess: bool
    """Whether the split was chosen before anything was measured."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.torch_name)

    @property
    def leads_node(self) -> bool:
        """Whether this rank does what one rank per node does, such as building the rows."""
        return self.role.local_rank == 0

    @property
    def leads_drafters(self) -> bool:
        """Whether this rank writes metrics, exports and the compile report."""
        return self.role.name == "drafter" and self.role.index == 0

    @property
    def gate_ranks(self) -> tuple[int, ...]:
        """The ranks that take turns at the gate: all drafters, and the first of each target that is compiled."""
        nodes = self.topology.leaders_by_node("target") if self.config.target.compile else ()
        return (*(rank for ranks in nodes for rank in ranks), *self.topology.drafter_ranks)

    def wait_for(self, key: str, what: str, timeout: float) -> Any:
        """The value of a control key that another rank sets."""
        self.lifecycle.wait_until(lambda: self.control.has(key), what, timeout, 0.02)
        return self.control.get(key)


@dataclass(frozen=True)
class Models:
    """The target's files and the shapes that follow from them."""

    folder: Path
    tokenizer: Any
    drafter: DFlashConfig
    layout: RowLayout


def user_input(make: Callable[[], T]) -> T:
    """Run `make`; a ValueError of the models package is the user's to mend, a wait that ran out may be retried."""
    try:
        return make()
    except ValueError as error:
        raise UserError(*str(error).split(" -> ", 1)) from error
    except TimeoutError as error:
        raise RetryableError(*str(error).split(" -> ", 1)) from error


def describe_models(config: Config) -> Models:
    """Find the target and derive the drafter's shape and the row's layout, without loading weights.

    Raises:
        UserError: no such target, or options that do not fit it.
        RetryableError: another start has been converting the target for too long.
    """
    target, drafter, patience = config.target, config.drafter, lock_patience(config.runtime)
    folder = user_input(lambda: resolve_target(target.model, target.revision, target.trust_remote_code, patience))
    tokenizer = user_input(lambda: load_tokenizer(folder, target.trust_remote_code))
    hf_config = user_input(lambda: load_config(folder, target.trust_remote_code))
    mask = drafter.mask_token_id
    if mask is None:
        mask = user_input(lambda: default_mask_token_id(hf_config, tokenizer))
    depth = hf_config.get_text_config(decoder=True).num_hidden_layers
    shape = user_input(
        lambda: DFlashConfig.from_target(
            hf_config,
            layers=drafter.layers,
            block_size=drafter.block_size,
            mask_token_id=mask,
            layer_ids=target.layer_ids or default_layer_ids(depth, drafter.layers),
        )
    )
    width = len(shape.target_layer_ids) * shape.hidden_size
    layout = RowLayout(config.data.row_length, width, getattr(torch, target.dtype))
    return Models(folder, tokenizer, shape, layout)


def compute_dtype(config: Config) -> torch.dtype:
    return DTYPES[config.train.precision]


def to_compute(batch: RowBatch, dtype: torch.dtype) -> RowBatch:
    """The batch with its features in the compute dtype (no copy where they are already)."""
    return replace(batch, features=batch.features.to(dtype))


def agree_schedule(rank: Rank) -> Schedule:
    """The schedule that the first drafter published once it knew rows and checkpoint."""
    start = rank.wait_for("schedule", "the first drafter to publish the schedule", rank.config.runtime.load_timeout)
    return Schedule(rank.topology, rank.config.train.accumulation, **start)
