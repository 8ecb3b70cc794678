"""Typed peeks against the messages that kio's classes say they are, in every version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.entities import MILLISECOND, Encoder, RandomEntities, readable

from isthmus_protocol import peeks, schema
from isthmus_protocol.schema import ApiKey, supported
from isthmus_protocol.wire import MalformedFrame, NeedMore


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def ms(value: Any) -> int:
    return round(value / MILLISECOND)


def topic(entity: Any) -> bytes:
    """The name or id that a topic's struct has."""
    for name in ("name", "topic"):
        if hasattr(entity, name):
            return getattr(entity, name).encode()
    return topic_id(entity)


def topic_id(entity: Any) -> bytes:
    return bytes(16) if entity.topic_id is None else entity.topic_id.bytes


def named_partitions(topics: Any, partitions: str) -> list[Any]:
    return [(topic(entry), list(getattr(entry, partitions))) for entry in topics]


def expected_produce_topics(message: Any) -> Any:
    return message.acks, text(message.transactional_id), [topic(entry) for entry in message.topic_data]


def expected_produce_batches(message: Any) -> Any:
    return (
        message.acks,
        text(message.transactional_id),
        ms(message.timeout),
        [
            (topic(entry), [(partition.index, partition.records) for partition in entry.partition_data])
            for entry in message.topic_data
        ],
    )


def expected_produce_response(message: Any) -> Any:
    return [
        (
            topic(entry),
            [(answer.index, int(answer.error_code), answer.base_offset) for answer in entry.partition_responses],
        )
        for entry in message.responses
    ]


def expected_fetch_partitions(message: Any) -> Any:
    forgotten = getattr(message, "forgotten_topics_data", None)
    return (
        ms(message.max_wait),
        message.isolation_level,
        getattr(message, "session_id", None),
        getattr(message, "session_epoch", None),
        [
            (topic(entry), [(partition.partition, partition.fetch_offset) for partition in entry.partitions])
            for entry in message.topics
        ],
        None if forgotten is None else named_partitions(forgotten, "partitions"),
    )


def expected_fetch_response(message: Any) -> Any:
    return (
        int(message.error_code) if hasattr(message, "error_code") else None,
        getattr(message, "session_id", None),
        [
            (
                topic(entry),
                [
                    (
                        partition.partition_index,
                        int(partition.error_code),
                        partition.high_watermark,
                        partition.last_stable_offset,
                        getattr(partition, "log_start_offset", None),
                        None
                        if partition.aborted_transactions is None
                        else [
                            (aborted.producer_id, aborted.first_offset) for aborted in partition.aborted_transactions
                        ],
                        partition.records,
                    )
                    for partition in entry.partitions
                ],
            )
            for entry in message.responses
        ],
    )


def expected_list_offsets(message: Any) -> Any:
    return (
        getattr(message, "isolation_level", None),
        [
            (topic(entry), [(partition.partition_index, partition.timestamp) for partition in entry.partitions])
            for entry in message.topics
        ],
    )


def expected_listed_offsets(message: Any) -> Any:
    return [
        (
            topic(entry),
            [
                (
                    partition.partition_index,
                    partition.offset,
                    partition.timestamp,
                    getattr(partition, "leader_epoch", None),
                    partition.error_code,
                )
                for partition in entry.partitions
            ],
        )
        for entry in message.topics
    ]


def expected_metadata(message: Any) -> Any:
    topics = message.topics
    if topics is not None:
        topics = [(text(entry.name), topic_id(entry) if hasattr(entry, "topic_id") else None) for entry in topics]
    if message.__version__ == 0 and not topics:
        topics = None
    return topics, getattr(message, "allow_auto_topic_creation", True)


def expected_delete_topics(message: Any) -> Any:
    if hasattr(message, "topic_names"):
        return [(text(name), None) for name in message.topic_names]
    return [(text(entry.name), topic_id(entry)) for entry in message.topics]


def expected_delete_records(message: Any) -> Any:
    return [
        (topic(entry), [(partition.partition_index, partition.offset) for partition in entry.partitions])
        for entry in message.topics
    ]


def expected_topics(message: Any) -> Any:
    wanted = [field.name for field in dataclasses.fields(message.topics[0])] if message.topics else []
    names = [name for name in wanted if name in ("name", "topic", "topic_id")]
    return [
        topic_id(entry) if name == "topic_id" else text(getattr(entry, name))
        for entry in message.topics or ()
        for name in names
    ]


def expected_offset_fetch_groups(message: Any) -> Any:
    groups = message.groups if hasattr(message, "groups") else (message,)
    return [text(group.group_id) for group in groups]


def expected_group_id(message: Any) -> Any:
    return text(message.group_id)


def expected_transactional_id(message: Any) -> Any:
    name = "transactional_id" if hasattr(message, "transactional_id") else "v3_and_below_transactional_id"
    return text(getattr(message, name))


def of(api_key: ApiKey, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda version, frame: function(api_key, version, frame)


TOPIC_APIS = [
    (ApiKey.METADATA, "response"),
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, "response"),
    (ApiKey.LIST_OFFSETS, "request"),
    (ApiKey.OFFSET_FOR_LEADER_EPOCH, "request"),
    (ApiKey.OFFSET_COMMIT, "request"),
]
GROUP_APIS = [
    ApiKey.OFFSET_COMMIT,
    ApiKey.TXN_OFFSET_COMMIT,
    ApiKey.JOIN_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.LEAVE_GROUP,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.OFFSET_DELETE,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ApiKey.STREAMS_GROUP_HEARTBEAT,
]
TRANSACTION_APIS = [
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.END_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.TXN_OFFSET_COMMIT,
    ApiKey.PRODUCE,
]
PEEKS: list[tuple[ApiKey, str, Callable[..., Any], Callable[[Any], Any]]] = [
    (ApiKey.PRODUCE, "request", peeks.produce_topics, expected_produce_topics),
    (ApiKey.PRODUCE, "request", peeks.produce_batches, expected_produce_batches),
    (ApiKey.PRODUCE, "response", peeks.produce_response, expected_produce_response),
    (ApiKey.FETCH, "request", peeks.fetch_partitions, expected_fetch_partitions),
    (ApiKey.FETCH, "response", peeks.fetch_response, expected_fetch_response),
    (ApiKey.LIST_OFFSETS, "request", peeks.list_offsets, expected_list_offsets),
    (ApiKey.LIST_OFFSETS, "response", peeks.listed_offsets, expected_listed_offsets),
    (ApiKey.METADATA, "request", peeks.metadata, expected_metadata),
    (
        ApiKey.CREATE_TOPICS,
        "request",
        peeks.create_topics,
        lambda message: ([topic(entry) for entry in message.topics], message.validate_only),
    ),
    (ApiKey.DELETE_TOPICS, "request", peeks.delete_topics, expected_delete_topics),
    (
        ApiKey.CREATE_PARTITIONS,
        "request",
        peeks.create_partitions,
        lambda message: ([(topic(entry), entry.count) for entry in message.topics], message.validate_only),
    ),
    (ApiKey.DELETE_RECORDS, "request", peeks.delete_records, expected_delete_records),
    (ApiKey.OFFSET_FETCH, "request", peeks.offset_fetch_groups, expected_offset_fetch_groups),
    *(
        (
            api_key,
            kind,
            lambda version, frame, of=(api_key, kind): peeks.topics(of[0], version, of[1], frame),
            expected_topics,
        )
        for api_key, kind in TOPIC_APIS
    ),
    *((api_key, "request", of(api_key, peeks.group_id), expected_group_id) for api_key in GROUP_APIS),
    *(
        (api_key, "request", of(api_key, peeks.transactional_id), expected_transactional_id)
        for api_key in TRANSACTION_APIS
    ),
]


@pytest.mark.parametrize(("api_key", "kind", "function", "expected"), PEEKS)
def test_peeks_give_what_the_message_says(
    api_key: ApiKey, kind: str, function: Callable[..., Any], expected: Callable[[Any], Any]
) -> None:
    low, high = supported()[api_key]
    for version in range(low, high + 1):
        entity_type: Any = (schema.request_type if kind == "request" else schema.response_type)(api_key, version)
        for seed in range(8):
            messages = RandomEntities(f"{api_key} {version} {seed}", array_min=seed // 4)
            message = messages.entity(entity_type)
            for encoder in (Encoder(), Encoder(messages.rng)):
                frame = encoder.message(message, kind)
                assert readable(function(version, frame)) == expected(message)
                assert readable(function(version, memoryview(frame))) == expected(message)
        with pytest.raises(NeedMore):
            function(version, frame[:12])
        with pytest.raises((MalformedFrame, NeedMore)):
            function(version, b"\x00\x00\x00\x0a" + frame[4:])
    with pytest.raises(LookupError):
        function(high + 1, frame)


def test_records_are_views_of_the_frame() -> None:
    message = RandomEntities(1, array_min=2).entity(schema.request_type(ApiKey.PRODUCE, 11))
    frame = bytearray(Encoder().request(message))
    *_, topics = peeks.produce_batches(11, frame)
    views = [records for _, partitions in topics for _, records in partitions if records]
    assert views
    views[0][0] ^= 0xFF
    *_, again = peeks.produce_batches(11, bytes(frame))
    changed = next(records for _, partitions in again for _, records in partitions if records)
    assert changed[0] == views[0][0]


def test_ids_of_topics_whose_committed_offsets_are_asked_for() -> None:
    for seed in range(20):
        message: Any = RandomEntities(seed).entity(schema.request_type(ApiKey.OFFSET_FETCH, 10))
        expected = [topic_id(entry) for group in message.groups for entry in group.topics or ()]
        assert peeks.offset_fetch_topic_ids(10, Encoder().request(message)) == expected


def test_topics_by_name_or_id() -> None:
    assert [peeks.topics_are_ids(ApiKey.PRODUCE, version) for version in (12, 13)] == [False, True]
    assert [peeks.topics_are_ids(ApiKey.FETCH, version) for version in (12, 13)] == [False, True]
    assert [peeks.topics_are_ids(ApiKey.OFFSET_COMMIT, version) for version in (9, 10)] == [False, True]
    assert not peeks.topics_are_ids(ApiKey.METADATA, 12)
    assert not peeks.topics_are_ids(ApiKey.DELETE_TOPICS, 6)
    assert not peeks.topics_are_ids(ApiKey.HEARTBEAT, 4)


def test_requests_without_one_group_or_transaction() -> None:
    frame = Encoder().request(RandomEntities(0).entity(schema.request_type(ApiKey.OFFSET_FETCH, 9)))
    with pytest.raises(LookupError):
        peeks.group_id(ApiKey.OFFSET_FETCH, 9, frame)
    with pytest.raises(LookupError):
        peeks.transactional_id(ApiKey.ADD_PARTITIONS_TO_TXN, 4, frame)


def codes(entity: Any) -> set[int]:
    found = set()
    for field in dataclasses.fields(entity):
        value = getattr(entity, field.name)
        if field.name.endswith("error_code"):
            found.add(int(value))
        for inside in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(inside):
                found |= codes(inside)
    return found


@pytest.mark.parametrize("api_key", sorted(supported()))
def test_error_codes_of_any_response(api_key: int) -> None:
    low, high = supported()[api_key]
    for version in range(low, high + 1):
        message = RandomEntities(f"{api_key} {version} codes").entity(schema.response_type(api_key, version))
        found = peeks.error_codes(api_key, version, Encoder().response(message))
        assert found - {0} == codes(message) - {0}  # A tagged code of 0 is not on the wire.
