"""An argument parser for the command words that reports mistakes as every other part does: one line, exit code 78."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from launcher.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """argparse, with a UserError instead of usage text and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", f"see {self.prog} --help")


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from `lowest` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is too few, give at least {lowest}")
        return value

    return read
