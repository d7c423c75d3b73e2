"""The error of a save that failed: which ranks were at fault, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from launcher.errors import RetryableError
from launcher.votes import VoteFailed


class SaveFailed(RetryableError):
    """A checkpoint could not be written; the message names the ranks and their errors. Older ones are untouched."""

    def __init__(self, stage: str, failure: VoteFailed, folder: Path) -> None:
        super().__init__(f"saving {folder} failed while {stage} it ({failure})", _advice(failure, folder.parent))
        self.ranks_at_fault = frozenset(failure.causes)

    def ends_the_run(self, why: str) -> SaveFailed:
        """The same error, with why the run does not go on after it."""
        self.what = f"{why}: {self.what}"
        return self


def _advice(failure: VoteFailed, folder: Path) -> str:
    """What to do about a save that failed; its folder is where the older checkpoints are."""
    if any(
        os.strerror(number) in cause for number in (errno.ENOSPC, errno.EDQUOT) for cause in failure.causes.values()
    ):
        return f"make room for {folder}; the checkpoints there are whole"
    logs = " and ".join(f"rank_{rank}.log" for rank in sorted(failure.causes))
    return f"see {logs} in {folder.parent / 'logs'}; the checkpoints in {folder} are whole"
