"""What an answer says of quotas (KIP-219): for how long the broker reads nothing more from its connection.

A throttled answer comes at once, a Fetch's without records, and the connection is mute then. The time stands first in
nearly all answers, and last in those to Produce.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from functools import cache
from typing import Final

from isthmus_protocol.schema import ApiKey, response_header_flexible, response_type

_MS: Final = struct.Struct(">i")
_BODY: Final = 8
"""Behind size and correlation id."""


def throttle_ms(api_key: int, version: int, frame: bytes | bytearray) -> int:
    """The throttle time of a whole response frame; 0 where its version has none, or has it where nobody looks."""
    place = _place(api_key, version)
    if place is None:
        return 0
    if place >= 0:
        return int(_MS.unpack_from(frame, place)[0]) if len(frame) >= place + _MS.size else 0
    # With tags behind it (addresses of new leaders, v10) its place is not known without reading all.
    if place == _BEFORE_TAGS and frame[-1] != 0:
        return 0
    return int(_MS.unpack_from(frame, len(frame) + place)[0])


_LAST: Final = -4
_BEFORE_TAGS: Final = -5
"""The body ends in a section of tags, which is one byte if there are none."""


@cache
def _place(api_key: int, version: int) -> int | None:
    """Where it stands: from the frame's start, or (negative) from its end."""
    kind = response_type(api_key, version)
    names = [field.name for field in fields(kind)]
    if names[:1] == ["throttle_time"]:
        return _BODY + response_header_flexible(api_key, version)
    if api_key == ApiKey.PRODUCE and "throttle_time" in names:
        return _BEFORE_TAGS if kind.__flexible__ else _LAST
    return None
