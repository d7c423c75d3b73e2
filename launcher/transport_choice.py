"""Which transport carries the rows of a run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from launcher.control import Control
from launcher.ipc_memory import CudaMemory
from launcher.ipc_transport import IpcTransport
from launcher.transports import GlooTransport, NcclTransport, Transport


def make_transport(
    backend: str, group: dist.ProcessGroup, device: torch.device, timeout: float, control: Control
) -> Transport:
    """NCCL where each rank has a GPU of its own, CUDA IPC where ranks share some, gloo on CPUs.

    Args:
        backend: of `group`, which all ranks are in.
        timeout: seconds after which a row that does not come is given up.
    """
    if backend == "nccl":
        return NcclTransport(group, device)
    host = GlooTransport(group, device, timeout)
    return host if device.type == "cpu" else IpcTransport(host, CudaMemory(device), control, dist.get_rank(), timeout)
