"""Recognises the Produce answers that nobody has to look into: each partition appended, nothing else said.

Nearly all answers to Produce are of this kind, and a proxy sees one for each request. Walking through one for its
tagged fields, where a broker's address may stand, takes a microsecond. Here an answer is one large number: the bytes
that make its structure (lengths, counts, error codes, sections of tagged fields) must be those of a template, and the
others (topic id, offsets, times) may be anything.

No position is written down: a template comes from encoding two answers that differ in all that may be anything, with
every bit 0 in one and 1 in the other. What is equal in both is structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from uuid import UUID

from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import encode_response
from isthmus_protocol.schema import ApiKey, message_spec

T = TypeVar("T")

PARTITIONS_MAX: Final = 64
"""Of a template. With more, a walk costs little for each."""

_Template = tuple[int, int]
"""Mask of the structure, and the structure."""


def pass_plain_produce(version: int, look: Callable[[bytes], bytes | T]) -> Callable[[bytes], bytes | T]:
    """A function of whole response frames that only gets the Produce answers that may have something to look into.

    Those that report appends to one topic, and nothing else, come back as they are. Some that are plain may get
    through to the function, no other one comes back. Of versions with topic names, whose length is not fixed, it gets
    all.
    """
    spec = message_spec(ApiKey.PRODUCE, version, "response")
    topic = next(field.entity for field in spec.fields if field.name == "responses")
    assert topic is not None
    if not any(field.name == "topic_id" for field in topic.fields):
        return look
    one, two = (_template(version, count) for count in (1, 2))
    smallest = _size(one)
    each = _size(two) - smallest
    templates: dict[int, _Template] = {}
    number = int.from_bytes

    def template_of(size: int) -> _Template | None:
        count, rest = divmod(size - smallest, each)
        count += 1
        return _template(version, count) if not rest and 1 <= count <= PARTITIONS_MAX else None

    def passed(frame: bytes) -> bytes | T:
        template = templates.get(len(frame))
        if template is not None:
            return frame if number(frame, "big") & template[0] == template[1] else look(frame)
        template = template_of(len(frame))
        if template is None:
            return look(frame)
        templates[len(frame)] = template
        return passed(frame)

    return passed


def _size(template: _Template) -> int:
    return (template[0].bit_length() + 7) // 8


def _template(version: int, partitions: int) -> _Template:
    zeros, ones = (int.from_bytes(_answer(version, partitions, bits), "big") for bits in (0, -1))
    size = len(_answer(version, partitions, 0))
    mask = ((1 << 8 * size) - 1) ^ zeros ^ ones
    assert mask >> 8 * (size - 1) == 0xFF, "the size prefix is structure"
    return mask, zeros & mask


def _answer(version: int, partitions: int, bits: int) -> bytes:
    """An answer whose free fields have these bits."""
    partition = {"index": bits, "base_offset": bits, "log_append_time": bits, "log_start_offset": bits}
    values = {
        "responses": [{"topic_id": UUID(int=bits % (1 << 128)), "partition_responses": [partition] * partitions}],
        "throttle_time": bits,
    }
    return encode_response(build(schema.response_type(ApiKey.PRODUCE, version), values), bits)
