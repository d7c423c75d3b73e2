"""The gate on a GPU: a real turn is proved, and each way to lose fused, block-sparse attention is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import models.draft_step
import models.drafter_layer
from launcher.config_sections import TrainConfig
from launcher.drafter_step import DrafterStep
from models.attention import Backend
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch
from models.drafter_layer import DFlashLayer
from models.masks import block_mask, dense_mask
from tests.gates import Passed, lone_group, pass_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Dense attention would add 3.2 GB in each layer, several times what the whole step takes.
ROW_LENGTH, ANCHORS, LAYERS = 2048, 256, 3
CONFIG = DFlashConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_parameters=None,
    vocab_size=8192,
    max_position_embeddings=8192,
    block_size=16,
    mask_token_id=8191,
    target_layer_ids=(1, 3),
    num_target_layers=8,
)
Trick = Callable[[DrafterStep, RowBatch, pytest.MonkeyPatch], None]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with lone_group("nccl") as group:
        yield group
    torch.cuda.empty_cache()


def make_step(group: dist.ProcessGroup, sharded: bool, precision: str, compiled: bool) -> DrafterStep:
    torch.manual_seed(0)
    with torch.device("cuda"):
        drafter = DFlashDrafter(CONFIG)
        table = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, dtype=torch.bfloat16)
    if compiled:
        drafter.compile_layers()
    train = TrainConfig.model_validate({"anchors": ANCHORS, "precision": precision})
    return DrafterStep(
        drafter,
        lambda module: DraftForward(
            module, FrozenEnds(table, table), anchors=ANCHORS, backend="flex", float8=precision == "float8"
        ),
        DeviceMesh.from_group(group, "cuda"),
        train,
        total_steps=10,
        sharded=sharded,
    )


def make_batch() -> RowBatch:
    """Two documents, all of it supervised."""
    index_S = torch.arange(ROW_LENGTH, device="cuda")
    doc_S = (index_S >= ROW_LENGTH // 3).int()
    return RowBatch(
        0,
        torch.randn(ROW_LENGTH, 2 * CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16),
        torch.randint(0, CONFIG.vocab_size - 1, (ROW_LENGTH,), device="cuda"),
        torch.ones(ROW_LENGTH, dtype=torch.bool, device="cuda"),
        doc_S,
        index_S - doc_S * (ROW_LENGTH // 3),
    )


@pytest.mark.parametrize(
    ("sharded", "precision", "accumulation"), [(False, "bf16", 1), (True, "bf16", 2), (False, "float8", 1)]
)
def test_a_good_turn_is_proved(
    group: dist.ProcessGroup, tmp_path: Path, sharded: bool, precision: str, accumulation: int
) -> None:
    step = make_step(group, sharded, precision, compiled=True)
    passed = pass_alone(step, make_batch(), tmp_path, accumulation)
    assert passed.error is None and passed.report["verified"] and passed.report["attention"] == "flex"
    proof = passed.proof
    wanted = LAYERS * accumulation
    assert sum(count for name, count in proof["kernels"].items() if "backward" in name) == wanted
    assert sum(proof["kernels"].values()) == 2 * wanted
    assert 0 < proof["peak_bytes"] < proof["bound_bytes"] < proof["dense_bytes"] / 2
    assert f"{wanted} forward and {wanted} backward flex kernels" in passed.console[0]
    print(passed.console[0], passed.turn and passed.turn.parts)


def _failing_backend(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("no kernel for this graph")


def _suppressed(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing compile whose error is suppressed."""
    step.drafter.compile_layers(backend=cast(Any, _failing_backend))


def _suppressed_with_graph_breaks(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where torch may go on uncompiled; only the guard in `attend` stands between it and dense scores."""
    step.drafter.compile_layers()
    for layer in cast("list[DFlashLayer]", list(step.drafter.layers)):
        layer.forward = torch.compile(DFlashLayer.forward.__get__(layer), backend=_failing_backend)


def _nested_trace(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread traces, and torch is told not to mind."""
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    step.drafter.compile_layers()


def _compiled(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it should be; the trick is in the settings."""
    step.drafter.compile_layers()


def _eager_flex(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention uncompiled, past the guard: dense scores."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, backend: Backend) -> Any:
        if backend != "flex":
            return honest(q, k, v, mask, backend)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    honest = models.drafter_layer.attend  # what the float32 reference goes on with
    monkeypatch.setattr(models.drafter_layer, "attend", attend)


def _dense(step: DrafterStep, batch: RowBatch) -> torch.Tensor:
    inputs = step.forward.block_inputs(batch)
    return dense_mask(inputs.anchors, batch.doc, CONFIG.block_size, ROW_LENGTH)


def _dense_sdpa(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA with the dense mask in place of flex, compiled and right in its numbers."""
    dense = _dense(step, batch)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, backend: Backend) -> torch.Tensor:
        if backend != "flex":
            return honest(q, k, v, mask, backend)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense[None, None], enable_gqa=True)

    honest = models.drafter_layer.attend
    monkeypatch.setattr(models.drafter_layer, "attend", attend)
    step.drafter.compile_layers()


def _one_dense_layer(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in one layer of three."""
    dense = _dense(step, batch)
    step.drafter.compile_layers()
    layer = cast("list[DFlashLayer]", list(step.drafter.layers))[1]

    def forward(x: torch.Tensor, context: torch.Tensor, rope: Any, mask: Any, backend: Backend) -> torch.Tensor:
        return DFlashLayer.forward(layer, x, context, rope, dense, "sdpa")

    layer.forward = cast(Any, torch.compile(forward, dynamic=False, fullgraph=True))


def _lost_tile(step: DrafterStep, batch: RowBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of the forward's table is gone, in a row of tiles that holds no reference block."""

    def lossy(*args: Any) -> BlockMask:
        mask = block_mask(*args)
        count = mask.kv_num_blocks.clone()
        count[..., 5] -= 1
        mask.kv_num_blocks = count
        return mask

    monkeypatch.setattr(models.draft_step, "block_mask", lossy)
    step.drafter.compile_layers()


@pytest.mark.parametrize(
    ("trick", "settings", "missing"),
    [
        (_suppressed, {"suppress_errors": True}, "no kernel for this graph"),
        (_suppressed_with_graph_breaks, {"suppress_errors": True}, ""),
        (_nested_trace, {"error_on_nested_fx_trace": False}, ""),
        (_compiled, {"recompile_limit": 1}, "FailOnRecompileLimitHit"),
        (_eager_flex, {}, "kernel ran 0 times"),
        (_eager_flex, {}, "over the block-sparse bound"),
        (_dense_sdpa, {}, "kernel ran 0 times instead of 3 in forward"),
        (_one_dense_layer, {}, "kernel ran 2 times instead of 3 in backward"),
        (_lost_tile, {}, "tiles lost in forward"),
    ],
)
def test_the_gate_is_not_fooled(
    group: dist.ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trick: Trick,
    settings: dict[str, Any],
    missing: str,
) -> None:
    """`settings` are torch._dynamo's; an empty `missing` leaves the words to torch or to `attend`."""
    step, batch = make_step(group, False, "bf16", compiled=False), make_batch()
    trick(step, batch, monkeypatch)
    with torch._dynamo.config.patch(settings):
        passed = pass_alone(step, batch, tmp_path)
    assert_caught(passed, missing)


def assert_caught(passed: Passed, missing: str) -> None:
    assert passed.error is not None and not passed.report["verified"]
    assert passed.proof["missing"] and "NOT PROVED" in passed.console[0]
    assert missing in "; ".join(passed.proof["missing"])
    print(passed.console[0][:300])
