"""What a rank of a target takes, counted on meta, and who is refused for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from launcher.cli import parse
from launcher.errors import UserError
from launcher.plan_memory import target_bytes
from launcher.plan_shapes import run_shape
from launcher.row_layout import RowLayout
from launcher.target_loading import refuse_too_few
from models.shapes import SHAPES
from models.target_bytes import CONTEXT_BYTES, TargetBytes, fewest_ranks
from models.target_memory import count_target, ranks_needed
from models.target_random import shape_config

LAYER_IDS = (1, 9, 17, 25, 33)


def count(evaluated: bool = False, shape: str = "qwen3-8b") -> TargetBytes:
    return count_target(shape_config(shape), LAYER_IDS, 3072, 126_000_000, 2, torch.bfloat16, evaluated)


def test_weights_are_those_of_the_layers_that_run() -> None:
    need = count()
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288
    assert need.divided == 2 * 34 * layer
    embedding, rows = 2 * 151936 * 4096, 4 * 126_000_000
    rest = need.whole - embedding - rows - CONTEXT_BYTES
    assert 0 < rest < 1e9  # norms and activations
    assert need.of_rank(4) == need.divided // 4 + need.whole


def test_an_evaluation_needs_the_whole_model_beside_the_layers() -> None:
    plain, evaluated = count(), count(evaluated=True)
    assert evaluated.divided - plain.divided == pytest.approx(plain.divided * 36 / 34, rel=1e-3)
    assert evaluated.whole - plain.whole == pytest.approx(4 * 2 * 151936 * 4096, rel=1e-2)


def test_the_fewest_ranks_that_fit_and_divide_the_heads() -> None:
    config, need = shape_config("qwen3-8b"), count()
    assert ranks_needed(config, need, 141 * 10**9) == 1
    assert ranks_needed(config, need, need.of_rank(3)) == 4  # 8 key heads do not divide by 3
    assert ranks_needed(config, need, need.whole) is None
    alone = AutoConfig.for_model("phi3", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    assert ranks_needed(alone, TargetBytes(100, 10), 60) is None


def test_too_few_ranks_are_refused_with_the_number_that_would_do() -> None:
    need = TargetBytes(120 * 10**9, 10 * 10**9)
    refuse_too_few(need, 2, 80 * 10**9, 2)
    with pytest.raises(UserError, match="target_tp=1: a rank of the target needs 130 GB, its GPU has 80 GB") as caught:
        refuse_too_few(need, 1, 80 * 10**9, 2)
    assert "set it to 2" in str(caught.value)
    with pytest.raises(UserError, match="smaller target"):
        refuse_too_few(need, 8, 9 * 10**9, None)


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("prompts", [0, 10])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-14b", "smollm2-135m", "mixture"])
def test_a_plan_counts_what_the_run_counts(name: str, prompts: int, dtype: str, tmp_path: Path) -> None:
    raw = SHAPES.get(name, MIXTURE)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = [f"--target.model={tmp_path}", f"--target.dtype={dtype}", f"--eval.prompts={prompts}"]
    config = parse(["--preset=tiny", "--data.row_length=3072", *flags]).config
    shape, number = run_shape(config), getattr(torch, dtype)
    layer_ids, model = shape.drafter.target_layer_ids, AutoConfig.from_pretrained(tmp_path)
    layout = RowLayout(3072, len(layer_ids) * model.hidden_size, number)
    in_flight = config.topology.rows_in_flight
    run = count_target(model, layer_ids, layout.row_length, layout.nbytes, in_flight, number, prompts > 0)
    plan = target_bytes(shape)
    assert plan.divided == pytest.approx(run.divided, rel=0.01) and plan.whole == pytest.approx(run.whole, rel=0.01)
    for gigabytes in (2, 24, 48, 80, 141):
        memory = gigabytes * 10**9
        assert fewest_ranks(list(shape.target_sizes), plan, memory) == ranks_needed(model, run, memory), gigabytes
