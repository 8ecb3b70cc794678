"""A Produce that is refused by its head: its records are thrown away as they come, whatever there is of them."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final
from uuid import UUID

from isthmus_protocol.elements import TooManyElements
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.peeks import topics_are_ids
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.schema import ApiKey, request_flexible
from isthmus_protocol.wire import MalformedFrame, read_uvarint

PARTITIONS_MAX: Final = 500
"""Of one that is thrown away: each is looked at as it comes, and put into the request that is left, on the loop."""
_SLICE_BYTES: Final = 16 * 1024
"""Of which the partitions are counted before more is looked at."""


def has_few_partitions(version: int, data: bytes, end: int) -> bool:
    """Whether a Produce to one topic, whose name ends at ``end``, says that it has no more than may be thrown away."""
    try:
        if request_flexible(ApiKey.PRODUCE, version):
            count, behind = read_uvarint(data, end)
            count -= 1
        else:
            count, behind = int.from_bytes(data[end : end + 4], "big", signed=True), end + 4
    except IndexError:
        return False
    return behind <= len(data) and count <= PARTITIONS_MAX


class RefusedProduce:
    """One, from its size prefix on."""

    def __init__(self, version: int, correlation_id: int, size: int, partitions_max: int) -> None:
        """``size``: of the frame with its prefix."""
        self._version = version
        self._correlation_id = correlation_id
        self._left = size
        self._partitions_max = partitions_max
        self._scan = ProduceScan(version)

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take the next bytes. Returns the request with null for records once it has come, and what comes behind it.

        Raises MalformedFrame.
        """
        taken = data[: self._left]
        self._left -= len(taken)
        scan = self._scan
        for start in range(0, len(taken), _SLICE_BYTES):
            scan.feed(taken[start : start + _SLICE_BYTES])
            if len(scan.parts) > self._partitions_max:
                raise TooManyElements(f"produce with more than {self._partitions_max} partitions")
        if self._left:
            return None, b""
        if not scan.done:
            raise MalformedFrame("a Produce ends within its partitions")
        return self._without_records(), data[len(taken) :]

    def _without_records(self) -> bytes:
        scan = self._scan
        by_id = topics_are_ids(ApiKey.PRODUCE, self._version)
        topics: list[dict[str, Any]] = [
            {
                "topic_id" if by_id else "name": UUID(bytes=topic) if by_id else topic.decode("utf-8", "replace"),
                "partition_data": [{"index": part.partition, "records": None} for part in parts],
            }
            for topic, parts in groupby(scan.parts, lambda part: part.topic)
        ]
        values = {"transactional_id": None, "acks": scan.acks, "timeout": 0, "topic_data": topics}
        return encode_request(build_request(ApiKey.PRODUCE, self._version, values), self._correlation_id, None)
