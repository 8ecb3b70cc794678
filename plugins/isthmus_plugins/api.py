"""What a plugin may use: requests and verdicts, and the interfaces of the process it runs in.

A plugin sees this module and :mod:`isthmus_plugins.hookspecs`, the protocol and the control component, and nothing of
the proxy's insides. The proxy's own classes satisfy the interfaces here structurally.

Verdicts of a request hook (see :class:`RequestHook`):

======================  ===============================================================================================
``None``                forward the request as it is
``NEED_MORE``           the frame is only a prefix and not enough: ask again with the whole frame
``WITHOUT_RECORDS``     this prefix of a Produce is refused, whatever its records are: ask again, for the answer, when
                        they have been thrown away, with null in their place
:class:`Answer`         do not forward; answer the client with this frame, in its turn
:class:`Replace`        forward another frame in place of this one
:class:`Hold`           wait; nothing behind this request on its connection is read until the awaited verdict is there
:class:`Ask`            ask the broker something else first, as the client: its answer leads to the verdict
:class:`Close`          close the connection, for a logged reason
======================  ===============================================================================================
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from isthmus_protocol.partition_scan import ScannedPartition

if TYPE_CHECKING:
    pass


class Gate:
    """An answer that waits. A response hook returns it in the answer's place, another one for each answer; whoever made
    it opens it later, once, with what is to be sent.

    Answers keep their order: whatever comes behind it on its connection waits for it, heartbeats too. Hooks behind the
    one that made it see the frame when it opens.
    """

    __slots__ = ("_frame", "_hooks", "_opened", "dropped")

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._hooks: tuple[ResponseHook, ...] = ()
        self._opened: Callable[[], None] | None = None
        self.dropped = False
        """Nobody waits for it any more: the client is gone, or its connection was closed."""

    def open(self, frame: bytes) -> None:
        """Send ``frame`` when its turn comes. Only the first call counts, and none if it was dropped.

        It may be opened before the session has taken it.
        """
        if self._frame is None and not self.dropped:
            self._frame = frame
            if self._opened is not None:
                self._opened()

    def then(self, hook: ResponseHook) -> Gate:
        """Have ``hook`` see the frame when the gate has opened, behind those that see it already. Returns itself."""
        self._hooks += (hook,)
        return self

    # The session's side.

    def take(self, opened: Callable[[], None]) -> bool:
        """Call ``opened`` when it opens; True, and it is not called, if it is open. RuntimeError: it was taken."""
        if self._opened is not None:
            raise RuntimeError("a gate stands for one answer")
        self._opened = opened
        return self._frame is not None

    def answer(self) -> bytes | Gate:
        """What the hooks behind an open gate make of its frame: another gate where one of them waits for more.

        Raises what they raise.
        """
        assert self._frame is not None
        answer: bytes | Gate = self._frame
        hooks = self._hooks
        self._let_go()
        for hook in hooks:
            answer = passed_on(hook, answer)
        return answer

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self.dropped = True
        self._let_go()

    def _let_go(self) -> None:
        self._hooks = ()
        self._opened = _nothing


def _nothing() -> None:
    pass


ResponseHook: TypeAlias = Callable[[bytes], bytes | Gate]
"""Takes a whole response frame and returns the frame to send in its place (the same object where nothing changes), or a
gate where that is not to be sent yet."""


AnswerLooks: TypeAlias = Callable[[bytes, float], ResponseHook | None]
"""Takes a whole request frame and when it came, and returns what is to see its answer."""


def passed_on(hook: ResponseHook, answer: bytes | Gate) -> bytes | Gate:
    """``hook`` behind another one that returned ``answer``."""
    return answer.then(hook) if isinstance(answer, Gate) else hook(answer)


def in_turn(first: ResponseHook | None, second: ResponseHook | None) -> ResponseHook | None:
    """What has an answer seen by one hook and then by the other, where there are two."""
    if first is None or second is None:
        return first or second
    return partial(_both, first, second)


def _both(first: ResponseHook, second: ResponseHook, frame: bytes) -> bytes | Gate:
    return passed_on(second, first(frame))


class Request:
    """One request as a hook sees it. It is valid during the call only."""

    __slots__ = ("api_key", "aside", "client", "correlation_id", "frame", "leave", "now", "version", "whole")

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
        self.aside = False
        """It is large: pure hooks are asked in another thread (``aside``)."""
        self.leave: Leave | None = None
        """Set by a hook that forwards this Produce as it is, and would forward any other to the same single topic."""


class Leave:
    """A hook's leave to forward more Produce requests to one topic without asking again.

    It covers requests of the same connection that have the same bytes up to the end of their only topic: header,
    transactional id, acks, topic. It stands until ``until``, and ends on every connection at once when that is set
    back.
    """

    __slots__ = ("answers", "until")

    def __init__(self, until: float, answers: AnswerLooks | None = None) -> None:
        self.until = until
        """Seconds on the loop's monotonic clock."""
        self.answers = answers
        """For a hook that looks at answers: called with each request that is covered, in the place of the hook. None:
        ask the hook about this one."""


class Client:
    """Who sent a request: one downstream connection."""

    __slots__ = ("address", "broker_id", "listener", "principal", "session_id")

    def __init__(self, session_id: int, address: str, broker_id: int, listener: str = "") -> None:
        self.session_id = session_id
        self.address = address
        self.broker_id = broker_id
        """The broker behind this connection; -1 while it is a bootstrap connection to any of them."""
        self.listener = listener
        """The proxy's own address that it came to, as it is bound (``host:port``)."""
        self.principal: str | None = None
        """Who it is, with its type (``User:app-1``); None: it has not authenticated, or not in a way that is read."""


class _NeedMore(enum.Enum):
    NEED_MORE = enum.auto()
    WITHOUT_RECORDS = enum.auto()


NEED_MORE: Final = _NeedMore.NEED_MORE
WITHOUT_RECORDS: Final = _NeedMore.WITHOUT_RECORDS


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the broker's place with this whole response frame."""

    frame: bytes | Gate
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
class Ask:
    """Ask the broker on the client's own connection, so with the client's rights and none of the proxy's.

    Nothing behind the request is read until it has answered; the client sees nothing of it.
    """

    frame: bytes
    """A whole request with the correlation id :data:`ASKED_ID`, in a version that all brokers serve."""
    then: Callable[[Any], Verdict]
    """Takes what ``read`` made of the answer. Not called where a connection is lost. It is called where the request is
    decided: on the loop, or about a large one in the other thread (:attr:`RequestHook.pure`)."""
    read: Callable[[bytes], Any] = bytes
    """Takes the whole answer frame, and nothing else counts for it: a large one it reads in the other thread."""


ASKED_ID: Final = 0
"""Correlation id of what the proxy asks itself on a client's connection."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the client's connection, as a broker does with what it cannot answer."""

    reason: str
    forward: bytes = b""
    """A request without an answer (Produce with acks=0) that is forwarded first: what was not refused of this one."""


Verdict: TypeAlias = (
    Literal[_NeedMore.NEED_MORE, _NeedMore.WITHOUT_RECORDS] | Answer | Replace | Hold | Ask | Close | None
)


@dataclass(frozen=True, slots=True)
class RequestHook:
    """One plugin's interest in one API, for a range of versions.

    ``on_request`` is called on the fast path, in the order of the connection: it must not block. Several plugins' hooks
    for one API run in the order in which the plugins are configured: what one replaces is what those behind it see, and
    they see the answer first; any other verdict that is not ``None`` ends the matter.
    """

    api_key: int
    on_request: Callable[[Request], Verdict]
    whole: bool = False
    """True if the hook can do nothing with a prefix: it is called once, with the whole frame."""
    versions: tuple[int, int] = (0, 0x7FFF)
    pure: bool = False
    """True if it may be asked in another thread than the loop's, as it is about requests of thousands of elements: it
    changes nothing that others look at, and what it reads is replaced as a whole. What it awaits, in a Hold, is awaited
    on the loop. The loop decides such requests itself where a hook of the API is not pure."""


# ---- what the process offers ----


TAP_REQUEST, TAP_ANSWER, TAP_OWN_ANSWER, TAP_GATED, TAP_MORE = 1, 2, 3, 9, 11
"""What a tap notes: a request was forwarded, or answered here; an answer: the broker's has come, the proxy gives one
of its own, the broker's waits at a gate, more first bytes of one have come."""
TAP_BYTES: Final = 512
"""So many first bytes of a frame are enough for a tap."""
TAP_PRODUCED_BYTES: Final = 16 * 1024
"""Of the answer to a Produce, which says something of each partition."""


def tap_answer_bytes(key: int) -> int:
    """How many first bytes of an answer a tap notes; ``key``: API key << 16 | version."""
    return TAP_BYTES if key >> 16 else TAP_PRODUCED_BYTES


TapNote: TypeAlias = tuple[int, int, float, float, int, bytes]
"""Kind (:data:`TAP_REQUEST` ...); session; when it came, and when this was noted (monotonic seconds); API key << 16 |
version; the frame's first bytes, from its size on and as far as they were there, eight at least.

Of a request at most :data:`TAP_BYTES`, of an answer :func:`tap_answer_bytes`; where an answer will have more, up to
that many, more is noted: behind a head of an answer (:data:`TAP_HEAD`).
"""
TAP_HEAD: Final = struct.Struct(">ii")
"""Size, as a frame has it, and correlation id: how an answer begins."""


class Tap(Protocol):
    """Is called for all traffic, on the traffic path: it must only take notes."""

    note: Callable[[TapNote], object]
    """Best the ``extend`` of a list: what is called on the traffic path comes into cold caches, and so does every
    object that is kept, a tuple for each note too."""

    def wants_parts(self, session: int, at: float, correlation_id: int) -> bool:
        """Whether to look for the partitions of a request, or of its answer. ``at``: when it was forwarded."""

    def parts(self, session: int, key: int, correlation_id: int, found: Sequence[ScannedPartition], total: int) -> None:
        """Partitions of a Produce request that has several, or of the answer to a Fetch: the next ones of them.

        ``total``: how many there are, with the last ones; 0 before. Called where it has more bytes than
        :data:`TAP_BYTES`, and ``wants_parts`` said so. After its first bytes, and before the next request, or answer,
        of its session. Of an answer that hooks see as a whole before its first bytes, and behind the answer before it.
        """

    def sent(self, session: int, correlation_id: int) -> None:
        """An answer that waited at a gate goes out."""
