"""Fingerprint and environment records: what counts as a change, how it is told, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.environment import (
    check_environment,
    check_lock,
    main,
    read_fingerprint,
    record_environment,
    write_fingerprint,
)
from launcher.errors import RetryableError, UserError
from launcher.fingerprint import (
    Fingerprint,
    collect,
    describe_cpu,
    diff,
    digest,
    parse_assignments,
    record_hash,
    source_hash,
)

BUILD: Fingerprint = {
    "python": "CPython 3.12.3",
    "torch": "2.11.0+cu130",
    "torch.git": "70d99e998b" + "0" * 30,
    "torch.cuda": "13.0",
    "torch.record": "a" * 64,
    "triton": "3.6.0",
    "triton.record": "b" * 64,
    "gpu": "NVIDIA H200 sm_90",
    "gpus": "8",
    "driver": "580.159.03",
    "kernels": "c" * 64,
}
RECORD = """torch/__init__.py,sha256=abc,120
../../../bin/torchrun,sha256=def,232
torch/__pycache__/__init__.cpython-311.pyc,,
torch-2.11.0.dist-info/INSTALLER,sha256=xyz,4
torch-2.11.0.dist-info/RECORD,,
"""


def test_collects_quickly_and_without_torch() -> None:
    program = (
        "import sys, json\nfrom launcher.fingerprint import collect\nfound = collect()\n"
        "assert 'torch' not in sys.modules\nprint(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=_root(), check=True)
    found = json.loads(done.stdout)
    import torch

    assert found["torch"] == torch.__version__
    assert found["torch.git"] == torch.version.git_version
    assert len(found["torch.record"]) == 64
    started = time.process_time()
    assert collect() == found, "the same environment gives the same fingerprint"
    assert time.process_time() - started < 1.5, "about 0.15 s of a core"


def test_no_change_is_no_difference() -> None:
    assert diff(BUILD, dict(BUILD)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch.git": "1" * 40}, "torch 2.11.0 is another build than last time (git 70d99e998b -> 1111111111)"),
        ({"torch.record": "d" * 64}, "torch 2.11.0 is another build than last time (wheel aaaaaaaaaa -> dddddddddd)"),
        (
            {"torch": "2.11.0+cu128", "torch.cuda": "12.8"},
            "torch 2.11.0 is another build than last time (version 2.11.0+cu130 -> 2.11.0+cu128, cuda 13.0 -> 12.8)",
        ),
        (
            {"torch": "2.12.0+cu130", "torch.git": "1" * 40, "torch.record": "e" * 64},
            "torch: 2.11.0+cu130 -> 2.12.0+cu130",
        ),
        ({"driver": "590.1"}, "driver: 580.159.03 -> 590.1"),
        ({"nvidia-nccl-cu13": "2.28"}, "nvidia-nccl-cu13: none -> 2.28"),
    ],
)
def test_one_line_per_package_says_what_changed(changed: Fingerprint, said: str) -> None:
    assert [str(change) for change in diff(BUILD, BUILD | changed)] == [said]


@pytest.mark.parametrize("field", ["torch.git", "torch.record", "driver", "gpu", "python", "triton"])
def test_a_cache_depends_on_whatever_shapes_its_kernels(field: str) -> None:
    assert digest(BUILD | {field: "other"}) != digest(BUILD)


@pytest.mark.parametrize("field", ["gpus", "kernels", "os", "transformers"])
def test_a_cache_survives_what_cannot_change_its_kernels(field: str) -> None:
    assert digest(BUILD | {field: "other"}) == digest(BUILD)


def test_a_record_hash_ignores_what_an_installation_adds() -> None:
    elsewhere = RECORD.replace("sha256=def,232", "sha256=other,260").replace("xyz", "uv").replace(".pyc,,", ".pyc,x,1")
    shuffled = "\n".join(reversed(elsewhere.splitlines()))
    assert record_hash(shuffled) == record_hash(RECORD)
    assert record_hash(RECORD.replace("abc", "abd")) != record_hash(RECORD)
    assert record_hash(None) is None


def test_reads_plain_and_annotated_assignments() -> None:
    source = (
        "from typing import Optional\n__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: str = None\n"
    )
    assert parse_assignments(source) == {"__version__": "2.11.0+cu128", "cuda": "12.8"}


def test_the_cpu_counts_by_model_and_vector_units() -> None:
    info = "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 avx512f\nprocessor : 1\nmodel name : Some CPU\n"
    assert describe_cpu(info) == "Some CPU avx2 avx512f"


def test_an_edited_kernel_changes_the_source_hash(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("x = 1\n")
    before = source_hash(tmp_path)
    (tmp_path / "loss.py").write_text("x = 2\n")
    assert source_hash(tmp_path) != before


def test_a_second_attempt_lists_what_changed(tmp_path: Path) -> None:
    first, second = tmp_path / "attempts/1", tmp_path / "attempts/2"
    for folder in (first, second):
        folder.mkdir(parents=True)
    assert record_environment(tmp_path, first, BUILD, strict=True) == []
    notices = record_environment(tmp_path, second, BUILD | {"torch.git": "1" * 40}, strict=False)
    assert len(notices) == 1
    assert "torch 2.11.0 is another build than last time" in notices[0]
    assert read_fingerprint(first) == BUILD, "the earlier attempt keeps its own record"
    assert read_fingerprint(tmp_path)["torch.git"] == "1" * 40


def test_a_dry_run_does_not_use_up_a_change(tmp_path: Path) -> None:
    attempt, other = tmp_path / "attempts/2", BUILD | {"torch.git": "1" * 40}
    attempt.mkdir(parents=True)
    record_environment(tmp_path, tmp_path, BUILD, strict=False)
    assert len(record_environment(tmp_path, attempt, other, strict=False, dry_run=True)) == 1
    assert (read_fingerprint(tmp_path), read_fingerprint(attempt)) == (BUILD, other)
    with pytest.raises(UserError, match="another build"):
        check_environment(tmp_path, other, strict=True)
    assert len(record_environment(tmp_path, attempt, other, strict=False)) == 1
    check_environment(tmp_path, other, strict=True)


@pytest.mark.parametrize("left", [b"", b'{"torch": ', b"[1]", b'{"torch": 1}', bytes(range(256)), b"[" * 100_000])
def test_a_record_that_a_crash_left_costs_a_line(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "environment.json").write_bytes(left)
    with pytest.raises(UserError, match="environment.json.* leave out --strict-environment") as refused:
        check_environment(tmp_path, BUILD, strict=True)
    assert refused.value.code == 78 and "\n" not in str(refused.value)
    (line,) = record_environment(tmp_path, tmp_path, BUILD, strict=False)
    assert str(tmp_path / "environment.json") in line and "\n" not in line
    assert record_environment(tmp_path, tmp_path, BUILD, strict=True) == [], "it was written anew"


def test_a_record_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "environment.json").mkdir()
    with pytest.raises(RetryableError, match="cannot write .*environment.json: Is a directory") as refused:
        record_environment(tmp_path / "run", tmp_path, BUILD, strict=False)
    assert refused.value.code == 75


def test_strict_refuses_and_keeps_the_old_record(tmp_path: Path) -> None:
    record_environment(tmp_path, tmp_path, BUILD, strict=True)
    with pytest.raises(UserError, match="another build") as refused:
        record_environment(tmp_path, tmp_path, BUILD | {"torch.record": "9" * 64}, strict=True)
    assert refused.value.code == 78
    assert read_fingerprint(tmp_path) == BUILD


def test_a_lock_pins_the_environment_but_not_the_code(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    write_fingerprint(tmp_path / "environment.lock", {k: v for k, v in BUILD.items() if k != "kernels"})
    check_lock(config, BUILD | {"kernels": "0" * 64, "os": "Linux 7"})
    with pytest.raises(UserError, match="driver: 580.159.03 -> 1"):
        check_lock(config, BUILD | {"driver": "1"})


def test_a_lock_without_a_place_pins_starts_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["--lock"]) == 0
    check_lock(None, collect())
    other = collect() | {"torch": "1.0"}
    with pytest.raises(UserError, match="environment.lock pins another") as refused:
        check_environment(tmp_path / "run", other, strict=False)
    assert refused.value.code == 78 and f"{tmp_path}/environment.lock" in str(refused.value)
    assert "torch: " in str(refused.value) and str(refused.value).endswith("fingerprint --lock")
    check_lock(elsewhere / "my.toml", other)
    monkeypatch.chdir(elsewhere)
    check_lock(None, other)


def test_commands_lock_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lock", str(tmp_path / "run.toml")]) == 0
    check_lock(tmp_path / "run.toml", collect())
    for name, values in {"a": BUILD, "b": BUILD | {"triton": "3.7.0"}}.items():
        (tmp_path / name).mkdir()
        write_fingerprint(tmp_path / name / "environment.json", values)
    capsys.readouterr()
    assert main(["--diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "triton: 3.6.0 -> 3.7.0" in capsys.readouterr().out
    assert main(["--diff", str(tmp_path / "a"), str(tmp_path / "a/environment.json")]) == 0
    with pytest.raises(UserError, match="cannot read"):
        main(["--diff", str(tmp_path / "a"), str(tmp_path / "nothing")])
    with pytest.raises(UserError, match="unrecognized"):
        main(["--nope"])


def test_a_lock_beside_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write .*nowhere/environment.lock: No such file") as refused:
        main(["--lock", str(tmp_path / "nowhere/x.toml")])
    assert refused.value.code == 78 and "\n" not in str(refused.value)


def _root() -> Path:
    return Path(__file__).resolve().parent.parent
