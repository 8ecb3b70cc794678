"""The relay that cuts connections, on plain sockets."""

from __future__ import annotations

import socket
import struct

from support.relay import Relay

NOW = struct.pack("ii", 1, 0)
"""For SO_LINGER: a reset, so that the relay's next write fails."""


def test_late_bytes_of_a_connection_that_is_gone_cut_the_live_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Relay(server.getsockname()[:2]) as relay:
        host, _, port = relay.address.partition(":")
        with socket.create_connection((host, int(port)), 10) as old:
            old_end, _ = server.accept()
            relay.stall()
            old.sendall(b"held")
            with socket.create_connection((host, int(port)), 10) as live:
                live_end, _ = server.accept()
                with live_end:
                    old_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)
                    old_end.close()
                    relay.cut_after(1)
                    relay.release()
                    assert live.recv(1) == b""
