"""What a client may send, as the ApiVersions response says it: what the broker and the proxy both know.

The broker's list of APIs is cut down in place, so that all else in the response (features, finalized features and their
epoch, tags of later versions) stays as it is. Its header is always v0, in the flexible versions too (KIP-511).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Final

from isthmus_protocol.error_codes import UNSUPPORTED_VERSION
from isthmus_protocol.locate import Want, entity_locator
from isthmus_protocol.schema import ApiKey, message_spec, supported
from isthmus_protocol.wire import MalformedFrame, write_uvarint

_BODY: Final = 8
"""Where the body starts: behind the size and the correlation id."""

_ANSWERS_REMEMBERED: Final = 64
"""Brokers of a cluster differ in few answers, but throttle time and features change them."""


@cache
def proxied() -> Mapping[int, tuple[int, int]]:
    """The APIs and versions that clients may use through the proxy: ``{api key: (lowest, highest)}``."""
    return MappingProxyType(dict(supported()))


def intersect(version: int, frame: bytes) -> bytes:
    """A broker's ApiVersions response frame, cut down to what the proxy knows; the same object where nothing changes.

    ``version`` is the request's. A broker that does not know it answers UNSUPPORTED_VERSION in the form of v0, and so
    it passes. Raises MalformedFrame.
    """
    size = int.from_bytes(frame[:4], "big", signed=True)
    if size != len(frame) - 4 or size < 6:
        raise MalformedFrame(f"An ApiVersions response of {len(frame)} bytes cannot be")
    changed = _intersect_body(version, frame[_BODY:])
    if changed is None:
        return frame
    return (len(changed) + 4).to_bytes(4, "big") + frame[4:_BODY] + changed


def unsupported_version_answer(correlation_id: int) -> bytes:
    """The response frame for an ApiVersions request that is newer than the proxy (KIP-511).

    In the form of v0, with the error UNSUPPORTED_VERSION and the versions of ApiVersions itself, from which the client
    chooses for its next attempt.
    """
    lowest, highest = proxied()[ApiKey.API_VERSIONS]
    body = b"".join(
        number.to_bytes(size, "big")
        for number, size in ((UNSUPPORTED_VERSION, 2), (1, 4), (ApiKey.API_VERSIONS, 2), (lowest, 2), (highest, 2))
    )
    return (len(body) + 4).to_bytes(4, "big") + correlation_id.to_bytes(4, "big", signed=True) + body


_WANTS: Final[tuple[Want, ...]] = (
    "api_keys@",
    ("api_keys", ("@", "api_key", "min_version", "min_version@", "max_version", "max_version@")),
)


@lru_cache(maxsize=_ANSWERS_REMEMBERED)
def _intersect_body(version: int, body: bytes) -> bytes | None:
    """None where nothing changes. Remembered, because every connection asks."""
    if int.from_bytes(body[:2], "big") == UNSUPPORTED_VERSION:
        version = 0
    spec = message_spec(ApiKey.API_VERSIONS, version, "response")
    (start, end), apis = entity_locator(spec, _WANTS)(body, 0, len(body))
    entries: list[bytes] = []
    for (entry, entry_end), api_key, lowest, (min_start, min_end), highest, (max_start, max_end) in apis:
        ours = proxied().get(api_key)
        if ours is None:
            continue
        low, high = max(lowest, ours[0]), min(highest, ours[1])
        if low > high:
            continue
        if api_key == ApiKey.PRODUCE:
            # Brokers claim v0 to v2 of it without serving them, since old versions of librdkafka switch off features
            # when they are missing (KAFKA-18659).
            low = lowest
        entries += (
            body[entry:min_start],
            low.to_bytes(2, "big", signed=True),
            body[min_end:max_start],
            high.to_bytes(2, "big", signed=True),
            body[max_end:entry_end],
        )
    count = len(entries) // 5
    prefix = write_uvarint(count + 1) if spec.flexible else count.to_bytes(4, "big")
    changed = b"".join((body[:start], prefix, *entries, body[end:]))
    return None if changed == body else changed
