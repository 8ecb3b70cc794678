"""The name that a producer of the reversal benchmark knows leads to whom it is to lead."""

from __future__ import annotations

import socket

from isthmus_bench.moving_name import MovingName


def test_a_name_leads_elsewhere_from_then_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        MovingName() as name,
    ):
        name.lead_to(*one.getsockname())
        first, stays = _through(name, one, b"one")
        name.lead_to(*other.getsockname())
        second, there = _through(name, other, b"other")
        first.sendall(b"still")
        assert stays.recv(5) == b"still"
        for each in (first, stays, second, there):
            each.close()


def _through(name: MovingName, to: socket.socket, said: bytes) -> tuple[socket.socket, socket.socket]:
    """A connection to the name, and its other end."""
    client = socket.create_connection(("127.0.0.1", name.port), 5)
    client.sendall(said)
    to.settimeout(5)
    end, _ = to.accept()
    end.settimeout(5)
    assert end.recv(len(said)) == said
    return client, end
