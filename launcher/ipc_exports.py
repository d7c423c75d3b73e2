"""The target's side of ipc_transport.py: which buffer is exported to whom, and which copies are awaited."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import torch

from launcher.control import Control
from launcher.ipc_memory import SharedMemory, Words, pair_key
from launcher.transports import Departure
from models.errors import first_line

PROBE_BYTES = 64


class Exports:
    """The target's side."""

    def __init__(self, memory: SharedMemory, control: Control, rank: int, timeout: float) -> None:
        self._memory, self._control, self._rank, self._timeout = memory, control, rank, timeout
        self._probe: torch.Tensor | None = None
        self._value = os.urandom(PROBE_BYTES)
        # By drafter: why it does not map this rank's memory, None where it does.
        self._refusals: dict[int, str | None] = {}
        self._slots: dict[int, int] = {}
        self._words: dict[tuple[int, int], Words] = {}
        self._numbers = count()
        # By slot: the number of the row in it.
        self._rows: dict[int, int] = {}

    @property
    def used(self) -> bool:
        return None in self._refusals.values()

    def place(self, buffer: torch.Tensor, drafter: int) -> dict[str, Any]:
        """Where the drafter finds the row in `buffer`; before the first one, something to try it on."""
        if drafter not in self._refusals and not self._control.has(f"{pair_key(self._rank, drafter)}/probe"):
            self._offer_probe(drafter)
        if self._refusals.get(drafter) is not None:
            return {}
        slot = self._slots.setdefault(id(buffer), len(self._slots))
        self._rows[slot] = next(self._numbers)
        if (slot, drafter) not in self._words:
            self._words[slot, drafter] = self._memory.export(buffer)
        return {"slot": slot, "row": self._rows[slot], "words": self._words[slot, drafter]}

    def departure(self, buffer: torch.Tensor, drafter: int) -> Departure | None:
        """The wait for the drafter's copy of the row in `buffer`; None where the row must be sent."""
        pair = pair_key(self._rank, drafter)
        if drafter not in self._refusals:
            # The drafter has asked for the row and is about to answer.
            what = f"rank {drafter} to say whether it can map the memory of rank {self._rank}"
            self._refusals[drafter] = self._control.wait(f"{pair}/answer", what, self._timeout)["refused"]
        if self._refusals[drafter] is not None:
            return None
        return Departure(gone=_Copied(self._control, f"{pair}/copied/{self._rows[self._slots[id(buffer)]]}"))

    def make_probe(self) -> None:
        self._probe = self._memory.hold(self._value)

    def closable(self) -> bool:
        drafters = [drafter for drafter, refused in self._refusals.items() if refused is None]
        return all(self._control.has(f"{pair_key(self._rank, drafter)}/closed") for drafter in drafters)

    def close(self) -> None:
        self._probe = None
        self._slots.clear()

    def _offer_probe(self, drafter: int) -> None:
        assert self._probe is not None, "what is sent from here was allocated in memory()"
        try:
            offer = {"words": self._memory.export(self._probe), "value": self._value.hex()}
        except RuntimeError as error:
            self._refusals[drafter] = reason = f"rank {self._rank} cannot export memory: {first_line(error)}"
            offer = {"refused": reason}
        self._control.set(f"{pair_key(self._rank, drafter)}/probe", offer)


class _Copied:
    """Whether a drafter has said that its copy of a row has run; the key goes with the answer."""

    def __init__(self, control: Control, key: str) -> None:
        self._control, self._key, self._seen = control, key, False

    def __call__(self) -> bool:
        if not self._seen and self._control.has(self._key):
            self._control.delete(self._key)
            self._seen = True
        return self._seen
