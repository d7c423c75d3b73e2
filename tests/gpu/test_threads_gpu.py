"""Why drafters are processes: the same first compile by threads of one process, and by ranks that take turns.

LAUNCHER_TEST_ROUNDS sets the rounds of the ranks, 2 by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
# A single thread takes 20 s with an empty cache.
THREADS_LIMIT = 40
ROUNDS = int(os.environ.get("LAUNCHER_TEST_ROUNDS", "2"))

THREADS = """
import sys, threading, traceback
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

def train() -> None:
    try:
        shape = (1, 4, 512, 64)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        compiled(q, k, v, block_mask=mask).sum().backward()
        torch.cuda.synchronize()
        print("clean", flush=True)
    except BaseException:
        print("error", traceback.format_exc().strip().splitlines()[-1][:200], flush=True)

torch.zeros(1, device="cuda")
threads = [threading.Thread(target=train) for _ in range(int(sys.argv[1]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def first_compile(threads: int, cache: Path) -> str:
    """`clean`, or how the threads of a fresh process failed with an empty cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    with subprocess.Popen(
        [sys.executable, "-c", THREADS, str(threads)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        try:
            said, _ = child.communicate(timeout=THREADS_LIMIT)
            ending = "" if child.returncode == 0 else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            child.kill()
            said, ending = child.communicate()[0], f"hang: not done after {THREADS_LIMIT} s"
    problems = [line for line in said.splitlines() if line != "clean"] + [ending] * bool(ending)
    return "; ".join(problems) or "clean"


def test_threads_of_one_process_fail_at_their_first_compile(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcome = first_compile(RANKS, tmp_path / "cache")
    record_property("threads", outcome)
    print(f"{RANKS} threads: {outcome}")
    assert outcome != "clean", "threads can compile now: README tells another story"


@pytest.mark.timeout(120 * ROUNDS + 60)
def test_ranks_that_take_turns_are_clean_in_every_round(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three four " * 8}]
    chats.write_text((json.dumps({"messages": messages}) + "\n") * 16)
    for number in range(ROUNDS):
        run_dir = tmp_path / f"round-{number}"
        done = subprocess.run([*command(run_dir, chats)], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout[-2000:]
        report = json.loads((run_dir / "compile_report.json").read_text())
        turns = [turn for turn in report["turns"] if turn["role"] == "drafter"]  # the target takes one of its own
        first, *others = turns
        assert report["verified"] and len(others) == RANKS - 1
        assert first["cache_misses"] > 0, "the round began with an empty cache"
        assert all(turn["cache_misses"] == 0 for turn in others)
        print(f"round {number}: " + ", ".join(f"rank {t['rank']} {t['seconds']} s {t['parts']}" for t in turns))


def command(run_dir: Path, chats: Path) -> list[str]:
    """A dry run of three drafters and a target on one GPU with a cache of its own."""
    flags = [
        "--preset=tiny",
        "--nproc=4",
        "--topology.targets=1",
        f"--topology.drafters={RANKS}",
        "--runtime.share_gpus=true",
        "--runtime.device=cuda",
        "--train.precision=bf16",
        "--data.row_length=256",
        "--data.holdout=2",
        "--train.anchors=32",
        "--dry-run",
        f"--data.path={chats}",
        f"--run-dir={run_dir}",
        f"--compile.cache_dir={run_dir}-cache",
    ]
    return [sys.executable, str(ROOT / "launcher" / "main.py"), *flags]
