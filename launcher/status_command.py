"""`status [RUN]`: how a run stands or ended.

./launch.sh status                 the demo's run folder
./launch.sh status runs/q8 --json  as written in status.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from launcher.command_parser import CommandParser
from launcher.config_sections import RuntimeConfig
from launcher.errors import UserError
from launcher.status import FILE_NAME, final_box, read_status


def main(args: list[str]) -> int:
    """Print the status; returns the run's own exit code, 0 while it runs."""
    parser = CommandParser(prog="./launch.sh status", description="Print how a run stands or ended.")
    parser.add_argument("run", nargs="?", type=Path, default=RuntimeConfig().run_dir, help="run folder")
    parser.add_argument("--json", action="store_true", help="print status.json")
    flags = parser.parse_args(args)
    try:
        status = read_status(flags.run)
    except ValueError as error:
        raise UserError(f"{flags.run / FILE_NAME} is damaged: {error}", "remove it, or start the run again") from error
    if status is None:
        raise UserError(f"{flags.run} holds no status.json", "give the folder of a run that has started")
    print(json.dumps(asdict(status), indent=2) if flags.json else final_box(status, sys.stdout), end="")
    return status.code or 0
