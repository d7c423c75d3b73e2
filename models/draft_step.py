"""The forward of one micro-batch, from features to loss: the same callable for the gate, training and the bench.

Notation: S row length, N anchors, B block size, H target hidden, K tapped layers, V vocabulary. A micro-batch is
one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from models.anchors import Anchors, anchor_generator, sample_anchors
from models.float8 import Head8, linear8, require_float8
from models.loss import LossKind, LossSums, block_labels, default_gamma, draft_loss
from models.masks import block_mask, dense_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from models.attention import Backend
    from models.dflash import DFlashDrafter


@dataclass(frozen=True)
class RowBatch:
    """One packed row with the target's features; all tensors on the drafter's device."""

    index: int
    """Global micro-batch index: with the seed, all that the anchors depend on."""
    features: Tensor
    """[S, K*H], outputs of the tapped layers side by side."""
    ids: Tensor
    """int64 [S]."""
    loss_mask: Tensor
    """bool [S], whether a token is a training target."""
    doc: Tensor
    """int32 [S], document of each token, contiguous; -1 for padding."""
    positions: Tensor
    """int64 [S], counted from 0 in each document."""


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head, shared and never trained; one and the same tensor if the target ties them."""

    embed: Tensor
    """[V, H]."""
    head: Tensor
    """[V, H]."""


@dataclass(frozen=True)
class BlockInputs:
    """What the blocks of a row need besides its features."""

    anchors: Anchors
    ids: Tensor
    """int64 [N*B]: the anchor's token, then mask tokens; mask tokens alone in padding blocks."""
    positions: Tensor
    """int64 [N*B]: position of the anchor in its document, counted on."""
    mask: BlockMask | Tensor
    """BlockMask for flex, bool [N*B, S+N*B] for SDPA."""


class DraftForward:
    """Anchors, mask, drafter, head and loss of one row. Holds no state between calls and never waits for the device."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        ends: FrozenEnds,
        *,
        anchors: int,
        backend: Backend,
        loss: LossKind = "decay",
        gamma: float | None = None,
        alpha: float = 0.5,
        seed: int = 0,
        float8: bool = False,
    ) -> None:
        """
        Args:
            drafter: the drafter, its layers compiled if the backend is flex.
            ends: embedding and head of the target, in the compute dtype.
            anchors: N, blocks per row.
            backend: attention backend; decides the form of the mask.
            loss: position weights.
            gamma: decay; default by block size.
            alpha: smoothing of D-PACE.
            seed: seed of the anchors.
            float8: run the GEMMs of block rows and of the head in float8.

        Raises:
            ValueError: float8 cannot run at these sizes or on this GPU.
        """
        config = drafter.config
        self.drafter, self.ends = drafter, ends
        self.head: Tensor | Head8 = ends.head
        if float8:
            _use_float8(drafter, ends, anchors)
            self.head = Head8.of(ends.head)
        self.anchors, self.backend, self.seed = anchors, backend, seed
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.loss, self.gamma, self.alpha = loss, gamma or default_gamma(config.block_size), alpha

    def block_inputs(self, batch: RowBatch) -> BlockInputs:
        """Draw the anchors of a row and lay out its blocks and their mask."""
        generator = anchor_generator(self.seed, batch.index, batch.doc.device)
        anchors = sample_anchors(batch.loss_mask, batch.doc, self.anchors, generator)
        first_N = torch.where(anchors.keep_N, batch.ids[anchors.position_N], self.mask_token_id)
        ids_NB = torch.nn.functional.pad(first_N[:, None], (0, self.block_size - 1), value=self.mask_token_id)
        offset_B = torch.arange(self.block_size, device=batch.doc.device)
        positions_NB = batch.positions[anchors.position_N][:, None] + offset_B
        build = block_mask if self.backend == "flex" else dense_mask
        mask = build(anchors, batch.doc, self.block_size, batch.doc.shape[0])
        return BlockInputs(anchors, ids_NB.flatten(), positions_NB.flatten(), mask)

    def hidden(self, batch: RowBatch, inputs: BlockInputs) -> Tensor:
        """The drafter's output for all blocks of a row, [N*B, H]."""
        block_embeddings = embedding(inputs.ids, self.ends.embed)
        return self.drafter(
            block_embeddings, batch.features, batch.positions, inputs.positions, inputs.mask, self.backend
        )

    def score(self, batch: RowBatch, inputs: BlockInputs, hidden: Tensor) -> LossSums:
        """Head, loss and metrics of the drafter's output."""
        labels, supervised = block_labels(batch.ids, batch.loss_mask, batch.doc, inputs.anchors, self.block_size)
        return draft_loss(hidden, self.head, labels, supervised, kind=self.loss, gamma=self.gamma, alpha=self.alpha)

    def __call__(self, batch: RowBatch) -> LossSums:
        """Loss sums of one row; `loss` is differentiable by the drafter's parameters."""
        inputs = self.block_inputs(batch)
        return self.score(batch, inputs, self.hidden(batch, inputs))


def _use_float8(drafter: DFlashDrafter, ends: FrozenEnds, anchors: int) -> None:
    config = drafter.config
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
    sizes |= {"key heads": config.num_kv_heads * config.head_dim, "vocabulary": ends.head.shape[0]}
    capability = torch.cuda.get_device_capability(ends.head.device) if ends.head.is_cuda else None
    require_float8(anchors * config.block_size, sizes, capability)
    drafter.use_linear(linear8)
