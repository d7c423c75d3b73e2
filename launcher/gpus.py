"""Which GPUs a run may use: NVML's, as CUDA_VISIBLE_DEVICES masks them. No torch.

A machine without GPUs trains on the CPU without a word. One whose GPUs cannot be had as they are asked for is refused:
nobody who owns GPUs means eight CPU ranks of a large target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from launcher.errors import UserError

MASK = "CUDA_VISIBLE_DEVICES"
# CUDA counts no GPU from such a word on; the second is what Slurm gives a job that asked for none.
NOTHING = {"-1", "NoDevFiles"}
ON_CPU = "or train without GPUs: --device cpu"


def gpu_handles() -> list[Any]:
    """NVML's handles of the GPUs of this process, counted as CUDA does by PCI bus; [] without a driver or GPUs.

    Raises:
        UserError: there is a driver, but NVML cannot reach it, or none of its GPUs.
    """
    pynvml = _nvml()
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = [handle for index in range(count) if (handle := _handle(pynvml, index)) is not None]
    except pynvml.NVMLError as error:
        if error.value in {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            return []
        raise _unusable(error) from error
    if count and not handles:
        raise UserError(
            f"NVML lets this process use none of the machine's {count} GPUs",
            f"ask the scheduler or the container runtime for some, {ON_CPU}",
        )
    return handles


def gpu_uuids(device: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """UUIDs of the GPUs for `runtime.device`, in the order of CUDA_VISIBLE_DEVICES where it is set; [] for the CPU.

    Raises:
        UserError: as `gpu_handles`, or the mask names what is no GPU of this process.
    """
    if device == "cpu":
        return []
    mask = environ.get(MASK)
    named = None if mask is None else list(takewhile(lambda word: word not in NOTHING, _words(mask)))
    if named == []:
        return []
    found = _uuids()
    return found if named is None or not found else [_gpu_named(word, found) for word in named]


def _nvml() -> Any:
    """Its errors carry a `value` that their class does not declare, hence Any."""
    import pynvml

    return pynvml


def _words(mask: str) -> list[str]:
    return [word.strip() for word in mask.split(",") if word.strip()]


def _handle(pynvml: Any, index: int) -> Any:
    """None for a GPU that this container or job was not given: NVML counts it, CUDA does not."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            return None
        raise


def _uuids() -> list[str]:
    pynvml, handles = _nvml(), gpu_handles()
    try:
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> UserError:
    return UserError(f"the GPUs cannot be used; NVML says: {error}", f"mend the driver, {ON_CPU}")


def _gpu_named(word: str, found: list[str]) -> str:
    """The one GPU of an index, a UUID, or the beginning of a UUID."""
    by_index = word.isdigit()
    matches = found[int(word) :][:1] if by_index else [uuid for uuid in found if uuid.startswith(word)]
    if len(matches) == 1:
        return matches[0]
    if word.startswith("MIG-"):
        why, fix = "a slice of a GPU; ranks use whole ones", "give indices or UUIDs of GPUs"
    elif matches:
        why, fix = f"the beginning of {len(matches)} UUIDs", "give more of it"
    else:
        why, fix = f"none of the {len(found)} GPUs that NVML finds", "doctor lists them, in the order of their indices"
    raise UserError(f"{MASK}: {word} is {why}", f"{fix}, {ON_CPU}")
