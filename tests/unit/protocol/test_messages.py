"""Frames to kio's payloads and back, over every API, version and direction; and what malformed bytes do."""

from __future__ import annotations

import datetime
import random
import struct
import uuid
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    classify_field,
    get_field_tag,
    get_schema_field_type,
    is_optional,
)
from support.seeds import examples

from isthmus_protocol import schema
from isthmus_protocol.messages import (
    MalformedFrame,
    build_request,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    error_code,
    parse_request_head,
)

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
ALL_VERSIONS = [
    (key, version) for key, name in sorted(api_key_map.items()) for version in sorted(schema_name_map[name])
]


class Sampler:
    """Random messages. ``extreme`` chooses empty, null and largest values more often than ordinary ones."""

    def __init__(self, seed: int, extreme: bool = False) -> None:
        self.random = random.Random(seed)
        self.extreme = extreme

    def message(self, entity_type: Any) -> Any:
        return entity_type(**{field.name: self.value(field) for field in fields(entity_type)})

    def value(self, field: Any) -> Any:
        kind = classify_field(field)
        if kind.is_array:
            if "None" in str(field.type).rsplit(",", 1)[-1] and get_field_tag(field) is None and self.chance():
                return None
            count = 0 if self.extreme and self.chance() else self.random.randint(0, 3)
            return tuple(self.single(field, kind, nullable=False) for _ in range(count))
        nullable = is_optional(field) and (get_field_tag(field) is None or field.default is None)
        return self.single(field, kind, nullable)

    def chance(self) -> bool:
        return self.random.random() < (0.5 if self.extreme else 0.2)

    def single(self, field: Any, kind: Any, nullable: bool) -> Any:
        if nullable and self.chance():
            return None
        if isinstance(kind, EntityField | EntityTupleField):
            return self.message(kind.type_)
        draw = self.random
        match get_schema_field_type(field):
            case "string":
                return "".join(draw.choices("abÄ€.-_", k=draw.randint(0, 200 if self.extreme else 5)))
            case "bytes" | "records":
                return draw.randbytes(draw.randint(0, 300))
            case "bool":
                return draw.random() < 0.5
            case "error_code":
                return draw.choice(list(ErrorCode))
            case "uuid":
                return uuid.UUID(int=draw.getrandbits(128))
            case "float64":
                return draw.uniform(-1e9, 1e9)
            case "timedelta_i32":
                return datetime.timedelta(milliseconds=self.integer("int32"))
            case "timedelta_i64":
                return datetime.timedelta(milliseconds=draw.randint(-1, 10**12))
            case "datetime_i64":
                # kio's decoder goes through a float, and is a microsecond off in the far future.
                return EPOCH + datetime.timedelta(milliseconds=draw.randint(0, 4 * 10**12))
            case number:
                return self.integer(number)

    def integer(self, kafka_type: str) -> int:
        bits = int(kafka_type.lstrip("uint"))
        low, high = (0, 2**bits - 1) if kafka_type.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if self.extreme:
            return self.random.choice((low, high, 0))
        return self.random.randint(max(low, -1), min(high, 1000))


def samples(entity_type: Any) -> Iterator[Any]:
    yield Sampler(1).message(entity_type)
    yield Sampler(2).message(entity_type)
    yield Sampler(3, extreme=True).message(entity_type)
    yield Sampler(4, extreme=True).message(entity_type)


def kio_body(entity_type: Any, body: bytes) -> Any:
    """What kio's native decoder reads. Safe here: the bytes were just encoded."""
    value, end = entity_reader(entity_type)(body, 0)
    assert end == len(body)
    return value


@pytest.mark.parametrize("api_key", sorted(api_key_map))
def test_every_message_round_trips_and_decodes_as_kio_does(api_key: int) -> None:
    for version in sorted(schema_name_map[api_key_map[api_key]]):
        request_type = schema.request_type(api_key, version)
        for payload in samples(request_type):
            for client_id in ("client-ä", "", None):
                frame = encode_request(payload, 77, client_id)
                head, decoded = decode_request(frame)
                assert head[:4] == (api_key, version, 77, client_id)
                assert decoded == payload == kio_body(request_type, frame[head.body :])
                assert encode_request(decoded, 77, client_id) == frame
        response_type = schema.response_type(api_key, version)
        for payload in samples(response_type):
            frame = encode_response(payload, -5)
            header = 9 if schema.response_header_flexible(api_key, version) else 8
            assert decode_response(api_key, version, frame) == (-5, payload)
            assert payload == kio_body(response_type, frame[header:])


def test_all_frame_types_decode() -> None:
    request = Sampler(1).message(schema.request_type(0, 9))
    frame = encode_request(request, 1, "c")
    padded = memoryview(b"xx" + frame + b"yy")[2:-2]
    for same in (frame, bytearray(frame), memoryview(frame), memoryview(bytearray(frame)), padded):
        assert decode_request(same) == decode_request(frame)
        assert parse_request_head(same) == decode_request(frame)[0]


def test_api_versions_is_answered_with_header_v0() -> None:
    payload = Sampler(1).message(schema.response_type(18, 3))
    frame = encode_response(payload, 9)
    # Straight after the correlation id comes the body's error code, with no tagged fields in between.
    assert struct.unpack_from(">ih", frame, 4) == (9, payload.error_code.value)


def test_an_unknown_version_still_has_a_head() -> None:
    request = Sampler(1).message(schema.request_type(18, 4))
    frame = bytearray(encode_request(request, 5, "new"))
    struct.pack_into(">h", frame, 6, 99)
    head = parse_request_head(frame)
    assert (head.api_key, head.version, head.correlation_id, head.client_id) == (18, 99, 5, "new")
    with pytest.raises(MalformedFrame, match="unknown version 99"):
        decode_request(frame)


def test_a_client_id_that_is_no_utf8_is_accepted_as_a_broker_does() -> None:
    frame = bytearray(encode_request(Sampler(1).message(schema.request_type(18, 0)), 5, "ab"))
    frame[14:16] = b"\xff\xfe"
    assert parse_request_head(frame).client_id == "\ufffd\ufffd"


def frame_of(body: bytes, api_key: int, version: int) -> bytes:
    flexible = schema.request_flexible(api_key, version)
    head = struct.pack(">hhih", api_key, version, 1, -1) + (b"\x00" if flexible else b"")
    return struct.pack(">i", len(head) + len(body)) + head + body


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "no complete header"),
        (b"\x00\x00\x00\x04\x00\x12\x00\x00", "no complete header"),
        (struct.pack(">ihhih", 99, 18, 0, 1, -1), "size prefix"),
        (struct.pack(">ihhih", 10, 999, 0, 1, -1), "unknown API key 999"),
        (struct.pack(">ihhih", 10, 18, 0, 1, 5), "client id of 5 bytes"),
        (struct.pack(">ihhih", 10, 18, 0, 1, -2), "client id of -2 bytes"),
        (struct.pack(">ihhih", 10, 18, 3, 1, -1), "tagged fields"),
        (struct.pack(">ihhih4s", 14, 18, 3, 1, -1, b"\x01\x00\x7f\x00"), "tagged fields"),
        (struct.pack(">ihhih", 10, 18, -1, 1, -1), "unknown version -1"),
        (frame_of(b"\xff\xff\xff\xff\x0f", 3, 9), "items announced"),  # kio's own decoder aborts the process here
        (frame_of(b"\x7f\xff\xff\xff", 3, 1), "items announced"),
        (frame_of(b"\x80\x00\x00\x00", 3, 1), "non-nullable|nullable array"),
        (frame_of(b"\xff\xff\xff\xff\xff\x01", 3, 9), "varint"),
        (frame_of(b"\x02\xff", 3, 9), "index out of range"),
        (frame_of(b"\x02\x03\xc3\x28\x00\x00\x00\x00\x00", 3, 9), "utf-8"),
        (frame_of(b"\x00\x01\x00\x00", 3, 9), "index out of range"),
    ],
)
def test_malformed_requests(frame: bytes, reason: str) -> None:
    with pytest.raises(MalformedFrame, match=reason):
        decode_request(frame)


@pytest.mark.parametrize("api_key", [0, 1, 3, 8, 11, 18, 24, 36, 41, 60, 65, 68, 75])
def test_every_truncation_is_malformed_and_every_trailing_byte_of_a_response(api_key: int) -> None:
    for version in sorted(schema_name_map[api_key_map[api_key]]):
        request = encode_request(Sampler(5).message(schema.request_type(api_key, version)), 1, "c")
        response = encode_response(Sampler(5).message(schema.response_type(api_key, version)), 1)
        for frame, decode in (
            (request, decode_request),
            (response, lambda frame: decode_response(api_key, version, frame)),  # noqa: B023 - called in the loop
        ):
            for size in range(4, len(frame), 1 + len(frame) // 60):
                cut = struct.pack(">i", size - 4) + frame[4:size]
                with pytest.raises(MalformedFrame):
                    decode(cut)
        with pytest.raises(MalformedFrame, match="1 bytes left over"):
            decode_response(api_key, version, struct.pack(">i", len(response) - 3) + response[4:] + b"\x00")
        longer = struct.pack(">i", len(request) - 3) + request[4:] + b"\x00"
        assert decode_request(longer) == decode_request(request), "brokers do not mind"


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(ALL_VERSIONS), st.integers(0, 2**32), st.data())
def test_flipped_bytes_decode_or_are_malformed(api: tuple[int, int], seed: int, data: st.DataObject) -> None:
    key, version = api
    request = bytearray(encode_request(Sampler(seed).message(schema.request_type(key, version)), 1, "c"))
    response = bytearray(encode_response(Sampler(seed).message(schema.response_type(key, version)), 1))
    for frame in (request, response):
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(8, max(8, len(frame) - 1)))
            if at < len(frame):
                frame[at] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
    try:
        head, payload = decode_request(request)
    except MalformedFrame:
        pass
    else:
        encode_request(payload, head.correlation_id, head.client_id)
    try:
        _, answer = decode_response(key, version, response)
    except MalformedFrame:
        pass
    else:
        encode_response(answer, 1)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(ALL_VERSIONS), st.binary(max_size=200))
def test_random_bytes_decode_or_are_malformed(api: tuple[int, int], body: bytes) -> None:
    key, version = api
    try:
        decode_request(frame_of(body, key, version))
    except MalformedFrame:
        pass
    try:
        decode_response(key, version, struct.pack(">ii", len(body) + 4, 1) + body)
    except MalformedFrame:
        pass


def test_no_item_of_an_array_has_zero_bytes() -> None:
    """The decoder refuses a count beyond the bytes left; that is right only if each item takes one at least."""

    def check(entity_type: Any) -> None:
        for field in fields(entity_type):
            kind = classify_field(field)
            if isinstance(kind, EntityTupleField):
                assert kind.type_.__flexible__ or fields(kind.type_), kind.type_
            if isinstance(kind, EntityField | EntityTupleField):
                check(kind.type_)

    for key, version in ALL_VERSIONS:
        check(schema.request_type(key, version))
        check(schema.response_type(key, version))


def test_unknown_tagged_fields_are_skipped() -> None:
    payload = Sampler(1).message(schema.request_type(22, 4))
    frame = encode_request(payload, 1, "c")
    assert frame.endswith(b"\x00")
    with_tag = frame[4:-1] + b"\x01\x63\x03abc"
    head, decoded = decode_request(struct.pack(">i", len(with_tag)) + with_tag)
    assert decoded == payload
    assert encode_request(decoded, 1, head.client_id) == frame


def test_a_tagged_field_must_fill_its_size() -> None:
    body = b"\x00\x00" + b"\x01" + b"\x00\x00\x00\x00" + b"\x01\x01\x09" + bytes(9)  # finalized_features_epoch: 8 bytes
    with pytest.raises(MalformedFrame, match="tag 1"):
        decode_response(18, 3, struct.pack(">ii", len(body) + 4, 1) + body)


def test_unknown_error_codes_keep_their_number() -> None:
    frame = struct.pack(">iih", 6, 1, 4711)
    _, payload = decode_response(12, 0, frame)  # Heartbeat v0: an error code and nothing else
    code: Any = payload.error_code  # type: ignore[attr-defined]
    assert code == 4711
    assert code.value == 4711
    assert code.name == "unknown_error_code_4711"
    assert code.retriable is False
    assert encode_response(payload, 1) == frame
    assert error_code(42) is ErrorCode.invalid_request
    assert error_code(4711) == 4711


@pytest.mark.parametrize("start_ms", [-1, -7, 2**63 - 1, -(2**63), 253402300800000])
def test_times_that_python_has_no_datetime_for(start_ms: int) -> None:
    """DescribeTransactions answers -1 where no transaction is open; kio's decoder refuses that."""
    sampled = Sampler(1)
    response_type = schema.response_type(65, 0)
    while True:
        payload: Any = sampled.message(response_type)
        if len(payload.transaction_states) == 1:
            break
    marker = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    (state,) = payload.transaction_states
    state = type(state)(
        **{
            field.name: marker if field.name == "transaction_start_time" else getattr(state, field.name)
            for field in fields(state)
        }
    )
    payload = response_type(throttle_time=payload.throttle_time, transaction_states=(state,))  # type: ignore[call-arg]
    encoded = struct.pack(">q", int(marker.timestamp() * 1000))
    frame = encode_response(payload, 1).replace(encoded, struct.pack(">q", start_ms))
    _, decoded = decode_response(65, 0, frame)
    if abs(start_ms) < 10:
        assert encode_response(decoded, 1) == frame
    else:  # clamped
        encode_response(decoded, 1)


def test_a_retention_time_of_for_ever_is_clamped() -> None:
    body = struct.pack(">hih", 0, -1, 0) + struct.pack(">q", 2**63 - 1) + struct.pack(">i", 0)
    _, payload = decode_request(frame_of(body, 8, 2))
    assert payload.retention_time > datetime.timedelta(days=10**8)  # type: ignore[attr-defined]


def test_any_byte_but_zero_is_true() -> None:
    body = struct.pack(">iB", -1, 7)
    _, payload = decode_request(frame_of(body, 3, 4))
    assert payload.allow_auto_topic_creation is True  # type: ignore[attr-defined]


def test_requests_are_built_from_plain_values() -> None:
    values = {"topics": [{"name": "a", "num_partitions": 3, "replication_factor": 1}], "timeout": 1500}
    for version in range(2, 8):
        built: Any = build_request(19, version, values)
        assert (built.topics[0].name, built.topics[0].num_partitions, built.topics[0].configs) == ("a", 3, ())
        assert built.timeout == datetime.timedelta(seconds=1.5)
        assert decode_request(encode_request(built, 1, None))[1] == built


def test_a_field_of_other_versions_is_left_out_and_a_typo_is_not() -> None:
    old: Any = build_request(3, 1, {"topics": None, "allow_auto_topic_creation": False})
    assert not hasattr(old, "allow_auto_topic_creation")
    new: Any = build_request(3, 12, {"topics": None, "allow_auto_topic_creation": False})
    assert new.allow_auto_topic_creation is False
    by_name: Any = build_request(0, 12, {"topic_data": [{"name": "a", "topic_id": None}]})
    assert by_name.topic_data[0].name == "a"
    with pytest.raises(TypeError, match="topicz"):
        build_request(3, 12, {"topicz": None})
    with pytest.raises(TypeError, match="nume"):
        build_request(3, 12, {"topics": [{"nume": "a"}]})
