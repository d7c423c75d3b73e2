"""Helpers: shapes of drafters; a tiny one, its rows and its training step, for tests on CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from launcher.config_sections import TrainConfig
from launcher.drafter_step import DrafterStep
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch

ROW_LENGTH, BLOCK_SIZE, ANCHORS, HIDDEN, VOCABULARY = 64, 4, 8, 32, 100
CONFIG = DFlashConfig(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_parameters=None,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    block_size=BLOCK_SIZE,
    mask_token_id=VOCABULARY - 1,
    target_layer_ids=(1, 2),
    num_target_layers=4,
)
# That of the published drafter for Qwen3-8B, for what needs its sizes and no weights.
QWEN3_8B = DFlashConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_parameters=None,
    vocab_size=151936,
    max_position_embeddings=40960,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)


def make_batch(index: int, supervised: int = ROW_LENGTH) -> RowBatch:
    """Random row `index`, of which the last `supervised` tokens carry loss."""
    generator = torch.Generator().manual_seed(index)
    loss_mask = torch.zeros(ROW_LENGTH, dtype=torch.bool)
    loss_mask[ROW_LENGTH - supervised :] = True
    return RowBatch(
        index,
        torch.randn(ROW_LENGTH, 2 * HIDDEN, generator=generator),
        torch.randint(0, VOCABULARY - 1, (ROW_LENGTH,), generator=generator),
        loss_mask,
        torch.zeros(ROW_LENGTH, dtype=torch.int32),
        torch.arange(ROW_LENGTH),
    )


def make_step(over: dist.ProcessGroup | DeviceMesh, compiled: bool = False, sharded: bool = True) -> DrafterStep:
    """The training step of the tiny drafter over a group or a mesh, always with the same weights."""
    torch.manual_seed(0)
    drafter = DFlashDrafter(CONFIG)
    if compiled:
        drafter.compile_layers()
    ends = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    train = TrainConfig(anchors=ANCHORS, precision="float32", warmup_ratio=0.0)
    return DrafterStep(
        drafter,
        lambda sharded: DraftForward(sharded, FrozenEnds(ends, ends), anchors=ANCHORS, backend="sdpa"),
        over if isinstance(over, DeviceMesh) else DeviceMesh.from_group(over, "cpu"),
        train,
        total_steps=10,
        sharded=sharded,
    )
