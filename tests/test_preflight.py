"""What is refused before any rank starts: GPUs that others hold (an NVML of our own), checkpoints that cannot serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import preflight
from launcher.checkpoint_folder import EXTRA, checkpoints_of
from launcher.config import Config, validate
from launcher.errors import RetryableError, UserError
from launcher.manifest import seal_files, write_manifest
from launcher.preflight import check_checkpoint, holders, wait_for_gpus

ROOT = Path(__file__).resolve().parent.parent
MINE, OTHER = "GPU-00000000-0001", "GPU-00000000-0002"
WAIT = ["--device=cuda", "--runtime.gpu_wait=1"]
# As a module `pynvml` for a real start: two GPUs; a process holds 60 of 80 GB of the second.
FAKE_NVML = f"""
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): raise NVMLError("not in this test")
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(index): return ["{MINE}", "{OTHER}"][index]
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=61 * 10**9, total=80 * 10**9)
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid={os.getpid()}, usedGpuMemory=60 * 10**9)] if handle == "{OTHER}" else []
"""


class FakeNvml:
    """Cards of 80 GB and who computes on them: UUID -> [(pid, bytes)]."""

    class NVMLError(Exception):
        pass

    def __init__(self, users: dict[str, list[tuple[int, int | None]]]) -> None:
        self.users, self.looks = users, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.users:
            raise self.NVMLError("Insufficient Permissions")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=61 * 10**9, total=80 * 10**9)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        self.looks += 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.users[handle]]


def fake(monkeypatch: pytest.MonkeyPatch, users: dict[str, list[tuple[int, int | None]]]) -> FakeNvml:
    nvml = FakeNvml(users)
    monkeypatch.setattr(preflight, "pynvml", nvml)
    monkeypatch.setattr(preflight, "POLL_SECONDS", 0.01)
    return nvml


def test_who_holds_how_much_of_which_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {MINE: [(os.getpid(), 60 * 10**9), (2, 10**9)], OTHER: [(3, None)]})
    mine, other = holders([MINE, OTHER])
    assert f"pid {os.getpid()} (py" in str(mine) and f"holds 60.0 of 80 GB of {MINE}" in str(mine)
    assert other.used == 61 * 10**9, "NVML does not say how much this process has: the card's use stands for it"


def test_a_busy_gpu_is_waited_for_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake(monkeypatch, {MINE: [(2**22 + 1, 60 * 10**9)]})
    said: list[str] = []
    with pytest.raises(RetryableError, match=f"holds 60.0 of 80 GB of {MINE}.*runtime.gpu_wait") as refusal:
        wait_for_gpus([MINE], 0.1, said.append)
    assert refusal.value.code == 75 and nvml.looks > 2 and len(said) == 1


def test_a_gpu_that_comes_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake(monkeypatch, {MINE: [(7, 60 * 10**9)]})
    wait_for_gpus([MINE], 60.0, lambda text: nvml.users.update({MINE: []}))
    assert nvml.looks == 2


def test_an_nvml_that_may_not_look_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {})
    wait_for_gpus([MINE], 0.0, print)


def test_a_start_on_a_busy_gpu_ends_with_75_and_names_the_process(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE_NVML)
    ended = subprocess.run(
        [sys.executable, "launcher/main.py", "--preset=tiny", f"--run-dir={tmp_path / 'run'}", *WAIT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert ended.returncode == 75, ended.stderr
    assert f"pid {os.getpid()} (" in ended.stderr and "after 1 s (runtime.gpu_wait)" in ended.stderr
    assert not (tmp_path / "run/attempts").exists(), "nothing was started"


def saved(run_dir: Path, step: int, config: Config, micro_batches: int = 0) -> Path:
    folder = checkpoints_of(run_dir) / f"step-{step}"
    folder.mkdir(parents=True)
    extra = {"step": step, "micro_batches": micro_batches, "config": config.model_dump(mode="json")}
    (folder / EXTRA).write_text(json.dumps({"extra": extra}))
    (folder / "__0_0.distcp").write_bytes(bytes(preflight.SMALL_BYTES + 1))
    write_manifest(folder, seal_files(sorted(folder.iterdir())), step)
    return folder


def config_of(run_dir: Path, layers: int = 1, resume: str = "auto") -> Config:
    return validate({"runtime": {"run_dir": run_dir, "resume": resume}, "drafter": {"layers": layers}})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    check_checkpoint(config_of(tmp_path))
    saved(tmp_path, 5, config_of(tmp_path))
    check_checkpoint(config_of(tmp_path))
    with pytest.raises(UserError, match="drafter.layers: 1 -> 2"):
        check_checkpoint(config_of(tmp_path, layers=2))
    check_checkpoint(config_of(tmp_path, layers=2, resume="none"))


def test_a_checkpoint_set_aside_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5, config_of(tmp_path))
    aside = folder.rename(folder.with_name("step-5.old-1"))
    with pytest.raises(UserError, match="rename it to step-5 "):
        check_checkpoint(config_of(tmp_path, resume=str(aside)))
    assert aside.is_dir()


def test_a_run_without_a_usable_checkpoint_is_refused_and_a_damaged_one_passed_over(tmp_path: Path) -> None:
    older, newer = (saved(tmp_path, step, config_of(tmp_path)) for step in (5, 9))
    (newer / EXTRA).write_text("{}")
    check_checkpoint(config_of(tmp_path))
    with pytest.raises(UserError, match="no usable checkpoint"):
        check_checkpoint(config_of(tmp_path, resume=str(newer)))
    (older / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(UserError, match="has 5 bytes.*--resume none") as refusal:
        check_checkpoint(config_of(tmp_path))
    assert refusal.value.code == 78
