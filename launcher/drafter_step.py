"""One optimizer step of the drafter: accumulate micro-batches, then update. The gate, training and the bench run this.

Several ranks: FSDP2 holds float32 master shards and gathers them in the compute precision. One rank: `MasterWeights`
holds the masters, without FSDP2's copies and casts. The loss is a sum; the gradient is divided
by the sum of weights over all ranks and micro-batches inside the fused AdamW kernel, together with clipping, so that
normalisation is global (SpecForge #731) and costs no pass over the gradients. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from launcher.config_sections import TrainConfig
from launcher.step_memory import StateBytes
from launcher.step_optimizers import DTYPES, ShardedAdamW, WholeAdamW
from models.dflash import DFlashDrafter
from models.draft_step import DraftForward, LossSums, RowBatch


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of 0-based `step`: linear warm-up, then cosine, WSD (decay over the last 20 %) or flat."""
    warmup = max(1, round(config.warmup_ratio * total))
    floor = config.min_lr_ratio
    if step < warmup:
        return config.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    if config.schedule == "cosine":
        return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))
    if config.schedule == "wsd":
        return config.lr * (1 - (1 - floor) * max(0.0, (share - 0.8) / 0.2))
    return config.lr


def shard_drafter(drafter: DFlashDrafter, mesh: DeviceMesh, precision: str) -> None:
    """Wrap layer by layer, in place. Gathered layers stay whole until the update: a drafter is small."""
    # Inputs are not cast: rotary tables stay float32 (a bf16 phase drifts with position).
    policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32, cast_forward_inputs=False)
    for module in [*drafter.layers, drafter]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        assert isinstance(module, FSDPModule)
        # Gradients are summed; the update divides by the weight. Gloo knows no other reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, summed over ranks and micro-batches, still on the device until `read()`.

    values: float32 [6 + 2B]: loss, weight, accepted, blocks, this rank's own loss, gradient norm, counts per offset.
    """

    step: int
    lr: float
    values: Tensor
    block_size: int
    copied: torch.cuda.Event | None

    def read(self) -> dict[str, Any]:
        """Metrics as plain numbers; waits for this step's copy only.

        accuracy is per offset 1..B-1; acceptance_length is the mean of leading matches + 1 over blocks.
        """
        if self.copied is not None:
            self.copied.synchronize()
        loss, weight, accepted, blocks, own_loss, norm, *rest = self.values.tolist()
        correct, count = rest[: self.block_size], rest[self.block_size :]
        return {
            "loss": loss / max(weight, 1e-9),
            "acceptance_length": accepted / max(blocks, 1.0),
            "accuracy": [round(c / max(n, 1.0), 5) for c, n in zip(correct[1:], count[1:], strict=True)],
            "lr": self.lr,
            "grad_norm": norm,
            "blocks": int(blocks),
            "supervised_tokens": int(sum(count)),
            "finite": math.isfinite(norm),
            "own_loss_finite": math.isfinite(own_loss),
        }


class DrafterStep:
    """The drafter of one rank with its optimizer.

    Args:
        drafter: not yet sharded; its layers are compiled already.
        make_forward: builds the forward of one micro-batch over the (sharded) drafter.
        mesh: the ranks that train together; with two dimensions the nodes, each of which holds all weights in
            shards, and the ranks of a node.
        total_steps: length of the learning rate schedule.
        sharded: FSDP2; False only where the run has one drafter, whose step it makes shorter by a tenth.
        shift: added to a step's number to find its place in that schedule (schedule.rate_span).
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        make_forward: Callable[[DFlashDrafter], DraftForward],
        mesh: DeviceMesh,
        config: TrainConfig,
        total_steps: int,
        sharded: bool = True,
        shift: int = 0,
    ) -> None:
        self.drafter, self._config, self._total, self._shift = drafter, config, total_steps, shift
        self.precision = config.precision
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        if not sharded and mesh.size() > 1:
            raise ValueError(f"an unsharded drafter trains on one rank, not {mesh.size()}")
        if sharded:
            shard_drafter(drafter, mesh, config.precision)
        self.forward = make_forward(drafter)
        self._optimizer = ShardedAdamW(drafter, config) if sharded else WholeAdamW(drafter, config)
        self._sums: Tensor | None = None
        # Keeps summed gradients near the size of averaged ones, whatever the number of blocks.
        self._scale = 1.0 / (config.anchors * (drafter.config.block_size - 1))

    def accumulate(self, batch: RowBatch, last: bool) -> None:
        """Forward and backward of one micro-batch; gradients are reduced over the ranks with the `last` one."""
        self._optimizer.before_micro_batch(last)
        sums = self.forward(batch)
        (sums.loss * self._scale).backward()
        self._optimizer.after_micro_batch(last)
        packed = pack_sums(sums)
        self._sums = packed if self._sums is None else self._sums + packed

    def update(self, step: int) -> StepResult:
        """Divide, clip and apply the accumulated gradient. A non-finite one changes nothing on any rank."""
        assert self._sums is not None, "update without a micro-batch"
        sums, self._sums = self._sums, None
        own_loss = sums[:1].clone()
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        lr = learning_rate(step + self._shift, self._total, self._config)
        norm = self._optimizer.step(lr, weight=sums[1] * self._scale, clip_norm=self._config.clip_norm)
        values = torch.cat([sums[:4], own_loss, norm[None], sums[4:]])
        block_size = self.drafter.config.block_size
        if values.device.type != "cuda":
            return StepResult(step, lr, values, block_size, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepResult(step, lr, host, block_size, copied)

    def state_bytes(self, accumulating: bool) -> StateBytes:
        """Bytes that a step adds for weights and gradients, beside the activations.

        Args:
            accumulating: a step has several micro-batches.
        """
        count = sum(param.numel() for param in self.drafter.parameters())
        held, gradients = self._optimizer.bytes_per_parameter(DTYPES[self.precision].itemsize, accumulating)
        return StateBytes(count * held, count * gradients)

    def state(self) -> dict[str, Any]:
        """Master weights and moments as tensors that a distributed checkpoint can reshard."""
        return {"model": self._optimizer.masters(), "optimizer": self._optimizer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint loaded into `state()`'s tensors."""
        self._optimizer.load(state["model"], state["optimizer"])


def pack_sums(sums: LossSums) -> Tensor:
    """float32 [4 + 2B]: loss, weight, accepted, blocks, correct per offset, count per offset."""
    scalars = [sums.loss.detach(), sums.weight, sums.accepted, sums.blocks]
    return torch.cat(
        [torch.stack([scalar.float() for scalar in scalars]), sums.correct_B.float(), sums.count_B.float()]
    )
