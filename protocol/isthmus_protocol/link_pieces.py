"""Large frames of a link, cut into pieces that may come between other frames.

A frame that is written whole has all behind it wait: over a thin line a batch of 60 MB keeps a small one for seconds.
So a large frame may come in PIECE frames, and other frames between these::

    PIECE   frame number (4) | size of the whole (4) | some of its bytes, in order

The *whole* is what stands behind the 4-byte size of the frame if it comes uncut: its type and its body. The number is
the sender's; no two frames have the same of which some has come and not all. The piece that completes the size is the
last one. A piece of size 0, without bytes, says that the rest will not come: nobody waits for that frame any more.

Frames that come in pieces are larger than :data:`UNCUT_BYTES`, and all of which some has come and not all add up to no
more than :data:`UNFINISHED_BYTES_MAX`: whoever receives them holds no more than that, and ends a connection over which
more is begun.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from isthmus_protocol.link import FRAME_BYTES_MAX, HEAD, TYPES, MessageType
from isthmus_protocol.wire import MalformedFrame

PIECE_BYTES: Final = 128 * 1024
"""Of a frame, in one piece; smaller frames come whole. At 6 MB/s a piece takes 20 ms."""
UNCUT_BYTES: Final = 64 * 1024
"""A frame no larger than this comes whole, so that a peer cannot begin very many."""
UNFINISHED_BYTES_MAX: Final = FRAME_BYTES_MAX + 64 * 1024 * 1024
"""The largest frame, and what streams may have on their way beside it."""

SIZE_BYTES: Final = 4
"""Of a frame that comes uncut: its size, which no piece has."""

_PIECE: Final = struct.Struct(">II")


def encode_piece(number: int, size: int, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A PIECE frame with these bytes of a whole of ``size``, in parts that are written one after the other."""
    taken = sum(map(len, parts))
    return [HEAD.pack(1 + _PIECE.size + taken, MessageType.PIECE) + _PIECE.pack(number, size), *parts]


def encode_abandoned(number: int) -> bytes:
    """The PIECE frame that says that the rest of a frame will not come."""
    return HEAD.pack(1 + _PIECE.size, MessageType.PIECE) + _PIECE.pack(number, 0)


class _Unfinished:
    __slots__ = ("data", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray()


class Reassembly:
    """Puts frames together again. Grows with what comes, whatever is announced."""

    __slots__ = ("_unfinished", "announced_bytes")

    def __init__(self) -> None:
        self._unfinished: dict[int, _Unfinished] = {}
        self.announced_bytes = 0
        """Sizes of the frames of which some has come and not all: what it may come to hold."""

    def add(self, body: memoryview) -> tuple[MessageType, memoryview] | None:
        """Take the body of a PIECE frame; the type and body of the frame that it completes. Raises MalformedFrame."""
        if len(body) < _PIECE.size:
            raise MalformedFrame("a truncated PIECE")
        number, size = _PIECE.unpack_from(body)
        piece = body[_PIECE.size :]
        if not size:
            self._abandoned(number, piece)
            return None
        unfinished = self._unfinished.get(number)
        if unfinished is None:
            unfinished = self._begun(number, size)
        if size != unfinished.size or not 0 < len(piece) <= size - len(unfinished.data):
            raise MalformedFrame(
                f"a PIECE of {len(piece)} bytes, of a frame of {size}, where {len(unfinished.data)} of "
                f"{unfinished.size} have come"
            )
        unfinished.data += piece
        if len(unfinished.data) < size:
            return None
        self._forget(number)
        kind = TYPES.get(unfinished.data[0])
        if kind is None or kind is MessageType.PIECE:
            raise MalformedFrame(f"a link frame of type {unfinished.data[0]} in pieces")
        return kind, memoryview(unfinished.data)[1:]

    def _begun(self, number: int, size: int) -> _Unfinished:
        if not UNCUT_BYTES < size <= FRAME_BYTES_MAX:
            raise MalformedFrame(f"a link frame of {size} bytes in pieces")
        if self.announced_bytes + size > UNFINISHED_BYTES_MAX:
            raise MalformedFrame(
                f"a link frame of {size} bytes is begun where others of {self.announced_bytes} are not finished"
            )
        self.announced_bytes += size
        unfinished = self._unfinished[number] = _Unfinished(size)
        return unfinished

    def _abandoned(self, number: int, piece: memoryview) -> None:
        if piece or number not in self._unfinished:
            raise MalformedFrame(f"a PIECE of size 0 for frame {number}, which is not under way, or with bytes")
        self._forget(number)

    def _forget(self, number: int) -> None:
        self.announced_bytes -= self._unfinished.pop(number).size
