"""An argument parser for the command words that reports mistakes as every other part does: one line, exit code 78."""

from __future__ import annotations

import argparse
from typing import NoReturn

from launcher.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """argparse, with a UserError instead of usage text and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", f"see {self.prog} --help")
