"""A start that cannot be: who says so, and how the ranks that did start learn of it. No torch."""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import NoReturn

from launcher.errors import LauncherError
from launcher.outcome import claim_failure, failure_of
from launcher.runtime import RankEnv, connect
from launcher.signal_inbox import catch_signals

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
