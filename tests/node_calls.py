"""Helpers: calls of nodes as the first one hears them."""

from __future__ import annotations

from typing import Any

from launcher.roll_call_verdict import Call

BUILD = {"torch": "2.12.0+cu130", "torch.git": "a" * 40, "torch.record": "b" * 64}


def call(node: int, nodes: int = 2, **fields: Any) -> Call:
    known: dict[str, Any] = {"protocol": 1, "host": f"host{node}", "pid": node, "ranks": 8, "build": BUILD}
    return Call(node=node, nodes=nodes, **(known | fields))
