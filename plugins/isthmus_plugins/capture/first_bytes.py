"""What the first bytes of requests and answers say: names, partitions, batch headers, error codes. Never contents.

Most frames are whole within their first bytes. Of a Produce request or an answer to a Fetch that is not, partitions
come apart from these. Where they do not (a connection ended), what is here is read; the event says so (``partial``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from isthmus_plugins.api import TAP_HEAD
from isthmus_protocol import peeks, resources
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.locate import locator
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.records import COMPRESSION_MASK, HEADER_SIZE
from isthmus_protocol.schema import ApiKey, message_spec, request_flexible
from isthmus_protocol.wire import MalformedFrame, NeedMore, read_uvarint

NONE: Final = -1
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_CLIENT_ID_AT: Final = 12
_BATCH: Final = struct.Struct(">q13xh20xqhii")
"""Of a batch's header: base offset, attributes, producer id and epoch, first sequence, count of records."""
assert _BATCH.size == HEADER_SIZE
_OLD_MESSAGE: Final = struct.Struct(">q9xB")
"""Of a message older than magic 2: offset, attributes."""
_OFFSET_AND_TIME: Final = struct.Struct(">q8x")
"""Of a partition in an answer to Produce: base offset, log append time. Before it: index and error code."""
_INDEX_AND_ERROR: Final = 6
_ONE_BYTE_LENGTHS: Final = 127
Topic = bytes | str
"""Its name, or where a version has ids alone its id (16 bytes)."""


class PartFacts(NamedTuple):
    """What is known of one partition in a request or an answer. -1: nothing.

    From ``compression`` to ``base_sequence``, and ``base_offset`` of what was fetched: of its first batch.
    """

    topic: Topic | None = None
    partition: int = NONE
    records: int = NONE
    batches: int = NONE
    batch_bytes: int = NONE
    compression: int = NONE
    producer_id: int = NONE
    producer_epoch: int = NONE
    base_sequence: int = NONE
    error_code: int | None = None
    base_offset: int = NONE


NOT_READ: Final = PartFacts()
_facts: Final = partial(tuple.__new__, PartFacts)
"""Of all values at once: half of what calling the class takes."""


@dataclass(slots=True)
class RequestFacts:
    client_id: str | None = None
    group_id: str | None = None
    transactional_id: str | None = None
    software: str | None = None
    """Name and version that an ApiVersions request tells."""
    acks: int = NONE
    parts: tuple[PartFacts, ...] = ()
    partial: bool = False
    lone_head_end: int | None = None
    """Of a Produce request with one partition: where its head ends."""


@dataclass(slots=True)
class ResponseFacts:
    error_code: int = NONE
    """Of the answer as a whole: the first one in it that is none, or 0. -1: there is no answer, or it was not read."""
    parts: tuple[PartFacts, ...] = ()
    partial: bool = False


# ---- requests ----


def request_facts(api_key: int, version: int, first: bytes, size: int) -> RequestFacts:
    """What a request's first bytes say; ``size``: of the whole frame. Bytes that are no such request say nothing."""
    facts = RequestFacts(partial=len(first) < size)
    try:
        facts.client_id = _client_id(first)
        if api_key == ApiKey.PRODUCE:
            _produce(facts, version, first)
        elif api_key == ApiKey.FETCH and not facts.partial:
            *_, topics, _ = peeks.fetch_partitions(version, first)
            by_id = peeks.topics_are_ids(ApiKey.FETCH, version)
            facts.parts = tuple(
                PartFacts(_named(topic, by_id), partition)
                for topic, partitions in topics
                for partition, _ in partitions
            )
        else:
            _others(facts, api_key, version, first)
    except (MalformedFrame, NeedMore, LookupError, struct.error, IndexError):
        facts.partial = True
    return facts


def _client_id(first: bytes) -> str | None:
    (length,) = _INT16.unpack_from(first, 12)
    return None if length < 0 else first[14 : 14 + length].decode("utf-8", "replace")


def _others(facts: RequestFacts, api_key: int, version: int, first: bytes) -> None:
    if api_key == ApiKey.API_VERSIONS and version >= 3:
        name, release = locator(api_key, version, "request", ("client_software_name", "client_software_version"))(first)
        facts.software = f"{name.decode('utf-8', 'replace')} {release.decode('utf-8', 'replace')}"
    groups = resources.groups_in(api_key, version)
    if groups is not None:
        facts.group_id = next((each.decode("utf-8", "replace") for each in groups(first)), None)
    names = {each.name for each in message_spec(api_key, version, "request").fields}
    if "transactional_id" in names:
        found = peeks.transactional_id(api_key, version, first)
        facts.transactional_id = None if found is None else found.decode("utf-8", "replace")
    topics = resources.topics_in(api_key, version)
    if topics is not None:
        named, ids = topics(first)
        facts.parts = tuple(PartFacts(each.decode("utf-8", "replace")) for each in named)
        facts.parts += tuple(PartFacts(each) for each in ids)


class LoneProduce(NamedTuple):
    """What Produce requests of one partition have in common whose first bytes are the same."""

    version: int
    head: bytes
    """These bytes, from the client id on."""
    facts: RequestFacts
    topic: Topic
    flexible: bool

    def facts_of(self, version: int, first: bytes) -> RequestFacts | None:
        """What another request says; None: it is not like these."""
        if version != self.version or not first.startswith(self.head, _CLIENT_ID_AT):
            return None
        position = _CLIENT_ID_AT + len(self.head)
        try:
            (partition,) = _INT32.unpack_from(first, position)
            if self.flexible:
                size, position = read_uvarint(first, position + 4)
                size -= 1
            else:
                (size,) = _INT32.unpack_from(first, position + 4)
                position += 8
            part = _produced(self.topic, partition, size, first, position)
        except (struct.error, IndexError, MalformedFrame):
            return None
        known = self.facts
        return RequestFacts(known.client_id, None, known.transactional_id, None, known.acks, (part,))


def lone_produce(version: int, first: bytes, facts: RequestFacts) -> LoneProduce | None:
    """What a Produce request has in common with others like it, if it has one partition."""
    if facts.lone_head_end is None or not facts.parts or facts.parts[0].topic is None:
        return None
    head = first[_CLIENT_ID_AT : facts.lone_head_end]
    return LoneProduce(version, head, facts, facts.parts[0].topic, request_flexible(ApiKey.PRODUCE, version))


def _produce(facts: RequestFacts, version: int, first: bytes) -> None:
    scan = ProduceScan(version)
    scan.feed(first)
    facts.acks = scan.acks
    named = scan.transactional_id
    facts.transactional_id = None if named is None else named.decode("utf-8", "replace")
    facts.parts = produced_parts(version, scan.parts)
    facts.partial = not scan.done
    facts.lone_head_end = scan.lone_head_end


def produced_parts(version: int, found: Iterable[ScannedPartition]) -> tuple[PartFacts, ...]:
    """What is known of the partitions of a Produce request."""
    by_id = peeks.topics_are_ids(ApiKey.PRODUCE, version)
    return tuple(_produced(_named(part.topic, by_id), part.partition, part.size, part.header, 0) for part in found)


def _produced(topic: Topic, partition: int, size: int, data: bytes, position: int) -> PartFacts:
    """A partition whose records begin at ``position``. Raises struct.error: their header is not there."""
    if size < HEADER_SIZE:
        return PartFacts(topic, partition, 0, 0, 0)
    _, attributes, producer_id, epoch, sequence, records = _BATCH.unpack_from(data, position)
    compression = attributes & COMPRESSION_MASK
    return _facts((topic, partition, records, 1, size, compression, producer_id, epoch, sequence, None, NONE))


# ---- answers ----


class LoneAnswer(NamedTuple):
    """What answers to Produce requests of one partition have in common that are the same but for offset and time."""

    head: bytes
    """From behind the correlation id up to the base offset."""
    tail: bytes
    """From behind the log append time on."""
    part: PartFacts

    def facts_of(self, first: bytes) -> ResponseFacts | None:
        """What another answer says; None: it is not like these."""
        head, tail, part = self
        offset_at = TAP_HEAD.size + len(head)
        is_like = len(first) == offset_at + _OFFSET_AND_TIME.size + len(tail) and first.endswith(tail)
        if not is_like or not first.startswith(head, TAP_HEAD.size):
            return None
        (base_offset,) = _OFFSET_AND_TIME.unpack_from(first, offset_at)
        return ResponseFacts(0, (_facts((*part[:-1], base_offset)),))


def lone_answer(version: int, first: bytes, facts: ResponseFacts) -> LoneAnswer | None:
    """What a whole answer to a Produce request of one partition has in common with others, if there is no error."""
    if facts.partial or facts.error_code != 0 or len(facts.parts) != 1:
        return None
    (part,) = facts.parts
    named = len(part.topic if isinstance(part.topic, bytes) else str(part.topic).encode())
    if request_flexible(ApiKey.PRODUCE, version):
        lengths = 3 if isinstance(part.topic, bytes) else 4  # tags, topics, name, partitions: a byte of each
        if named >= _ONE_BYTE_LENGTHS:
            return None
    else:
        lengths = 10  # topics, name, partitions
    offset_at = TAP_HEAD.size + lengths + named + _INDEX_AND_ERROR
    head, tail = first[TAP_HEAD.size : offset_at], first[offset_at + _OFFSET_AND_TIME.size :]
    lone = LoneAnswer(head, tail, part)
    return lone if lone.facts_of(first) == facts else None


def response_facts(api_key: int, version: int, first: bytes, size: int) -> ResponseFacts:
    """What an answer's first bytes say; ``size``: of the whole frame."""
    facts = ResponseFacts(partial=len(first) < size)
    try:
        if api_key == ApiKey.PRODUCE:
            by_id = peeks.topics_are_ids(ApiKey.PRODUCE, version)
            facts.parts = tuple(
                PartFacts(_named(topic, by_id), partition, error_code=code, base_offset=base_offset)
                for topic, partitions in peeks.produce_response(version, first)
                for partition, code, base_offset in partitions
            )
            facts.error_code = _first_error(part.error_code for part in facts.parts)
        elif api_key == ApiKey.FETCH:
            _fetched(facts, version, first)
        elif facts.partial:
            facts.error_code = NONE
        else:
            facts.error_code = _first_error(sorted(peeks.error_codes(api_key, version, first)))
    except (MalformedFrame, NeedMore, LookupError, struct.error, IndexError):
        facts.partial = True
    return facts


def _first_error(codes: Iterable[int | None]) -> int:
    return next((code for code in codes if code), 0)


def _fetched(facts: ResponseFacts, version: int, first: bytes) -> None:
    scan = FetchScan(version)
    scan.feed(first)
    told = fetched_facts(version, scan.parts)
    facts.parts, facts.error_code = told.parts, scan.error_code or told.error_code
    facts.partial = not scan.done


def fetched_facts(version: int, found: Iterable[ScannedPartition]) -> ResponseFacts:
    """What an answer to a Fetch says of the partitions that were found."""
    by_id = peeks.topics_are_ids(ApiKey.FETCH, version)
    parts = tuple(_fetched_part(_named(part.topic, by_id), part) for part in found)
    return ResponseFacts(_first_error(part.error_code for part in parts), parts)


def _fetched_part(topic: Topic, part: ScannedPartition) -> PartFacts:
    facts = PartFacts(topic, part.partition, part.records, part.batches, part.size, error_code=part.error_code)
    if len(part.header) == HEADER_SIZE:
        base_offset, attributes, producer_id, epoch, sequence, _ = _BATCH.unpack(part.header)
        return facts._replace(
            compression=attributes & COMPRESSION_MASK,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            base_offset=base_offset,
        )
    if part.header:
        offset, attributes = _OLD_MESSAGE.unpack(part.header)
        compression = attributes & COMPRESSION_MASK
        # Of a compressed message it is the last one's inside.
        return facts._replace(compression=compression, base_offset=NONE if compression else offset)
    return facts


def _named(topic: bytes, by_id: bool) -> Topic:
    return topic if by_id else topic.decode("utf-8", "replace")
