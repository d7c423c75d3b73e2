"""Rows between processes of one host that share GPUs: the drafter maps the target's buffers and copies rows itself.

    target:  export a buffer once per drafter; row ready: its header says in which buffer it lies
    drafter: buffer mapped (once) -> copy on a side stream -> once that has run: copied/N ............ target: refill

Whether memory can be shared is tried at the first row between two ranks: the target exports a few random bytes, and
the drafter reads them through its mapping and answers. Where that fails both use the host, and the run says why, once.
Each row's end travels as a key of the control store: the order of rows is that of RowSender and RowReceiver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.control import Control
from launcher.ipc_exports import Exports
from launcher.ipc_imports import Imports
from launcher.ipc_memory import SharedMemory
from launcher.transports import Arrival, Checksum, Departure, Transport


class IpcTransport(Transport):
    """Maps memory where two ranks can, and hands rows to `host` where they cannot."""

    def __init__(self, host: Transport, memory: SharedMemory, control: Control, rank: int, timeout: float) -> None:
        self._host, self._memory = host, memory
        self._exports = Exports(memory, control, rank, timeout)
        self._imports = Imports(memory, control, rank, timeout)

    @property
    def way(self) -> str:
        return "CUDA IPC" if self._exports.used or self._imports.used else self._host.way

    @contextmanager
    def memory(self) -> Iterator[None]:
        with self._memory.exportable():
            yield
            self._exports.make_probe()

    def place(self, buffer: torch.Tensor, rank: int) -> dict[str, Any]:
        return self._exports.place(buffer, rank)

    def send(self, buffer: torch.Tensor, rank: int) -> Departure:
        return self._exports.departure(buffer, rank) or self._host.send(buffer, rank)

    def receive(
        self,
        buffer: torch.Tensor,
        rank: int,
        after: torch.cuda.Event | None,
        checksum: Checksum,
        header: dict[str, Any],
    ) -> Arrival:
        if (mapped := self._imports.mapped(rank, header)) is None:
            return self._host.receive(buffer, rank, after, checksum, header)
        landing = self._memory.copy(buffer, mapped, after, checksum)
        self._imports.tell_when(landing, rank, header)
        return landing

    def closable(self) -> bool:
        return self._exports.closable()

    def close(self) -> None:
        self._imports.close()
        self._exports.close()
        self._memory.collect()
