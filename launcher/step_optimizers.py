"""The optimizers of a drafter's step: float32 masters and fused AdamW, for one rank and for shards over several.

Both divide the summed gradient by the sum of weights and clip it inside the update kernel, know the same names in a
checkpoint, and never wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from launcher.config_sections import TrainConfig
from models.master_weights import MasterWeights

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "float8": torch.bfloat16}


class WholeAdamW:
    """One rank: the drafter's parameters are working copies, masters and moments stand beside them."""

    def __init__(self, drafter: nn.Module, config: TrainConfig) -> None:
        dtype = DTYPES[config.precision]
        self._weights = MasterWeights(drafter, dtype, betas=config.betas, weight_decay=config.weight_decay)

    def before_micro_batch(self, last: bool) -> None:
        """Nothing to prepare: no other rank takes part."""

    def after_micro_batch(self, last: bool) -> None:
        """Keep the sum of several micro-batches in float32."""
        if not last:
            self._weights.fold()

    def bytes_per_parameter(self, compute_bytes: int, accumulating: bool) -> tuple[int, int]:
        """Held during the step: float32 sums of earlier micro-batches; growing in backward: gradients."""
        return 4 * accumulating, compute_bytes

    def step(self, lr: float, weight: Tensor, clip_norm: float) -> Tensor:
        """As `ShardedAdamW.step`."""
        return self._weights.step(lr, weight, clip_norm)

    def masters(self) -> dict[str, Tensor]:
        return self._weights.masters

    def state(self) -> dict[str, Any]:
        """The same names as `ShardedAdamW.state`, so that a checkpoint serves both."""
        return self._weights.state()

    def load(self, model: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._weights.load(model, state)


class _ScaledAdamW(torch.optim.AdamW):
    """AdamW with the two tensors that its fused kernel reads, as torch's GradScaler sets them."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class ShardedAdamW:
    """Fused AdamW over this rank's shards as plain tensors.

    The fused kernel divides by `grad_scale` and skips the update where `found_inf` is set, so that normalisation,
    clipping and the vote against bad numbers need no extra pass and no wait for the device.
    """

    def __init__(self, drafter: nn.Module, config: TrainConfig) -> None:
        self._drafter = drafter
        self._params: dict[str, nn.Parameter] = dict(drafter.named_parameters())
        self._local = {name: nn.Parameter(_local(param)) for name, param in self._params.items()}
        self._adamw = _ScaledAdamW(
            list(self._local.values()), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._group = _shard_group(next(iter(self._params.values())))

    def before_micro_batch(self, last: bool) -> None:
        """Gradients are reduced over the ranks with the last micro-batch only."""
        assert isinstance(self._drafter, FSDPModule)
        self._drafter.set_requires_gradient_sync(last)

    def after_micro_batch(self, last: bool) -> None:
        """FSDP2 adds micro-batches up by itself."""

    def bytes_per_parameter(self, compute_bytes: int, accumulating: bool) -> tuple[int, int]:
        """Held during the step: gathered weights, sums of earlier micro-batches; growing in backward: their sum."""
        return compute_bytes + 4 * accumulating, 4

    def masters(self) -> dict[str, Tensor]:
        return self._drafter.state_dict()

    def step(self, lr: float, weight: Tensor, clip_norm: float) -> Tensor:
        """Apply gradient / weight, clipped to `clip_norm`; returns the norm before clipping, a scalar on the device."""
        grads = []
        for name, param in self._params.items():
            assert param.grad is not None, f"{name} got no gradient"
            grad = _local(param.grad)
            self._local[name].grad = grad
            grads.append(grad)
        norm = self._total_norm(grads) / weight
        found_inf = (~torch.isfinite(norm)).float()
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.found_inf = found_inf
        self._adamw.grad_scale = torch.nan_to_num(weight * (norm / clip_norm).clamp(min=1.0), nan=1.0, posinf=1.0)
        self._adamw.step()
        for name, param in self._params.items():
            param.grad = self._local[name].grad = None
        return norm

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def state(self) -> dict[str, Any]:
        """Moments by parameter name, sharded as the parameters are; the step counts as plain tensors."""
        state: dict[str, Any] = {}
        for name, param in self._params.items():
            own = self._adamw.state.get(self._local[name]) or self._empty_state(name)
            state[f"{name}.step"] = own["step"].cpu()
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{name}.{moment}"] = _like(own[moment], param)
        return state

    def load(self, model: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._drafter.load_state_dict(model)
        for name in self._params:
            own = self._adamw.state.get(self._local[name]) or self._empty_state(name)
            own["step"].copy_(state[f"{name}.step"])
            for moment in ("exp_avg", "exp_avg_sq"):
                own[moment].copy_(_local(state[f"{name}.{moment}"]))

    def _empty_state(self, name: str) -> dict[str, Tensor]:
        local = self._local[name]
        self._adamw.state[local] = {
            "step": torch.zeros((), device=local.device),
            "exp_avg": torch.zeros_like(local),
            "exp_avg_sq": torch.zeros_like(local),
        }
        return self._adamw.state[local]


def _local(tensor: Tensor) -> Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _like(local: Tensor, param: nn.Parameter) -> Tensor:
    """`local` as the shard of a tensor that is laid out like `param`."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _shard_group(param: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that hold one copy of a parameter together: the last dimension of the mesh."""
    return param.device_mesh.get_group(param.device_mesh.ndim - 1) if isinstance(param, DTensor) else None
