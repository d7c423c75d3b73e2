"""Pack documents of many lengths into rows of one length. Pure functions, no files, no torch.

Notation: S row length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PADDING = -1
"""Document number of a padding token."""


@dataclass(frozen=True)
class Document:
    """One tokenised chat."""

    ids: npt.NDArray[np.int32]
    """[length]."""
    loss_mask: npt.NDArray[np.bool_]
    """[length], True for the assistant's tokens."""

    @classmethod
    def empty(cls) -> Document:
        return cls(ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.bool_))


@dataclass(frozen=True)
class Row:
    """One packed row; documents lie side by side from the left, padding fills the rest."""

    ids: npt.NDArray[np.int32]
    """[S]."""
    loss_mask: npt.NDArray[np.bool_]
    """[S]."""
    doc: npt.NDArray[np.int32]
    """[S], 0, 1, ... from the left; -1 for padding."""
    positions: npt.NDArray[np.int32]
    """[S], from 0 in each document; 0 for padding."""


def has_anchor(loss_mask: npt.NDArray[np.bool_]) -> bool:
    """Whether a document can hold a block: two supervised tokens in a row."""
    return bool((loss_mask[:-1] & loss_mask[1:]).any())


def plan_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Which documents share a row: best fit, longest first. Deterministic, about linear in the documents.

    Args:
        lengths: tokens of each document, 1 to `row_length`.
        row_length: tokens of a row.

    Returns:
        For each row the indices of its documents; each document is in exactly one row.
    """
    rows: list[list[int]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms = 0  # bit r is set when some row has exactly r tokens left
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1  # the lowest bit set: the tightest fit
            row = rows_with_room[room].pop()
            rows[row].append(index)
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([index])
        rows_with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def build_row(documents: Iterable[Document], row_length: int, pad_id: int) -> Row:
    """Lay documents side by side; together they must fit."""
    kept = list(documents)
    lengths = [len(document.ids) for document in kept]
    ids, loss_mask = np.full(row_length, pad_id, np.int32), np.zeros(row_length, np.bool_)
    used = sum(lengths)
    ids[:used] = np.concatenate([document.ids for document in kept])
    loss_mask[:used] = np.concatenate([document.loss_mask for document in kept])
    return layout_row(ids, loss_mask, lengths)


def layout_row(ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.bool_], lengths: Sequence[int]) -> Row:
    """The row of these tokens, [S] with padding, whose documents have these lengths from the left."""
    doc = np.full(len(ids), PADDING, np.int32)
    positions = np.zeros(len(ids), np.int32)
    used = sum(lengths)
    doc[:used] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions[:used] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return Row(ids=ids, loss_mask=loss_mask, doc=doc, positions=positions)
