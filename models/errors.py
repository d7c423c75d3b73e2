"""What others' errors say, in one line."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """What went wrong, without the advice and the stacks that torch, transformers and the hub's client add below."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
