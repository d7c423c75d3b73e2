"""One rank's weights without sharding: compute-precision copies in the module, float32 masters and AdamW beside it.

FSDP2 on one rank still casts, copies and "reduces" every weight and gradient. Here the backward's gradients are read
where autograd left them, and one kernel does the whole update: it reads a gradient in compute precision, updates
float32 master and moments, and writes the working copy. State dict keys are those of the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-8


class MasterWeights:
    """AdamW (decoupled decay) over the float32 masters of a module's parameters. Nothing here waits for the device."""

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype, *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Take the module's float32 weights as masters and put working copies in their place.

        Args:
            module: its parameters are all trained; their storage is replaced in place.
            compute_dtype: precision of forward and backward.
            betas: decay of the moments.
            weight_decay: decoupled decay.
        """
        self._params = dict(module.named_parameters())
        self._betas, self._decay = betas, weight_decay
        self.masters = {name: param.detach().float().clone() for name, param in self._params.items()}
        self._mean = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._square = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        device = next(iter(self.masters.values())).device
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        self._folded: dict[str, Tensor] = {}
        for name, param in self._params.items():
            param.data = self.masters[name].to(compute_dtype)

    def fold(self) -> None:
        """Add the gradients of a micro-batch that is not the step's last one to a float32 sum."""
        for name, param in self._params.items():
            grad = self._grad(name)
            if name in self._folded:
                self._folded[name].add_(grad)
            else:
                self._folded[name] = grad.float()
            param.grad = None

    @torch.no_grad()
    def step(self, lr: float, weight: Tensor, clip_norm: float) -> Tensor:
        """Apply gradient / weight, clipped to `clip_norm`; a gradient that is not finite changes nothing.

        Args:
            lr: learning rate.
            weight: scalar on the device, what the summed gradient is divided by.
            clip_norm: largest norm of the divided gradient.

        Returns:
            The norm of the divided gradient before clipping, float32 scalar on the device.
        """
        if self._folded:
            self.fold()
        grads = self._folded or {name: self._grad(name) for name in self._params}
        parts = torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32)
        norm = torch.stack(parts).square().sum().sqrt() / weight
        skip = (~torch.isfinite(norm)).float()
        divisor = torch.nan_to_num(weight * (norm / clip_norm).clamp(min=1.0), nan=1.0, posinf=1.0).float()
        self._count += 1 - skip
        update = _update_kernel(self._count.device.type)
        for name, param in self._params.items():
            state = (self.masters[name], self._mean[name], self._square[name])
            update(param, grads[name], state, self._count, divisor, skip, lr, self._betas, self._decay)
            param.grad = None
        self._folded = {}
        return norm

    def _grad(self, name: str) -> Tensor:
        grad = self._params[name].grad
        assert grad is not None, f"{name} got no gradient"
        return grad

    def state(self) -> dict[str, Any]:
        """Step count and moments by parameter name: the moments themselves, the count as a copy on the host."""
        state: dict[str, Any] = {}
        for name in self._params:
            state[f"{name}.step"] = self._count.cpu()
            state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"] = self._mean[name], self._square[name]
        return state

    @torch.no_grad()
    def load(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Take over masters and moments, as `masters` and `state()` gave them, and refresh the copies."""
        for name, param in self._params.items():
            self.masters[name].copy_(model[name])
            self._mean[name].copy_(optimizer[f"{name}.exp_avg"])
            self._square[name].copy_(optimizer[f"{name}.exp_avg_sq"])
            self._count.copy_(optimizer[f"{name}.step"])
            param.copy_(self.masters[name])


def _update_kernel(device_type: str) -> Any:
    if device_type == "cuda":
        from models.master_kernels import adamw_  # Triton comes with CUDA builds of torch only

        return adamw_
    return adamw_reference_


def adamw_reference_(
    working: Tensor,
    grad: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    count: Tensor,
    divisor: Tensor,
    skip: Tensor,
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """One parameter's AdamW step in place.

    Args:
        working: the copy in compute precision, rewritten.
        grad: its gradient, in any precision.
        state: float32 master, mean and mean square.
        count: float32 scalar, the number of this step, from 1.
        divisor: float32 scalar that the gradient is divided by.
        skip: float32 scalar; 1 leaves everything as it was.
        lr, betas, decay: of AdamW.
    """
    master, mean, square = state
    if skip.item():
        return
    grad = grad.float() / divisor
    master.mul_(1 - lr * decay)
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    corrected = (square / (1 - betas[1] ** count)).sqrt_().add_(EPS)
    master.sub_(mean / corrected * (lr / (1 - betas[0] ** count)))
    working.copy_(master)
