"""What TCP does with links' connections: it holds little that is not sent and, over a synchronous link, never stops to
measure.

BBR (version 1) lets what is on its way fall to four packets for 0.2 s every 10 s, to measure the round trip. Over
a link of 20 ms and 500 records a second, acks then come 0.1 s late (``isthmus bench sync``: p99 85 ms instead of 23).
So where that is the system's choice, connections of synchronous links use another one. Those of asynchronous links keep
it: it carries more over a lossy WAN.
"""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any, Final

log = logging.getLogger("isthmus_plugins.replication")

STOPS_TO_MEASURE: Final = "bbr"
STEADY: Final = ("cubic", "reno")
"""What to use instead, the best first. The second one is always allowed."""
_NAME_BYTES: Final = 16
"""TCP_CA_NAME_MAX of Linux."""
_OPTION: Final[int | None] = getattr(socket, "TCP_CONGESTION", None)
UNSENT_BYTES: Final = 256 * 1024
"""What the system may hold that is not on its way yet: 2 ms of a line of a gigabit, 40 of one of 50 megabits."""
_NOTSENT_LOWAT: Final = 25
"""TCP_NOTSENT_LOWAT of Linux, which older versions of Python do not name."""


def keep_little_unsent(connected: Any) -> None:
    """Have the system take no more of a connection than the line will soon; else it may take some megabytes, and what
    is sent next comes behind them. ``connected``: its socket, or what an event loop shows of it."""
    if not sys.platform.startswith("linux"):
        return
    try:
        connected.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_BYTES)
    except OSError as error:
        log.warning("small frames may wait for large ones", extra={"detail": f"TCP_NOTSENT_LOWAT not set: {error}"})


class CongestionControl:
    """That of one connection. ``connected``: its socket, or what an event loop shows of it."""

    def __init__(self, connected: Any) -> None:
        self._socket = connected
        self._steady = False
        self._chosen: str | None = None
        """The system's choice, where it was replaced."""

    def keep_steady(self, wanted: bool) -> None:
        """Use one that never stops to measure, or the system's again."""
        if _OPTION is None or wanted == self._steady:
            return
        self._steady = wanted
        try:
            if wanted:
                self._replace(_OPTION)
            elif self._chosen is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _OPTION, self._chosen.encode())
                self._chosen = None
        except OSError as error:
            log.warning("congestion control not set", extra={"detail": str(error)})

    def _replace(self, option: int) -> None:
        chosen = self._socket.getsockopt(socket.IPPROTO_TCP, option, _NAME_BYTES).rstrip(b"\0").decode()
        if chosen != STOPS_TO_MEASURE:
            return
        for name in STEADY:
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, name.encode())
            except OSError:  # not there, or not allowed to this user
                continue
            self._chosen = chosen
            return
        log.warning(
            "acks of synchronous links may come 0.2 s late every 10 s: TCP uses bbr, and nothing else is allowed",
            extra={"detail": "set sysctl net.ipv4.tcp_allowed_congestion_control"},
        )
