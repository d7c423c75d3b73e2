"""A small sharded model that trains, saves and loads on the gloo ranks of tests/rank_pool.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launcher.checkpoint import Checkpointer
from launcher.checkpoint_io import split_state
from launcher.config import CheckpointConfig


def wait(ready: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Trainer:
    """A small sharded model and its optimizer. 7 rows do not divide by 2 or 3."""

    def __init__(self, width: int = 7) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.95))

    def train(self, steps: int) -> None:
        for step in range(steps):
            # The same rows on every rank: the result does not depend on how many there are.
            rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def numbers(self) -> list[float]:
        tensors, _ = split_state(self.state())
        return [
            float(tensor.full_tensor().double().sum() if hasattr(tensor, "full_tensor") else tensor.double().sum())
            for _, tensor in sorted(tensors.items())
        ]


def make_checkpointer(run_dir: Path, **options: Any) -> Checkpointer:
    config = CheckpointConfig(**{"asynchronous": False} | options)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Checkpointer(run_dir, config, group, wait, 30.0)


def save(run_dir: Path, *steps: int, train: int = 2, width: int = 7, **options: Any) -> list[float]:
    trainer, checkpointer = Trainer(width), make_checkpointer(run_dir, **options)
    for step in steps:
        trainer.train(train)
        checkpointer.save(step, trainer.state(), {"micro_batch": step * 10}, required=True)
    return trainer.numbers()


def load(run_dir: Path, path: Path, more_steps: int = 0) -> tuple[list[float], dict[str, Any], Any]:
    trainer, checkpointer = Trainer(), make_checkpointer(run_dir)
    state = trainer.state()
    extra = checkpointer.load(path, state)
    trainer.restore(state)
    trainer.train(more_steps)
    return trainer.numbers(), extra, trainer.optimizer.param_groups[0]["betas"]
