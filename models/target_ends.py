"""The target's frozen ends, shared with the drafter: token embedding, LM head, and the id of the mask token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from models.draft_step import FrozenEnds
from models.target_random import RandomWeights
from models.target_weights import load_config, tensor_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLD_HEAD_NAMES = ["embed_out.weight"]
"""What GPT-NeoX files call the head."""


def load_frozen_ends(
    folder: Path, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> FrozenEnds:
    """Read only the embedding and the head: two tensors [V, H] on `device`, one and the same where they are tied.

    The embedding is the raw table even where the model scales it (Gemma), as the official drafter reads it.

    Raises:
        ValueError: a tensor is missing or has fewer rows than the vocabulary.
    """
    config = load_config(folder, trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    names = {id(module): name for name, module in skeleton.named_modules()}
    rows, hidden_size = embedding.weight.shape

    def read(module: torch.nn.Module) -> Tensor:
        return _read(folder, f"{names[id(module)]}.weight", (rows, hidden_size), dtype, torch.device(device))

    embed_VH = read(embedding)
    tied = config.get_text_config(decoder=True).tie_word_embeddings or config.tie_word_embeddings
    return FrozenEnds(embed=embed_VH, head=embed_VH if tied else read(head))


def default_mask_token_id(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The first embedding row that no token of the tokenizer uses (151669 for Qwen3).

    Raises:
        ValueError: the tokenizer uses every row; the option that chooses a token is named.
    """
    rows = config.get_text_config(decoder=True).vocab_size
    used = set(tokenizer.get_vocab().values())
    for token_id in range(rows):
        if token_id not in used:
            return token_id
    reserved = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    spare = [f"{token_id} {token}" for token_id, token in _added_tokens(tokenizer) if token_id not in reserved]
    hint = f", for example {spare[-1]}" if spare else ""
    raise ValueError(
        f"drafter.mask_token_id: the tokenizer uses all {rows} rows of the embedding"
        f" -> name a token that never occurs in the chats{hint}"
    )


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    return sorted((token_id, str(token)) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)


def _read(folder: Path, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of this name, cut to the vocabulary's rows where a file pads it."""
    if RandomWeights.marked(folder):
        weight = torch.empty(shape, dtype=dtype, device=device)
        RandomWeights.of(folder).fill(name, weight)
        return weight
    files = tensor_files(folder)
    # Wrapped models are stored under other prefixes than they have in memory, so the last two parts of a name decide.
    endings = [".".join(name.split(".")[-2:])] + OLD_HEAD_NAMES * (name == "lm_head.weight")
    found = sorted((key for key in files if any(f".{key}".endswith(f".{ending}") for ending in endings)), key=len)
    if not found:
        raise ValueError(f"target.model: no tensor {name} in {folder}")
    rows, hidden_size = shape
    with safe_open(files[found[0]], framework="pt", device=str(device)) as file:
        weight = file.get_tensor(found[0])
    if weight.shape[0] < rows or weight.shape[1] != hidden_size:
        raise ValueError(f"target.model: {found[0]} is {list(weight.shape)}, expected {list(shape)}")
    # contiguous() of a slice at the start is a view that keeps the padding alive, hence clone()
    return (weight[:rows].clone() if weight.shape[0] > rows else weight).to(dtype)
