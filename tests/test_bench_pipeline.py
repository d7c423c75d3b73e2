"""The benches of the hand-off and of a whole run, on CPU with a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.bench import main
from launcher.bench_alone import Alone
from launcher.bench_pipeline import (
    WARM_UP,
    PipelineOptions,
    pipeline_config,
    pipeline_table,
    rates_of_run,
    run_launcher,
    sides_alone,
    write_chats,
)
from launcher.bench_transfer import share_of_link, transfer_table
from launcher.cli import parse
from launcher.config import for_device
from launcher.errors import LauncherError
from launcher.plan_shapes import run_shape


def words_of(path: Path) -> list[int]:
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [len(chat[1]["content"].split()) for chat in chats]


def test_chats_are_the_same_every_time_and_long_tailed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_chats(tmp_path / name, words=50_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    lengths = sorted(words_of(tmp_path / "a"))
    assert 50_000 <= sum(lengths) < 50_000 + lengths[-1]
    assert lengths[-1] > 8 * lengths[len(lengths) // 2] > 800


def step(seconds: float, rows: float, wait: float) -> dict[str, Any]:
    return {"step_seconds": seconds, "rows_per_s": rows, "data_wait": wait, "target_wait": 0.5, "rows_ready": 2}


def test_rates_leave_the_first_steps_out_and_weigh_by_time() -> None:
    steps = [step(9.0, 0.1, 1.0)] * WARM_UP + [step(1.0, 8.0, 0.0), step(3.0, 4.0, 0.2)] * WARM_UP
    assert rates_of_run(steps) == {"rows_per_s": 5.0, "data_wait": 0.15, "target_wait": 0.5, "rows_ready": 2.0}
    assert rates_of_run(steps[-2:])["rows_per_s"] == 4.0, "of a short run its later half"


def test_transfer_moves_rows_and_hides_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--device", "cpu", "--context", "64", "--steps", "12", "--warm", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["backend"] == "gloo" and report["row_mb"] == pytest.approx(64 * (5 * 64 * 4 + 13) / 1e6, abs=1e-3)
    assert report["gbs"] == pytest.approx(report["row_mb"] / report["row_ms"], rel=0.1, abs=0.002)
    assert 0 <= report["hidden"] <= 1 and report["wait_ms_behind_compute"] < report["compute_ms"]
    assert report["row_median_ms"] > 0 and report["link_gbs"] is None and report["share_of_link"] is None
    assert "median" in transfer_table(report) and "datasheet" not in transfer_table(report)


def test_a_rate_between_two_gpus_is_a_share_of_their_links_datasheet() -> None:
    assert share_of_link("NVIDIA H200", "nccl", 90e9) == {"link_gbs": 450.0, "share_of_link": 0.2}
    inside_one = share_of_link("NVIDIA H200", "gloo", 90e9)
    assert inside_one == share_of_link("NVIDIA H20", "nccl", 90e9) == {"link_gbs": None, "share_of_link": None}


def test_the_sides_of_a_pipeline_are_counted_as_their_own_benches_count() -> None:
    """The README's figures of one H200: 67.6 ms and 611 TFLOP/s of the target, 129.6 ms and 565 of the drafter."""
    alone = Alone(1 / 0.0676, 1 / 0.1296, "NVIDIA H200", "2.11.0", 683e12, 683e12, 1024.0)
    config = for_device(parse(["--preset=qwen3-8b", "--target.model=random:qwen3-8b"]).config, "cuda")
    sides = sides_alone(run_shape(config), alone, 512)
    target, drafter = sides["target"], sides["drafter"]
    assert target["tflops"] == pytest.approx(611, rel=0.02) and drafter["tflops"] == pytest.approx(565, rel=0.02)
    assert target["share_of_matmul"] == pytest.approx(611 / 683, rel=0.02)
    assert target["share_of_datasheet"] == pytest.approx(611 / 989, rel=0.02)
    fewer = sides_alone(run_shape(config), alone, 256)["drafter"]["tflops"]
    assert fewer is not None and drafter["tflops"] is not None and fewer < 0.6 * drafter["tflops"]


@pytest.mark.slow
def test_pipeline_runs_the_launcher_and_both_sides_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    words = ["--context", "64", "--anchors", "4", "--layers", "1", "--block-size", "4", "--precision", "float32"]
    assert main(["pipeline", "--device", "cpu", "--steps", "14", *words, "--warm", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    slower = min(report["target_alone"], report["drafter_alone"])
    assert report["share_of_slower"] == pytest.approx(report["rows_per_s"] / slower, rel=1e-3)
    assert report["rows_per_s"] > 0 and 0 <= report["data_wait"] <= 1 and report["steps"] == 14
    for side in report["sides"].values():
        assert side["tflops"] > 0 and side["share_of_matmul"] == pytest.approx(
            side["tflops"] / side["matmul_tflops"], rel=0.05
        )
        assert side["share_of_datasheet"] is None
    assert report["peak_gb"] == {"target": 0, "drafter": 0} and "alone: target" in pipeline_table(report)


@pytest.mark.slow
def test_a_run_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    options = PipelineOptions("tiny", 64, 4, 1, 4, "float32", 4, "cpu", False)
    config = pipeline_config(options, tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"messages": 3}\n')
    with pytest.raises(LauncherError, match="the run ended with code 78:(.|\n)*chats.jsonl:1"):
        run_launcher(config, tmp_path)
