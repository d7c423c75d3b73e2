"""What this machine compiles with: every version, commit and wheel that can change a kernel. Without importing torch.

The same version string can hide another build (`2.11.0+cu128`, another commit, a rebuilt wheel), so each key wheel
is known by its commit and by the hashes in its RECORD too. Takes about 0.2 s.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launcher.errors import UserError
from launcher.gpus import gpu_handles

Fingerprint = dict[str, str | None]
"""Flat, field -> value. `torch.git`, `torch.record` and the like belong to the package before the dot."""

WHEELS = ("torch", "triton", "transformers", "safetensors")
CUDA_WHEELS = ("cublas", "cuda-nvrtc", "cuda-runtime", "cudnn", "nccl", "nvshmem")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
# What a compiled kernel depends on. The number of GPUs and our own sources are left out: Inductor and Triton key their
# entries by source already, and a cache that went cold at every edit would be no asset.
CACHE_FIELDS = ("python", "machine", "cpu", "libc", "compiler", "driver", "gpu")
CACHE_PACKAGES = ("torch", "triton", "nvidia-")
INSTALL_FILES = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")


@dataclass(frozen=True)
class Change:
    """One difference between two fingerprints; `rebuilt` means another build behind the same version."""

    field: str
    was: str | None
    now: str | None
    rebuilt: bool = False
    detail: str = ""

    def __str__(self) -> str:
        if self.rebuilt:
            return f"{self.field} {public_version(self.now)} is another build than last time ({self.detail})"
        return f"{self.field}: {self.was or 'none'} -> {self.now or 'none'}"


def collect() -> Fingerprint:
    """The fingerprint of this Python on this machine."""
    found: Fingerprint = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": describe_cpu(_read("/proc/cpuinfo")),
        "compiler": describe_compiler(),
        "kernels": source_hash(Path(__file__).resolve().parent.parent / "models"),
    }
    names = [*WHEELS, *(f"nvidia-{name}{suffix}" for name in CUDA_WHEELS for suffix in ("", "-cu12", "-cu13"))]
    for name in names:
        found |= describe_wheel(name)
    return found | describe_torch() | describe_gpus()


def digest(fingerprint: Fingerprint) -> str:
    """12 hex digits over what compiled kernels depend on; names a compile cache."""
    lines = [f"{field}={value}" for field, value in sorted(cache_fields(fingerprint).items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def cache_fields(fingerprint: Fingerprint) -> Fingerprint:
    """The part that a compile cache depends on."""
    return {k: v for k, v in fingerprint.items() if k in CACHE_FIELDS or k.startswith(CACHE_PACKAGES)}


def diff(was: Fingerprint, now: Fingerprint) -> list[Change]:
    """All differences, one per package: another version, or another build of the same version."""
    changes = []
    fields = dict.fromkeys([*was, *now])
    for package in dict.fromkeys(field.partition(".")[0] for field in fields):
        group = [field for field in fields if field.partition(".")[0] == package]
        differing = [field for field in group if was.get(field) != now.get(field)]
        if not differing:
            continue
        old, new = was.get(package), now.get(package)
        if len(group) > 1 and old and new and public_version(old) == public_version(new):
            detail = ", ".join(
                f"{_part(field)} {_short(was.get(field))} -> {_short(now.get(field))}" for field in differing
            )
            changes.append(Change(package, old, new, rebuilt=True, detail=detail))
        else:
            changes.append(Change(package, old, new))
    return changes


def public_version(version: str | None) -> str:
    """'2.11.0' of '2.11.0+cu130'."""
    return (version or "").partition("+")[0]


def describe_wheel(name: str) -> Fingerprint:
    """Version and RECORD hash of a package; nothing where it is not installed."""
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return {}
    return {name: wheel.version, f"{name}.record": record_hash(wheel.read_text("RECORD"))}


def record_hash(record: str | None) -> str | None:
    """sha256 over the file hashes of a RECORD, without the lines that differ from one installation to the next.

    Scripts in `bin/` carry the path of their environment, and byte code and installer notes are written on the spot.
    """
    if record is None:
        return None
    kept = []
    for line in record.splitlines():
        path, _, rest = line.rpartition(",")[0].rpartition(",")
        local = path.startswith("..") or path.endswith(".pyc") or path.rpartition("/")[2] in INSTALL_FILES
        if rest and not local:
            kept.append(f"{path},{rest}")
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()


def describe_torch() -> Fingerprint:
    """Full version, commit and CUDA version out of torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    values = parse_assignments(_read(os.path.join(spec.submodule_search_locations[0], "version.py")))
    found = {"torch": "__version__", "torch.git": "git_version", "torch.cuda": "cuda", "torch.hip": "hip"}
    return {field: values[name] for field, name in found.items() if values.get(name) is not None}


def parse_assignments(source: str) -> dict[str, str | None]:
    """Top-level `name = 'text'` and `name: type = 'text'` of a Python source; other statements are passed over."""
    values: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            values[target.id] = value.value
    return values


def describe_gpus() -> Fingerprint:
    """Driver and GPUs that this process may use by NVML, whatever CUDA_VISIBLE_DEVICES hides; {} without any."""
    import pynvml

    try:
        handles = gpu_handles()
        if not handles:
            return {}
        driver, kinds = pynvml.nvmlSystemGetDriverVersion(), []
        for handle in handles:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            kinds.append(f"{pynvml.nvmlDeviceGetName(handle)} sm_{major}{minor}")
    except (UserError, pynvml.NVMLError):  # a run that needs these GPUs is refused with the reason
        return {}
    return {"driver": driver, "gpu": " + ".join(dict.fromkeys(kinds)), "gpus": str(len(kinds))}


def describe_cpu(cpuinfo: str) -> str:
    """Model and the vector extensions that Inductor picks code by."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return " ".join([fields.get("model name", platform.machine()), *(flag for flag in CPU_FLAGS if flag in flags)])


def describe_compiler() -> str | None:
    """Name and version of the C++ compiler that Inductor and Triton call."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if path is None:
        return None
    answer = subprocess.run([path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=10)
    return f"{os.path.basename(path)} {answer.stdout.strip()}"


def source_hash(folder: Path) -> str:
    """sha256 over the names and contents of a folder's Python files."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _part(field: str) -> str:
    return {"record": "wheel"}.get(field.partition(".")[2], field.partition(".")[2] or "version")


def _short(value: str | None) -> str:
    return "none" if value is None else value[:10] if len(value) >= 40 else value
