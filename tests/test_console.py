"""console.log and the terminal: neither stops the other, and the pipe that they are fed from is always emptied."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import outlet
from launcher.console import Tee
from launcher.outlet import Outlet
from tests.full_pipes import fill

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture(name="full_pipe")
def make_full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that takes no more."""
    reading, writing = os.pipe()
    fill(writing)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_an_outlet_keeps_the_newest_lines_for_a_reader_that_was_away(
    full_pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "KEPT_BYTES", 50)
    out = Outlet(full_pipe[1])
    for number in range(100):
        out.write(b"line %d\n" % number)
    assert not out.drain(0.1), "nobody reads"
    said = b""
    while not said.endswith(b"line 99\n"):
        said += os.read(full_pipe[0], 4096)
    lines = said.lstrip(b"x").decode().splitlines()
    assert out.drain(10.0)
    assert lines[-6:] == [f"line {number}" for number in range(94, 100)]
    assert any("lines left out: nobody read them in time" in line for line in lines)


def test_an_outlet_outlives_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    out = Outlet(writing)
    for _ in range(3):
        assert out.write(b"words\n") == 6
        assert out.drain(10.0)
    os.close(writing)


CLOSED = """
import os, sys
from pathlib import Path
from launcher.outlet import open_closed_streams
open_closed_streams()
kept = Path(sys.argv[1]).open("w")
print("said to nobody", sys.stdout.isatty(), flush=True)
print("said to nobody", file=sys.stderr, flush=True)
kept.write(f"{kept.fileno() > 2} {sys.stdin.read()!r}")
"""


def test_streams_that_the_caller_closed_are_nobodys_and_no_files(tmp_path: Path) -> None:
    closing = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    words = ["bash", "-c", closing, sys.executable, CLOSED, str(tmp_path / "kept")]
    assert subprocess.run(words, cwd=ROOT, timeout=30, check=False).returncode == 0
    assert (tmp_path / "kept").read_text() == "True ''"
