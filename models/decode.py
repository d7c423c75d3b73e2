"""Greedy decoding of the target, alone and with a drafter: the second must give the first's tokens in fewer steps.

A speculative step: the newest token (not yet run by the target) and mask tokens form a block; the drafter fills the
block in one pass; the target runs the block once and keeps its longest correct prefix plus its own next token. The
target's key-value cache is cut back to what was kept, and the hidden states of the kept tokens become the drafter's
next context. Source: the decode loop of the DFlash paper.

Shapes: B block size, H hidden, K tapped layers, V vocabulary. Batch size is 1 throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from models.dflash import DFlashDrafter

if TYPE_CHECKING:
    from models.draft_step import FrozenEnds


@dataclass(frozen=True)
class DecodeResult:
    """The new tokens, and how many each step of the target gained."""

    token_ids: list[int]
    """New tokens only; a stop token, if any, is the last one."""
    accepted: list[int] = field(default_factory=list)
    """Per target step after the prompt: correct drafted tokens + 1, cut where the output ends; sums to len - 1."""


@torch.no_grad()
def greedy_generate(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """The target's own greedy continuation, one token a step; ends after a stop token or `max_new_tokens`."""
    target = _CachedTarget(model, layer_ids=())
    output: list[int] = []
    step_ids = list(prompt_ids)
    while len(output) < max_new_tokens and not (output and output[-1] in stop_ids):
        step_ids = [target.run(step_ids, num_logits=1).next_ids[-1]]
        output += step_ids
    return output


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> DecodeResult:
    """The same tokens as `greedy_generate`, by drafting and verifying whole blocks.

    model, drafter and ends are on one device; the drafter's dtype may differ from the target's. The drafter must be a
    plain module (not sharded). Equality is exact as long as the target's argmax does not depend on how many tokens run
    at once: in float32 it does not, in bfloat16 near-ties may fall differently.
    Raises ValueError for an empty prompt or a target whose state cannot be rewound.
    """
    if max_new_tokens < 1:
        return DecodeResult([])
    target = _CachedTarget(model, drafter.config.target_layer_ids)
    proposer = _Proposer(drafter, ends)
    step = target.run(prompt_ids, num_logits=1)
    output, accepted = [step.next_ids[-1]], []
    features = step.features
    while len(output) < max_new_tokens and output[-1] not in stop_ids:
        block_ids = [output[-1]]
        room = max_new_tokens - len(output)
        if room > 1:
            block_ids += proposer.propose(output[-1], features, target.length)[: room - 1]
        before = target.length
        step = target.run(block_ids, num_logits=len(block_ids))
        gained = _until_stop(_verified(block_ids, step.next_ids), stop_ids)
        output += gained
        accepted.append(len(gained))
        target.rewind(before + len(gained))
        features = step.features[: len(gained)]
    return DecodeResult(output, accepted)


def _verified(block_ids: list[int], next_ids: list[int]) -> list[int]:
    """Drafted tokens that the target would have chosen itself, up to the first that is not, and its choice there."""
    matches = 0
    while matches + 1 < len(block_ids) and block_ids[matches + 1] == next_ids[matches]:
        matches += 1
    return next_ids[: matches + 1]


def _until_stop(ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """The ids up to and including the first stop token."""
    ends = [index + 1 for index, token in enumerate(ids) if token in stop_ids]
    return ids[: ends[0]] if ends else ids


class _Proposer:
    """Drafter, its cache, and the target's embedding and head: from the newest token to B - 1 proposed ones."""

    def __init__(self, drafter: DFlashDrafter, ends: FrozenEnds) -> None:
        self._drafter, self._ends = drafter, ends
        self._cache = drafter.new_cache()
        self._dtype = drafter.fc.weight.dtype

    def propose(self, newest: int, new_features: Tensor, start: int) -> list[int]:
        """Proposals for positions start + 1 .. start + B - 1; new_features [n, K*H] end right before `start`."""
        config = self._drafter.config
        block_ids = torch.full((config.block_size,), config.mask_token_id, device=self._ends.embed.device)
        block_ids[0] = newest
        embeddings_BH = F.embedding(block_ids, self._ends.embed).to(self._dtype)
        hidden_BH = self._drafter.draft(embeddings_BH, new_features.to(self._dtype), self._cache, start)
        logits_BV = F.linear(hidden_BH[1:].to(self._ends.head.dtype), self._ends.head)
        return logits_BV.argmax(-1).tolist()


@dataclass(frozen=True)
class _TargetStep:
    next_ids: list[int]
    """The target's choice after each of the last `num_logits` tokens run."""
    features: Tensor
    """[tokens run, K*H] outputs of the tapped layers."""


class _CachedTarget:
    """A target with its key-value cache, run on a few tokens at a time and rewound after wrong ones."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._model, self._layer_ids = model, layer_ids
        self._cache = _rewindable_cache(model.config)
        # transformers renames the argument; its old name still serves models that ship their own code
        self._cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self.length = 0

    def run(self, ids: Sequence[int], num_logits: int) -> _TargetStep:
        """Append `ids` to the sequence."""
        if not ids:
            raise ValueError("cannot decode from an empty prompt: give at least one token")
        ids_1n = torch.tensor([list(ids)], device=self._model.device)
        output = self._model(
            ids_1n,
            **{self._cache_argument: self._cache},
            use_cache=True,
            logits_to_keep=num_logits,
            output_hidden_states=bool(self._layer_ids),
        )
        self.length += len(ids)
        # hidden_states[0] is the embedding, so the output of 0-based layer l is entry l + 1
        taps = [output.hidden_states[layer_id + 1][0] for layer_id in self._layer_ids]
        features = torch.cat(taps, dim=-1) if taps else output.logits.new_empty(len(ids), 0)
        return _TargetStep(output.logits[0].argmax(-1).tolist(), features)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if surplus := self.length - length:
            self._cache.crop(-surplus)
        self.length = length


def _rewindable_cache(config: Any) -> DynamicCache:
    """A cache that can be cut back; ValueError where transformers cannot do that for this target.

    Plain attention layers keep all keys and values, sliding-window layers too (the mask applies the window), so that
    any cut is exact. Recurrent layers can only be rewound by a transformers that records their states.
    """
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    if kinds <= {"full_attention", "sliding_attention", "chunked_attention"}:
        return DynamicCache()
    cache = DynamicCache(config=config)
    if not hasattr(cache, "activate_past_recording"):
        raise ValueError(f"this transformers cannot rewind {', '.join(sorted(kinds))} layers: use a newer release")
    cache.activate_past_recording()
    return cache
