"""Pipes that nobody empties, as a paused terminal or pager is one."""

from __future__ import annotations

import fcntl
import os


def fill(writing: int) -> None:
    """Make a pipe as small as it can be and fill it; whoever writes into it then waits for its reader."""
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
