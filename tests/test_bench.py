"""The bench command on CPU, and the work it counts."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import launcher.bench
from launcher.bench import main, table
from launcher.bench_target import target_table
from launcher.errors import UserError
from launcher.work_model import StepShape, datasheet, find_gpu, step_work, update_bytes

ROOT = Path(__file__).resolve().parents[1]
QWEN3_8B = StepShape(
    context=3072,
    anchors=512,
    block_size=16,
    hidden=4096,
    intermediate=12288,
    layers=5,
    query_width=4096,
    key_width=1024,
    vocabulary=151936,
    taps=5,
    visible=1552.0,
)


def test_work_of_the_8b_drafter_is_the_published_model() -> None:
    work, tokens = step_work(QWEN3_8B), 8192
    assert work.parameters == pytest.approx(1.0486e9, rel=1e-3)
    assert work.head / tokens == pytest.approx(2.49e9, rel=0.01)
    context = 3072 * (0.252e9 + 0.336e9)
    assert (work.total - context) / tokens == pytest.approx(8.7e9, rel=0.02)
    assert work.backward > 2 * work.forward - 2 * 3072 * 5 * 4096 * 4096


def test_bytes_of_the_update_and_datasheets() -> None:
    assert update_bytes(10) == 280
    assert datasheet("NVIDIA H200", "bf16") == 989.0
    assert datasheet("NVIDIA H200", "float8") == 1979.0
    assert datasheet("cpu", "bf16") is None and datasheet("NVIDIA H200", "float32") is None


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 sm_90", "H200"),
        ("h200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("NVIDIA B200", "B200"),
        ("h2000", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_a_datasheet_is_found_by_whole_words(name: str, sheet: str | None) -> None:
    found = find_gpu(name)
    assert (found.name if found else None) == sheet
    assert (datasheet(name, "bf16") is None) == (sheet is None)


# Two drafters are sharded as well.
@pytest.mark.parametrize(
    "flags",
    [[], pytest.param(["--sharded"], marks=pytest.mark.slow), ["--drafters", "2"], ["--precision", "float8"]],
)
def test_drafter_bench_runs_on_cpu(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    words = ["drafter", "--device", "cpu", "--context", "96", "--anchors", "4", "--steps", "2", "--json", "--warm"]
    assert main([*words, "--layers", "1", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["step_ms"] > 0 and report["rows_per_s"] > 0 and report["tflops"] > 0
    assert set(report["parts_ms"]) == set(report["floor_ms"])
    assert sum(report["parts_ms"].values()) == pytest.approx(report["step_ms"], rel=0.5)
    assert report["furthest"] in report["parts_ms"]
    assert report["rows_per_s"] == pytest.approx(report["drafters"] * 1e3 / report["step_ms"], rel=0.01)
    assert report["drafters"] == (2 if "--drafters" in flags else 1)
    assert "rows/s" in table(report)


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_target_bench_runs_on_cpu(attention: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    words = ["target", "--device", "cpu", "--context", "96", "--steps", "2", "--json", "--warm", "--taps", "2"]
    assert main([*words, "--precision", "float32", "--attention", attention]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    ways = ["stock eager", "ours eager", "ours compiled"]
    assert list(report["parts_ms"]) == list(report["floor_ms"]) == list(report["part_tflops"]) == ways
    assert report["layers"] == {"stock eager": 8, "ours eager": 6, "ours compiled": 6}
    assert report["tokens_per_s"] == pytest.approx(96e3 / report["parts_ms"]["ours compiled"], rel=0.01)
    assert 0 <= report["feature_error"] < 1e-4
    over = {way: report["parts_ms"][way] - report["floor_ms"][way] for way in ways}
    assert report["furthest"] == max(over, key=over.__getitem__)
    assert f"furthest from its floor: {report['furthest']}" in target_table(report)
    assert all(way in target_table(report) for way in ways)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="no shape"):
        main(["drafter", "--device", "cpu", "--shape", "nothing"])
    with pytest.raises(UserError, match="bench target: .*no shape"):
        main(["target", "--device", "cpu", "--shape", "nothing"])
    with pytest.raises(UserError, match="--context: invalid int value: 'many'"):
        main(["drafter", "--context", "many"])


COUNTS = {
    "drafter": ("--context", "--anchors", "--steps", "--layers", "--block-size", "--drafters"),
    "target": ("--context", "--documents", "--steps", "--taps"),
    "transfer": ("--context", "--steps", "--taps"),
    "pipeline": ("--context", "--anchors", "--steps", "--layers", "--block-size"),
}


@pytest.mark.parametrize("number", ["0", "-5"])
@pytest.mark.parametrize(("part", "option"), [(part, option) for part in COUNTS for option in COUNTS[part]])
def test_a_number_that_leaves_nothing_to_measure_is_refused(part: str, option: str, number: str) -> None:
    with pytest.raises(UserError) as caught:
        main([part, "--device", "cpu", option, number])
    lowest = 2 if option == "--block-size" else 1
    assert f"bench {part}: argument {option}: {number} is too few, give at least {lowest}" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.code == 78


def test_such_a_number_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys, runpy; sys.argv = ['main.py', 'bench', 'drafter', '--steps', '0']\n"
        "try: runpy.run_path('launcher/main.py', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and "--steps: 0 is too few" in done.stderr, done.stderr


@pytest.mark.parametrize("part", ["drafter", "target", "transfer", "pipeline"])
def test_every_option_that_a_bench_documents_exists(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    documented = (launcher.bench.__doc__ or "") + (importlib.import_module(f"launcher.bench_{part}").__doc__ or "")
    lines = [line for line in documented.splitlines() if f"./launch.sh bench {part}" in line]
    with pytest.raises(SystemExit):
        main([part, "--help"])
    known = capsys.readouterr().out
    assert all(option in known for line in lines for option in re.findall(r"--[a-z-]+", line)), lines
