"""Speculative decoding equals the target's greedy decoding token for token, and a good drafter fills its blocks."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.decode import DecodeResult, greedy_generate, speculative_generate
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch

VOCAB, MASK, BLOCK = 61, 60, 8

torch.set_num_threads(1)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "initializer_range": 0.3,  # makes greedy text of a random target varied instead of one repeated token
}


@cache
def target_of(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).eval()
    layer_types = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=layer_types)).eval()


def ends_of(model: PreTrainedModel) -> FrozenEnds:
    embed, head = model.get_parameter("model.embed_tokens.weight"), model.get_parameter("lm_head.weight")
    return FrozenEnds(embed.detach(), head.detach())


def random_drafter(model: PreTrainedModel, seed: int) -> DFlashDrafter:
    torch.manual_seed(seed)
    config = DFlashConfig.from_target(model.config, layers=2, block_size=BLOCK, mask_token_id=MASK, layer_ids=[1, 3])
    return DFlashDrafter(config).eval()


def check_result(result: DecodeResult, expected: list[int]) -> None:
    assert result.token_ids == expected
    assert sum(result.accepted) == max(len(expected) - 1, 0)
    assert all(1 <= gained <= BLOCK for gained in result.accepted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_drafter_gives_the_targets_own_tokens(family: str, seed: int) -> None:
    model = target_of(family, seed)
    drafter = random_drafter(model, seed)
    prompt = torch.randint(0, MASK, (1 + 6 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
    expected = greedy_generate(model, prompt, 40, stop_ids=())
    theirs: torch.Tensor = model.generate(  # pyrefly: ignore[not-callable]
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False
    )
    assert expected == theirs[0, len(prompt) :].tolist()
    check_result(speculative_generate(model, drafter, ends_of(model), prompt, 40, ()), expected)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 3, BLOCK])
def test_short_outputs(max_new_tokens: int) -> None:
    model = target_of("llama", 0)
    expected = greedy_generate(model, [5], max_new_tokens, ())
    assert len(expected) == max_new_tokens
    result = speculative_generate(model, random_drafter(model, 0), ends_of(model), [5], max_new_tokens, ())
    check_result(result, expected)


def test_an_empty_prompt_is_refused() -> None:
    model = target_of("llama", 0)
    with pytest.raises(ValueError, match="empty prompt"):
        speculative_generate(model, random_drafter(model, 0), ends_of(model), [], 4, ())


PROMPT = [7, 3, 11, 19]
LENGTH = 33


@cache
def memorised() -> tuple[PreTrainedModel, DFlashDrafter]:
    """A drafter trained by the real training step, for a few seconds, on the target's own continuation of PROMPT."""
    model = target_of("llama", 1)
    ids = torch.tensor(PROMPT + greedy_generate(model, PROMPT, LENGTH, ()))
    drafter = random_drafter(model, 0)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in drafter.config.target_layer_ids], dim=-1)
    positions = torch.arange(len(ids))
    row = {"features": features, "ids": ids, "loss_mask": positions >= len(PROMPT), "positions": positions}
    forward = DraftForward(drafter, ends_of(model), anchors=16, backend="sdpa", seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for index in range(120):
        sums = forward(RowBatch(index=index, doc=torch.zeros(len(ids), dtype=torch.int32), **row))
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, drafter.eval()


def test_a_memorised_chat_is_accepted_in_full_blocks() -> None:
    model, drafter = memorised()
    expected = greedy_generate(model, PROMPT, LENGTH, ())
    assert len(set(expected)) > 10, "the text must not be a trivial repetition"
    result = speculative_generate(model, drafter, ends_of(model), PROMPT, LENGTH, ())
    check_result(result, expected)
    assert result.accepted == [BLOCK] * ((LENGTH - 1) // BLOCK)


@pytest.mark.parametrize("offset", range(1, BLOCK + 2))
def test_a_stop_token_inside_an_accepted_block_ends_the_output(offset: int) -> None:
    model, drafter = memorised()
    text = greedy_generate(model, PROMPT, LENGTH, ())
    stop = text[BLOCK + offset]
    expected = text[: text.index(stop) + 1]
    assert greedy_generate(model, PROMPT, LENGTH, {stop}) == expected
    check_result(speculative_generate(model, drafter, ends_of(model), PROMPT, LENGTH, {stop}), expected)


def test_a_drafter_in_another_dtype_does_not_change_the_tokens() -> None:
    model, drafter = memorised()
    half = random_drafter(model, 0).to(torch.bfloat16)
    half.load_state_dict(drafter.state_dict())
    result = speculative_generate(model, half, ends_of(model), PROMPT, LENGTH, ())
    assert result.token_ids == greedy_generate(model, PROMPT, LENGTH, ())
    assert mean(result.accepted) > 0.7 * BLOCK
