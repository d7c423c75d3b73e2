"""console.log and the terminal: neither stops the other, and the pipe that they are fed from is always emptied."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from launcher.console import Tee


def _speak(descriptor: int) -> None:
    with os.fdopen(descriptor, "wb") as pipe:
        for number in range(5000):  # several times what a pipe holds
            pipe.write(b"step %d of a run whose disk is full\n" % number)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_leaves_nobody_standing_at_a_full_pipe(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    tee = Tee(Path("/dev/full"))
    reading, writing = os.pipe()
    rank = threading.Thread(target=_speak, args=(writing,), daemon=True)
    rank.start()
    thread = tee.follow(os.fdopen(reading, "rb"))
    thread.join(timeout=30)
    rank.join(timeout=30)
    assert not thread.is_alive() and not rank.is_alive()
    tee.close()
    shown = capfdbinary.readouterr().out.splitlines()
    assert shown[0] == b"[launch] console.log lacks lines from here: No space left on device"
    assert len(shown) == 5001 and shown[-1].startswith(b"step 4999")
