"""Connections of synchronous links do not use BBR, which stops every 10 s."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from isthmus_plugins.replication.link.congestion import STEADY, STOPS_TO_MEASURE, CongestionControl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_CONGESTION is Linux's")


def _available() -> set[str]:
    return set(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split())


def _used(connected: socket.socket) -> str:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
    ):
        yield client


def test_bbr_is_replaced_while_the_link_is_synchronous(connected: socket.socket) -> None:
    if STOPS_TO_MEASURE not in _available():
        pytest.skip("this kernel has no bbr")
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, STOPS_TO_MEASURE.encode())
    control = CongestionControl(connected)

    control.keep_steady(True)
    assert _used(connected) in STEADY

    control.keep_steady(True)
    assert _used(connected) in STEADY

    control.keep_steady(False)
    assert _used(connected) == STOPS_TO_MEASURE


@pytest.mark.parametrize("wanted", [True, False])
def test_another_choice_of_the_system_stays(connected: socket.socket, wanted: bool) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    CongestionControl(connected).keep_steady(wanted)
    assert _used(connected) == "reno"


def test_a_connection_that_is_gone_is_only_logged(connected: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    connected.close()
    CongestionControl(connected).keep_steady(True)
    assert "congestion control not set" in caplog.text
