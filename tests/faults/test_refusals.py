"""Starts that must be refused at once, before any rank or any import of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launcher.run_folder import lock_run
from launcher.trial import ROOT

MAIN = str(ROOT / "launcher" / "main.py")
WRONG = ["--drafter.layer=2", "--train.lr=fast", "--data.path=none.jsonl"]


def _start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_all_problems_of_a_configuration_at_once(tmp_path: Path) -> None:
    ended = _start(MAIN, "--preset=tiny", f"--run-dir={tmp_path / 'run'}", *WRONG)
    assert ended.returncode == 78
    assert len(ended.stderr.splitlines()) == 3 and "did you mean" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_under_a_bare_torchrun_one_rank_says_it(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--log-dir", str(tmp_path)]
    ended = _start(*torchrun, "--redirects=3", MAIN, "--preset=tiny", *WRONG)
    assert ended.returncode != 0
    said = [path.read_text() for path in sorted(tmp_path.rglob("stderr.log"))]
    assert sum("train.lr" in text for text in said) == 1


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with lock_run(run_dir):
        ended = _start(MAIN, "--preset=tiny", f"--run-dir={run_dir}")
    assert ended.returncode == 78
    assert "is in use by pid" in ended.stderr and "Traceback" not in ended.stderr
