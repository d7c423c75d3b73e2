"""Where the threads of this process are: stack dumps, the flight recorder, and whether one sits in a collective."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import IO

# Where the blocking waits are called: torch's own collectives, and our sends and receives of rows.
COLLECTIVE_FILES = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}launcher{os.sep}transports.py")


def dump_stacks(log: IO[str], why: str, traces: Path, rank: int) -> None:
    """Write all Python stacks to the log, and torch's record of the last collectives to `traces/`."""
    log.write(f"\n[{time.strftime('%H:%M:%S')}] {why}; stacks of all threads:\n")
    log.flush()
    faulthandler.dump_traceback(file=log, all_threads=True)
    recorded = dump_flight_recorder(traces, rank)
    if recorded is not None:
        log.write(f"flight recorder: {recorded}\n")
    log.flush()


def dump_flight_recorder(traces: Path, rank: int) -> Path | None:
    """Write what c10d recorded (TORCH_FR_BUFFER_SIZE) as JSON; None without NCCL, records, or room on the disk."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return None
    text = dump().decode()
    if not json.loads(text).get("entries"):
        return None
    path = traces / f"nccl_rank_{rank}.json"
    try:
        traces.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:  # whoever dumps is on its way out, which this must not end
        return None
    return path


def is_in_collective(own_thread: int) -> bool:
    """Whether another thread's innermost Python frame is one that calls the blocking waits."""
    files = [frame.f_code.co_filename for thread, frame in sys._current_frames().items() if thread != own_thread]
    return any(part in file for part in COLLECTIVE_FILES for file in files)
