"""Compiled locators against kio, over every API and version, and against bytes of every other kind."""

from __future__ import annotations

import dataclasses
import itertools
import random
import struct
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kio.schema.index import api_key_map, schema_name_map
from support.entities import Encoder, RandomEntities, all_wants, located, random_wants, readable
from support.seeds import examples

from isthmus_protocol import schema
from isthmus_protocol.locate import entity_locator, locator, locator_source, response_skimmer
from isthmus_protocol.messages import encode_request, encode_response
from isthmus_protocol.schema import ApiKey, EntitySpec, MessageKind, message_spec, supported
from isthmus_protocol.wire import MalformedFrame, NeedMore, write_uvarint

KINDS: tuple[MessageKind, MessageKind] = ("request", "response")
CLIENT_VERSIONS = [
    (api_key, version) for api_key, (low, high) in supported().items() for version in range(low, high + 1)
]


def entity_type(api_key: int, version: int, kind: MessageKind) -> Any:
    return schema.request_type(api_key, version) if kind == "request" else schema.response_type(api_key, version)


def with_size(frame: bytes) -> bytes:
    """The bytes as a frame of just these bytes."""
    return struct.pack(">i", len(frame) - 4) + frame[4:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api_key", sorted(api_key_map))
def test_all_fields_are_found_as_kio_wrote_them(api_key: int, kind: MessageKind) -> None:
    for version in schema_name_map[api_key_map[api_key]]:
        spec = message_spec(api_key, version, kind)
        wants = all_wants(spec)
        if not wants:
            continue
        locate = locator(api_key, version, kind, wants)
        messages = RandomEntities(f"{api_key} {version} {kind}")
        unknown_tags = Encoder(messages.rng)
        for _ in range(3):
            entity = messages.entity(entity_type(api_key, version, kind))
            frame = encode_request(entity, 7, "client") if kind == "request" else encode_response(entity, 7)
            assert Encoder().message(entity, kind) == frame
            expected = located(entity, wants)
            assert readable(locate(frame)) == expected
            assert readable(locate(unknown_tags.message(entity, kind))) == expected
            assert readable(locate(memoryview(b"\xee" * 9 + frame + b"\xee" * 9), 9)) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api_key", sorted(supported()))
def test_some_fields_are_found_and_the_others_skipped(api_key: int, kind: MessageKind) -> None:
    low, high = supported()[api_key]
    for version in range(low, high + 1):
        messages = RandomEntities(f"{api_key} {version} {kind} some")
        spec = message_spec(api_key, version, kind)
        for _ in range(2):
            wants = random_wants(spec, messages.rng)
            if not wants:
                continue
            locate = locator(api_key, version, kind, wants)
            for _ in range(2):
                entity = messages.entity(entity_type(api_key, version, kind))
                frame = Encoder(messages.rng).message(entity, kind)
                assert readable(locate(frame)) == located(entity, wants), wants


@pytest.mark.parametrize("kind", KINDS)
def test_spans_tile_the_message(kind: MessageKind) -> None:
    for api_key, version in CLIENT_VERSIONS:
        spec = message_spec(api_key, version, kind)
        messages = RandomEntities(f"{api_key} {version} {kind} spans")
        entity = messages.entity(entity_type(api_key, version, kind))
        frame = Encoder(messages.rng).message(entity, kind)
        wants = ("@", *(f"{field.name}@" for field in spec.fields), "@tags")
        (body, end), *spans, tags = locator(api_key, version, kind, wants)(frame)
        position = body
        for field, (start, field_end) in zip(spec.fields, spans, strict=True):
            assert start == position
            alone = EntitySpec(field.name, spec.flexible, (field,), ())
            inside = field.name if field.entity is None else (field.name, all_wants(field.entity))
            assert readable(entity_locator(alone, (inside,))(frame, start, field_end)) == located(entity, (inside,))
            position = field_end
        assert (tags is not None) == spec.flexible
        if tags is not None:
            assert tags[0] == position
            position = tags[1]
        assert position == end == len(frame)


def test_spans_inside_arrays_and_tags() -> None:
    entity = RandomEntities(5, array_max=4).entity(schema.response_type(ApiKey.PRODUCE, 12))
    frame = Encoder().response(entity)
    wants = (("responses", ("@", ("partition_responses", ("index@", "index")))), "node_endpoints@")
    responses, endpoints = locator(ApiKey.PRODUCE, 12, "response", wants)(frame)
    assert entity.node_endpoints
    assert endpoints[1] - endpoints[0] == len(frame[endpoints[0] : endpoints[1]])
    assert frame[endpoints[0]] == len(entity.node_endpoints) + 1
    assert len(responses) == len(entity.responses) > 1
    for ((_, end), partitions), ((start, _), _) in itertools.pairwise(responses):
        assert end == start
        for (index_start, index_end), index in partitions:
            assert frame[index_start:index_end] == struct.pack(">i", index)


def test_fields_of_other_versions_are_none() -> None:
    request = RandomEntities(1, array_max=2).entity(schema.request_type(ApiKey.FETCH, 4))
    found = locator(ApiKey.FETCH, 4, "request", ("session_id", "@tags", ("forgotten_topics_data", ("topic",))))(
        Encoder().request(request)
    )
    assert found == (None, None, None)


def test_the_walk_stops_behind_the_last_wanted_field() -> None:
    messages = RandomEntities(8)
    request = messages.entity(schema.request_type(ApiKey.PRODUCE, 9))
    topic = dataclasses.replace(request.topic_data[0], name="the-only-topic")
    frame = Encoder().request(dataclasses.replace(request, topic_data=(topic,)), client_id=None)
    wants = ("acks", ("topic_data", ("name",)))
    locate = locator(ApiKey.PRODUCE, 9, "request", wants)
    acks, names = locate(frame)
    assert names == [b"the-only-topic"]
    last = frame.index(names[0]) + len(names[0])
    assert locate(frame[:last]) == (acks, names)
    with pytest.raises(NeedMore):
        locate(frame[: last - 1])
    assert "skip_tags" in locator_source(ApiKey.PRODUCE, 9, "request", wants)


# Bytes that are not what they should be.

SAMPLED = [
    (ApiKey.PRODUCE, 3, "request"),
    (ApiKey.PRODUCE, 9, "request"),
    (ApiKey.PRODUCE, 13, "request"),
    (ApiKey.PRODUCE, 10, "response"),
    (ApiKey.FETCH, 4, "response"),
    (ApiKey.FETCH, 12, "request"),
    (ApiKey.FETCH, 17, "response"),
    (ApiKey.METADATA, 1, "request"),
    (ApiKey.METADATA, 12, "request"),
    (ApiKey.METADATA, 8, "response"),
    (ApiKey.METADATA, 12, "response"),
    (ApiKey.OFFSET_FETCH, 9, "request"),
    (ApiKey.CREATE_TOPICS, 7, "request"),
    (ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, "response"),
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, "response"),
    (ApiKey.ADD_PARTITIONS_TO_TXN, 5, "request"),
    (ApiKey.API_VERSIONS, 4, "response"),
    (ApiKey.SHARE_FETCH, 2, "response"),
]


def sample(api_key: int, version: int, kind: MessageKind, seed: int) -> tuple[Any, bytes, list[Any]]:
    """A message, its frame, and wants: everything, or some."""
    messages = RandomEntities(f"{api_key} {version} {kind} {seed}", array_max=2)
    entity = messages.entity(entity_type(api_key, version, kind))
    spec = message_spec(api_key, version, kind)
    rng = random.Random(f"{api_key} {version} {kind}")  # The same few wants each time, since compiling takes its time.
    wants = [all_wants(spec), *(chosen for _ in range(2) if (chosen := random_wants(spec, rng)))]
    return entity, Encoder(messages.rng).message(entity, kind), wants


@pytest.mark.parametrize(("api_key", "version", "kind"), SAMPLED)
def test_a_prefix_gives_the_answer_or_asks_for_more(api_key: int, version: int, kind: MessageKind) -> None:
    entity, frame, wanted = sample(api_key, version, kind, seed=1)
    for wants in wanted:
        locate, expected = locator(api_key, version, kind, wants), located(entity, wants)
        answered = False
        for end in [*range(min(len(frame), 1500)), len(frame)]:
            try:
                found = readable(locate(frame[:end]))
            except NeedMore:
                assert not answered
            else:
                assert found == expected
                answered = True
        assert answered


@pytest.mark.parametrize(("api_key", "version", "kind"), SAMPLED)
def test_a_frame_that_ends_early_is_malformed(api_key: int, version: int, kind: MessageKind) -> None:
    entity, frame, wanted = sample(api_key, version, kind, seed=2)
    for wants in wanted:
        locate, expected = locator(api_key, version, kind, wants), located(entity, wants)
        for end in range(4, min(len(frame), 1500)):
            cut = with_size(frame[:end])
            for behind in (b"", b"\x00" * 64, b"\xff" * 64, frame):  # What follows belongs to the next frame.
                try:
                    found = readable(locate(cut + behind))
                except MalformedFrame:
                    continue
                assert found == expected


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_any_bytes_give_an_answer_or_one_of_two_errors(data: st.DataObject) -> None:
    api_key, version, kind = data.draw(st.sampled_from(SAMPLED))
    _, frame, wanted = sample(api_key, version, kind, data.draw(st.integers(0, 3)))
    flipped = bytearray(frame)
    places = st.integers(0, len(frame) - 1)
    for position, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        flipped[position] = byte
    if data.draw(st.booleans()):
        position = data.draw(places)
        flipped[position : position + 4] = data.draw(
            st.sampled_from(
                [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff"]
            )
        )
    if data.draw(st.booleans()):
        flipped = bytearray(with_size(bytes(flipped)))
    for wants in wanted:
        try:
            locator(api_key, version, kind, wants)(bytes(flipped[: data.draw(places)]))
            locator(api_key, version, kind, wants)(bytes(flipped))
        except (MalformedFrame, NeedMore):
            pass


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(SAMPLED), st.binary(max_size=200))
@example(SAMPLED[1], b"\x00\x00\x00\x09" + b"\x80" * 40)
@example(SAMPLED[0], b"\x80\x00\x00\x00" + b"\x00" * 40)
def test_noise_gives_an_answer_or_one_of_two_errors(which: tuple[int, int, MessageKind], noise: bytes) -> None:
    for frame in (noise, with_size(b"\x00" * 4 + noise)):
        try:
            locator(*which, all_wants(message_spec(*which)))(frame)
        except (MalformedFrame, NeedMore):
            pass


def test_a_hostile_count_is_refused_before_the_loop() -> None:
    for version, count in ((8, b"\x7f\xff\xff\xff"), (9, write_uvarint(0x7FFFFFFF))):
        head = struct.pack(">ihhih", 0, ApiKey.PRODUCE, version, 1, -1)
        head += b"\x00" + b"\x00" if version == 9 else b"\xff\xff"  # Header's tags; null transactional id.
        prefix = head + struct.pack(">hi", 1, 1000) + count
        locate = locator(ApiKey.PRODUCE, version, "request", ("acks", ("topic_data", ("name",))))
        with pytest.raises(MalformedFrame):
            locate(with_size(prefix))
        # 1 GB is said to follow: still not enough for that many.
        with pytest.raises(MalformedFrame):
            locate(struct.pack(">i", 1 << 30) + prefix[4:])


@pytest.mark.parametrize("length", [-2, -32768])
def test_a_negative_length_is_malformed(length: int) -> None:
    frame = with_size(struct.pack(">ihhihh", 0, ApiKey.PRODUCE, 3, 1, -1, length) + b"\x00" * 20)
    with pytest.raises(MalformedFrame):
        locator(ApiKey.PRODUCE, 3, "request", ("acks",))(frame)


def test_null_where_it_may_not_be_is_malformed() -> None:
    for api_key, version in ((ApiKey.HEARTBEAT, 3), (ApiKey.HEARTBEAT, 4)):
        null = b"\x00" if version == 4 else b"\xff\xff"
        header_tags = b"\x00" if version == 4 else b""
        frame = with_size(struct.pack(">ihhih", 0, api_key, version, 1, -1) + header_tags + null + b"\x00" * 20)
        with pytest.raises(MalformedFrame):
            locator(api_key, version, "request", ("group_id",))(frame)


# Walking in chunks.


@cache
def skimmed() -> list[tuple[int, int, str]]:
    """Not before they are needed: to look at all schemas takes each worker a second."""
    return [
        (api_key, version, "@tags" if spec.tagged else spec.fields[-1].name)
        for api_key, version in CLIENT_VERSIONS
        if (spec := message_spec(api_key, version, "response")).flexible
        and schema.response_header_flexible(api_key, version)
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 10_000])
def test_a_skimmer_finds_the_place_in_any_chunks(chunk_bytes: int) -> None:
    for api_key, version, until in skimmed() if chunk_bytes > 2 else skimmed()[::5]:
        messages = RandomEntities(f"{api_key} {version} skim", array_max=2)
        frame = Encoder(messages.rng).response(messages.entity(schema.response_type(api_key, version)))
        expected = locator(api_key, version, "response", (until if until == "@tags" else f"{until}@",))(frame)[0]
        chunks = [frame[start : start + chunk_bytes] for start in range(0, len(frame), chunk_bytes)]
        walk = response_skimmer(api_key, version, until)(chunks[0], 0, len(chunks[0]))
        position, index = 0, 0
        try:
            position = next(walk)
            while True:
                while position >= len(chunks[index]):
                    position -= len(chunks[index])
                    index += 1
                position = walk.send((chunks[index], position, len(chunks[index])))
        except StopIteration as stop:
            found = index * chunk_bytes + stop.value
        assert found == expected
