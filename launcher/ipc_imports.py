"""The drafter's side of ipc_transport.py: what is mapped, and telling the targets which rows were copied."""

from __future__ import annotations

import logging
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from launcher.control import Control
from launcher.ipc_memory import Landing, SharedMemory, pair_key
from models.errors import first_line

log = logging.getLogger("launcher")
WARNED = "ipc/warned"


class Imports:
    """The drafter's side."""

    def __init__(self, memory: SharedMemory, control: Control, rank: int, timeout: float) -> None:
        self._memory, self._control, self._rank, self._timeout = memory, control, rank, timeout
        # By target: whether this rank maps its memory.
        self._agreed: dict[int, bool] = {}
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._teller: _Teller | None = None

    @property
    def used(self) -> bool:
        return any(self._agreed.values())

    def mapped(self, source: int, header: dict[str, Any]) -> torch.Tensor | None:
        """The memory of `source` that holds the row of this header; None where the row comes through the host."""
        if source not in self._agreed:
            self._agreed[source] = self._answer(source)
        if not self._agreed[source]:
            return None
        place = source, header["slot"]
        if place not in self._mapped:
            self._mapped[place] = self._memory.open(header["words"])
        return self._mapped[place]

    def tell_when(self, landing: Landing, source: int, header: dict[str, Any]) -> None:
        """Let `source` refill the row's buffer once the copy has run."""
        if self._teller is None:
            self._teller = _Teller(self._control)
        self._teller.put(landing, f"{pair_key(source, self._rank)}/copied/{header['row']}")

    def close(self) -> None:
        if self._teller is not None:
            self._teller.close(self._timeout)
        self._memory.settle()
        self._mapped.clear()
        for source, agreed in self._agreed.items():
            if agreed:
                self._control.set(f"{pair_key(source, self._rank)}/closed", True)

    def _answer(self, source: int) -> bool:
        """Try what `source` offers, and tell it."""
        pair = pair_key(source, self._rank)
        offer = self._control.get(f"{pair}/probe")
        refused = offer.get("refused") or self._try(source, offer)
        self._control.set(f"{pair}/answer", {"refused": refused})
        if refused is not None and self._control.claim(WARNED, refused):
            log.warning("CUDA IPC cannot be used, rows between ranks that share GPUs go through the host: %s", refused)
        return refused is None

    def _try(self, source: int, offer: dict[str, Any]) -> str | None:
        """Why the memory of `source` cannot be mapped here, if so."""
        try:
            value = self._memory.read(self._memory.open(offer["words"]))
        except RuntimeError as error:
            return f"rank {self._rank} cannot map memory of rank {source}: {first_line(error)}"
        if value.hex() != offer["value"]:
            return f"rank {self._rank} reads other bytes in the memory of rank {source} than lie there"
        return None


class _Teller:
    """A thread that sleeps until copies have run, and tells their targets; the training thread never waits for them."""

    def __init__(self, control: Control) -> None:
        self._control = control.clone()
        self._error: Exception | None = None
        self._queue: SimpleQueue[tuple[Landing, str] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="ipc-teller", daemon=True)
        self._thread.start()

    def put(self, landing: Landing, key: str) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put((landing, key))

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                landing, key = item
                landing.wait()
                self._control.set(key, True)
        except Exception as error:  # of CUDA or of the store; `put` raises it where it ends the rank
            self._error = error
            log.error("cannot tell a target that its row was copied: %s", error)
