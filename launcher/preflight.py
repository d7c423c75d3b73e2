"""What would stop every rank anyway, seen before any of them starts. No torch.

The ranks check all of it again, more thoroughly: they may be started by torchrun alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

from launcher.checkpoint_folder import check_name, checkpoints_of, published, read_extra
from launcher.config import Config
from launcher.config_changes import check_resumed_config
from launcher.errors import RetryableError, UserError
from launcher.manifest import problems_of

# Checksums of files up to this size are taken; larger ones are only looked at for their size.
SMALL_BYTES = 1 << 20
# Context of another process; a rank needs the rest. Graphics processes are not counted.
HELD_SHARE = 0.1
POLL_SECONDS = 1.0


def check_checkpoint(config: Config) -> None:
    """Refuse a run whose checkpoints are all damaged, or whose newest one is of another model; changes nothing.

    Raises:
        UserError: as `find_checkpoint` and `check_resumed_config`.
    """
    run_dir, resume = config.runtime.run_dir, config.runtime.resume
    if resume == "none":
        return
    folders = published(run_dir) if resume == "auto" else [Path(resume).expanduser()]
    for folder in folders:
        check_name(run_dir, folder)
    problems = {folder: problems_of(folder, SMALL_BYTES) for folder in folders}
    good = [folder for folder in folders if not problems[folder]]
    if good:
        check_resumed_config(read_extra(good[0])["config"], config)
    elif folders:
        found = "\n".join(f"skipped checkpoint {folder}: {'; '.join(problems[folder])}" for folder in folders)
        where = checkpoints_of(run_dir) if resume == "auto" else resume
        raise UserError(f"no usable checkpoint in {where}:\n{found}", "start anew with --resume none")


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU; `used` bytes, or those of the whole card where NVML cannot tell."""

    gpu: str
    pid: int
    used: int
    total: int

    def __str__(self) -> str:
        name = "in another container or of another user"
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(self.pid).name()
        return f"pid {self.pid} ({name}) holds {self.used / 1e9:.1f} of {self.total / 1e9:.0f} GB of {self.gpu}"


def wait_for_gpus(uuids: list[str], patience: float, say: Callable[[str], None]) -> None:
    """Wait until nobody else computes on these GPUs, such as ranks of an earlier start that are still on their way out.

    Raises:
        RetryableError: somebody does after `patience` seconds; names who holds how much of which GPU.
    """
    deadline, told = time.monotonic() + patience, False
    while found := holders(uuids):
        if time.monotonic() >= deadline:
            raise RetryableError(
                f"GPUs are in use: {'; '.join(map(str, found))}",
                f"after {patience:.0f} s (runtime.gpu_wait): stop them, choose others with CUDA_VISIBLE_DEVICES,"
                " or share them with --runtime.share_gpus=true",
            )
        if not told:
            say(f"[launch] waiting for GPUs: {'; '.join(map(str, found))}")
            told = True
        time.sleep(min(POLL_SECONDS, patience))


def holders(uuids: list[str]) -> list[Holder]:
    """Processes that hold a good part of one of these GPUs; none where NVML cannot tell."""
    found = []
    try:
        pynvml.nvmlInit()
        for uuid in uuids:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                used = int(memory.used if process.usedGpuMemory is None else process.usedGpuMemory)
                if used > HELD_SHARE * int(memory.total):
                    found.append(Holder(uuid, process.pid, used, int(memory.total)))
    except pynvml.NVMLError:
        return []
    return found
