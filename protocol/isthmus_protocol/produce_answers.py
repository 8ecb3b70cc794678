"""What a Produce request's answer says of each partition, and the same answer with some partitions refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.refusals import Refusal
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import Frame, MalformedFrame

Place = tuple[bytes, int]
"""A partition as the frames name it: topic (name or id, see ``peeks``) and index."""

_LAST_OFFSET_DELTA: Final = struct.Struct(">i")
_LAST_OFFSET_DELTA_AT: Final = 23
"""In a record batch (magic 2)."""


class Writes(NamedTuple):
    """What a Produce request writes."""

    acks: int
    transactional: bool
    timeout_ms: int
    records: dict[Place, int]
    """By partition: how many offsets its batch takes."""


def writes(version: int, frame: Frame) -> Writes:
    """What a whole Produce request writes. Raises MalformedFrame."""
    acks, transactional_id, timeout_ms, topics = peeks.produce_batches(version, frame)
    counts: dict[Place, int] = {}
    for topic, partitions in topics:
        for partition, records in partitions:
            if records is not None:
                counts[topic, partition] = _offsets(records)
    return Writes(acks, transactional_id is not None, timeout_ms, counts)


def _offsets(records: memoryview) -> int:
    """How many offsets a batch takes. A broker takes one batch for a partition, and refuses what is none."""
    if len(records) < _LAST_OFFSET_DELTA_AT + _LAST_OFFSET_DELTA.size:
        return 0
    (last,) = _LAST_OFFSET_DELTA.unpack_from(records, _LAST_OFFSET_DELTA_AT)
    return int(last) + 1


def refused_in(version: int, frame: bytes, refusals: Mapping[Place, Refusal]) -> bytes:
    """A Produce answer in which some partitions are refused. Raises MalformedFrame."""
    correlation_id, answer = decode_response(ApiKey.PRODUCE, version, frame)
    found: Any = answer
    topics = tuple(
        replace(
            topic,
            partition_responses=tuple(
                _refused(result, refusals.get((_topic(topic), result.index))) for result in topic.partition_responses
            ),
        )
        for topic in found.responses
    )
    return encode_response(replace(found, responses=topics), correlation_id)


def _topic(topic: Any) -> bytes:
    if hasattr(topic, "name"):
        return str(topic.name).encode()
    if topic.topic_id is None:
        raise MalformedFrame("a Produce answer for a topic without an id")
    return bytes(topic.topic_id.bytes)


def _refused(result: Any, refusal: Refusal | None) -> Any:
    if refusal is None:
        return result
    values: dict[str, Any] = {"error_code": error_code(refusal.code), "base_offset": type(result.base_offset)(-1)}
    if "error_message" in {each.name for each in fields(result)}:
        values["error_message"] = refusal.message
    return replace(result, **values)
