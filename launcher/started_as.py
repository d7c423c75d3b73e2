"""How a run was started, beside its options: what the command that goes on with it begins with. No torch.

The options are in the run folder's config.toml. The flags of launch.sh and of torchrun are nowhere but in the command
line; the parent of the ranks, or a rank under a bare torchrun, keeps them in an environment variable.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.cli import Command
    from launcher.runtime import RankEnv

STARTED_AS = "LAUNCHER_STARTED_AS"
MAIN = Path(__file__).resolve().with_name("main.py")


def as_launched(command: Command) -> str:
    """`./launch.sh` with those of its flags that no config.toml has."""
    flags = {
        "--nproc": command.nproc,
        "--nnodes": command.nnodes if command.nnodes > 1 else None,
        "--node-rank": command.node_rank if command.nnodes > 1 else None,
        "--master": command.master or None,
        "--max-restarts": command.max_restarts or None,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["./launch.sh", *words, *_switches(command)])


def under_torchrun(command: Command, env: RankEnv, environ: Mapping[str, str] = os.environ) -> str:
    """torchrun with as many ranks on as many nodes, for one of its ranks to say."""
    where = ["--standalone"]
    if env.nodes > 1:
        where = [f"--nnodes={env.nodes}", f"--node_rank={env.node}"]
        where += [f"--master_addr={env.master_addr}", f"--master_port={env.master_port}"]
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    again = [] if restarts == "0" else [f"--max_restarts={restarts}"]
    ranks = f"--nproc_per_node={env.local_world_size}"
    return shlex.join(["torchrun", *where, ranks, *again, short_path(MAIN), *_switches(command)])


def short_path(path: Path | str) -> str:
    """A path as one would type it here."""
    return str(path).removeprefix(f"{Path.cwd()}{os.sep}")


def _switches(command: Command) -> list[str]:
    strict = ["--strict-environment"] if command.strict_environment else []
    return [*strict, *(["--dry-run"] if command.config.dry_run else [])]
