"""One feature row as bytes, and the header that goes ahead of it.

A row is one flat byte buffer (features, ids, document numbers, positions, loss mask), so that one message moves it and
the target writes its features straight into what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from launcher.errors import LauncherError
from launcher.packing import Row
from models.draft_step import RowBatch

# Odd multipliers make a checksum that sees swapped tokens; 64-bit products wrap alike in numpy and on every device.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class HeaderMismatch(LauncherError):
    """A row arrived that is not the one expected; nothing of it is trained on."""


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of a row of S tokens with `width` = K*H features per token."""

    row_length: int
    width: int
    dtype: torch.dtype

    @property
    def feature_bytes(self) -> int:
        return self.row_length * self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.feature_bytes + 13 * self.row_length

    def buffer(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def features(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [S, K*H] on the features of a buffer."""
        return buffer[: self.feature_bytes].view(self.dtype).view(self.row_length, self.width)

    def ints(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [3, S] int32 on ids, document numbers and positions."""
        end = self.feature_bytes + 12 * self.row_length
        return buffer[self.feature_bytes : end].view(torch.int32).view(3, self.row_length)

    def loss_mask(self, buffer: torch.Tensor) -> torch.Tensor:
        """View [S] uint8."""
        return buffer[self.feature_bytes + 12 * self.row_length :]

    def write(self, buffer: torch.Tensor, row: Row) -> None:
        """Copy a packed row into a buffer, all but its features."""
        ints = torch.stack([torch.as_tensor(part) for part in (row.ids, row.doc, row.positions)]).int()
        self.ints(buffer).copy_(ints, non_blocking=True)
        self.loss_mask(buffer).copy_(torch.as_tensor(row.loss_mask), non_blocking=True)

    def batch(self, index: int, buffer: torch.Tensor) -> RowBatch:
        """The micro-batch that a filled buffer holds; features stay views, the small parts are copies."""
        ids, doc, positions = self.ints(buffer)
        return RowBatch(
            index=index,
            features=self.features(buffer),
            ids=ids.long(),
            loss_mask=self.loss_mask(buffer).bool(),
            doc=doc.clone(),
            positions=positions.long(),
        )

    def header(self, index: int, ids: Any) -> dict[str, Any]:
        """What both sides must agree on; `ids` is the row's int32 numpy array."""
        return self._expected(index) | {"ids": checksum_of(ids)}

    def checksum(self, buffer: torch.Tensor) -> torch.Tensor:
        """`checksum_of` the ids in a buffer: int64 scalar on the buffer's device, without waiting for it."""
        multipliers = torch.arange(self.row_length, device=buffer.device).mul_(2).add_(1).mul_(_GOLDEN)
        return (self.ints(buffer)[0].long() * multipliers).sum()

    def check(self, header: dict[str, Any], index: int, source: int) -> None:
        """Refuse a row of another index or shape.

        Raises:
            HeaderMismatch: names both sides' values.
        """
        _compare(header, self._expected(index), index, source)

    def check_ids(self, header: dict[str, Any], arrived: int, index: int, source: int) -> None:
        """Refuse a row whose ids are not those that were sent.

        Args:
            arrived: `checksum` of the buffer that was received.

        Raises:
            HeaderMismatch: names both checksums.
        """
        _compare({"checksum of ids": header["ids"]}, {"checksum of ids": arrived}, index, source)

    def _expected(self, index: int) -> dict[str, Any]:
        return {"index": index, "row_length": self.row_length, "width": self.width, "dtype": str(self.dtype)}


def checksum_of(ids: Any) -> int:
    """64-bit checksum of a row's ids (int32 numpy array) that depends on their order."""
    multipliers = (np.arange(len(ids), dtype=np.int64) * 2 + 1) * np.int64(_GOLDEN)
    return int((ids.astype(np.int64) * multipliers).sum())


def _compare(sent: dict[str, Any], expected: dict[str, Any], index: int, source: int) -> None:
    wrong = [
        f"{key} is {sent.get(key)!r}, expected {value!r}" for key, value in expected.items() if sent.get(key) != value
    ]
    if wrong:
        raise HeaderMismatch(f"row {index} from rank {source}: {'; '.join(wrong)}")
