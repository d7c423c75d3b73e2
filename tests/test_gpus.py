"""Which GPUs a run may use: a stand-in for NVML, and every way to mask them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from launcher.doctor import check_gpus
from launcher.errors import UserError
from launcher.gpus import gpu_uuids

GPUS = ["GPU-aaaa", "GPU-bbbb", "GPU-bccc", "GPU-dddd"]


@dataclass
class FakeNvml:
    """NVML's calls; `errors` by name, or by index of a GPU whose handle cannot be had."""

    uuids: list[str] = field(default_factory=lambda: list(GPUS))
    errors: dict[str | int, int] = field(default_factory=dict)

    def fail(self, place: str | int) -> None:
        if place in self.errors:
            raise pynvml.NVMLError(self.errors[place])

    def nvmlInit(self) -> None:
        self.fail("init")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.fail(index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self.fail("uuid")
        return self.uuids[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"):
        monkeypatch.setattr(pynvml, name, getattr(fake, name))
    return fake


def masked(mask: str | None, device: str = "auto") -> list[str]:
    return gpu_uuids(device, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, GPUS),
        ("2,0", [GPUS[2], GPUS[0]]),
        (" 3 , GPU-aa ", [GPUS[3], GPUS[0]]),
        ("GPU-bb", [GPUS[1]]),
        ("1,-1,0", [GPUS[1]]),
        ("", []),
        (",", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_users_mask_chooses_and_orders_gpus(mask: str | None, expected: list[str]) -> None:
    assert masked(mask) == masked(mask, "cuda") == expected


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("mask", "line"),
    [
        ("0,7", "CUDA_VISIBLE_DEVICES: 7 is none of the 4 GPUs that NVML finds"),
        ("-2", "-2 is none of the 4 GPUs"),
        ("GPU-xxxx", "GPU-xxxx is none of the 4 GPUs"),
        ("GPU-b", "GPU-b is the beginning of 2 UUIDs"),
        ("MIG-aaaa", "MIG-aaaa is a slice of a GPU"),
    ],
)
def test_a_mask_of_what_is_no_gpu_is_refused_and_never_means_cpu(mask: str, line: str) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match=f"{line}.* -> .*--device cpu"):
            masked(mask, device)
    assert masked(mask, "cpu") == []


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
@pytest.mark.parametrize("mask", [None, "0", "MIG-aaaa"])
def test_without_a_driver_there_are_no_gpus(nvml: FakeNvml, code: int, mask: str | None) -> None:
    nvml.errors["init"] = code
    assert masked(mask) == masked(mask, "cuda") == []


@pytest.mark.parametrize("mask", [None, "0"])
def test_a_driver_without_gpus_is_the_cpu(nvml: FakeNvml, mask: str | None) -> None:
    nvml.uuids = []
    assert masked(mask) == []


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("init", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch."),
        ("init", pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        ("init", pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        (2, pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost"),
        ("uuid", pynvml.NVML_ERROR_NOT_SUPPORTED, "Not Supported"),
    ],
)
def test_a_driver_in_trouble_is_refused_with_its_own_words(
    nvml: FakeNvml, place: str | int, code: int, words: str
) -> None:
    nvml.errors[place] = code
    with pytest.raises(
        UserError, match=f"NVML says: .*{words} -> mend the driver, or train without GPUs: --device cpu"
    ):
        masked(None)
    assert masked(None, "cpu") == [] == masked("", "auto")


def test_gpus_that_a_container_was_not_given_are_not_counted(nvml: FakeNvml) -> None:
    nvml.errors |= dict.fromkeys([0, 2], pynvml.NVML_ERROR_NO_PERMISSION)
    assert masked(None) == [GPUS[1], GPUS[3]] and masked("1") == [GPUS[3]]
    nvml.errors |= dict.fromkeys(range(4), pynvml.NVML_ERROR_NO_PERMISSION)
    with pytest.raises(UserError, match="none of the machine's 4 GPUs"):
        masked(None)


@pytest.mark.parametrize(
    ("code", "level", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "WARN", "NVML finds none"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "MISS", "NVML says: "),
    ],
)
def test_the_doctor_says_what_a_start_would(nvml: FakeNvml, code: int, level: str, words: str) -> None:
    nvml.errors["init"] = code
    (check,) = check_gpus()
    assert check.level == level and words in check.found and "CPU" in check.fix.upper()


def test_the_doctor_lists_the_gpus_beside_a_mask_that_fits_none(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetP2PStatus"):
        monkeypatch.setattr(pynvml, name, unknown)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    checks = list(check_gpus())
    assert [check.name for check in checks] == [*(f"GPU {index}" for index in range(4)), "peer access", "GPU mask"]
    assert checks[-1].level == "MISS" and "4 is none of the 4 GPUs" in checks[-1].found
