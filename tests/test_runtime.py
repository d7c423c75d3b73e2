"""Devices and environment variables of a rank, decided before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from launcher.config import Config
from launcher.errors import UserError
from launcher.runtime import Device, RankEnv, choose_device, point_traces, prepare_environment

GPUS = [f"GPU-{letter * 4}" for letter in "abcd"]


def rank_env(local_rank: int, ranks: int) -> RankEnv:
    return RankEnv(local_rank, local_rank, ranks, ranks, "127.0.0.1", 29500, 0, True)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(GPUS))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: GPUS[index])


def test_each_rank_gets_its_own_gpu() -> None:
    assert [choose_device("auto", False, GPUS, rank_env(i, 4)) for i in range(4)] == [
        Device("cuda", gpu) for gpu in GPUS
    ]


def test_too_few_gpus_is_refused_and_names_the_option() -> None:
    with pytest.raises(UserError, match=r"8 ranks on 4 GPUs -> .*--runtime.share_gpus=true"):
        choose_device("auto", False, GPUS, rank_env(0, 8))
    assert choose_device("auto", True, GPUS, rank_env(5, 8)) == Device("cuda", GPUS[1], ranks=2)
    assert choose_device("auto", True, GPUS, rank_env(0, 9)).ranks == 3, "the most that share one of them"
    assert choose_device("auto", True, GPUS, rank_env(3, 4)) == Device("cuda", GPUS[3])


def test_cuda_without_a_gpu_is_refused() -> None:
    assert choose_device("auto", False, [], rank_env(0, 8)) == Device("cpu", ranks=8)
    with pytest.raises(UserError, match="NVML finds no GPU"):
        choose_device("cuda", False, [], rank_env(0, 8))


@pytest.mark.usefixtures("four_gpus")
def test_environment_is_masked_and_keeps_the_users_values() -> None:
    environ: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "3,1", "TORCH_FR_BUFFER_SIZE": "7"}
    device = prepare_environment(Config(), rank_env(1, 2), environ)
    assert device == Device("cuda", GPUS[1])
    assert environ["CUDA_VISIBLE_DEVICES"] == GPUS[1]
    assert environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo", "one node binds loopback only"


def test_the_flight_recorder_is_on_under_both_names_and_writes_into_the_run(tmp_path: Path) -> None:
    environ: dict[str, Any] = {}
    prepare_environment(Config(), rank_env(0, 2), environ)
    assert environ["TORCH_FR_BUFFER_SIZE"] == environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    point_traces(tmp_path / "traces", environ)
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "traces/nccl_watchdog_rank_")
