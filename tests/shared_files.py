"""Host memory that processes share by torch's own files: stands in for a GPU's memory where there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from launcher.ipc_memory import Words
from launcher.transports import Checksum


@dataclass
class LateCopy:
    """A copy that runs by itself `delay` seconds after it was queued, as on a busy device."""

    buffer: torch.Tensor
    mapped: torch.Tensor
    checksum: Checksum
    delay: float
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        time.sleep(self.delay)
        self.buffer.copy_(self.mapped)
        self.done.set()

    def ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        assert self.done.wait(20)

    def finish(self) -> int:
        return int(self.checksum(self.buffer))


@dataclass
class SharedFiles:
    """`forbidden`: what the system does not let us do: export, open, or (`read`) see the other's bytes."""

    forbidden: str = ""
    delay: float = 0.0
    exports: int = 0
    opened: int = 0
    copies: list[LateCopy] = field(default_factory=list)

    def exportable(self) -> nullcontext[None]:
        return nullcontext()

    def hold(self, data: bytes) -> torch.Tensor:
        return torch.tensor(list(data), dtype=torch.uint8)

    def export(self, buffer: torch.Tensor) -> Words:
        self._try("export")
        self.exports += 1
        manager, name, size = buffer.untyped_storage()._share_filename_cpu_()
        return [manager.decode(), name.decode(), size]

    def open(self, words: Words) -> torch.Tensor:
        self._try("open")
        self.opened += 1
        storage = torch.UntypedStorage._new_shared_filename_cpu(words[0].encode(), words[1].encode(), words[2])
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def read(self, mapped: torch.Tensor) -> bytes:
        return bytes(mapped.tolist()) if self.forbidden != "read" else bytes(len(mapped))

    def copy(
        self, buffer: torch.Tensor, mapped: torch.Tensor, after: torch.cuda.Event | None, checksum: Checksum
    ) -> LateCopy:
        copy = LateCopy(buffer, mapped, checksum, self.delay)
        self.copies.append(copy)
        threading.Thread(target=copy.run).start()
        return copy

    def settle(self) -> None:
        for copy in self.copies:
            copy.wait()
        self.copies.clear()

    def collect(self) -> None:
        """Nothing to look through."""

    def _try(self, what: str) -> None:
        if what == self.forbidden:
            raise RuntimeError(f"{what}: operation not permitted\nand much advice")


@contextmanager
def heard(lines: list[str]) -> Iterator[None]:
    """Warnings and errors of the launcher, as the console would show them."""
    import logging

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(logging.WARNING), logging.getLogger("launcher")
    logger.addHandler(ear)
    try:
        yield
    finally:
        logger.removeHandler(ear)
