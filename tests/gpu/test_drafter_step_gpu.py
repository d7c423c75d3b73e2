"""The whole training step on a GPU: no wait for the device, no second compile, the same losses in float8 and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from launcher.bench_drafter import BenchOptions, _make_batch, _make_step
from launcher.bench_timing import Marks
from models.dflash import DFlashConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONFIG = DFlashConfig(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_parameters=None,
    vocab_size=4096,
    max_position_embeddings=4096,
    block_size=16,
    mask_token_id=4095,
    target_layer_ids=(1, 3),
    num_target_layers=8,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_steps_never_wait_nor_compile_again_and_agree() -> None:
    losses = {}
    for precision, sharded in (("bf16", False), ("bf16", True), ("float8", False)):
        torch._dynamo.reset()
        marks = Marks("cuda")
        options = BenchOptions(CONFIG, 640, 40, precision, sharded, 1, "cuda")
        torch.manual_seed(0)
        step, batch = _make_step(options, marks), _make_batch(options)
        results = []
        for number in range(4):
            marks.begin()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
                try:
                    step.accumulate(batch, last=True)
                    results.append(step.update(number))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        losses[precision, sharded] = [result.read()["loss"] for result in results]
    whole = losses["bf16", False]
    assert losses["bf16", True] == pytest.approx(whole, rel=2e-3)
    assert losses["float8", False] == pytest.approx(whole, rel=1e-2)
