"""Puts other bytes in the place of some of a message's, and copies what is between them in large slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from isthmus_protocol.wire import write_uvarint

Span: TypeAlias = tuple[int, int]
"""Where something stands in a frame: from, to."""
Edit: TypeAlias = tuple[int, int, bytes]
"""``(start, end, what takes the place of these bytes)``"""


def edited(data: bytes, edits: Iterable[Edit]) -> bytes:
    """``data`` with ``edits``, which are in order of position and do not overlap."""
    parts: list[bytes] = []
    position = 0
    for start, end, replacement in edits:
        parts += (data[position:start], replacement)
        position = end
    parts.append(data[position:])
    return b"".join(parts)


def edited_frame(frame: bytes, edits: list[Edit]) -> bytes:
    """As :func:`edited`, with the size prefix put right."""
    length = len(frame) + sum(len(replacement) - (end - start) for start, end, replacement in edits)
    return edited(frame, [(0, 4, (length - 4).to_bytes(4, "big")), *edits])


def encoded_string(value: bytes, flexible: bool) -> bytes:
    """A string as messages have it, behind its size."""
    return (write_uvarint(len(value) + 1) if flexible else len(value).to_bytes(2, "big")) + value


def encoded_count(count: int, flexible: bool) -> bytes:
    """The count that stands before an array."""
    return write_uvarint(count + 1) if flexible else count.to_bytes(4, "big")
