"""Messages of more elements than their reader takes on are refused before they are read."""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from isthmus_protocol import peeks
from isthmus_protocol.elements import TooManyElements, at_most, carried
from isthmus_protocol.messages import build_request, decode_request, encode_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import TAGS_MAX, MalformedFrame, skip_tags, write_uvarint

MANY = 500_000


def deletion(topics: int, version: int = 5) -> bytes:
    """A request of so many names of no bytes, one byte each."""
    body = write_uvarint(topics + 1) + b"\x01" * topics + struct.pack(">i", 30_000) + b"\x00"
    head = struct.pack(">hhih", ApiKey.DELETE_TOPICS, version, 7, -1) + b"\x00"
    return struct.pack(">i", len(head) + len(body)) + head + body


def commit(partitions: int) -> bytes:
    asked = [{"partition_index": each, "committed_offset": 1} for each in range(partitions)]
    values = {"group_id": "g", "topics": [{"name": f"t{each}", "partitions": asked} for each in range(3)]}
    return encode_request(build_request(ApiKey.OFFSET_COMMIT, 9, values), 1, "c")


def test_too_many_are_refused_before_they_are_read() -> None:
    frame = deletion(MANY)
    decode_request(deletion(1))  # compiles what reads it
    began = time.process_time()
    with at_most(1_000), pytest.raises(TooManyElements, match="more than 1000 elements"):
        decode_request(frame)
    assert time.process_time() - began < 0.01  # more than a second, were they read


def test_elements_of_all_arrays_of_a_message_count() -> None:
    frame = commit(300)
    with at_most(903):
        decode_request(frame)
    with at_most(902), pytest.raises(TooManyElements):
        decode_request(frame)


def test_each_reading_of_a_message_may_be_bounded() -> None:
    """Several hooks read the same request."""
    frame = commit(300)
    with at_most(903, each=True):
        for _ in range(3):
            decode_request(frame)
            peeks.topics(ApiKey.OFFSET_COMMIT, 9, "request", frame)
    with at_most(902, each=True), pytest.raises(TooManyElements):
        decode_request(frame)
    with at_most(2 * 903 - 1):
        decode_request(frame)
        with pytest.raises(TooManyElements):
            decode_request(frame)


def test_what_is_only_looked_for_counts_as_well() -> None:
    frame = commit(300)
    with at_most(903):
        peeks.topics(ApiKey.OFFSET_COMMIT, 9, "request", frame)
    with at_most(600), pytest.raises(TooManyElements):
        peeks.topics(ApiKey.OFFSET_COMMIT, 9, "request", frame)


def test_the_bound_ends_with_its_block_and_holds_for_its_thread() -> None:
    async def main() -> None:
        with at_most(10):
            elsewhere = await asyncio.get_running_loop().run_in_executor(None, decode_request, deletion(100))
        assert len(elsewhere[1].topic_names) == 100  # type: ignore[attr-defined]

    asyncio.run(main())
    decode_request(deletion(100))


def test_a_thousand_tagged_fields_are_none_that_anybody_meant() -> None:
    def tags(count: int) -> bytes:
        return write_uvarint(count) + b"\x63\x00" * count

    assert skip_tags(tags(TAGS_MAX), 0) == len(tags(TAGS_MAX))
    with pytest.raises(MalformedFrame, match="tagged fields"):
        skip_tags(tags(TAGS_MAX + 1), 0)
    frame = deletion(1)[:-1] + tags(TAGS_MAX + 1)
    frame = struct.pack(">i", len(frame) - 4) + frame[4:]
    with pytest.raises(MalformedFrame, match="tagged fields"):
        decode_request(frame)


def test_work_for_later_takes_the_bound_along_that_is_for_it() -> None:
    def read(topics: int) -> object:
        return decode_request(deletion(topics))

    unbounded = carried(lambda: read(100))
    with at_most(10):
        as_here = carried(lambda: read(11))
    with at_most(10, each=True, aside=50):
        enough, too_many = carried(lambda: (read(50), read(50))), carried(lambda: read(51))
    unbounded()
    enough()
    for bounded in (as_here, too_many):
        with pytest.raises(TooManyElements):
            bounded()
