"""What an answer says of quotas (KIP-219): for how long the broker reads nothing more from its connection.

A throttled answer comes at once, a Fetch's without records, and the connection is mute then. The time stands first in
nearly all answers, and behind the partitions in those to Produce.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from functools import cache
from typing import Final

from isthmus_protocol.locate import Locator, locator
from isthmus_protocol.schema import ApiKey, response_header_flexible, response_type
from isthmus_protocol.wire import MalformedFrame

_MS: Final = struct.Struct(">i")
_BODY: Final = 8
"""Behind size and correlation id."""


def throttle_ms(api_key: int, version: int, frame: bytes | bytearray) -> int:
    """The throttle time of a whole response frame; 0 where its version has none, and where the frame is malformed."""
    place = _place(api_key, version)
    if place is None:
        return 0
    if isinstance(place, int):
        return int(_MS.unpack_from(frame, place)[0]) if len(frame) >= place + _MS.size else 0
    try:
        # Not from the frame's end: whatever tags say (addresses of new leaders, v10) stands there, and ends in 0, too.
        return int(place(frame))
    except MalformedFrame:
        return 0


@cache
def _place(api_key: int, version: int) -> int | Locator | None:
    """Where it stands: from the frame's start, or what finds it."""
    names = [field.name for field in fields(response_type(api_key, version))]
    if names[:1] == ["throttle_time"]:
        return _BODY + response_header_flexible(api_key, version)
    if api_key == ApiKey.PRODUCE and "throttle_time" in names:
        return locator(api_key, version, "response", ("throttle_time",))
    return None
