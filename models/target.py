"""The frozen target: decoder layers up to the last tap, run over packed rows.

Notation: S row length, H hidden size, K tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from models.target_attention import NAME as PACKED_FLEX
from models.target_attention import check_servable, packed_row, uncompiled_allowed
from models.target_parallel import load_shard
from models.target_slices import TargetShard
from models.target_weights import LoadOptions, cut_config, load_config, load_model

PROBE_LENGTH = 24
PROBE_TOLERANCE = 0.1
"""Relative change of a probe's features: a leak or a wrong mask gives about 1, rounding below 0.02."""

MIXTURE_TOLERANCE = 0.3
"""The same on average for a mixture of experts, where rounding sends some tokens elsewhere."""


class TappedTarget(nn.Module):
    """Runs a decoder over one packed row and returns the outputs of the tapped layers. Frozen, no logits."""

    layers: nn.ModuleList

    def __init__(self, decoder: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        super().__init__()
        self.decoder = decoder.eval().requires_grad_(False)
        self.layers = decoder_layers(decoder)
        self.layer_ids = tuple(layer_ids)
        self._stock = str(decoder.config._attn_implementation)
        drop_final_norm(decoder)
        self.hidden_size: int = decoder.config.get_text_config(decoder=True).hidden_size
        self._features_SF: Tensor | None = None
        for slot, layer_id in enumerate(self.layer_ids):
            self.layers[layer_id].register_forward_hook(self._keep(slot))

    def _keep(self, slot: int) -> Any:
        def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            hidden_1SH = output[0] if isinstance(output, tuple) else output
            assert self._features_SF is not None, "a tapped layer ran outside of TappedTarget.forward"
            columns = slice(slot * self.hidden_size, (slot + 1) * self.hidden_size)
            self._features_SF[:, columns] = hidden_1SH[0]

        return hook

    @torch.no_grad()
    def forward(self, ids: Tensor, doc: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """Features of a packed row, each document as if it ran alone.

        Args:
            ids: token ids, int64 [S].
            doc: document of each token, int [S]; -1 is padding, whose features mean nothing.
            positions: position in its document, int64 [S], from 0 in each document.
            out: [S, K*H] in the model's dtype to write into, such as the buffer that will be sent.

        Returns:
            Outputs of the tapped layers (before any final norm), side by side in the order of `layer_ids`: [S, K*H].
        """
        # At position 0 throughout, every padding token is a document of its own.
        positions_1S = torch.where(doc < 0, 0, positions)[None]
        shape = (len(ids), len(self.layer_ids) * self.hidden_size)
        self._features_SF = torch.empty(shape, dtype=self.decoder.dtype, device=ids.device) if out is None else out
        # Without mask and cache, transformers isolates documents wherever positions do not go up by one; a mask of ones
        # spares it the search, which would wait for the device, where the documents are given.
        mask = torch.ones_like(ids)[None] if self.packed else None
        with packed_row(doc):
            self.decoder(input_ids=ids[None], attention_mask=mask, position_ids=positions_1S, use_cache=False)
        features_SF, self._features_SF = self._features_SF, None
        return features_SF

    @property
    def packed(self) -> bool:
        """Whether attention is FlexAttention over the documents' tiles, and not transformers' own with a dense mask."""
        return self.decoder.config._attn_implementation == PACKED_FLEX

    @property
    def attention_layers(self) -> int:
        """Layers that run softmax attention; some families mix in others."""
        kinds = getattr(self.decoder.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        return sum("linear" not in kind and "attention" in kind for kind in kinds)

    @property
    def mixes_experts(self) -> bool:
        """Whether layers choose experts by token, so that rounding may change which ones."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return any((getattr(self.decoder.config, name, None) or 0) > 1 for name in names)

    @contextmanager
    def stock_attention(self) -> Generator[None]:
        """Within it attention is the one that transformers chose: the reference, with a dense mask."""
        chosen = str(self.decoder.config._attn_implementation)
        self.decoder.set_attn_implementation(self._stock)
        try:
            yield
        finally:
            self.decoder.set_attn_implementation(chosen)

    def use_packed_attention(self) -> None:
        """Switch to FlexAttention, and prove on a small row that it gives the features of transformers' own.

        Raises:
            ValueError: the model cannot be served, or differs; says what to set.
        """
        check_servable(self.decoder)
        row = self._probe_row()
        expected = self(*row)
        self.decoder.set_attn_implementation(PACKED_FLEX)
        with uncompiled_allowed():
            error = float(token_errors(self(*row), expected).mean())
        if not error < (MIXTURE_TOLERANCE if self.mixes_experts else PROBE_TOLERANCE):
            raise ValueError(
                f"target.attention: flex gives {type(self.decoder).__name__} other features (by {error:.0%})"
                " -> set target.attention=sdpa (a dense mask, slower)"
            )

    def compile_layers(self, **options: Any) -> None:
        """Compile each layer on its own, in place; equal layers share one graph."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True, **options)

    def check_isolation(self) -> None:
        """Prove on a small row that a document does not see its neighbour.

        Raises:
            ValueError: it does (some recurrent and custom models ignore positions), or features are not finite.
        """
        beside_first, beside_other = (self(*self._probe_row(neighbour))[PROBE_LENGTH:] for neighbour in (7919, 104729))
        if not bool(beside_first.isfinite().all()):
            raise ValueError(f"target.model: {type(self.decoder).__name__} gives features that are not finite")
        if float(token_errors(beside_other, beside_first).max()) > PROBE_TOLERANCE:
            raise ValueError(
                f"target.model: {type(self.decoder).__name__} lets packed documents see each other"
                " -> choose a target whose layers all respect position_ids"
            )

    def _probe_row(self, neighbour: int = 7919) -> tuple[Tensor, Tensor, Tensor]:
        """ids, doc and positions of two short documents; the first one's ids follow from `neighbour`."""
        device, vocab_size = self.decoder.device, self.decoder.config.get_text_config(decoder=True).vocab_size
        index = torch.arange(PROBE_LENGTH, device=device)
        ids = torch.cat([index * neighbour % vocab_size, index * 1299709 % vocab_size])
        return ids, torch.arange(2, device=device).repeat_interleave(PROBE_LENGTH), index.repeat(2)


def token_errors(features: Tensor, expected: Tensor) -> Tensor:
    """The relative difference of each token's features, by norm: float32 [S] from two of [S, F]."""
    expected = expected.float()
    return (features.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def load_tapped_target(
    folder: Path,
    layer_ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    shard: TargetShard | None = None,
    before_probe: Callable[[], object] = lambda: None,
) -> TappedTarget:
    """Load the decoder layers up to the last tapped one; nothing above them, no head, is read.

    Args:
        shard: this rank's part of a target that several ranks share; all of them call this, and then run every row.
        before_probe: called once the weights are there, before the first forward.

    Raises:
        ValueError: impossible layer ids, weights missing, or a model that cannot run packed rows.
    """
    config = load_config(folder, trust_remote_code)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(set(layer_ids)) < len(layer_ids) or not all(0 <= layer_id < num_layers for layer_id in layer_ids):
        raise ValueError(f"target.layer_ids: {list(layer_ids)} are not distinct layers out of 0..{num_layers - 1}")
    cut = cut_config(config, max(layer_ids) + 1)
    model = _load(AutoModel, cut, LoadOptions(folder, dtype, torch.device(device), trust_remote_code), shard)
    target = TappedTarget(model.get_decoder(), layer_ids)
    before_probe()
    target.check_isolation()
    return target


def load_full_target(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    shard: TargetShard | None = None,
) -> PreTrainedModel:
    """The whole causal LM with its head, frozen, for decoding."""
    config = load_config(folder, trust_remote_code)
    options = LoadOptions(folder, dtype, torch.device(device), trust_remote_code)
    model = _load(AutoModelForCausalLM, config, options, shard)
    return model.eval().requires_grad_(False)


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The decoder's stack of layers."""
    stacks = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    if not stacks:
        raise ValueError(f"target.model: {type(decoder).__name__} has no list of layers to tap")
    return max(stacks, key=len)


def drop_final_norm(decoder: nn.Module) -> None:
    """Put nothing in the place of the norm behind the decoder's layers: taps are taken before it."""
    children = list(decoder.named_children())
    stack = [child for _, child in children].index(decoder_layers(decoder))
    for name, child in children[stack + 1 :]:
        if type(child).__name__.endswith("Norm"):
            setattr(decoder, name, nn.Identity())


def _load(
    auto_class: Any, config: PreTrainedConfig, options: LoadOptions, shard: TargetShard | None
) -> PreTrainedModel:
    if shard is None:
        return load_model(auto_class, config, options)
    return load_shard(auto_class, config, options, shard)
