"""Where the blocks of a row start: anchors drawn uniformly, afresh for each micro-batch.

Notation: S row length, N anchors (blocks) per row. A row is a packed sequence of documents; `doc_S` names the
document of each token, -1 where the row is padding. Each document's tokens are contiguous.
Nothing here waits for the device, so the draw costs a few small kernels and no pause of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MIX = 0xBF58476D1CE4E5B9
_MIX_MORE = 0x94D049BB133111EB
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class Anchors:
    """N slots in ascending order; surplus slots repeat the last anchor, come last and have `keep_N` False."""

    position_N: Tensor
    """int64, index of the anchor token in the row."""
    keep_N: Tensor
    """bool, whether the slot holds a drawn anchor."""


def valid_anchors(loss_mask_S: Tensor, doc_S: Tensor) -> Tensor:
    """Positions a block may start at: supervised, followed by a supervised token of the same document.

    A block may reach past the end of its document; the surplus tokens then carry no loss.

    Args:
        loss_mask_S: bool, whether a token is a training target.
        doc_S: int32, document of a token, -1 for padding.

    Returns:
        bool [S].
    """
    pair = loss_mask_S[:-1] & loss_mask_S[1:] & (doc_S[:-1] == doc_S[1:]) & (doc_S[:-1] >= 0)
    return torch.nn.functional.pad(pair, (0, 1))


def sample_anchors(loss_mask_S: Tensor, doc_S: Tensor, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Draw `num_anchors` valid anchors uniformly without replacement, in ascending order.

    Ascending anchors never change the loss, but neighbours then see nearly the same context, so that most
    attention tiles are either full or empty. The slots are always `num_anchors`, however few anchors are valid.

    Args:
        loss_mask_S: bool, whether a token is a training target.
        doc_S: int32, document of a token, -1 for padding.
        num_anchors: slots to fill.
        generator: on the device of the row; see `anchor_generator`.
    """
    row_length = doc_S.shape[0]
    valid_S = valid_anchors(loss_mask_S, doc_S)
    draw_S = torch.rand(row_length, device=doc_S.device, generator=generator).masked_fill_(~valid_S, 2.0)
    drawn, chosen = draw_S.topk(min(num_anchors, row_length), largest=False)
    # A slot without an anchor gets the index S, which sorts last.
    slot_N = torch.where(drawn < 2.0, chosen, row_length).sort().values
    slot_N = torch.nn.functional.pad(slot_N, (0, num_anchors - slot_N.shape[0]), value=row_length)
    keep_N = slot_N < row_length
    last = torch.where(keep_N, slot_N, 0).max()
    return Anchors(torch.where(keep_N, slot_N, last), keep_N)


def anchor_generator(seed: int, micro_batch: int, device: torch.device | str) -> torch.Generator:
    """The generator of one micro-batch: a pure function of the run's seed and the global micro-batch index.

    Neighbouring seeds and indices are mixed (splitmix64), so that their draws are unrelated.
    """
    state = (seed * _GOLDEN + micro_batch + 1) & _MASK_64
    for multiplier, shift in ((_MIX, 30), (_MIX_MORE, 27)):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK_64
    generator = torch.Generator(device=device)
    return generator.manual_seed((state ^ (state >> 31)) >> 1)
