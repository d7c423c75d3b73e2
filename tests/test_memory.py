"""Memory samples and peaks, with an NVML that can be told to fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import memory
from launcher.memory import GpuProbe, MemoryWatcher, peaks_by_role
from launcher.topology import Role

UUID = "GPU-9ae9ae2b-6f32-4f8e-8c4b-000000000001"
TARGET, DRAFTER, OTHER_DRAFTER = Role(0, "target", 0, 0, 0), Role(1, "drafter", 0, 0, 1), Role(2, "drafter", 1, 0, 2)


class FakeNvml:
    """The calls of pynvml that GpuProbe makes, over cards by UUID."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards: dict[str, int]) -> None:
        self.cards, self.lost = cards, False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.cards:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(used=self.cards[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return [SimpleNamespace(pid=7, usedGpuMemory=3), SimpleNamespace(pid=8, usedGpuMemory=None)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml({"GPU-another": 1, UUID: 5_000_000_000})
    monkeypatch.setattr(memory, "pynvml", fake)
    return fake


def watch(path: Path, phases: list[str], uuid: str | None = UUID) -> MemoryWatcher:
    """A watcher that is not started, for a rank that goes through `phases`, one a sample."""
    return MemoryWatcher(path, DRAFTER, uuid, 0.01, lambda: phases.pop(0) if len(phases) > 1 else phases[0])


def test_the_card_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    assert GpuProbe(UUID).used() == 5_000_000_000
    assert GpuProbe(UUID).processes() == [(7, 3), (8, 0)]


def test_an_unknown_card_is_one_warning(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    probe = GpuProbe("GPU-unknown")
    assert probe.used() is None and probe.used() is None and probe.processes() == []
    assert [record.getMessage() for record in caplog.records] == ["GPU memory is not watched: NVML: Not Found"]


def test_a_card_that_fails_mid_run_is_one_warning(
    nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = watch(tmp_path / "memory.jsonl", ["step"])
    assert watcher.peaks()["step"]["gpu"] == 5_000_000_000
    nvml.lost = True
    for _ in range(3):
        peaks = watcher.peaks()
    assert peaks["step"]["gpu"] == 5_000_000_000 and peaks["step"]["rss"] > 0, "the host is still watched"
    assert [record.getMessage() for record in caplog.records] == ["GPU memory is no longer watched: NVML: GPU is lost"]


def test_peaks_are_kept_by_phase(nvml: FakeNvml, tmp_path: Path) -> None:
    watcher = watch(tmp_path / "memory.jsonl", ["load", "step", "step", "after step"])
    for used in (1, 9, 4):
        nvml.cards[UUID] = used
        watcher.peaks()
    assert {phase: values["gpu"] for phase, values in watcher.peaks().items()} == {
        "load": 1,
        "step": 9,
        "after step": 4,
    }


def test_samples_go_to_a_file_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    with watch(path, ["step"], uuid=None):
        deadline = time.monotonic() + 20
        while not path.exists() or path.read_text().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(sample["rank"], sample["role"], sample["phase"]) for sample in samples} == {(1, "drafter", "step")}
    assert all(sample["rss"] > 0 and sample["host_available"] > 0 and "gpu" not in sample for sample in samples)


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with watch(tmp_path / "gone" / "memory.jsonl", ["step"], uuid=None) as watcher:
        watcher._thread.join(timeout=20)
    assert watcher.peaks()["step"]["rss"] > 0
    assert len(caplog.records) == 1 and "memory.jsonl: No such file" in caplog.records[0].getMessage()


def test_the_summary_names_the_highest_rank_of_each_role_and_what_it_was_at() -> None:
    peaks = {
        TARGET: {"load": {"rss": 3_000_000_000}, "step": {"rss": 2_000_000_000}},
        DRAFTER: {"step": {"gpu": 40_000_000_000, "rss": 1}, "after load": {"gpu": 45_600_000_000, "rss": 2}},
        OTHER_DRAFTER: {"step": {"gpu": 44_000_000_000, "rss": 4_000_000_000}},
    }
    assert peaks_by_role(peaks) == (
        "peak memory: target host 3.0 GB (rank 0, load), drafter GPU 45.6 GB (rank 1, after load),"
        " drafter host 4.0 GB (rank 2, step)"
    )
