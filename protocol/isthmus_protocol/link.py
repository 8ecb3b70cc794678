"""The link protocol: messages between the proxies of two clusters.

A connection starts with a handshake in which both ends prove that they hold the link's secret before anything else is
said. To create a link the dialler names a token of the acceptor's cluster: its PROOF is a signature then, and the
acceptor's own proof stands in WELCOME, after it. After the handshake both ends are equal: either may call the other,
and records flow from the leader end of a namespace to its follower end, whoever dialled.

::

    dialler                                acceptor
      HELLO  versions, link, cluster, nonce, key -->
                                      <-- CHALLENGE  version, cluster, nonce, key, proof
      PROOF  proof                           -->
                                      <-- WELCOME  (proof)  (or REJECT code, message, at any point)
      then, in both directions:  CALL / RESULT   control, JSON
                                 APPEND          records of one partition, whole batches, in offset order
                                 APPENDED        the follower's log end, cumulative
                                 STOPPED         a stream ended, with the reason
                                 HEARTBEAT       nothing said for a while
                                 PIECE           a part of a large frame (:mod:`isthmus_protocol.link_pieces`)
                                 SEALED          all of these and WELCOME, where both ends know how to encrypt frames
                                                 and one at least has no TLS (:mod:`isthmus_protocol.link_cipher`)

A frame is a 4-byte size (of what follows), a 1-byte type and a body. ``HELLO`` states the versions that the dialler
speaks; the acceptor chooses. The keys are X25519 public keys: a link's secret is agreed on, never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from isthmus_protocol.wire import MalformedFrame

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
FRAME_BYTES_MAX: Final = 128 * 1024 * 1024
"""Above any batch a broker takes (``message.max.bytes``) plus its neighbours in one APPEND."""
HANDSHAKE_BYTES_MAX: Final = 16 * 1024
"""What an end that has proved nothing may make us hold."""
NONCE_BYTES: Final = 32

HEAD: Final = struct.Struct(">IB")
"""Size of what follows it, and type."""
_JSON: Final = json.JSONEncoder(separators=(",", ":"))
_APPEND: Final = struct.Struct(">IqqqI")
_APPENDED: Final = struct.Struct(">Iq")
_STREAM: Final = struct.Struct(">I")


class MessageType(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REJECT = 5
    CALL = 16
    RESULT = 17
    APPEND = 18
    APPENDED = 19
    STOPPED = 20
    HEARTBEAT = 21
    PIECE = 22
    SEALED = 23


TYPES: Final = {int(each): each for each in MessageType}


class Append(NamedTuple):
    """Whole batches of one stream, in offset order. Offsets between them have no records at the source."""

    stream: int
    from_offset: int
    """Where the APPEND before this one ended: what lies between that and the first batch has no records, either."""
    source_start: int
    """The source's log start when the batches were read."""
    source_end: int
    """The source's high watermark when the batches were read; exclusive."""
    source_end_age_ms: int
    """How long before sending the oldest record that the follower lacks was seen. The base of lag in seconds."""
    records: bytes | memoryview


class Appended(NamedTuple):
    """All records of the stream before ``end_offset`` are in the follower's in-sync replicas."""

    stream: int
    end_offset: int


class Stopped(NamedTuple):
    """The follower end takes no more of a stream."""

    stream: int
    code: str
    message: str
    end_offset: int | None
    """Up to where it has the source's records; None: as it said last."""


def encode(kind: MessageType, body: bytes) -> bytes:
    """A frame of any type."""
    return HEAD.pack(len(body) + 1, kind) + body


def encode_json(kind: MessageType, body: Mapping[str, Any]) -> bytes:
    """A frame with a JSON object as its body."""
    return encode(kind, _JSON.encode(body).encode())


def encode_append_head(
    stream: int, from_offset: int, source_start: int, source_end: int, source_end_age_ms: int, records_size: int
) -> bytes:
    """What stands before the records of an APPEND frame; the records are written after it without a copy."""
    return HEAD.pack(1 + _APPEND.size + records_size, MessageType.APPEND) + _APPEND.pack(
        stream, from_offset, source_start, source_end, min(source_end_age_ms, 0xFFFFFFFF)
    )


def encode_appended(stream: int, end_offset: int) -> bytes:
    return HEAD.pack(1 + _APPENDED.size, MessageType.APPENDED) + _APPENDED.pack(stream, end_offset)


def stream_of(head: bytes | memoryview) -> int | None:
    """The stream of an APPEND frame, by what :func:`encode_append_head` made; None: the frame is of another type."""
    return _STREAM.unpack_from(head, HEAD.size)[0] if head[HEAD.size - 1] == MessageType.APPEND else None


def decode_append(body: memoryview) -> Append:
    """The body of an APPEND frame. Raises MalformedFrame."""
    if len(body) < _APPEND.size:
        raise MalformedFrame("a truncated APPEND")
    stream, from_offset, source_start, source_end, age_ms = _APPEND.unpack_from(body)
    return Append(stream, from_offset, source_start, source_end, age_ms, body[_APPEND.size :])


def decode_appended(body: memoryview) -> Appended:
    """The body of an APPENDED frame. Raises MalformedFrame."""
    if len(body) != _APPENDED.size:
        raise MalformedFrame("a truncated APPENDED")
    return Appended(*_APPENDED.unpack(body))


def decode_stopped(body: memoryview) -> Stopped:
    """The body of a STOPPED frame. Raises MalformedFrame."""
    said = decode_json(body)
    stream, end_offset = said.get("stream"), said.get("end_offset")
    if type(stream) is not int or not (end_offset is None or type(end_offset) is int):
        raise MalformedFrame("a STOPPED whose stream or end_offset is no number")
    return Stopped(stream, str(said.get("code")), str(said.get("message")), end_offset)


def decode_json(body: memoryview) -> dict[str, Any]:
    """The body of a frame with a JSON object. Raises MalformedFrame."""
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedFrame("not a JSON object")
    return value


class Splitter:
    """Cuts a stream of bytes into frames. Holds no more than one frame and one chunk.

    What comes within one chunk is not copied, and a frame of several chunks once.
    """

    __slots__ = ("_frame_bytes_max", "_held", "_parts", "_wanted")

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        """Of a frame that is not whole."""
        self._held = 0
        """Bytes of them."""
        self._wanted = HEAD.size
        """Bytes of that frame, once its head is there."""
        self._frame_bytes_max = HANDSHAKE_BYTES_MAX

    def authenticated(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """The peer has proved who it is: frames may be large."""
        self._frame_bytes_max = frame_bytes_max

    def feed(self, chunk: bytes) -> Iterator[tuple[MessageType, memoryview]]:
        """The frames that ``chunk`` completes, as type and body. Raises MalformedFrame."""
        position = 0
        if self._parts:
            if self._held < HEAD.size:
                chunk = b"".join((*self._parts, chunk))
            elif self._held + len(chunk) < self._wanted:
                self._parts.append(chunk)
                self._held += len(chunk)
                return
            else:
                position = self._wanted - self._held
                frame = b"".join((*self._parts, memoryview(chunk)[:position]))
                self._parts = []
                yield self._type(frame[HEAD.size - 1]), memoryview(frame)[HEAD.size :]
        view, size = memoryview(chunk), len(chunk)
        while size - position >= HEAD.size:
            following, kind = HEAD.unpack_from(chunk, position)
            if not 1 <= following <= self._frame_bytes_max:
                raise MalformedFrame(f"a link frame of {following} bytes")
            end = position + 4 + following
            if end > size:
                self._wanted = 4 + following
                break
            yield self._type(kind), view[position + HEAD.size : end]
            position = end
        self._held = size - position
        self._parts = [view[position:]] if self._held else []

    @staticmethod
    def _type(kind: int) -> MessageType:
        message_type = TYPES.get(kind)
        if message_type is None:
            raise MalformedFrame(f"a link frame of unknown type {kind}")
        return message_type


def choose_version(minimum: int, maximum: int) -> int | None:
    """The highest version that both ends speak; None if there is none."""
    version = min(maximum, VERSION_MAX)
    return version if version >= max(minimum, VERSION_MIN) else None


def transcript(hello: Mapping[str, Any], challenge: Mapping[str, Any]) -> bytes:
    """What both proofs cover: every word of HELLO and CHALLENGE but the proof, so that neither can be altered."""
    said = {key: value for key, value in challenge.items() if key != "proof"}
    return json.dumps([dict(hello), said], sort_keys=True, separators=(",", ":")).encode()


def proof(secret: bytes, side: str, said: bytes) -> str:
    """What proves to the other side that this ``side`` (``dialler`` or ``acceptor``) holds the secret."""
    return hmac.new(secret, side.encode() + b"\0" + said, hashlib.sha256).hexdigest()


def proof_holds(secret: bytes, side: str, said: bytes, given: str) -> bool:
    """Whether ``given`` is the proof, compared in constant time."""
    return hmac.compare_digest(proof(secret, side, said), given)
