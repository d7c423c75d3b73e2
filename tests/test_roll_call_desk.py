"""The port of the roll call: strangers, a crowd of them, something else that holds it, a host that nobody knows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from launcher import roll_call_desk
from launcher.errors import UserError
from launcher.roll_call import find_address
from tests.node_calls import LONG, connect, node, together
from tests.node_calls import eager as eager
from tests.node_calls import free_address as free_address


def hung_up(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_neither_stop_nor_block_the_call(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call_desk, "SPEAK_SECONDS", 0.3)

    lines = (b"GET / HTTP/1.1\r\n\r\n", b"x" * (70 << 10), b"\x16\x03\x01\n", b"{", b"")

    def strangers() -> list[bool]:
        links = [connect(master) for _ in range(5)]
        for link, line in zip(links, lines, strict=True):
            with suppress(OSError):  # already turned away
                link.sendall(line)
        ended = [hung_up(link) for link in links]
        for link in links:
            link.close()
        return ended

    def then_call() -> list[str]:
        assert strangers() == [True] * 5
        return node(1, master)

    first, other = together(lambda: node(0, master), then_call)
    assert isinstance(first, list) and isinstance(other, list)


def test_no_more_strangers_than_can_be_held(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call_desk, "STRANGERS", 2)

    def crowd() -> bool:
        with connect(master), connect(master), connect(master) as third:
            ended = hung_up(third)
        node(1, master)
        return ended

    assert together(lambda: node(0, master), crowd)[1] is True


@pytest.fixture
def echo(master: str) -> Iterator[None]:
    """Something that holds the port and sends back what it gets."""
    host, _, port = master.rpartition(":")
    with socket.create_server((host, int(port))) as listener:

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    link.sendall(link.recv(1 << 16))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LONG)


@pytest.mark.usefixtures("echo")
def test_a_port_that_something_else_holds(master: str) -> None:
    (first,) = together(lambda: node(0, master))
    assert first.code == 75 and f"cannot listen on port {master.rpartition(':')[2]} of this node: Address" in str(first)
    (other,) = together(lambda: node(1, master, patience=1.0))
    assert other.code == 75 and str(other).startswith(f"node 0 did not answer at {master}")


def test_a_host_without_an_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="--master: nosuch has no address: .*Name or service not known"):
        find_address("nosuch", 0.1)
