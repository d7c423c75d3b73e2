"""What a rank does before its turn so that the turn holds nothing but compiling.

A first compile with a warm cache spends most of its time on imports; GPU libraries start with their first call. None of
that needs a turn.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

# Imported by torch with the first compile, and these import the rest.
COMPILER = (
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_aot",
    "torch._export.db.logging",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.async_compile",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.hooks",
    "torch._inductor.kernel.flex.flex_attention",
    "torch._inductor.runtime.static_cuda_launcher",
    "torch._inductor.runtime.static_triton_launcher",
    "torch._inductor.runtime.triton_heuristics",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.utils.cpp_extension",
)
GPU = (
    "triton",
    "triton.compiler",
    "triton.language",
    "models.float8_kernels",
    "models.loss_kernels",
    "models.master_kernels",
)


def warm_up(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
    """Import the compiler and start the device's libraries: context, cuBLAS, NCCL over `group`, autograd's threads."""
    import_compiler(device)
    square = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
    (square @ square).sum().backward()
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()


def import_compiler(device: torch.device) -> None:
    """Import what the first compile for `device` would, unless compiling is turned off."""
    # torch.compile looks at both; this option follows TORCH_COMPILE_DISABLE alone.
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return
    for name in COMPILER + GPU if device.type == "cuda" else COMPILER:
        # Some exist in some versions of torch only.
        if find_spec(name) is not None:
            import_module(name)
    from torch._inductor.codegen.common import init_backend_registration

    # Both import every backend, as the first compile would.
    torch._dynamo.list_backends()
    init_backend_registration()
