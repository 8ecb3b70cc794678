"""What the hot path reads of requests and answers, in every version, without decoding them.

Every function takes the version and a frame, whole or a prefix of one, and raises NeedMore where the prefix ends before
the answer, MalformedFrame where the bytes are not such a message, and LookupError where the proxy has no schema for the
version. Frames hold more than what is looked at here, which is not validated. In results

- a *topic* is bytes: the name where the version has names, else the topic id, whose 16 bytes are
  ``uuid.UUID.bytes``. ``topics_are_ids`` says which; where a version has both, both are given;
- *records* are memoryview slices of the frame, so they live no longer than the frame's buffer does; None for null;
- names, groups and transactional ids are UTF-8 bytes, None for null;
- what a version does not have is None, unless the function says what stands for it.

``peek`` is the general form, for what has no function here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any, Final

from isthmus_protocol.locate import Locator, Want, locator
from isthmus_protocol.schema import ApiKey, EntitySpec, MessageKind, WireType, message_spec
from isthmus_protocol.splicing import Span
from isthmus_protocol.wire import Frame


def peek(api_key: int, version: int, kind: MessageKind, fields: tuple[Want, ...]) -> Locator:
    """A function of a frame that returns ``fields`` of it; ``locate`` says how to name them. Cached."""
    return locator(api_key, version, kind, fields)


class _Versions(dict[int, Locator]):
    """An API's peeks by version, each compiled when a frame of that version comes first."""

    def __init__(self, api_key: ApiKey, kind: MessageKind, *fields: Want) -> None:
        super().__init__()
        self._api_key, self._kind, self._fields = api_key, kind, fields

    def __missing__(self, version: int) -> Locator:
        found = self[version] = locator(self._api_key, version, self._kind, self._fields)
        return found


@cache
def topics_are_ids(api_key: int, version: int) -> bool:
    """Whether a request of this version has topic ids and no names (Produce and Fetch since v13, OffsetCommit v10)."""
    names = _field_names(message_spec(api_key, version, "request"))
    return "topic_id" in names and not names & _TOPIC_NAMES


_TOPIC_NAMES: Final = frozenset({"name", "topic", "topic_name"})


def _field_names(spec: EntitySpec) -> set[str]:
    names = {field.name for field in spec.fields}
    for field in spec.fields:
        if field.entity is not None:
            names |= _field_names(field.entity)
    return names


# Produce

_NAME_BYTES: Final = 250
"""One more than a topic's name can have."""
_PRODUCE_TOPICS: Final = _Versions(
    ApiKey.PRODUCE, "request", "acks", "transactional_id", ("topic_data", ("name|topic_id",))
)
_PRODUCE_BATCHES: Final = _Versions(
    ApiKey.PRODUCE,
    "request",
    "acks",
    "transactional_id",
    "timeout",
    ("topic_data", ("name|topic_id", ("partition_data", ("index", "records")))),
)
_PRODUCE_RECORDS: Final = _Versions(
    ApiKey.PRODUCE,
    "request",
    "acks",
    ("topic_data", ("name|topic_id", ("partition_data", ("index", "records", "records@")))),
)
_PRODUCE_RESPONSE: Final = _Versions(
    ApiKey.PRODUCE,
    "response",
    ("responses", ("name|topic_id", ("partition_responses", ("index", "error_code", "base_offset")))),
)


def topic_text(name: bytes) -> str:
    """A topic's name as text; of one that is longer than names can be, megabytes maybe, the beginning alone."""
    return name[:_NAME_BYTES].decode("utf-8", "replace")


def produce_topics(version: int, frame: Frame) -> tuple[int, bytes | None, list[bytes]]:
    """A Produce request's ``(acks, transactional id, topics)``. A prefix up to the last topic's name is enough."""
    found: tuple[int, bytes | None, list[bytes]] = _PRODUCE_TOPICS[version](frame)
    return found


def produce_batches(
    version: int, frame: Frame
) -> tuple[int, bytes | None, int, list[tuple[bytes, list[tuple[int, memoryview | None]]]]]:
    """A Produce request's ``(acks, transactional id, timeout in ms, [(topic, [(partition, records)])])``."""
    found: tuple[int, bytes | None, int, list[tuple[bytes, list[tuple[int, memoryview | None]]]]]
    found = _PRODUCE_BATCHES[version](frame)
    return found


def produce_records(version: int, frame: Frame) -> tuple[int, list[tuple[bytes, list[tuple[int, int, int]]]]]:
    """A Produce request's ``(acks, [(topic, [(partition, start, end)])])``: where in the frame the records are."""
    acks, topics = _PRODUCE_RECORDS[version](frame)
    return acks, [
        (topic, [(index, end - len(records), end) for index, records, (_, end) in partitions if records is not None])
        for topic, partitions in topics
    ]


def produce_response(version: int, frame: Frame) -> list[tuple[bytes, list[tuple[int, int, int]]]]:
    """A Produce response's ``[(topic, [(partition, error code, base offset)])]``."""
    found: list[tuple[bytes, list[tuple[int, int, int]]]] = _PRODUCE_RESPONSE[version](frame)
    return found


# Fetch and ListOffsets

_FETCH_PARTITIONS: Final = _Versions(
    ApiKey.FETCH,
    "request",
    "max_wait",
    "isolation_level",
    "session_id",
    "session_epoch",
    ("topics", ("topic|topic_id", ("partitions", ("partition", "fetch_offset")))),
    ("forgotten_topics_data", ("topic|topic_id", "partitions")),
)
_FETCH_LEADER_EPOCHS: Final = _Versions(
    ApiKey.FETCH, "request", ("topics", ("topic|topic_id", ("partitions", ("current_leader_epoch@",))))
)
_FETCH_RESPONSE: Final = _Versions(
    ApiKey.FETCH,
    "response",
    "error_code",
    "session_id",
    (
        "responses",
        (
            "topic|topic_id",
            (
                "partitions",
                (
                    "partition_index",
                    "error_code",
                    "high_watermark",
                    "last_stable_offset",
                    "log_start_offset",
                    ("aborted_transactions", ("producer_id", "first_offset")),
                    "records",
                ),
            ),
        ),
    ),
)
_FETCHED_TOPICS: Final = _Versions(ApiKey.FETCH, "response", ("responses", ("topic|topic_id",)))
_FETCHED_SPANS: Final = _Versions(
    ApiKey.FETCH,
    "response",
    "error_code",
    (
        "responses",
        (
            "topic|topic_id",
            (
                "partitions",
                (
                    "partition_index",
                    "error_code",
                    "error_code@",
                    "high_watermark",
                    "high_watermark@",
                    "last_stable_offset",
                    "last_stable_offset@",
                    "log_start_offset",
                    "records",
                    "records@",
                ),
            ),
        ),
    ),
)
_LISTED_SPANS: Final = _Versions(
    ApiKey.LIST_OFFSETS,
    "response",
    (
        "topics",
        (
            "name",
            ("partitions", ("partition_index", "error_code", "error_code@", "timestamp@", "offset", "offset@")),
        ),
    ),
)
_LISTED_OFFSETS: Final = _Versions(
    ApiKey.LIST_OFFSETS,
    "response",
    (
        "topics",
        ("name", ("partitions", ("partition_index", "offset", "timestamp", "leader_epoch", "error_code"))),
    ),
)
_LIST_OFFSETS: Final = _Versions(
    ApiKey.LIST_OFFSETS,
    "request",
    "isolation_level",
    ("topics", ("name", ("partitions", ("partition_index", "timestamp")))),
)

FetchedPartition = tuple[int, int, int, int, int | None, list[tuple[int, int]] | None, memoryview | None]
"""``(partition, error code, high watermark, last stable offset, log start offset, aborted transactions, records)``

Aborted transactions are ``(producer id, first offset)``, and null where the request was read_uncommitted.
"""


def fetch_partitions(
    version: int, frame: Frame
) -> tuple[
    int,
    int,
    int | None,
    int | None,
    list[tuple[bytes, list[tuple[int, int]]]],
    list[tuple[bytes, list[int]]] | None,
]:
    """A Fetch request's ``(max wait in ms, isolation level, session id, session epoch, [(topic, [(partition, fetch
    offset)])], forgotten [(topic, [partition])])``."""
    found: tuple[
        int,
        int,
        int | None,
        int | None,
        list[tuple[bytes, list[tuple[int, int]]]],
        list[tuple[bytes, list[int]]] | None,
    ]
    found = _FETCH_PARTITIONS[version](frame)
    return found


def fetch_leader_epochs(version: int, frame: Frame) -> list[tuple[bytes, list[tuple[int, int] | None]]]:
    """Where a Fetch request's ``current_leader_epoch``s stand: ``[(topic, [(start, end)])]``, None before v9."""
    found: list[tuple[bytes, list[tuple[int, int] | None]]] = _FETCH_LEADER_EPOCHS[version](frame)
    return found


def fetch_response(
    version: int, frame: Frame
) -> tuple[int | None, int | None, list[tuple[bytes, list[FetchedPartition]]]]:
    """A Fetch response's ``(error code, session id, [(topic, [FetchedPartition])])``."""
    found: tuple[int | None, int | None, list[tuple[bytes, list[FetchedPartition]]]] = _FETCH_RESPONSE[version](frame)
    return found


def fetched_topics(version: int, frame: Frame) -> list[bytes]:
    """The topics of a Fetch response."""
    found: list[bytes] = _FETCHED_TOPICS[version](frame)
    return found


FetchedSpans = tuple[int, int, Span, int, Span, int, Span, int | None, memoryview | None, Span]
"""A partition of a Fetch response, and where in the frame its fields are (from, to): ``(partition, error code, where,
high watermark, where, last stable offset, where, log start offset, records, where with their size)``"""
ListedSpans = tuple[int, int, Span, Span, int, Span]
"""The same of a ListOffsets response: ``(partition, error code, where, where the timestamp is, offset, where)``"""


def fetched_spans(version: int, frame: Frame) -> tuple[int | None, list[tuple[bytes, list[FetchedSpans]]]]:
    """A Fetch response's ``(error code, [(topic, [FetchedSpans])])``, for who changes some of it."""
    found: tuple[int | None, list[tuple[bytes, list[FetchedSpans]]]] = _FETCHED_SPANS[version](frame)
    return found


def listed_spans(version: int, frame: Frame) -> list[tuple[bytes, list[ListedSpans]]]:
    """A ListOffsets response's ``[(topic name, [ListedSpans])]``, in the versions since 1."""
    found: list[tuple[bytes, list[ListedSpans]]] = _LISTED_SPANS[version](frame)
    return found


def listed_offsets(version: int, frame: Frame) -> list[tuple[bytes, list[tuple[int, int, int, int, int]]]]:
    """A ListOffsets response's ``[(topic name, [(partition, offset, timestamp in ms, leader epoch, error code)])]``, in
    the versions since 4."""
    found: list[tuple[bytes, list[tuple[int, int, int, int, int]]]] = _LISTED_OFFSETS[version](frame)
    return found


def list_offsets(version: int, frame: Frame) -> tuple[int | None, list[tuple[bytes, list[tuple[int, int]]]]]:
    """A ListOffsets request's ``(isolation level, [(topic name, [(partition, timestamp in ms)])])``.

    Negative timestamps have meanings of their own: -1 latest, -2 earliest, and others of KIP-405 and KIP-734.
    """
    found: tuple[int | None, list[tuple[bytes, list[tuple[int, int]]]]] = _LIST_OFFSETS[version](frame)
    return found


# Topics

_METADATA: Final = _Versions(ApiKey.METADATA, "request", ("topics", ("name", "topic_id")), "allow_auto_topic_creation")
_BROKERS: Final = _Versions(ApiKey.METADATA, "response", ("brokers", ("node_id",)))
_NEXT_TOPIC: Final = _Versions(
    ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    "response",
    ("next_cursor", ("topic_name", "topic_name@", "partition_index@")),
)
_CREATE_TOPICS: Final = _Versions(ApiKey.CREATE_TOPICS, "request", ("topics", ("name",)), "validate_only")
_DESCRIBED: Final = _Versions(ApiKey.DESCRIBE_CONFIGS, "request", ("resources", ("resource_type", "resource_name")))
_SETTINGS: Final = _Versions(
    ApiKey.DESCRIBE_CONFIGS,
    "response",
    ("results", ("resource_type", "resource_name", ("configs", ("name", "value@")))),
)
_DELETE_TOPICS: Final = _Versions(ApiKey.DELETE_TOPICS, "request", "topic_names", ("topics", ("name", "topic_id")))
_CREATE_PARTITIONS: Final = _Versions(
    ApiKey.CREATE_PARTITIONS, "request", ("topics", ("name", "count")), "validate_only"
)
_DELETE_RECORDS: Final = _Versions(
    ApiKey.DELETE_RECORDS, "request", ("topics", ("name", ("partitions", ("partition_index", "offset"))))
)


def metadata(version: int, frame: Frame) -> tuple[list[tuple[bytes | None, bytes | None]] | None, bool]:
    """A Metadata request's ``([(topic name, topic id)], whether missing topics may be created)``.

    The list is None where all topics are asked for, which v0 says with an empty list and later versions with null. A
    request without the flag (before v4) allows the creation.
    """
    topics, allowed = _METADATA[version](frame)
    if version == 0 and not topics:
        topics = None
    return topics, allowed is not False


def brokers(version: int, frame: Frame) -> list[int]:
    """The ids of the brokers in a Metadata response."""
    found: list[int] = _BROKERS[version](frame)
    return found


def next_topic(version: int, frame: Frame) -> tuple[bytes, tuple[int, int], tuple[int, int]] | None:
    """Where a DescribeTopicPartitions response is to be gone on with: a topic's name, where in the frame that is, and
    where the partition's number is. None: it is the last one."""
    found: tuple[bytes, tuple[int, int], tuple[int, int]] | None = _NEXT_TOPIC[version](frame)
    return found


def create_topics(version: int, frame: Frame) -> tuple[list[bytes], bool]:
    """A CreateTopics request's ``(topic names, whether it only validates)``."""
    found: tuple[list[bytes], bool] = _CREATE_TOPICS[version](frame)
    return found


def described_resources(version: int, frame: Frame) -> list[tuple[int, bytes]]:
    """A DescribeConfigs request's ``[(type of resource, name)]``."""
    found: list[tuple[int, bytes]] = _DESCRIBED[version](frame)
    return found


def described_settings(version: int, frame: Frame) -> list[tuple[int, bytes, list[tuple[bytes, tuple[int, int]]]]]:
    """A DescribeConfigs response's ``[(type of resource, name, [(setting, where its value is: from, to)])]``."""
    found: list[tuple[int, bytes, list[tuple[bytes, tuple[int, int]]]]] = _SETTINGS[version](frame)
    return found


def delete_topics(version: int, frame: Frame) -> list[tuple[bytes | None, bytes | None]]:
    """A DeleteTopics request's ``[(topic name, topic id)]``: from v6 on one of both, where no id is 16 zero bytes."""
    names, topics = _DELETE_TOPICS[version](frame)
    found: list[tuple[bytes | None, bytes | None]] = topics if names is None else [(name, None) for name in names]
    return found


def create_partitions(version: int, frame: Frame) -> tuple[list[tuple[bytes, int]], bool]:
    """A CreatePartitions request's ``([(topic name, new count of partitions)], whether it only validates)``."""
    found: tuple[list[tuple[bytes, int]], bool] = _CREATE_PARTITIONS[version](frame)
    return found


def delete_records(version: int, frame: Frame) -> list[tuple[bytes, list[tuple[int, int]]]]:
    """A DeleteRecords request's ``[(topic name, [(partition, offset to delete up to; -1: the high watermark)])]``."""
    found: list[tuple[bytes, list[tuple[int, int]]]] = _DELETE_RECORDS[version](frame)
    return found


# Groups and transactions

_OFFSET_FETCH: Final = _Versions(ApiKey.OFFSET_FETCH, "request", "group_id", ("groups", ("group_id",)))
_GROUP_MEMBER: Final = _Versions(
    ApiKey.CONSUMER_GROUP_HEARTBEAT, "request", "group_id", "member_id", "member_epoch", "topic_partitions@"
)
_HEARTBEAT_ANSWER: Final = _Versions(ApiKey.CONSUMER_GROUP_HEARTBEAT, "response", "error_code", "member_id")
_OFFSET_FETCH_TOPICS: Final = _Versions(
    ApiKey.OFFSET_FETCH, "request", ("topics", ("name",)), ("groups", (("topics", ("name|topic_id",)),))
)
_OFFSET_FETCH_TOPIC_IDS: Final = _Versions(ApiKey.OFFSET_FETCH, "request", ("groups", (("topics", ("topic_id",)),)))


@cache
def _group_id(api_key: int, version: int) -> Locator:
    return _required(api_key, version, "group_id")


@cache
def _transactional_id(api_key: int, version: int) -> Locator:
    return _required(api_key, version, "transactional_id|v3_and_below_transactional_id")


def _required(api_key: int, version: int, name: str) -> Locator:
    if not set(name.split("|")) & {field.name for field in message_spec(api_key, version, "request").fields}:
        raise LookupError(f"Requests of API key {api_key}, version {version} have no {name}")
    return locator(api_key, version, "request", (name,))


def group_id(api_key: int, version: int, frame: Frame) -> bytes:
    """The group of a request that is about one group: OffsetCommit, TxnOffsetCommit, JoinGroup, SyncGroup, Heartbeat,
    LeaveGroup, AddOffsetsToTxn, OffsetDelete and the heartbeats of consumer, share and streams groups, among others.

    Raises LookupError for other APIs; OffsetFetch has ``offset_fetch_groups``.
    """
    found: bytes = _group_id(api_key, version)(frame)
    return found


def offset_fetch_groups(version: int, frame: Frame) -> list[bytes]:
    """The groups of an OffsetFetch request: one, or from v8 on any number (KIP-709)."""
    group, groups = _OFFSET_FETCH[version](frame)
    return [group] if groups is None else groups


def offset_fetch_topic_ids(version: int, frame: Frame) -> list[bytes]:
    """The ids of the topics that an OffsetFetch request asks for, from v10 on: none in groups of which it wants all."""
    return list(chain.from_iterable(topics or () for topics in _OFFSET_FETCH_TOPIC_IDS[version](frame)))


def fetches_all_offsets(version: int, frame: Frame) -> bool:
    """Whether an OffsetFetch request asks for all topics in which a group has committed offsets (since v2)."""
    topics, groups = _OFFSET_FETCH_TOPICS[version](frame)
    return topics is None if groups is None else None in groups


def group_member(version: int, frame: Frame) -> tuple[bytes, bytes, int, tuple[int, int]]:
    """A ConsumerGroupHeartbeat request's ``(group, member's id, member epoch, where what it owns is: from, to)``."""
    found: tuple[bytes, bytes, int, tuple[int, int]] = _GROUP_MEMBER[version](frame)
    return found


def heartbeat_answer(version: int, frame: Frame) -> tuple[int, bytes | None]:
    """A ConsumerGroupHeartbeat response's ``(error code, member's id)``."""
    found: tuple[int, bytes | None] = _HEARTBEAT_ANSWER[version](frame)
    return found


def assigned_topics(api_key: int, version: int, frame: Frame) -> list[bytes]:
    """The ids of the topics that an answer to a member's heartbeat (KIP-848, KIP-932) assigns; none: it says nothing,
    or there are none."""
    found: list[bytes] | None = _assignment(api_key, version)(frame)
    return found or []


@cache
def _assignment(api_key: int, version: int) -> Locator:
    return locator(api_key, version, "response", (("assignment", (("topic_partitions", ("topic_id",)),)),))


def transactional_id(api_key: int, version: int, frame: Frame) -> bytes | None:
    """The transactional id of InitProducerId (null: a plain idempotent producer), EndTxn, AddOffsetsToTxn,
    TxnOffsetCommit, Produce and AddPartitionsToTxn before v4. Raises LookupError for other APIs."""
    found: bytes | None = _transactional_id(api_key, version)(frame)
    return found


_PRODUCER_NUMBER: Final = _Versions(
    ApiKey.INIT_PRODUCER_ID, "response", "error_code", "producer_id@", "producer_epoch@"
)


def producer_number(version: int, frame: Frame) -> tuple[int, tuple[int, int]]:
    """An InitProducerId response's error code, and where in the frame the producer's id and epoch are: from, to."""
    code, (start, _), (_, end) = _PRODUCER_NUMBER[version](frame)
    return code, (start, end)


# Topics of any message


@cache
def _topics(api_key: int, version: int, kind: MessageKind) -> Locator:
    (entity,) = (field.entity for field in message_spec(api_key, version, kind).fields if field.name == "topics")
    assert entity is not None
    names = tuple(field.name for field in entity.fields if field.name in {*_TOPIC_NAMES, "topic_id"})
    return locator(api_key, version, kind, (("topics", names),))


def topics(api_key: int, version: int, kind: MessageKind, frame: Frame) -> list[bytes | None]:
    """What a message calls its ``topics``: names, ids, or where the version has both, both. Null and no id included."""
    found = _topics(api_key, version, kind)(frame) or ()
    return list(chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in found))


# Error codes of any response


def error_codes(api_key: int, version: int, frame: Frame) -> set[int]:
    """All the error codes in a response, top-level and inside, 0 (no error) included. Empty for APIs without any."""
    wants = _error_code_wants(api_key, version)
    if not wants:
        return set()
    found: set[int] = set()
    _collect_codes(locator(api_key, version, "response", wants)(frame), found)
    return found


@cache
def _error_code_wants(api_key: int, version: int) -> tuple[Want, ...]:
    return tuple(_error_codes_in(message_spec(api_key, version, "response")))


def _error_codes_in(spec: EntitySpec) -> Iterable[Want]:
    for field in (*spec.fields, *spec.tagged):
        if field.entity is not None:
            inside = tuple(_error_codes_in(field.entity))
            if inside:
                yield field.name, inside
        elif field.wire is WireType.FIXED and field.name.endswith("error_code"):
            yield field.name


def _collect_codes(found: Any, codes: set[int]) -> None:
    if isinstance(found, int):
        codes.add(found)
    elif found is not None:
        for inside in found:
            _collect_codes(inside, codes)
