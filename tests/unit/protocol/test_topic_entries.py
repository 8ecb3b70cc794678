"""Entries of topics are found by a search of an answer's bytes: never another topic's, whatever topics are called."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_requests import versions
from support.seeds import examples

from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.topic_entries import TopicEntries, topic_entries
from isthmus_protocol.wire import MalformedFrame

PREFIX = b"__isthmus_"
LISTS = [(api, version) for api in (ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS) for version in versions(api)]
HOST = "__isthmus_control"
"""Of a broker: no topic's name."""


def topic(name: str | None, partitions: int = 2, **more: Any) -> dict[str, Any]:
    led = {"leader_id": 1, "replica_nodes": [1, 2, 3], "isr_nodes": [1, 2]}
    return {
        "name": name,
        "topic_id": uuid.uuid4(),
        "partitions": [{"partition_index": n, "leader_epoch": n, **led} for n in range(partitions)],
        **more,
    }


def answer(api_key: int, version: int, *topics: dict[str, Any], **more: Any) -> bytes:
    values = {"topics": topics, **more}
    if api_key == ApiKey.METADATA:
        values |= {"brokers": [{"node_id": 1, "host": HOST, "port": 9092}], "cluster_id": HOST, "controller_id": 1}
    return encode_response(build_response(api_key, version, values), 7)


def without(api_key: int, version: int, frame: bytes, prefix: str) -> bytes:
    """The slow way."""
    correlation_id, payload = decode_response(api_key, version, frame)
    answered: Any = payload
    topics = tuple(each for each in answered.topics if not (each.name or "").startswith(prefix))
    return encode_response(dataclasses.replace(answered, topics=topics), correlation_id)


def cut(entries: TopicEntries, frame: bytes) -> bytes:
    return entries.spliced(frame, [(entry, b"") for entry in entries.beginning_with(frame, PREFIX)])


CHARACTERS = "-._09AZaz"
NAMES = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=249),
    st.builds(
        lambda before, behind: (before + PREFIX.decode() + behind)[:249],
        st.text(CHARACTERS, max_size=3),
        st.text(CHARACTERS, max_size=140),
    ),
)


@pytest.mark.parametrize(("api_key", "version"), LISTS)
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(NAMES, unique=True, max_size=8), st.sampled_from([0, 3, 5, 9]), st.data())
def test_the_same_as_what_decodes(api_key: int, version: int, names: list[str], code: int, data: Any) -> None:
    frame = answer(api_key, version, *(topic(name, len(name) % 3, error_code=code) for name in names))
    entries = topic_entries(api_key, version)
    assert cut(entries, frame) == without(api_key, version, frame, PREFIX.decode())
    whole = list(entries.all_of(frame))
    asked = data.draw(st.sampled_from([*names, "-", "missing"]))
    entry = entries.named(frame, [asked.encode()]).get(asked.encode())
    if asked in names:
        assert entry is not None
        assert frame[entry.start : entry.end] == whole[names.index(asked)]
    else:
        assert entry is None


@pytest.mark.parametrize(("api_key", "version"), LISTS)
@pytest.mark.parametrize("size", [11, 17, 43, 44, 45, 46, 60, 120, 126, 127, 128, 249])
def test_a_name_inside_another_one_is_none(api_key: int, version: int, size: int) -> None:
    """Also where the longer name has, in front of it, the very byte that a size would be."""
    inner = PREFIX.decode() + "a" * (size - len(PREFIX))
    outer = [chr(size + 1) + inner if chr(size + 1) in CHARACTERS + "+123456789xyz" else "x" + inner, "xy" + inner]
    frame = answer(api_key, version, *(topic(name) for name in outer if len(name) <= 249))
    entries = topic_entries(api_key, version)
    assert not entries.named(frame, [inner.encode()])
    assert cut(entries, frame) is frame
    both = answer(api_key, version, *(topic(name) for name in (*outer, inner)))
    (entry,) = entries.named(both, [inner.encode()]).values()
    assert entry == entries.beginning_with(both, PREFIX)[0]
    assert both[entry.start : entry.end] == list(entries.all_of(both))[-1]


@pytest.mark.parametrize(("api_key", "version"), LISTS)
def test_ids_and_numbers_look_like_short_names(api_key: int, version: int) -> None:
    """In flexible versions ``a`` is 0x0261, partition 609; in classic ones 0x000161, partition 353."""
    other = topic("other", 0, topic_id=uuid.UUID(bytes=b"\0\0\2a\0\0\4ab-\0\0\0\0\0\0"))
    other["partitions"] = [{"partition_index": n, "leader_id": n} for n in (353, 609, 0x2612D)]
    entries = topic_entries(api_key, version)
    assert entries.named(answer(api_key, version, other), [b"a", b"ab-", b"a-"]) == {}
    frame = answer(api_key, version, other, topic("ab-"), topic("a"), topic("a-"))
    found = {name: frame[entry.start : entry.end] for name, entry in entries.named(frame, [b"a", b"ab-"]).items()}
    _, second, third, _ = entries.all_of(frame)
    assert found == {b"ab-": second, b"a": third}


@pytest.mark.parametrize("first", CHARACTERS)
def test_any_character_may_stand_in_front_of_names_of_any_size(first: str) -> None:
    names = [first + PREFIX.decode() + "a" * (size - len(PREFIX) - 1) for size in range(12, 130)]
    for version in (1, 9, 12):
        frame = answer(ApiKey.METADATA, version, *(topic(each, 1) for name in names for each in (name, "t")))
        entries = topic_entries(ApiKey.METADATA, version)
        assert not [frame[each.start : each.end] for each in entries.beginning_with(frame, PREFIX)]
        assert cut(entries, frame) is frame


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_others_take_their_place(version: int) -> None:
    entries = topic_entries(ApiKey.METADATA, version)
    frame = answer(ApiKey.METADATA, version, *(topic(f"t-{n}") for n in range(126)))
    (new, second) = entries.all_of(answer(ApiKey.METADATA, version, topic("new", 1), topic("second", 0)))
    (entry,) = entries.named(frame, [b"t-5"]).values()
    found: Any = decode_response(ApiKey.METADATA, version, entries.spliced(frame, [(entry, new)], [second]))[1]
    assert {each.name for each in found.topics} == {f"t-{n}" for n in range(126) if n != 5} | {"new", "second"}
    assert entries.spliced(frame, []) is frame


def test_an_id_without_a_name_is_found() -> None:
    unknown = topic(None, 0, error_code=100)
    frame = answer(ApiKey.METADATA, 12, topic("t"), unknown)
    entries = topic_entries(ApiKey.METADATA, 12)
    entry = entries.without_name(frame, unknown["topic_id"].bytes)
    assert entry is not None
    assert frame[entry.start : entry.end] == list(entries.all_of(frame))[1]
    assert entries.without_name(frame, uuid.uuid4().bytes) is None


@pytest.mark.parametrize("version", [1, 8, 9, 12, 13])
def test_the_others_cost_nothing(version: int) -> None:
    """Two milliseconds are wanted; decoding takes a hundred times that."""
    names = [f"orders-{n}-topic" for n in range(5_000)]
    names[2_500:2_500] = ["__isthmus_control", "__isthmus_transactions"]
    frame = answer(ApiKey.METADATA, version, *(topic(name, 3) for name in names))
    entries = TopicEntries(ApiKey.METADATA, version)
    asked = [name.encode() for name in names[:5_000:100]]
    taken = []
    for _ in range(5):
        start = time.thread_time()
        cut(entries, frame)
        assert len(entries.named(frame, asked)) == 50
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.01


@pytest.mark.parametrize("version", [0, 8, 12])
def test_only_those_that_are_wanted(version: int) -> None:
    topics = [topic(name) for name in ("a", "bb", "ccc")]
    frame = answer(ApiKey.METADATA, version, *topics)
    entries = TopicEntries(ApiKey.METADATA, version)
    every = list(entries.all_of(frame))
    asked: list[bytes] = []

    def is_second(entry: bytes) -> bool:
        asked.append(entry)
        return entry == every[1]

    kept = entries.only(frame, is_second)
    assert asked == every
    assert kept == answer(ApiKey.METADATA, version, topics[1])
    assert entries.only(frame, lambda entry: True) is frame
    assert entries.only(frame, lambda entry: False) == answer(ApiKey.METADATA, version)
    with pytest.raises(MalformedFrame):
        entries.only(frame[: len(frame) // 2], lambda entry: True)
