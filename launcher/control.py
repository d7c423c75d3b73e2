"""The control plane: a small JSON key-value layer over torch's TCPStore, apart from the tensors' process groups.

torchrun's agent hosts the store, so it outlives any rank. Readers poll, bounded by their caller; once a rank has its
Lifecycle, with that one's `wait_until`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from launcher.errors import DeadlineError


class Control:
    """Keys shared by all ranks of one attempt.

    A connection serves one thread at a time; another thread takes its own with `clone()`.
    """

    def __init__(self, host: str, port: int, prefix: str, serve: bool = False, timeout: float = 60.0) -> None:
        self._address = (host, port, prefix)
        self._timeout = timeout
        self.server = TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        self._store = PrefixStore(prefix, self.server)
        self.asked_at: float | None = None
        """When the call began that the store has not yet answered (monotonic); no call bounds itself."""
        self.hopeless: Callable[[], bool] = lambda: False
        """Tells `wait` that what it waits for cannot come any more."""

    def clone(self) -> Control:
        """A second connection, for another thread."""
        host, _, prefix = self._address
        return Control(host, self.server.port, prefix, timeout=self._timeout)

    def set(self, key: str, value: Any) -> None:
        with self._asking():
            self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value, None while nobody has set it."""
        with self._asking():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def has(self, *keys: str) -> bool:
        """Whether all the keys are set."""
        with self._asking():
            return self._store.check(list(keys))

    def wait(self, key: str, what: str, timeout: float, rank: int | None = None) -> Any:
        """The value of a key, for ranks that have no Lifecycle yet.

        Args:
            rank: who sets it, where that is not the first one of the node.

        Raises:
            DeadlineError: nobody set it within `timeout` seconds, or nobody will; names `what` was awaited.
        """
        began = time.monotonic()
        while not self.has(key):
            waited = time.monotonic() - began
            if waited > timeout or self.hopeless():
                error = DeadlineError(f"waited {waited:.0f} s for {what}", "see its message")
                error.awaited = rank
                raise error
            time.sleep(0.02)
        return self.get(key)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return its new value; a counter is read with `add(key, 0)`."""
        with self._asking():
            return self._store.add(key, amount)

    def claim(self, key: str, value: Any) -> bool:
        """Set the key unless another rank was first; True for the winner."""
        mine = json.dumps({"claim": uuid.uuid4().hex, "value": value})
        with self._asking():
            return self._store.compare_set(key, "", mine).decode() == mine

    def claimed(self, key: str) -> Any:
        """The winner's value of a claimed key, or None."""
        claim = self.get(key)
        return None if claim is None else claim["value"]

    def delete(self, key: str) -> None:
        with self._asking():
            self._store.delete_key(key)

    def group_store(self, name: str) -> PrefixStore:
        """A store for `init_process_group`, on this connection."""
        return PrefixStore(name, self._store)

    @contextmanager
    def _asking(self) -> Generator[None]:
        self.asked_at = time.monotonic()
        try:
            yield
        finally:
            self.asked_at = None
