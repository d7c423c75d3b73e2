"""The command words beside training: each is a module with `main(args) -> exit code`, imported when asked for."""

from __future__ import annotations

import importlib
import signal

from launcher.cli import COMMANDS, Command

# Words whose module has another name, so that no module shadows another's subject.
MODULES = {
    "cache": "launcher.cache_command",
    "export": "launcher.export_command",
    "fingerprint": "launcher.environment",
    "status": "launcher.status_command",
}


def run_command(command: Command) -> int:
    """Run a command word and return its exit code."""
    assert command.name in COMMANDS
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command without a traceback
    module = importlib.import_module(MODULES.get(command.name, f"launcher.{command.name}"))
    return module.main(command.args)
