"""Where the first node hears the others: a port that anyone can reach, so strangers get little time and few bytes."""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pydantic import ValidationError

from launcher.errors import RetryableError, UserError
from launcher.roll_call_verdict import Call, Verdict

CALL_BYTES, ANSWER_BYTES = 64 << 10, 4 << 20
# A caller says its line within this time; the answer fits into the buffers of a connection that is alive.
SPEAK_SECONDS, ANSWER_SECONDS = 10.0, 5.0
# Connections that have not said who they are; more are turned away.
STRANGERS = 256


@dataclass(eq=False)
class Caller:
    """A connection, and the call that came over it once its line is complete."""

    link: socket.socket
    until: float
    """Monotonic time by which it has said its line."""
    heard: bytes = b""
    call: Call | None = None


class Desk:
    """A port that is open for calls; use as a context manager.

    Raises:
        RetryableError: something else listens on the port.
        UserError: this process may not listen there.
    """

    def __init__(self, port: int) -> None:
        self._port, self._callers = port, list[Caller]()
        self._selector, self._stack = selectors.DefaultSelector(), ExitStack()

    def __enter__(self) -> Desk:
        self._stack.callback(self._selector.close)
        self._listener = self._stack.enter_context(open_port(self._port))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        for caller in self._callers:
            caller.link.close()
        self._stack.close()

    @property
    def calls(self) -> list[Call]:
        """Of the nodes that wait for an answer, and of those that refused and left."""
        return [caller.call for caller in self._callers if caller.call is not None]

    def attend(self, seconds: float) -> None:
        """Wait for something to come, at most `seconds`, and take it in."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for caller in [caller for caller in self._callers if caller.call is None and caller.until < now]:
            self._drop(caller)

    def answer(self, verdict: Verdict) -> None:
        """Tell everyone who called."""
        line = verdict.model_dump_json().encode() + b"\n"
        for caller in self._callers:
            if caller.call is not None:
                with suppress(OSError):  # it left meanwhile, and needs no answer
                    caller.link.settimeout(ANSWER_SECONDS)
                    caller.link.sendall(line)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # it hung up before it was let in
            return
        if sum(caller.call is None for caller in self._callers) >= STRANGERS:
            link.close()
            return
        link.setblocking(False)
        caller = Caller(link, time.monotonic() + SPEAK_SECONDS)
        self._callers.append(caller)
        self._selector.register(link, selectors.EVENT_READ, caller)

    def _hear(self, caller: Caller) -> None:
        try:
            part = caller.link.recv(CALL_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part or caller.call is not None:  # it hung up, or talks on after its line
            self._drop(caller)
            return
        caller.heard += part
        if b"\n" in caller.heard:
            caller.call = read_call(caller.heard)
        if caller.call is None and (b"\n" in caller.heard or len(caller.heard) > CALL_BYTES):
            self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        """End a connection; a node that goes before it was answered may call again, but a refusal stays one."""
        self._selector.unregister(caller.link)
        caller.link.close()
        if caller.call is None or caller.call.refusal is None:
            self._callers.remove(caller)


def read_call(line: bytes) -> Call | None:
    """The call that a line carries; None if it is anything else."""
    try:
        call = Call.model_validate_json(line)
    except ValidationError:
        return None
    return call if 0 < call.node < call.nodes else None


def open_port(port: int) -> socket.socket:
    """Listen on all interfaces, in IPv4 and IPv6 where the host has both; torchrun can have the port right after."""
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)  # with SO_REUSEADDR
    except OSError as error:
        what = f"--master: cannot listen on port {port} of this node: {os.strerror(error.errno or 0)}"
        if isinstance(error, PermissionError):
            raise UserError(what, "choose a port above 1023 on all nodes") from None
        fix = "it may be an earlier run on its way out: try again, or choose another port on all nodes"
        raise RetryableError(what, fix) from None
