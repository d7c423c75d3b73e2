"""A start that cannot be: who says so, and how the ranks that did start learn of it. No torch."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import NoReturn

from launcher.errors import LauncherError
from launcher.outcome import claim_failure, failure_of
from launcher.runtime import RankEnv, connect

# How long the ranks that stay quiet about a bad start give the first one to say it.
QUIET_SECONDS = 5.0


def refuse(error: LauncherError, speaks: bool) -> NoReturn:
    """Leave before the run began; one rank says why, the others keep quiet until it has."""
    if speaks:
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(QUIET_SECONDS)
    sys.exit(error.code)


def tell_other_nodes(env: RankEnv, error: LauncherError) -> None:
    """Leave the cause where ranks that did start look for one; they would wait for this node until their deadline."""
    failure = failure_of(error, env.rank, f"of node {env.node}", "start", 0, "the console of that node")
    with suppress(LauncherError):  # nobody to tell: the store is where they all would be
        claim_failure(connect(env, QUIET_SECONDS), failure)
