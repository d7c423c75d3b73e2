"""The one place for environment variables and devices, and the way to the control store.

`prepare_environment` runs before torch is imported: it masks every rank to its own GPU, so that each sees it as
`cuda:0` and Inductor's cache, keyed by device index, serves all of them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import Config
from launcher.errors import RetryableError, UserError
from launcher.gpus import gpu_uuids

if TYPE_CHECKING:
    from launcher.control import Control


@dataclass(frozen=True)
class RankEnv:
    """What torchrun tells a worker about itself."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    restart: int
    agent_store: bool

    @classmethod
    def read(cls, environ: MutableMapping[str, str] = os.environ) -> RankEnv:
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            master_addr=environ["MASTER_ADDR"],
            master_port=int(environ["MASTER_PORT"]),
            restart=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size

    def check_nodes(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Refuse nodes of different sizes: every one of them sees another number of ranks than its share.

        Raises:
            UserError: names both numbers.
        """
        agents = int(environ.get("GROUP_WORLD_SIZE", self.nodes))
        if agents * self.local_world_size != self.world_size:
            raise UserError(
                f"{agents} nodes with {self.world_size} ranks in all, but {self.local_world_size} of them on this one",
                "start every node with the same --nproc",
            )


@dataclass(frozen=True)
class Device:
    """The device of one rank. `uuid` names its GPU for NVML; `ranks` may share it, this one among them."""

    kind: str
    uuid: str | None = None
    ranks: int = 1

    @property
    def torch_name(self) -> str:
        return "cuda:0" if self.kind == "cuda" else "cpu"


def choose_device(requested: str, share: bool, gpus: list[str], env: RankEnv) -> Device:
    """The device of this rank.

    Raises:
        UserError: GPUs asked for but absent, or fewer GPUs than ranks without `runtime.share_gpus`.
    """
    if requested == "cpu" or (requested == "auto" and not gpus):
        return Device("cpu", ranks=env.local_world_size)
    if not gpus:
        raise UserError(
            "runtime.device=cuda: NVML finds no GPU, or CUDA_VISIBLE_DEVICES names none",
            "check the driver with ./launch.sh doctor",
        )
    if len(gpus) < env.local_world_size and not share:
        raise UserError(
            f"{env.local_world_size} ranks on {len(gpus)} GPU{'s' * (len(gpus) != 1)}",
            f"start {len(gpus)} ranks with --nproc {len(gpus)}, or let ranks share GPUs with --runtime.share_gpus=true",
        )
    return Device("cuda", gpus[env.local_rank % len(gpus)], -(-env.local_world_size // len(gpus)))


def prepare_environment(config: Config, env: RankEnv, environ: MutableMapping[str, str] = os.environ) -> Device:
    """Set every variable that torch, Triton, NCCL and gloo read. Must run before torch is imported."""
    requested = config.runtime.device
    device = choose_device(requested, config.runtime.share_gpus, gpu_uuids(requested, environ), env)
    environ["CUDA_VISIBLE_DEVICES"] = device.uuid or ""
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Long rows fragment the allocator late in a run (SpecForge saw OOM from it).
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # A rank compiles alone in its turn; more workers would only fight over cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1" if device.kind == "cpu" else str(_compile_threads(env)),
        # Flight recorder; the process group of NCCL still asks for its size by the second name.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if env.nodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in defaults.items():
        environ.setdefault(name, value)
    return device


def point_traces(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Where NCCL's watchdog writes what the flight recorder has, a file a rank; read when it does, not at import."""
    folder.mkdir(parents=True, exist_ok=True)
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder / 'nccl_watchdog_rank_'}")


def _compile_threads(env: RankEnv) -> int:
    return max(1, min(16, (os.cpu_count() or 1) // env.local_world_size * 2))


def connect(env: RankEnv, timeout: float) -> Control:
    """Reach the control store that torchrun's agent serves (rank 0 serves it where the agent does not)."""
    from launcher.control import Control

    serve = not env.agent_store and env.rank == 0
    try:
        return Control(env.master_addr, env.master_port, f"launcher/{env.restart}", serve, timeout)
    except Exception as error:  # torch raises several types here
        raise RetryableError(
            f"cannot reach the control store at {env.master_addr}:{env.master_port}: {error}",
            "check that the address is this job's and the port is open",
        ) from error


def set_threads(device: Device, env: RankEnv) -> None:
    """CPU ranks share the cores evenly, so that eight of them do not thrash."""
    import torch

    if device.kind == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // env.local_world_size))
