"""A piece of work in a thread whose error is kept for the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWork(threading.Thread):
    """Runs `work` once; `error` is what it raised. `run()` runs it in the calling thread."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the main thread raises it again
            self.error = error
