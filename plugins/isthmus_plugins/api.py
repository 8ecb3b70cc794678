"""What a plugin may use: requests and verdicts, and the interfaces of the process it runs in.

A plugin sees this module and :mod:`isthmus_plugins.hookspecs`, the protocol and the control component, and nothing of
the proxy's insides. The proxy's own classes satisfy the interfaces here structurally.

Verdicts of a request hook (see :class:`RequestHook`):

======================  ===============================================================================================
``None``                forward the request as it is
``NEED_MORE``           the frame is only a prefix and not enough: ask again with the whole frame
:class:`Answer`         do not forward; answer the client with this frame, in its turn
:class:`Replace`        forward another frame in place of this one
:class:`Hold`           wait; nothing behind this request on its connection is read until the awaited verdict is there
:class:`Close`          close the connection, for a logged reason
======================  ===============================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ResponseHook: TypeAlias = Callable[[bytes], bytes]
"""Takes a whole response frame and returns the frame to send in its place (the same object where nothing changes)."""


class Request:
    """One request as a hook sees it. It is valid during the call only."""

    __slots__ = ("api_key", "client", "correlation_id", "frame", "now", "version", "whole")

    def __init__(
        self,
        frame: bytes,
        whole: bool,
        api_key: int,
        version: int,
        correlation_id: int,
        now: float,
        client: Client,
    ) -> None:
        self.frame = frame
        """The frame with its size prefix; a prefix of it while ``whole`` is false."""
        self.whole = whole
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.now = now
        """When the request's bytes arrived, seconds on the loop's monotonic clock."""
        self.client = client


class Client:
    """Who sent a request: one downstream connection."""

    __slots__ = ("address", "broker_id", "session_id")

    def __init__(self, session_id: int, address: str, broker_id: int) -> None:
        self.session_id = session_id
        self.address = address
        self.broker_id = broker_id
        """The broker behind this connection; -1 while it is a bootstrap connection to any of them."""


class _NeedMore(enum.Enum):
    NEED_MORE = enum.auto()


NEED_MORE: Final = _NeedMore.NEED_MORE


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the broker's place with this whole response frame."""

    frame: bytes
    cause: str
    """Counted in the metric of refusals under this name."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Forward ``frame`` instead; ``on_response`` turns the broker's answer into the client's."""

    frame: bytes
    on_response: ResponseHook | None = None
    cause: str = ""
    """Set where part of the request was refused: counted like :attr:`Answer.cause`."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for the verdict. Hooks bound the time themselves."""

    verdict: Awaitable[Verdict]


@dataclass(frozen=True, slots=True)
class Close:
    """Close the client's connection, as a broker does with what it cannot answer."""

    reason: str


Verdict: TypeAlias = None | Literal[_NeedMore.NEED_MORE] | Answer | Replace | Hold | Close


@dataclass(frozen=True, slots=True)
class RequestHook:
    """One plugin's interest in one API, for a range of versions.

    ``on_request`` is called on the fast path, in the order of the connection: it must not block. Several plugins' hooks
    for one API run in the order in which the plugins are configured; the first verdict that is not ``None`` counts.
    """

    api_key: int
    on_request: Callable[[Request], Verdict]
    whole: bool = False
    """True if the hook can do nothing with a prefix: it is called once, with the whole frame."""
    versions: tuple[int, int] = (0, 0x7FFF)
