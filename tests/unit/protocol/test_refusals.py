"""Refusing requests, whole and in part. The broker's side is played by the same table with error code 0."""

from __future__ import annotations

import datetime
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from isthmus_protocol import bodies, schema
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE, OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import (
    RequestHead,
    build_request,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    parse_request_head,
)
from isthmus_protocol.refusals import Part, Refusal, Refused, parts_of, refuse, refuse_all
from isthmus_protocol.schema import ApiKey

ID_A, ID_B = uuid.UUID(int=10), uuid.UUID(int=11)
POLICY_VIOLATION = Refusal(44, "orders- is reserved by a-to-b")


def head_of(request: Any, correlation_id: int = 7) -> RequestHead:
    return parse_request_head(encode_request(request, correlation_id, "client"))


def decoded_answer(request: Any, refused: Refused) -> Any:
    assert refused.answer is not None
    correlation_id, payload = decode_response(request.__api_key__, request.__version__, refused.answer)
    assert correlation_id == 7
    return payload


def broker_answer(request: Any) -> Any:
    """A broker's answer that grants everything."""
    decode_request(encode_request(request, 7, "client"))  # what is forwarded can be encoded
    refused = refuse_all(head_of(request), request, Refusal(0))
    assert refused is not None
    if refused.answer is None:  # Metadata
        return refused.merge(
            blank(schema.response_type(request.__api_key__, request.__version__), controller_id=3, cluster_id="c")
        )
    return decoded_answer(request, refused)


def blank(entity_type: Any, **values: Any) -> Any:
    names = {field.name for field in fields(entity_type)}
    return bodies.blank(entity_type, {name: value for name, value in values.items() if name in names})


def codes(shaped: Any) -> list[int]:
    """All error codes in an answer's entries, in wire order."""

    def walk(value: Any) -> Iterator[int]:
        for field in fields(value):
            inner = getattr(value, field.name)
            if isinstance(inner, tuple):
                for item in inner:
                    if hasattr(item, "__dataclass_fields__"):
                        yield from walk(item)
            elif field.name in ("error_code", "partition_error_code") and value is not shaped:
                yield int(inner)

    return list(walk(shaped))


def fill(entity_type: Any, path: tuple[str, ...], variants: list[list[dict[str, Any]]]) -> Any:
    """A request with nested arrays at ``path``; ``variants[depth]`` are the items' values at each depth."""
    if not path:
        return blank(entity_type)
    array, *rest = path
    (field,) = (field for field in fields(entity_type) if field.name == array)
    item_type = field.type
    while hasattr(item_type, "__args__"):
        item_type = item_type.__args__[0]
    items = []
    for values in variants[0]:
        if "" in values:
            items.append(values[""])
            continue
        names = {field.name for field in fields(item_type)}
        inner = fill(item_type, tuple(rest), variants[1:])
        items.append(replace(inner, **{name: value for name, value in values.items() if name in names}))
    return blank(entity_type, **{array: tuple(items)})


TOPICS = [{"name": "a", "topic_id": ID_A}, {"name": "b", "topic_id": ID_B}]
PARTITIONS = [{"partition_index": 0, "index": 0}, {"partition_index": 1, "index": 1}]
BARE = [{"": 0}, {"": 1}]
REQUESTS: dict[int, Callable[[int], tuple[tuple[str, ...], list[list[dict[str, Any]]]]]] = {
    ApiKey.PRODUCE: lambda v: (("topic_data", "partition_data"), [TOPICS, PARTITIONS]),
    ApiKey.LIST_OFFSETS: lambda v: (("topics", "partitions"), [TOPICS, PARTITIONS]),
    ApiKey.METADATA: lambda v: (("topics",), [TOPICS]),
    ApiKey.OFFSET_COMMIT: lambda v: (("topics", "partitions"), [TOPICS, PARTITIONS]),
    ApiKey.TXN_OFFSET_COMMIT: lambda v: (("topics", "partitions"), [TOPICS, PARTITIONS]),
    ApiKey.OFFSET_DELETE: lambda v: (("topics", "partitions"), [TOPICS, PARTITIONS]),
    ApiKey.DELETE_RECORDS: lambda v: (("topics", "partitions"), [TOPICS, PARTITIONS]),
    ApiKey.CREATE_TOPICS: lambda v: (("topics",), [TOPICS]),
    ApiKey.CREATE_PARTITIONS: lambda v: (("topics",), [TOPICS]),
    ApiKey.DELETE_TOPICS: lambda v: (("topics",), [TOPICS]) if v >= 6 else (("topic_names",), [[{"": "a"}, {"": "b"}]]),
    ApiKey.WRITE_TXN_MARKERS: lambda v: (
        ("markers", "topics", "partition_indexes"),
        [[{"producer_id": 5}, {"producer_id": 6}], TOPICS, BARE],
    ),
    ApiKey.ALTER_CONFIGS: lambda v: (("resources",), [[{"resource_type": 2, "resource_name": n} for n in "ab"]]),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: lambda v: (
        ("resources",),
        [[{"resource_type": 2, "resource_name": n} for n in "ab"]],
    ),
    ApiKey.DELETE_GROUPS: lambda v: (("groups_names",), [[{"": "a"}, {"": "b"}]]),
    ApiKey.CREATE_ACLS: lambda v: (("creations",), [[{"resource_name": "a"}, {"resource_name": "b"}]]),
    ApiKey.DELETE_ACLS: lambda v: (("filters",), [[{"resource_name_filter": "a"}, {"resource_name_filter": "b"}]]),
}
CASES = [(key, v) for key in REQUESTS for v in range(schema.supported()[key][0], schema.supported()[key][1] + 1)]


def request_of(api_key: int, version: int, **values: Any) -> Any:
    path, variants = REQUESTS[api_key](version)
    request = fill(schema.request_type(api_key, version), path, variants)
    names = {field.name for field in fields(request)}
    return replace(request, **{name: value for name, value in values.items() if name in names})


@pytest.mark.parametrize(("api_key", "version"), CASES)
def test_every_mix_of_refusals_is_answered_in_request_order(api_key: int, version: int) -> None:
    request = request_of(api_key, version, acks=-1)
    head = head_of(request)
    count = len(list(parts_of(head, request)))
    dice = random.Random(api_key * 100 + version)
    masks = {0, 2**count - 1, *(dice.randrange(2**count) for _ in range(20))}
    for mask in masks:
        wanted = [44 if mask >> index & 1 else 0 for index in range(count)]
        decisions = iter(wanted)
        refused = refuse(head, request, lambda part: POLICY_VIOLATION if next(decisions) else None)  # noqa: B023
        if mask == 0:
            assert refused is None
            continue
        assert refused is not None
        assert len(refused.parts) == wanted.count(44)
        assert not refused.close
        if mask == 2**count - 1 and api_key != ApiKey.METADATA:
            answer = decoded_answer(request, refused)
            assert refused.remaining is None
        else:
            assert refused.answer is None
            assert refused.remaining is not None
            answer = refused.merge(broker_answer(refused.remaining) if mask != 2**count - 1 else metadata_of(version))
            encode_response(answer, 7)
        assert codes(answer) == wanted


def metadata_of(version: int, **values: Any) -> Any:
    return blank(schema.response_type(ApiKey.METADATA, version), **values)


@pytest.mark.parametrize(("api_key", "version"), CASES)
def test_error_entries_carry_identity_and_message(api_key: int, version: int) -> None:
    request = request_of(api_key, version, acks=1)
    refused = refuse_all(head_of(request), request, POLICY_VIOLATION)
    assert refused is not None
    answer = refused.merge(metadata_of(version)) if refused.answer is None else decoded_answer(request, refused)
    (array,) = (value for field in fields(answer) if isinstance(value := getattr(answer, field.name), tuple) and value)
    for index, entry in enumerate(array):
        if hasattr(entry, "name"):
            assert entry.name == "ab"[index]
        if hasattr(entry, "topic_id") and hasattr(request, "topics") and hasattr(request.topics[index], "topic_id"):
            assert entry.topic_id == (ID_A, ID_B)[index]
        if hasattr(entry, "resource_name"):
            assert (entry.resource_type, entry.resource_name) == (2, "ab"[index])
        if hasattr(entry, "group_id"):
            assert entry.group_id == "ab"[index]
        if hasattr(entry, "producer_id"):
            assert entry.producer_id == (5, 6)[index]
        if hasattr(entry, "error_message"):
            assert entry.error_message == POLICY_VIOLATION.message


@pytest.mark.parametrize("version", range(3, 14))
def test_produce_error_entries_are_a_brokers(version: int) -> None:
    request = request_of(ApiKey.PRODUCE, version, acks=1)
    refused = refuse_all(head_of(request), request, Refusal(42, "read-only"))
    assert refused is not None
    partition = decoded_answer(request, refused).responses[1].partition_responses[1]
    assert (partition.index, partition.base_offset, partition.log_append_time) == (1, -1, None)
    if version >= 5:
        assert partition.log_start_offset == -1
    if version >= 8:
        assert (partition.record_errors, partition.error_message) == ((), "read-only")


@pytest.mark.parametrize("version", [3, 9, 13])
def test_produce_without_acks_closes_the_connection(version: int) -> None:
    request = request_of(ApiKey.PRODUCE, version, acks=0)
    whole = refuse_all(head_of(request), request, Refusal(42))
    assert whole is not None
    assert (whole.close, whole.answer, whole.remaining) == (True, None, None)
    part: Any = refuse(head_of(request), request, lambda part: Refusal(42) if part.partition == 1 else None)
    assert (part.close, part.answer) == (True, None)
    assert [len(topic.partition_data) for topic in part.remaining.topic_data] == [1, 1]


def test_parts_say_what_they_are_about() -> None:
    def seen(api_key: int, version: int) -> list[tuple[Any, ...]]:
        request = request_of(api_key, version)
        return [(part.topic, part.topic_id, part.partition) for part in parts_of(head_of(request), request)]

    both = [("a", None, 0), ("a", None, 1), ("b", None, 0), ("b", None, 1)]
    assert seen(ApiKey.PRODUCE, 9) == both
    assert seen(ApiKey.PRODUCE, 13) == [(None, ID_A, 0), (None, ID_A, 1), (None, ID_B, 0), (None, ID_B, 1)]
    assert seen(ApiKey.OFFSET_COMMIT, 8) == both
    assert seen(ApiKey.WRITE_TXN_MARKERS, 1) == both * 2
    assert seen(ApiKey.CREATE_TOPICS, 7) == [("a", None, None), ("b", None, None)]
    assert seen(ApiKey.DELETE_TOPICS, 5) == [("a", None, None), ("b", None, None)]
    assert seen(ApiKey.DELETE_TOPICS, 6) == [("a", ID_A, None), ("b", ID_B, None)]
    assert seen(ApiKey.METADATA, 12) == [("a", ID_A, None), ("b", ID_B, None)]
    assert seen(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1) == [("a", None, None), ("b", None, None)]
    assert seen(ApiKey.DELETE_GROUPS, 2) == [(None, None, None)] * 2
    assert seen(ApiKey.CREATE_ACLS, 2) == [(None, None, None)] * 2


def test_config_resources_other_than_topics_are_no_topics() -> None:
    request = request_of(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
    broker = replace(request.resources[0], resource_type=4, resource_name="b")
    request = replace(request, resources=(broker, request.resources[1]))
    refused = refuse(head_of(request), request, lambda part: POLICY_VIOLATION if part.topic == "b" else None)
    assert refused is not None
    answer: Any = refused.merge(broker_answer(refused.remaining))
    assert [(entry.resource_type, entry.resource_name, int(entry.error_code)) for entry in answer.responses] == [
        (4, "b", 0),
        (2, "b", 44),
    ]


def add_partitions(version: int) -> Any:
    if version < 4:
        request_type: Any = schema.request_type(ApiKey.ADD_PARTITIONS_TO_TXN, version)
        return replace(
            fill(request_type, ("v3_and_below_topics", "partitions"), [TOPICS, BARE]), v3_and_below_transactional_id="t"
        )
    transactions = [{"transactional_id": "t1"}, {"transactional_id": "t2"}]
    request_type = schema.request_type(ApiKey.ADD_PARTITIONS_TO_TXN, version)
    return fill(request_type, ("transactions", "topics", "partitions"), [transactions, TOPICS, BARE])


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_nothing_is_added_to_a_transaction_if_a_partition_is_refused(version: int) -> None:
    request = add_partitions(version)
    refused = refuse(
        head_of(request), request, lambda part: Refusal(29) if (part.topic, part.partition) == ("b", 0) else None
    )
    assert refused is not None
    assert refused.remaining is None
    assert codes(decoded_answer(request, refused)) == [55, 55, 29, 55]
    assert [part.topic for part, _ in refused.parts] == ["b"]


@pytest.mark.parametrize("version", [4, 5])
def test_the_other_transactions_of_a_batch_go_on(version: int) -> None:
    request = add_partitions(version)

    def decide(part: Part) -> Refusal | None:
        transaction, topic = part.within
        named = (transaction.transactional_id, topic.name, part.partition)
        return Refusal(29) if named == ("t1", "a", 1) else None

    refused: Any = refuse(head_of(request), request, decide)
    assert [transaction.transactional_id for transaction in refused.remaining.transactions] == ["t2"]
    answer = refused.merge(broker_answer(refused.remaining))
    assert [result.transactional_id for result in answer.results_by_transaction] == ["t1", "t2"]
    assert codes(answer) == [55, 29, 55, 55, 0, 0, 0, 0]


def test_delete_topics_by_id_is_matched_although_the_broker_names_the_topic() -> None:
    request = request_of(ApiKey.DELETE_TOPICS, 6)
    request = replace(request, topics=tuple(replace(topic, name=None) for topic in request.topics))
    refused: Any = refuse(head_of(request), request, lambda part: POLICY_VIOLATION if part.topic_id == ID_A else None)
    granted = broker_answer(refused.remaining)
    named = replace(granted, responses=(replace(granted.responses[0], name="b"),))
    answer = refused.merge(named)
    assert [(entry.name, entry.topic_id, int(entry.error_code)) for entry in answer.responses] == [
        (None, ID_A, 44),
        ("b", ID_B, 0),
    ]


def test_the_brokers_order_gives_way_to_the_requests() -> None:
    request = request_of(ApiKey.CREATE_TOPICS, 7)
    third = replace(request.topics[0], name="c")
    request = replace(request, topics=(*request.topics, third))
    refused: Any = refuse(head_of(request), request, lambda part: POLICY_VIOLATION if part.topic == "b" else None)
    granted = broker_answer(refused.remaining)
    answer = refused.merge(replace(granted, topics=granted.topics[::-1]))
    assert [topic.name for topic in answer.topics] == ["a", "b", "c"]


def test_nothing_that_the_broker_says_is_lost() -> None:
    """A topic asked for twice, answered by one entry; an entry nobody asked for; a topic left out."""
    request = request_of(ApiKey.DELETE_RECORDS, 2)
    once = request.topics[0]
    request = replace(request, topics=(once, once, request.topics[1]))
    refused: Any = refuse(head_of(request), request, lambda part: Refusal(44) if part.partition == 1 else None)
    granted = broker_answer(refused.remaining)
    joined = replace(granted.topics[0], partitions=granted.topics[0].partitions * 2)
    stranger = replace(granted.topics[0], name="stranger")
    answer = refused.merge(replace(granted, topics=(joined, stranger)))
    assert [
        (topic.name, [(entry.partition_index, int(entry.error_code)) for entry in topic.partitions])
        for topic in answer.topics
    ] == [("a", [(0, 0), (1, 44), (0, 0)]), ("a", [(1, 44)]), ("b", [(1, 44)]), ("stranger", [(0, 0)])]


@pytest.mark.parametrize("version", range(14))
def test_metadata_always_comes_from_the_broker(version: int) -> None:
    request = request_of(ApiKey.METADATA, version)
    refused: Any = refuse_all(head_of(request), request, Refusal(17))
    assert refused.answer is None
    assert refused.remaining.topics == ()
    # In v0 that asks for all topics; they must not come through.
    unasked = blank(type(request.topics[0]), name="other")
    others = broker_answer(replace(request, topics=(unasked,)))
    answer = refused.merge(others)
    assert [(topic.name, int(topic.error_code)) for topic in answer.topics] == [("a", 17), ("b", 17)]
    if version >= 1:
        assert answer.controller_id == 3


def test_metadata_for_all_topics_has_no_parts() -> None:
    request = replace(request_of(ApiKey.METADATA, 12), topics=None)
    assert refuse_all(head_of(request), request, Refusal(17)) is None


@pytest.mark.parametrize(
    "api_key",
    [
        ApiKey.JOIN_GROUP,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.SYNC_GROUP,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.END_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
    ],
)
def test_requests_without_parts_are_refused_whole(api_key: int) -> None:
    low, high = schema.supported()[api_key]
    for version in range(low, high + 1):
        request = blank(schema.request_type(api_key, version), member_id="m")
        assert refuse(head_of(request), request, lambda part: None) is None
        refused = refuse_all(head_of(request), request, Refusal(30, "no"))
        assert refused is not None
        answer = decoded_answer(request, refused)
        assert answer.error_code == 30
        if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            assert answer.error_message == "no"
        if api_key == ApiKey.JOIN_GROUP:
            assert (answer.member_id, answer.generation_id, answer.members) == ("m", -1, ())
        assert refused.parts[0][0].item is request


def test_a_response_without_an_error_code_cannot_refuse() -> None:
    request = blank(schema.request_type(ApiKey.DESCRIBE_LOG_DIRS, 1))
    with pytest.raises(ValueError, match="no way to refuse"):
        refuse_all(head_of(request), request, Refusal(29))


def test_unknown_codes_are_passed_on() -> None:
    request = blank(schema.request_type(ApiKey.END_TXN, 3))
    refused = refuse_all(head_of(request), request, Refusal(4711))
    assert refused is not None
    assert decoded_answer(request, refused).error_code == 4711
    assert decoded_answer(request, refused).throttle_time == datetime.timedelta(0)


def scram(deletions: str, upsertions: str) -> Any:
    """AlterUserScramCredentials, a change for each letter."""
    values = {
        "deletions": [{"name": name, "mechanism": 1} for name in deletions],
        "upsertions": [
            {"name": name, "mechanism": 2, "iterations": 4096, "salt": b"s", "salted_password": b"p"}
            for name in upsertions
        ],
    }
    return build_request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, values)


def test_scram_credentials_are_answered_by_user() -> None:
    def deciding(names: str) -> Callable[[Part], Refusal | None]:
        return lambda part: POLICY_VIOLATION if part.item.name in names else None

    request = scram("ab", "bc")
    assert [part.item.name for part in parts_of(head_of(request), request)] == ["a", "b", "b", "c"]
    assert refuse(head_of(request), request, deciding("x")) is None
    refused = refuse(head_of(request), request, deciding("b"))
    assert refused is not None
    assert refused.remaining == scram("a", "c")
    answer: Any = refused.merge(broker_answer(refused.remaining))
    assert [(each.user, int(each.error_code)) for each in answer.results] == [("a", 0), ("b", 44), ("c", 0)]
    assert answer.results[1].error_message == POLICY_VIOLATION.message
    refused = refuse(head_of(request), request, deciding("abc"))
    assert refused is not None
    assert [(each.user, int(each.error_code)) for each in decoded_answer(request, refused).results] == [
        (user, 44) for user in "abc"
    ]


@pytest.mark.parametrize("version", [0, 1])
def test_quotas_are_matched_by_entity_in_whatever_order_a_broker_answers(version: int) -> None:
    entities = [[("user", "a")], [("user", "b"), ("client-id", "c")], [("user", None)], [("client-id", "c")]]
    values = {
        "entries": [
            {
                "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity],
                "ops": [{"key": "request_percentage", "value": 1.0, "remove": False}],
            }
            for entity in entities
        ],
        "validate_only": False,
    }
    request = build_request(ApiKey.ALTER_CLIENT_QUOTAS, version, values)

    def decide(part: Part) -> Refusal | None:
        return POLICY_VIOLATION if part.item.entity[0].entity_name == "b" else None

    refused = refuse(head_of(request), request, decide)
    assert refused is not None
    broker: Any = broker_answer(refused.remaining)
    answer: Any = refused.merge(replace(broker, entries=broker.entries[::-1]))
    assert [
        ([(each.entity_type, each.entity_name) for each in entry.entity], int(entry.error_code))
        for entry in answer.entries
    ] == [(entity, 44 if index == 1 else 0) for index, entity in enumerate(entities)]


@pytest.mark.parametrize(
    ("version", "code"), [(1, LEADER_NOT_AVAILABLE), (4, LEADER_NOT_AVAILABLE), (5, OFFSET_NOT_AVAILABLE)]
)
def test_who_searches_in_an_older_version_is_told_what_it_knows(version: int, code: int) -> None:
    """KIP-207: aiokafka, which searches in version 3, would end with an unknown error."""
    path, variants = REQUESTS[ApiKey.LIST_OFFSETS](version)
    request = fill(schema.request_type(ApiKey.LIST_OFFSETS, version), path, variants)
    refused = refuse(head_of(request), request, lambda part: Refusal(OFFSET_NOT_AVAILABLE))
    assert refused is not None
    assert {refusal.code for _, refusal in refused.parts} == {code}
    assert set(codes(decoded_answer(request, refused))) == {code}
    kept = refuse(head_of(request), request, lambda part: POLICY_VIOLATION)
    assert kept is not None
    assert {refusal for _, refusal in kept.parts} == {POLICY_VIOLATION}
