"""What a rank does before its turn so that the turn holds nothing but compiling.

A first compile with a warm cache spends most of its time on imports and on what torch computes once in a process; GPU
libraries start with their first call. None of that needs a turn.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.distributed as dist

from launcher.errors import UserError
from launcher.row_layout import RowLayout
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds
from models.masks import mask_from, tile_tables
from models.shapes import SHAPES

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
# Tokens of the rehearsal's row.
ROW_LENGTH = 32
OFF = "TORCHDYNAMO_DISABLE"


def warm_up(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None, rehearse: bool) -> None:
    """Start the compiler and the device's libraries: context, cuBLAS, NCCL over `group`, autograd's threads.

    Args:
        rehearse: also trace and run something small: for ranks that have to wait for others' turns in any case.
    """
    if is_compiling_on():
        start_compiler(device)
        if rehearse:
            rehearse_tracing(device)
    square = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
    (square @ square).sum().backward()
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    gc.freeze()  # the compiler's modules are not looked through again, which a turn would do several times


def is_compiling_on() -> bool:
    """Whether the user left torch.compile on, which looks at both; this option follows TORCH_COMPILE_DISABLE alone."""
    return not torch._dynamo.config.disable and os.environ.get(OFF) != "1"


def compiled_or_not(needed_by: str | None, instead: str = "") -> str:
    """For the console, of what is to be compiled.

    Args:
        needed_by: the option that allows nothing else, if one is set.
        instead: what to set so that it may run uncompiled.

    Raises:
        UserError: such an option is set, and torch.compile is turned off; or it is turned off in the way that makes an
            error of code which is to be one graph, as all of ours is.
    """
    if torch._dynamo.config.disable:
        raise UserError("TORCH_COMPILE_DISABLE=1: torch runs no step of ours so", f"unset it; {OFF}=1 runs uncompiled")
    if is_compiling_on():
        return "compiled"
    if needed_by:
        raise UserError(f"{needed_by} needs torch.compile, which {OFF}=1 turns off", f"unset it, or set {instead}")
    return f"not compiled: {OFF} is set"


def start_compiler(device: torch.device) -> None:
    """Import what the first compile for `device` would, and compute what the keys of Inductor's cache begin with."""
    for name in COMPILER + GPU if device.type == "cuda" else COMPILER:
        # Some exist in some versions of torch only.
        if find_spec(name) is not None:
            import_module(name)
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.codegen.common import init_backend_registration

    # Both import every backend, as the first compile would.
    torch._dynamo.list_backends()
    init_backend_registration()
    # Hashes of torch's and of Triton's sources; on a CPU, what its C++ compiler can do.
    torch_key()
    CacheBase.get_system()
    if device.type == "cpu":
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


def rehearse_tracing(device: torch.device) -> None:
    """Run a tiny drafter forward and backward by the code of the real one, traced but not compiled.

    Most of a first trace is work of once a process, and a GPU loads its kernels with their first call. Dynamo forgets
    what it traced. The loss is left out: its kernels are compiled, which is for a turn to do.
    """
    config = DFlashConfig.from_target(SimpleNamespace(**SHAPES["tiny"]), layers=1, block_size=4, mask_token_id=0)
    layout = RowLayout(ROW_LENGTH, len(config.target_layer_ids) * config.hidden_size, torch.float32)
    buffer = layout.buffer(device)
    layout.loss_mask(buffer).fill_(1)
    row = layout.batch(0, buffer)
    with device:
        drafter = DFlashDrafter(config)
        table_VH = torch.zeros(config.vocab_size, config.hidden_size)
    drafter.compile_layers("eager")
    step = DraftForward(drafter, FrozenEnds(table_VH, table_VH), anchors=2, backend="sdpa")
    inputs = step.block_inputs(row)
    if device.type == "cuda":
        trace_tables = torch.compile(tile_tables, backend="eager", dynamic=False, fullgraph=True)
        tables = trace_tables(inputs.anchors.position_N, inputs.anchors.keep_N, row.doc, config.block_size)
        inputs = replace(inputs, mask=mask_from(tables, len(inputs.ids), config.block_size, ROW_LENGTH))
        step.backend = "flex"
    step.hidden(row, inputs).sum().backward()
    torch._dynamo.reset()
