"""A start that cannot be: who says so, and how the ranks that did start learn of it. No torch."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.errors import DeadlineError, ExitCode, LauncherError
from launcher.members import START_LOG, STATES
from launcher.outcome import SUPERVISED, Failure, claim_failure, failure_of, publish_failure, tell_node
from launcher.processes import kill_process, read_process
from launcher.run_folder import ATTEMPT_VARIABLE
from launcher.runtime import RankEnv, connect
from launcher.siblings import find_siblings
from launcher.signal_inbox import catch_signals

if TYPE_CHECKING:
    from launcher.control import Control

# How long the ranks that stay quiet about a bad start give the first one to say it.
QUIET_SECONDS = 5.0
# Of those, each gives the ones before it so much longer.
TURN_SECONDS = 0.5


def refuse(error: LauncherError, local_rank: int) -> NoReturn:
    """Leave before the run began. The node's first rank says why; another one does if none before it has."""
    if local_rank == 0 or not _is_stopped_within(QUIET_SECONDS + TURN_SECONDS * (local_rank - 1)):
        print(error, file=sys.stderr, flush=True)
    sys.exit(error.code)


def _is_stopped_within(seconds: float) -> bool:
    """Whether torchrun stops this rank, as it does once another one has left."""
    inbox = catch_signals()
    select.select([inbox.descriptor], [], [], seconds)
    return bool(inbox.drain())


def tell_other_nodes(env: RankEnv, error: LauncherError) -> None:
    """Leave the cause where ranks that did start look for one; they would wait for this node until their deadline."""
    failure = failure_of(error, env.rank, f"of node {env.node}", "start", 0, "the console of that node")
    with suppress(LauncherError):  # nobody to tell: the store is where they all would be
        claim_failure(connect(env, QUIET_SECONDS), failure)


def first_rank_is_lost(env: RankEnv) -> bool:
    """Whether torchrun tidies up because of the rank that this one waits for before it can join."""
    first = frozenset({env.rank - env.local_rank})
    return catch_signals().asked is not None and bool(find_siblings().missing(first))


def blame_first_rank(control: Control, env: RankEnv, error: DeadlineError, run_dir: Path) -> None:
    """Name whom this rank has waited for in vain before it could join: the first one of all, or of its node.

    Nothing in that rank would end it, so this does. Where it is gone, torchrun knows how it ended, and launch.sh reads
    that.
    """
    own_first = env.rank - env.local_rank
    first = own_first if error.awaited is None else error.awaited
    pid = find_siblings().pids.get(first)
    process = None if pid is None else read_process(pid)
    if process is None and first == own_first and os.environ.get(SUPERVISED):
        return
    state = "it is gone" if first == own_first else "its node may be slow, or down"
    if process is not None:
        state = STATES.get(process.state, "it has not come that far")
    log = Path(os.environ.get(ATTEMPT_VARIABLE, "")) / START_LOG
    place = ("target 0" if first == 0 else f"of node {env.node}", "start", 0, ExitCode.RETRY, type(error).__name__)
    where = str(log) if first == own_first and log.is_file() else ""
    cause = publish_failure(control, Failure(first, *place, f"{error.what}: {state}", where), run_dir, env.node)
    tell_node(control, cause, run_dir, env.node)  # another node may have been the first to know
    if pid is not None and process is not None:
        kill_process(pid, process.start_ticks)
