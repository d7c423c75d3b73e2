"""A compiled step against dense float32: numbers and gradients of a few blocks, and every tile of the mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import embedding, pad

from models.anchors import Anchors
from models.dflash import DFlashDrafter
from models.draft_step import BlockInputs, DraftForward, RowBatch
from models.masks import dense_mask
from models.sharding import whole_tensor

REFERENCE_BLOCKS = 4


def reference_errors(
    drafter: DFlashDrafter, forward: DraftForward, batch: RowBatch, inputs: BlockInputs
) -> tuple[float, float]:
    """Relative errors of a few blocks' hidden states and parameter gradients against dense float32.

    The compiled drafter runs at its full shapes; the loss reaches only the chosen blocks, which a float32 copy with
    dense attention computes alone. Gradients of `drafter` are used up.
    """
    block_size, count = forward.block_size, inputs.anchors.position_N.shape[0]
    chosen = torch.linspace(0, count - 1, min(REFERENCE_BLOCKS, count), device=batch.doc.device).long().unique()
    rows = (chosen[:, None] * block_size + torch.arange(block_size, device=batch.doc.device)).flatten()
    hidden = forward.hidden(batch, inputs)
    generator = torch.Generator(batch.doc.device).manual_seed(0)
    probe = torch.randn(rows.shape[0], hidden.shape[1], device=hidden.device, generator=generator)
    (hidden[rows].float() * probe).sum().backward()

    reference = _float32_copy(drafter)
    anchors = Anchors(inputs.anchors.position_N[chosen], inputs.anchors.keep_N[chosen])
    mask = dense_mask(anchors, batch.doc, block_size, batch.doc.shape[0])
    embeddings = embedding(inputs.ids[rows], forward.ends.embed).float()
    expected = reference(embeddings, batch.features.float(), batch.positions, inputs.positions[rows], mask, "sdpa")
    (expected * probe).sum().backward()
    wanted = {name: param.grad for name, param in reference.named_parameters()}
    gradient_error = 0.0
    for name, param in drafter.named_parameters():
        grad, want = param.grad, wanted[name]
        assert grad is not None and want is not None
        gradient_error = max(gradient_error, _relative(whole_tensor(grad), want))
        param.grad = None
    return _relative(hidden[rows].detach(), expected.detach()), gradient_error


def mask_problems(mask: BlockMask, dense_QK: Tensor) -> list[str]:
    """What a mask's tile tables and predicate get wrong of the dense mask, a phrase each.

    A few blocks do not show a table that lost others; here every tile counts, for forward and for backward.

    Args:
        mask: as FlexAttention gets it.
        dense_QK: bool [queries, keys], what it should be.
    """
    row_size, column_size = mask.BLOCK_SIZE
    rows, columns = dense_QK.shape
    padded = pad(dense_QK, (0, -columns % column_size, 0, -rows % row_size))
    tiles = padded.unflatten(0, (-1, row_size)).unflatten(2, (-1, column_size))
    seen, whole = tiles.any(1).any(2), tiles.all(1).all(2)
    problems = []
    by_row = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    by_column = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    for side, tables, want, all_of in (("forward", by_row, seen, whole), ("backward", by_column, seen.mT, whole.mT)):
        partial, full = _listed(*tables[:2]), _listed(*tables[2:])
        for what, wrong in (
            ("lost", want & (partial + full == 0)),
            ("not masked", (full > 0) & ~all_of),
            ("visited twice", partial + full > 1),
        ):
            if count := int(wrong.sum()):
                problems.append(f"{count} of {want.numel()} tiles {what} in {side}")
    row_Q1 = torch.arange(rows, device=dense_QK.device)[:, None]
    column_K = torch.arange(columns, device=dense_QK.device)[None, :]
    zero = torch.zeros((), dtype=torch.long, device=dense_QK.device)
    if count := int((mask.mask_mod(zero, zero, row_Q1, column_K) != dense_QK).sum()):
        problems.append(f"the predicate differs for {count} of {dense_QK.numel()} pairs")
    return problems


def _listed(count: Tensor | None, index: Tensor | None) -> Tensor:
    """How often each tile is visited, int [rows of tiles, columns of tiles], from counts and indices."""
    assert count is not None and index is not None, "a table is missing"
    count, index = count[0, 0], index[0, 0]
    used = torch.arange(index.shape[1], device=index.device) < count[:, None]
    return torch.zeros_like(index).scatter_add_(1, index.long(), used.to(index.dtype))


def _float32_copy(drafter: DFlashDrafter) -> DFlashDrafter:
    """Dense and never compiled: the class's own forward, not the instance's."""
    with torch.device("meta"):
        copy = DFlashDrafter(drafter.config)
    weights = {name: whole_tensor(weight).detach().float() for name, weight in drafter.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    copy.rotary = drafter.rotary
    return copy.requires_grad_(True)


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Infinite where either is not finite: a NaN would compare as if it were no error."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))
    return error if math.isfinite(error) else math.inf
