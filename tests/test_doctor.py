"""The doctor: levels, exit code, and what it says on odd machines."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from launcher import doctor
from launcher.doctor import Check, check_environment_variables, check_gpus, check_host, main


class FakeNvml:
    """Two GPUs without a way between them; a process holds the second."""

    NVMLError = pynvml.NVMLError
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = (0,), 0  # as in nvidia-ml-py

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=10 << 30, total=80 << 30),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=4242)] * handle,
            "nvmlDeviceGetName": lambda handle: "GPU",
            "nvmlDeviceGetUUID": lambda handle: f"UUID-{handle}",
            "nvmlDeviceGetP2PStatus": lambda a, b, what: ctypes.c_int(what).value + 1,
        }
        return answers[name]


def test_gpus_with_users_and_without_peer_access_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml())
    free, held, peers = check_gpus()
    assert (free.level, held.level, peers.level) == ("OK", "WARN", "WARN")
    assert "10.0 of 80.0 GiB free" in free.found
    assert "pid 4242" in held.found
    assert "0-1" in peers.found


def test_small_shared_memory_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_SHARED_MEMORY", 1 << 60)
    assert any(check.level == "WARN" and "--shm-size" in check.fix for check in check_host())


def test_variables_that_a_run_overrides_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that has compiled
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    warned, noted = check_environment_variables()
    assert "TRITON_CACHE_DIR" in warned.found
    assert "NCCL_DEBUG=INFO" in noted.found


def test_something_missing_is_exit_code_78(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-compile"]) == 0
    assert "torch.git" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "missing", lambda wanted: ["torch>=2.11"])
    assert main(["--json", "--no-compile"]) == 78
    report = json.loads(capsys.readouterr().out)
    assert {"level": "MISS", "name": "packages"}.items() <= report["checks"][0].items()
    assert report["fingerprint"]["torch"]


def test_a_compiler_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRIAL", "raise SystemExit('InvalidCxxCompiler: no g++')")
    (check,) = doctor.check_compiler()
    assert check == Check("MISS", "compiler", "InvalidCxxCompiler: no g++", check.fix)
