"""Before torchrun starts on several nodes: their parents meet, and either all start or all end and know why. No torch.

The first node listens on the port of --master, the others call it and say who they are, and how they were started or
why they refuse to. When all have called, or the time is over, it gives everyone the same answer and frees the port,
which torchrun takes next. Without this a node whose parent refused leaves the others to torchrun's own join limit.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.cli import Command
from launcher.errors import ExitCode, LauncherError, RetryableError, UserError
from launcher.fingerprint import Fingerprint, source_hash
from launcher.roll_call_desk import ANSWER_BYTES, Desk
from launcher.roll_call_verdict import (
    PROTOCOL,
    REFUSAL_CHARACTERS,
    Call,
    RollCallError,
    Verdict,
    build_of,
    find_obstacle,
    judge,
    missing_nodes,
    name_nodes,
    shared_options,
)

Ready = Callable[[int, bool, Fingerprint], None]
Say = Callable[[str], None]
# How long a start that cannot be stays to say so; and how long after the first node's own deadline its answer may come.
TELL_SECONDS = 20.0
# A cluster may publish the name of its first node a little later than it starts the others.
RESOLVE_SECONDS = 20.0
CONNECT_SECONDS, RETRY_SECONDS, POLL_SECONDS = 5.0, 0.5, 1.0


@contextmanager
def roll_call(command: Command, say: Say) -> Iterator[Ready]:
    """A node's own checks go into the body, which ends with a call of what this yields: ranks, on GPUs, fingerprint.

    On leaving it all nodes have passed theirs. If the body raises, the other nodes are told, for at most 20 s, and it
    stays this node's error. Nothing happens on a single node.

    Raises:
        RollCallError: another node refused, is missing, or was started otherwise; with the code of that.
        RetryableError: the first node did not answer in time, or something else holds its port.
        UserError: the host of --master has no address.
    """
    mine = introduce(command)

    def ready(ranks: int, on_gpus: bool, fingerprint: Fingerprint) -> None:
        mine.ranks, mine.options = ranks, shared_options(command.config, on_gpus)
        mine.build = build_of(fingerprint) | {"launcher": source_hash(Path(__file__).parent)}

    try:
        yield ready
    except Exception as error:
        if command.nnodes > 1:
            _tell_refusal(mine, command.master, error, say)
        raise
    if command.nnodes > 1:
        awaited = range(1, mine.nodes) if mine.node == 0 else [0]
        say(f"[launch] waiting for {name_nodes(awaited)} of {mine.nodes} at {command.master}")
        verdict = take(mine, command.master, command.config.runtime.init_timeout)
        for notice in verdict.notices:
            say(f"[launch] {notice}")
        if verdict.code:
            raise RollCallError(verdict)


def take(mine: Call, master: str, patience: float) -> Verdict:
    """Meet the other nodes; waits for those that are not there yet for `patience` seconds."""
    find_address(master.rpartition(":")[0], min(RESOLVE_SECONDS, patience))
    return gather(mine, master, patience) if mine.node == 0 else ask(mine, master, patience)


def gather(mine: Call, master: str, patience: float) -> Verdict:
    """The first node's part: hear the others, then answer all of them.

    Raises:
        RetryableError: something else listens on the port.
        UserError: this process may not listen there.
    """
    deadline, hopeless = time.monotonic() + patience, False
    with Desk(int(master.rpartition(":")[2])) as desk:
        while missing_nodes(calls := [mine, *desk.calls]) and (left := deadline - time.monotonic()) > 0:
            if not hopeless and find_obstacle(calls):  # nobody will start; whoever calls soon still learns why
                hopeless, deadline = True, min(deadline, time.monotonic() + TELL_SECONDS)
            desk.attend(min(POLL_SECONDS, left))
        verdict = judge(calls, master, patience)
        desk.answer(verdict)
    return verdict


def ask(mine: Call, master: str, patience: float) -> Verdict:
    """Another node's part: call the first one until it answers.

    Raises:
        RetryableError: it did not in time.
    """
    host, _, port = master.rpartition(":")
    began = time.monotonic()
    while True:
        now = time.monotonic()
        answer_by = began + patience if mine.refusal else now + patience + TELL_SECONDS
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as link:
                link.sendall(mine.model_dump_json().encode() + b"\n")
                return _read_verdict(link, answer_by)
        except (OSError, ValueError):  # not there yet, gone again, or something else that listens there
            if time.monotonic() > began + patience:
                raise RetryableError(
                    f"node 0 did not answer at {master} within {patience:.0f} s (runtime.init_timeout)",
                    "start the same command there with --node-rank 0, or mend --master",
                ) from None
        time.sleep(RETRY_SECONDS)


def find_address(host: str, patience: float) -> None:
    """Wait until the name of the first node's host is known.

    Raises:
        UserError: it is not after `patience` seconds.
    """
    until = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > until:
                raise UserError(f"--master: {host} has no address: {error}", "mend it, or give an address") from None
        time.sleep(RETRY_SECONDS)


def introduce(command: Command) -> Call:
    """What this node knows of itself before its checks."""
    return Call(
        protocol=PROTOCOL,
        node=command.node_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        nodes=command.nnodes,
        strict=command.strict_environment,
    )


def _tell_refusal(mine: Call, master: str, error: Exception, say: Say) -> None:
    known = isinstance(error, LauncherError)
    mine.refusal = (str(error) if known else repr(error))[:REFUSAL_CHARACTERS]
    mine.code = error.code if known else ExitCode.UNCLASSIFIED
    say(f"[launch] this node cannot start; telling the others at {master}, for at most {TELL_SECONDS:.0f} s")
    try:
        with suppress(LauncherError):  # nobody to tell, and this node's own error is raised all the same
            take(mine, master, TELL_SECONDS)
    except SystemExit:  # a stop signal, which ends the wait and takes the place of the error
        say(str(error))
        raise


def _read_verdict(link: socket.socket, until: float) -> Verdict:
    heard = b""
    while not heard.endswith(b"\n"):
        link.settimeout(max(0.01, until - time.monotonic()))
        part = link.recv(ANSWER_BYTES)
        heard += part
        if not part or len(heard) > ANSWER_BYTES:
            raise ConnectionError("it hung up, or is somebody else")
    return Verdict.model_validate_json(heard)
