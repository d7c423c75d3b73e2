"""What a rank of a target takes, counted on meta, and who is refused for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from launcher.errors import UserError
from launcher.target_loading import refuse_too_few
from models.target_memory import CONTEXT_BYTES, TargetBytes, count_target, ranks_needed
from models.target_random import shape_config

LAYER_IDS = (1, 9, 17, 25, 33)


def count(evaluated: bool = False, shape: str = "qwen3-8b") -> TargetBytes:
    return count_target(shape_config(shape), LAYER_IDS, 3072, 126_000_000, 4, torch.bfloat16, evaluated)


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
