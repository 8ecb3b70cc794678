"""What the first bytes of requests and answers say: names, partitions, batch headers, error codes. Never contents.

Most frames are whole within their first bytes. Of a Produce request or an answer to a Fetch that is not, partitions
come apart from these. Where they do not (a connection ended), what is here is read; the event says so (``partial``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from isthmus_plugins.capture.events import NONE
from isthmus_protocol import peeks, resources
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.locate import locator
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.records import COMPRESSION_MASK, HEADER_SIZE
from isthmus_protocol.schema import ApiKey, message_spec
from isthmus_protocol.wire import MalformedFrame, NeedMore

_INT16: Final = struct.Struct(">h")
_BATCH: Final = struct.Struct(">q13xh20xqhii")
"""Of a batch's header: base offset, attributes, producer id and epoch, first sequence, count of records."""
assert _BATCH.size == HEADER_SIZE
_OLD_MESSAGE: Final = struct.Struct(">q9xB")
"""Of a message older than magic 2: offset, attributes."""
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


@dataclass(slots=True)
class RequestFacts:
    client_id: str | None = None
    group_id: str | None = None
    transactional_id: str | None = None
    software: str | None = None
    """Name and version that an ApiVersions request has."""
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
    return tuple(_produced(_named(part.topic, by_id), part) for part in found)


def _produced(topic: Topic, part: ScannedPartition) -> PartFacts:
    if part.size < HEADER_SIZE:
        return PartFacts(topic, part.partition, 0, 0, 0)
    _, attributes, producer_id, epoch, sequence, records = _BATCH.unpack(part.header)
    compression = attributes & COMPRESSION_MASK
    return PartFacts(topic, part.partition, records, 1, part.size, compression, producer_id, epoch, sequence)


# ---- answers ----


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
    found = fetched_facts(version, scan.parts)
    facts.parts, facts.error_code = found.parts, scan.error_code or found.error_code
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
