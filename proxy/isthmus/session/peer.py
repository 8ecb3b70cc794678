"""What the two connections of a session have in common: a transport, half a frame, and back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from isthmus.session.session import Session

WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
"""Bytes queued towards one peer before the other one is no longer read: a session holds at most this and one chunk."""
FLUSH_TIMEOUT_S: Final = 30.0
"""How long a peer that does not read may keep a closed connection's last bytes in memory."""


class Peer(asyncio.Protocol):
    """What both ends of a session have: a transport, bytes that are not a frame yet, and back-pressure."""

    __slots__ = ("_partial", "_streaming", "_transport", "_wanted", "send", "session")

    _transport: asyncio.Transport
    session: Session
    send: Callable[[bytes], None]
    """Queues bytes towards this peer."""

    def __init__(self) -> None:
        self._streaming = 0
        """Bytes that are still to come of a frame that is being forwarded."""
        self._partial: bytearray | None = None
        self._wanted = 0
        """How long ``_partial`` must be before it is worth another look."""

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has been forwarded in part."""
        return self._streaming > 0

    def _keep(self, data: bytes, wanted: int) -> None:
        self._partial = bytearray(data)
        self._wanted = wanted

    def _connected(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self.send = self._transport.write

    def finish(self) -> None:
        """Close after what is queued has been sent, within a bounded time; no more is read."""
        self._partial = None
        if self._transport.is_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()
