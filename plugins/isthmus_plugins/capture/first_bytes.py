"""What the first bytes of requests and answers say: names, partitions, batch headers, error codes. Never contents.

Most frames are whole within their first bytes. Of a Produce request that is not, partitions beyond the first come
apart from these. Of an answer to a Fetch that is not, the first partition is read and that of its batches which has its
header there; the event says so (``partial``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from isthmus_plugins.capture.notes import Note
from isthmus_protocol import peeks, resources
from isthmus_protocol.locate import locator
from isthmus_protocol.produce_scan import ProduceScan, ScannedPartition
from isthmus_protocol.records import COMPRESSION_MASK, HEADER_SIZE, BatchError, BatchHeader, read_header, walk
from isthmus_protocol.schema import ApiKey, message_spec, request_flexible
from isthmus_protocol.wire import MalformedFrame, NeedMore, read_uvarint, skip_tags

NONE: Final = -1
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_CLIENT_ID_AT: Final = 12
_BATCH: Final = struct.Struct(">21xh20xqhii")
"""Of a batch's header: attributes, producer id and epoch, first sequence, count of records."""
assert _BATCH.size == HEADER_SIZE
Topic = bytes | str
"""Its name, or where a version has ids alone its id (16 bytes)."""


class PartFacts(NamedTuple):
    """What is known of one partition in a request or an answer. -1: nothing."""

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

    def of(self, asked: PartFacts) -> PartFacts:
        """What is told of a partition that was asked about."""
        for part in self.parts:
            if part.topic == asked.topic and part.partition == asked.partition:
                return part
        return NOT_READ


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
    except (MalformedFrame, NeedMore, LookupError, BatchError, struct.error, IndexError):
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
    attributes, producer_id, epoch, sequence, records = _BATCH.unpack_from(data, position)
    compression = attributes & COMPRESSION_MASK
    return PartFacts(topic, partition, records, 1, size, compression, producer_id, epoch, sequence)


# ---- answers ----


def response_facts(api_key: int, version: int, first: bytes, note: Note | None) -> ResponseFacts:
    """What an answer's first bytes say."""
    facts = ResponseFacts()
    if note is None:
        return facts
    facts.partial = len(first) < note.size + 4
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
    except (MalformedFrame, NeedMore, LookupError, BatchError, struct.error, IndexError):
        facts.partial = True
    return facts


def _first_error(codes: Iterable[int | None]) -> int:
    return next((code for code in codes if code), 0)


def _fetched(facts: ResponseFacts, version: int, first: bytes) -> None:
    by_id = peeks.topics_are_ids(ApiKey.FETCH, version)
    if facts.partial:
        _first_of_fetched(facts, version, first, by_id)
        return
    parts = []
    for topic, partitions in peeks.fetch_response(version, first)[-1]:
        for partition, code, *_, records in partitions:
            part = PartFacts(_named(topic, by_id), partition, error_code=code)
            parts.append(_with_batches(part, _headers(records)))
    facts.parts = tuple(parts)
    facts.error_code = _first_error(part.error_code for part in parts)


def _first_of_fetched(facts: ResponseFacts, version: int, first: bytes, by_id: bool) -> None:
    """The first partition of an answer that is not whole."""
    reader = _Reader(first, request_flexible(ApiKey.FETCH, version))
    reader.position = 8
    if reader.flexible:
        reader.skip_tags()
    reader.int32()  # throttle time
    if version >= 7:
        facts.error_code = reader.int16()
        reader.int32()  # session
    if reader.count() < 1:
        return
    topic = reader.take(16) if by_id else reader.text()
    if reader.count() < 1 or topic is None:
        return
    partition, code = reader.int32(), reader.int16()
    reader.position += 16 + (8 if version >= 5 else 0)  # high watermark, last stable offset, log start
    facts.error_code = max(0, facts.error_code) or code
    part = PartFacts(_named(topic, by_id), partition, error_code=code)
    facts.parts = (part,)
    for _ in range(reader.count()):  # aborted transactions
        reader.position += 16
        if reader.flexible:
            reader.skip_tags()
    if version >= 11:
        reader.int32()  # preferred replica
    size = reader.count()
    facts.parts = (part._replace(batch_bytes=size),)
    if len(first) >= reader.position + HEADER_SIZE:
        facts.parts = (_with_batches(part, [read_header(first[reader.position :])])._replace(batch_bytes=size),)


# ---- batches ----


def _headers(records: memoryview | None) -> list[BatchHeader]:
    return [header for _, _, header in walk(records)] if records else []


def _with_batches(part: PartFacts, headers: list[BatchHeader]) -> PartFacts:
    if not headers:
        return part._replace(records=0, batches=0, batch_bytes=0)
    first = headers[0]
    return part._replace(
        records=sum(header.record_count for header in headers),
        batches=len(headers),
        batch_bytes=sum(header.length + 12 for header in headers),
        compression=first.attributes & COMPRESSION_MASK,
        producer_id=first.producer_id,
        producer_epoch=first.producer_epoch,
        base_sequence=first.base_sequence,
        base_offset=first.base_offset if part.base_offset == NONE else part.base_offset,
    )


def _named(topic: bytes, by_id: bool) -> Topic:
    return topic if by_id else topic.decode("utf-8", "replace")


class _Reader:
    """Reads a message field by field. Raises struct.error or IndexError where it ends."""

    def __init__(self, data: bytes, flexible: bool) -> None:
        self.data = data
        self.flexible = flexible
        self.position = 0

    def skip_tags(self) -> None:
        self.position = skip_tags(self.data, self.position)

    def int16(self) -> int:
        (value,) = _INT16.unpack_from(self.data, self.position)
        self.position += 2
        return int(value)

    def int32(self) -> int:
        (value,) = _INT32.unpack_from(self.data, self.position)
        self.position += 4
        return int(value)

    def count(self) -> int:
        """Of an array, or bytes; -1: null."""
        if not self.flexible:
            return self.int32()
        value, self.position = read_uvarint(self.data, self.position)
        return value - 1

    def text(self) -> bytes | None:
        if self.flexible:
            length = self.count()
        else:
            length = self.int16()
        return None if length < 0 else self.take(length)

    def take(self, length: int) -> bytes:
        if self.position + length > len(self.data):
            raise IndexError("the bytes end")
        taken = self.data[self.position : self.position + length]
        self.position += length
        return taken
