"""Train DFlash drafters: every target and every drafter is its own rank.

torchrun --standalone --nproc_per_node=8 launcher/main.py [--dry-run] [flags]
./launch.sh [flags]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# torchrun puts launcher/ first on the path; the packages lie beside it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.signal_inbox import StoppedBy, stop_signals  # noqa: E402


def _end(number: int, frame: object) -> None:
    """A stop before anything has started, which the run's own handlers replace."""
    raise StoppedBy(signal.Signals(number))


for _number in stop_signals():  # first of all: what else is imported takes a while
    signal.signal(_number, _end)

from launcher.cli import parse  # noqa: E402
from launcher.config import to_toml  # noqa: E402
from launcher.errors import LauncherError  # noqa: E402
from launcher.outlet import open_closed_streams  # noqa: E402


def main(argv: list[str]) -> int:
    """Read the command line; then be one rank, the parent of all ranks, or a command."""
    open_closed_streams()
    is_rank = "RANK" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        command = parse(argv)
        if command.print_config:
            print("" if local_rank else to_toml(command.config), end="")
            return 0
        if is_rank:
            from launcher.worker import run_rank

            run_rank(command)
        if command.name == "train":
            from launcher.supervisor import supervise

            return supervise(command)
        from launcher.commands import run_command

        return run_command(command)
    except LauncherError as error:
        from launcher.refusal import refuse

        refuse(error, local_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
