"""What a start says before it joins the others: its node's notices, the split, where it writes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launcher.runtime import RankEnv

if TYPE_CHECKING:
    from launcher.control import Control
    from launcher.journal import Journal
    from launcher.worker import Start


def attempt_key(env: RankEnv) -> str:
    """Where the first rank of a node tells the others of its attempt."""
    return f"attempt/{env.node}"


def announce_start(start: Start, control: Control, attempt_dir: Path, journal: Journal) -> None:
    """What the user should know of this start, and where it writes.

    The rank that speaks is on node 0, and a console shows the ranks of its node only: on another node the first rank
    speaks for that node.
    """
    env, nodes = start.env, start.topology.nodes
    for_node = env.node > 0 and env.local_rank == 0
    where = f"{start.topology.split} on {start.device.kind}, logs in {attempt_dir}"
    for notice in control.get(attempt_key(env))["notices"]:
        journal.announce(f"node {env.node}: {notice}" if nodes > 1 else notice, every_rank=for_node)
    if start.choice.why:
        journal.announce(start.choice.why)
    if for_node:
        rest = "node 0 shows progress and keeps checkpoints"
        journal.announce(f"node {env.node} of {nodes}, {where}; {rest}", every_rank=True)
    journal.announce(f"run folder {start.command.config.runtime.run_dir}, {where}")
