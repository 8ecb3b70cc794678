"""From what sessions note to events: paired, with what the first bytes say, and never contents."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from support.flat_events import flat

from isthmus_plugins.api import TAP_BYTES, TAP_HEAD
from isthmus_plugins.capture import pairing as pairing_module
from isthmus_plugins.capture.notes import Kind, Note, pack, pack_parts, told, unpack
from isthmus_plugins.capture.pairing import Pairing
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import BatchHeader, Compression
from isthmus_protocol.schema import ApiKey

ID = UUID(int=77)
MS = 1e-3


def batch(values: int, value: bytes = b"secret", compression: int = 0) -> bytes:
    records = [Record(number, 1, b"key", value) for number in range(values)]
    return encode_batch(records, BatchHeader(0, 0, 0, 2, 0, compression, 0, 1, 1, 9, 3, 40, values))


class Proxy:
    """A session's notes, one millisecond apart."""

    def __init__(self) -> None:
        self.pairing = Pairing({ID.bytes: "by-id"}.get)
        self.now = 0.0
        self.events: list[SimpleNamespace] = []

    def note(self, kind: int, frame: bytes, key: int = 0, took: float = 0.0) -> None:
        """Of a frame."""
        self.now += MS
        self.take(Note(kind, 1, self.now, self.now + took, key, frame[:TAP_BYTES]))

    def tell(self, kind: Kind, said: bytes = b"", number: int = 0, key: int = 0, *, correlation_id: int = 5) -> None:
        """Something else than a frame."""
        self.now += MS
        self.take(Note(kind, 1, self.now, self.now, key, TAP_HEAD.pack(number, correlation_id) + said))

    def take(self, note: Note) -> None:
        self.events += map(flat, self.pairing.take(note))

    def parts(self, api_key: int, version: int, found: list[ScannedPartition], total: int = 0) -> None:
        self.tell(Kind.PARTS, pack_parts(found), total, api_key << 16 | version)

    def ask(self, api_key: int, version: int, values: dict[str, Any], correlation_id: int = 5) -> None:
        frame = encode_request(build_request(ApiKey(api_key), version, values), correlation_id, "me")
        self.note(Kind.REQUEST, frame, api_key << 16 | version, took=20e-6)

    def answer(
        self, api_key: int, version: int, values: dict[str, Any], kind: int = Kind.ANSWER, correlation_id: int = 5
    ) -> None:
        frame = encode_response(build(schema.response_type(api_key, version), values), correlation_id)
        self.note(kind, frame, api_key << 16 | version, took=30e-6)


def produced(*parts: tuple[str, int, bytes], version: int = 9, acks: int = -1) -> dict[str, Any]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for topic, partition, records in parts:
        topics.setdefault(topic, []).append({"index": partition, "records": records})
    data = [{"name": topic, "topic_id": ID, "partition_data": found} for topic, found in topics.items()]
    known = {"topic_id"} if version >= 13 else {"name"}
    drop = {"name", "topic_id"} - known
    return {"acks": acks, "topic_data": [{k: v for k, v in each.items() if k not in drop} for each in data]}


def test_a_produce_request_of_several_partitions_is_an_event_for_each() -> None:
    proxy = Proxy()
    proxy.tell(Kind.OPENED, b"10.0.0.1:5\x0010.0.0.9:9092")
    proxy.tell(Kind.PRINCIPAL, b"User:app")
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(2, b"s")), ("t", 3, batch(5, b"s"))))
    assert proxy.events == []
    said = [{"index": 0, "base_offset": 100}, {"index": 3, "error_code": 6, "base_offset": -1}]
    proxy.answer(ApiKey.PRODUCE, 9, {"responses": [{"name": "t", "partition_responses": said}]})
    first, second = proxy.events
    assert (first.topic, first.partition, first.part, first.parts, first.records, first.batches) == ("t", 0, 0, 2, 2, 1)
    assert (second.topic, second.partition, second.part, second.records, second.batches) == ("t", 3, 1, 5, 1)
    assert (first.error_code, first.base_offset, second.error_code, second.base_offset) == (0, 100, 6, -1)
    assert (first.producer_id, first.producer_epoch, first.base_sequence, first.acks) == (9, 3, 40, -1)
    assert (first.client_id, first.client_address, first.principal) == ("me", "10.0.0.1:5", "User:app")
    assert first.listener == "10.0.0.9:9092"
    assert (first.proxy_us, first.broker_us, first.gate_us, first.partial) == (50, 980, 0, 0)
    assert first.batch_bytes == len(batch(2, b"s"))


@pytest.mark.parametrize("version", [3, 7, 8, 9, 12, 13])
def test_the_first_batch_of_a_large_produce_request_is_known(version: int) -> None:
    proxy = Proxy()
    large = batch(3, bytes(5000), Compression.NONE)
    proxy.ask(ApiKey.PRODUCE, version, produced(("by-id", 7, large), version=version))
    told = {"topic_id": ID} if version >= 13 else {"name": "by-id"}
    proxy.answer(
        ApiKey.PRODUCE, version, {"responses": [{**told, "partition_responses": [{"index": 7, "base_offset": 1}]}]}
    )
    (event,) = proxy.events
    assert (event.topic, event.partition, event.records, event.batches, event.partial) == ("by-id", 7, 3, 1, 0)
    assert (event.batch_bytes, event.producer_id, event.base_offset, event.error_code) == (len(large), 9, 1, 0)


@pytest.mark.parametrize("version", [3, 9, 13])
@pytest.mark.parametrize("acks", [-1, 0])
def test_all_partitions_of_a_large_produce_request_are_known(version: int, acks: int) -> None:
    proxy = Proxy()
    wanted = [("by-id", partition, batch(partition + 1, bytes(900), Compression.NONE)) for partition in range(5)]
    values = produced(*wanted, version=version, acks=acks)
    proxy.ask(ApiKey.PRODUCE, version, values)
    assert proxy.events == [], "it waits for its partitions"
    scan = ProduceScan(version)
    scan.feed(encode_request(build_request(ApiKey.PRODUCE, version, values), 5, "me"))
    proxy.parts(ApiKey.PRODUCE, version, scan.parts[:3])
    proxy.parts(ApiKey.PRODUCE, version, scan.parts[3:], 5)
    if acks:
        told = {"topic_id": ID} if version >= 13 else {"name": "by-id"}
        parts = [{"index": partition, "base_offset": 10 * partition} for partition in range(5)]
        proxy.answer(ApiKey.PRODUCE, version, {"responses": [{**told, "partition_responses": parts}]})
    assert [(each.part, each.parts, each.partition, each.partial) for each in proxy.events] == [
        (partition, 5, partition, 0) for partition in range(5)
    ]
    assert [each.records for each in proxy.events] == [1, 2, 3, 4, 5]
    assert [each.batch_bytes for each in proxy.events] == [len(records) for *_, records in wanted]
    assert {each.topic for each in proxy.events} == {"by-id"}
    if acks:
        assert [each.base_offset for each in proxy.events] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("version", [3, 9, 13])
def test_a_request_like_the_one_before_says_what_it_would_say_alone(version: int) -> None:
    source = random.Random(version)
    together = Proxy()
    for number in range(200):
        records = [batch(source.randint(1, 9), bytes(source.choice((1, 100, 900))), Compression.NONE), b""]
        topic, partition = source.choice(("by-id", "by-id-too")), source.randint(0, 3)
        values = produced((topic, partition, source.choice(records)), version=version, acks=source.choice((-1, 1)))
        alone = Proxy()
        for proxy in (together, alone):
            proxy.ask(ApiKey.PRODUCE, version, values, number)
            told = {"topic_id": ID} if version >= 13 else {"name": topic}
            parts = [{"index": partition, "base_offset": number}]
            answer = {"responses": [{**told, "partition_responses": parts}]}
            proxy.answer(ApiKey.PRODUCE, version, answer, correlation_id=number)
        (event,) = alone.events
        event.at = together.events[-1].at
        assert together.events[-1] == event


def test_an_unanswered_request_whose_partitions_never_came_is_an_event_all_the_same() -> None:
    proxy = Proxy()
    wanted = [("by-id", partition, batch(1, bytes(900), Compression.NONE)) for partition in range(3)]
    proxy.ask(ApiKey.PRODUCE, 9, produced(*wanted, acks=0))
    assert proxy.events == []
    proxy.ask(ApiKey.HEARTBEAT, 4, {"group_id": "g"}, correlation_id=6)
    (event,) = proxy.events
    assert (event.api_key, event.acks, event.partition, event.partial) == (ApiKey.PRODUCE, 0, 0, 1)


def test_a_topic_whose_name_is_not_known_keeps_its_id() -> None:
    proxy = Proxy()
    proxy.ask(
        ApiKey.PRODUCE,
        13,
        {"topic_data": [{"topic_id": UUID(int=5), "partition_data": [{"index": 0, "records": batch(1)}]}]},
    )
    proxy.answer(ApiKey.PRODUCE, 13, {"responses": [{"topic_id": UUID(int=5), "partition_responses": [{"index": 0}]}]})
    assert proxy.events[0].topic == UUID(int=5).bytes


def fetched(version: int, *partitions: tuple[int, int, bytes]) -> dict[str, Any]:
    """Partition, error code and records of each."""
    topic = {"topic_id": ID} if version >= 13 else {"topic": "by-id"}
    parts = [{"partition_index": index, "error_code": code, "records": records} for index, code, records in partitions]
    return {"responses": [{**topic, "partitions": parts}]}


def found(version: int, values: dict[str, Any]) -> list[ScannedPartition]:
    scan = FetchScan(version)
    scan.feed(encode_response(build(schema.response_type(ApiKey.FETCH, version), values), 5))
    return scan.parts


FETCH_VERSIONS = [4, 5, 7, 11, 12, 17]


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_what_was_fetched(version: int) -> None:
    proxy = Proxy()
    asked = {"topic_id": ID} if version >= 13 else {"topic": "by-id"}
    proxy.ask(ApiKey.FETCH, version, {"topics": [{**asked, "partitions": [{"partition": 2}, {"partition": 3}]}]})
    records = batch(3, bytes(10))
    proxy.answer(ApiKey.FETCH, version, fetched(version, (2, 0, records)))
    (event,) = proxy.events
    assert (event.topic, event.partition, event.records, event.batches) == ("by-id", 2, 3, 1)
    assert (event.batch_bytes, event.error_code, event.partial) == (len(records), 0, 0)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize(
    ("kind", "ahead"), [(Kind.ANSWER, False), (Kind.ANSWER, True), (Kind.GATED, True), (Kind.OWN_ANSWER, True)]
)
def test_all_partitions_of_a_large_fetch_are_known(version: int, kind: Kind, ahead: bool) -> None:
    """Those of one that hooks have seen as a whole come before it (``ahead``)."""
    proxy = Proxy()
    named = {"topic_id": ID} if version >= 13 else {"topic": "by-id"}
    asked = [{"partition": partition} for partition in range(100)]  # more than the first bytes say
    proxy.ask(ApiKey.FETCH, version, {"topics": [{**named, "partitions": asked}]})
    records = batch(3, bytes(900), Compression.GZIP) + batch(2, bytes(900))
    values = fetched(version, (2, 0, records), (3, 6, b""), (4, 0, batch(7, bytes(9))))
    parts = found(version, values)
    if not ahead:
        proxy.answer(ApiKey.FETCH, version, values, kind)
    proxy.parts(ApiKey.FETCH, version, parts[:2])
    assert proxy.events == [], "it waits for its partitions"
    proxy.parts(ApiKey.FETCH, version, parts[2:], 3)
    if ahead:
        proxy.answer(ApiKey.FETCH, version, values, kind)
    if kind == Kind.GATED:
        proxy.tell(Kind.SENT)
    assert [
        (each.topic, each.partition, each.part, each.parts, each.error_code, each.partial) for each in proxy.events
    ] == [("by-id", 2, 0, 3, 0, 0), ("by-id", 3, 1, 3, 6, 0), ("by-id", 4, 2, 3, 0, 0)]
    first, refused, last = proxy.events
    assert (first.records, first.batches, first.batch_bytes) == (5, 2, len(records))
    assert (first.compression, first.producer_id, first.producer_epoch, first.base_sequence) == (1, 9, 3, 40)
    assert (first.base_offset, last.base_offset, refused.base_offset) == (0, 0, -1)
    assert (refused.records, refused.batches, refused.batch_bytes, last.records) == (0, 0, 0, 7)


def test_an_answer_of_which_a_note_was_dropped_is_partial() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.FETCH, 17, {})
    values = fetched(17, *((partition, 0, batch(1, bytes(900), Compression.NONE)) for partition in range(4)))
    proxy.answer(ApiKey.FETCH, 17, values)
    proxy.parts(ApiKey.FETCH, 17, found(17, values)[2:], 4)
    assert [(each.partition, each.partial) for each in proxy.events] == [(2, 1), (3, 1)]


def test_messages_of_old_formats_have_no_producer() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.FETCH, 4, {})
    message = struct.pack(">qiIbB", 12, 18, 0, 0, 0) + struct.pack(">ii", -1, 4) + b"text"
    zipped = message[:17] + b"\x01" + message[18:]
    proxy.answer(ApiKey.FETCH, 4, fetched(4, (0, 0, message), (1, 0, zipped)))
    plain, compressed = proxy.events
    assert (plain.records, plain.batches, plain.compression, plain.base_offset) == (1, 1, 0, 12)
    assert (compressed.records, compressed.batches, compressed.compression, compressed.base_offset) == (-1, 1, 1, -1)
    assert {plain.producer_id, plain.base_sequence, compressed.producer_id} == {-1}


def test_an_answer_that_refuses_a_fetch_session_has_its_code() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.FETCH, 17, {})
    proxy.answer(ApiKey.FETCH, 17, {"error_code": 70, "responses": []})
    (event,) = proxy.events
    assert (event.error_code, event.parts, event.partial) == (70, 1, 0)


def test_first_bytes_that_come_in_pieces_are_put_together() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.FETCH, 17, {})
    said = build(schema.response_type(ApiKey.FETCH, 17), fetched(17, (2, 0, batch(3, bytes(100)))))
    frame, key = encode_response(said, 5), ApiKey.FETCH << 16 | 17
    assert len(frame) < TAP_BYTES
    for begin, end in ((0, 60), (60, 80), (80, len(frame))):
        assert proxy.events == []
        if begin:
            proxy.tell(Kind.MORE, frame[begin:end], key=key)
        else:
            proxy.note(Kind.ANSWER, frame[:end], key)
    (event,) = proxy.events
    assert (event.topic, event.records, event.partial, event.broker_us) == ("by-id", 3, 0, 980)


@pytest.mark.parametrize("how", ["the connection ends", "another answer comes"])
def test_an_answer_whose_partitions_never_came_is_an_event_of_what_was_seen(how: str) -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.FETCH, 17, {})
    proxy.answer(ApiKey.FETCH, 17, fetched(17, (2, 0, batch(3, bytes(900)) + batch(1)), (3, 0, batch(1, bytes(9)))))
    assert proxy.events == []
    if how == "the connection ends":
        proxy.tell(Kind.CLOSED)
    else:
        proxy.ask(ApiKey.HEARTBEAT, 4, {"group_id": "g"}, correlation_id=6)
        proxy.answer(ApiKey.HEARTBEAT, 4, {}, correlation_id=6)
    event = proxy.events[0]
    assert (event.topic, event.partition, event.parts, event.records, event.partial) == ("by-id", 2, 1, 3, 1)
    assert event.response_bytes > 900


def test_an_answer_behind_a_gate_is_an_event_when_it_goes_out() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(1))))
    said = {"responses": [{"name": "t", "partition_responses": [{"index": 0, "base_offset": 4}]}]}
    proxy.answer(ApiKey.PRODUCE, 9, said, Kind.GATED)
    proxy.ask(ApiKey.HEARTBEAT, 3, {"group_id": "g"}, 6)
    proxy.answer(ApiKey.HEARTBEAT, 3, {"error_code": 27}, correlation_id=6)
    (heartbeat,) = proxy.events
    assert (heartbeat.group_id, heartbeat.error_code, heartbeat.topic, heartbeat.parts) == ("g", 27, None, 1)
    proxy.tell(Kind.SENT)
    assert (proxy.events[1].gate_us, proxy.events[1].broker_us, proxy.events[1].base_offset) == (3000, 980, 4)


def test_an_answer_whose_client_went_had_waited_until_then() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(1))))
    proxy.answer(ApiKey.PRODUCE, 9, {}, kind=Kind.GATED)
    proxy.now += 70 * MS
    proxy.tell(Kind.CLOSED)
    (event,) = proxy.events
    assert event.gate_us == 71_000


def test_what_the_proxy_answers_itself_has_no_time_at_the_broker() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(1))))
    said = {"responses": [{"name": "t", "partition_responses": [{"index": 0, "error_code": 42, "base_offset": -1}]}]}
    proxy.answer(ApiKey.PRODUCE, 9, said, Kind.OWN_ANSWER)
    assert (proxy.events[0].broker_us, proxy.events[0].error_code) == (-1, 42)


def test_what_has_no_answer() -> None:
    proxy = Proxy()
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(1)), acks=0))
    assert (proxy.events[0].acks, proxy.events[0].response_bytes) == (0, -1)
    proxy.ask(ApiKey.API_VERSIONS, 3, {"client_software_name": "lib", "client_software_version": "1.2"}, 6)
    proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 1, batch(1))), 7)
    proxy.tell(Kind.CLOSED)
    versions, produce = proxy.events[1:]
    assert (versions.software, produce.software, produce.response_bytes, produce.error_code) == (
        "lib 1.2",
        "lib 1.2",
        -1,
        -1,
    )


def test_notes_that_were_dropped_are_counted_and_what_comes_behind_is_paired() -> None:
    proxy = Proxy()
    proxy.note(Kind.ANSWER, struct.pack(">ii", 4, 99))
    proxy.ask(ApiKey.HEARTBEAT, 3, {"group_id": "lost"}, 1)
    proxy.ask(ApiKey.HEARTBEAT, 3, {"group_id": "g"}, 2)
    proxy.answer(ApiKey.HEARTBEAT, 3, {}, correlation_id=2)
    assert [event.group_id for event in proxy.events] == ["g"]
    assert proxy.pairing.unpaired == 2


@pytest.mark.parametrize("api_key", [ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.OFFSET_COMMIT, ApiKey.API_VERSIONS])
def test_bytes_that_are_no_request_say_nothing(api_key: int) -> None:
    proxy = Proxy()
    head = struct.pack(">ihhih", 40, api_key, 9, 5, 2) + b"me"
    proxy.note(Kind.REQUEST, head + b"\xff" * 28, api_key << 16 | 9)
    proxy.note(Kind.ANSWER, struct.pack(">ii", 20, 5) + b"\xff" * 16, api_key << 16 | 9)
    (event,) = proxy.events
    assert (event.client_id, event.topic, event.partial) == ("me", None, 1)


def test_notes_are_read_as_they_were_packed() -> None:
    request, answer = struct.pack(">iIi", 7, 0xFFFFFFFF, -6) + b"abc", struct.pack(">ii", 8, -6) + b"defg"
    frames = [(Kind.REQUEST, request, 7), (Kind.ANSWER, answer, 8)]
    said = pack([value for kind, frame, _ in frames for value in (int(kind), 2, 3.0, 3.5, 0xFFFFFFFF, frame)])
    said += pack([*told(Kind.SENT, 2, b"abc", number=9, key=4, correlation_id=-6)])
    (first, two), (whole, one), (again, more) = unpack(said + said[:-1])
    both = list(two)
    assert both == list(more) == [Note(kind, 2, 3.0, 3.5, 0xFFFFFFFF, frame) for kind, frame, _ in frames]
    assert [note.head for note in both] == [(size, -6) for _, _, size in frames]
    (sent,) = one
    assert (sent.kind, sent.session, sent.noted - sent.at, sent.key) == (Kind.SENT, 2, 0.0, 4)
    assert (sent.head, sent.said) == ((9, -6), b"abc")
    assert (whole, again) == (len(said), len(said) + first)
    assert not list(unpack(said[:3]))


@pytest.mark.parametrize("version", range(3, 14))
@pytest.mark.parametrize("topic", ["t", "t" * 126, "t" * 127, "t" * 200])
def test_answers_like_one_before_say_what_each_says(version: int, topic: str) -> None:
    """Of one session, in which they are recognised, and each of a session of its own."""
    together, apart = Proxy(), []
    plain = [(partition, {"base_offset": offset}) for partition in (0, 1) for offset in (0, 7, 2**40)]
    failed = {"base_offset": -1, "error_code": 6}
    late = {"base_offset": 9, "log_append_time": datetime(2026, 1, 1, tzinfo=UTC)}
    for partition, said in [*plain, (0, failed), (1, late), (0, {"base_offset": 8}), (2, {"base_offset": 0})]:
        named = {"name": topic} if version < 13 else {"topic_id": ID}
        answer = {"responses": [{**named, "partition_responses": [{"index": partition, **said}]}]}
        apart.append(Proxy())
        for proxy in (together, apart[-1]):
            proxy.ask(ApiKey.PRODUCE, version, produced((topic, partition, batch(2)), version=version))
            proxy.answer(ApiKey.PRODUCE, version, answer)
        assert together.events[-1].base_offset == said["base_offset"]
        assert together.events[-1].error_code == said.get("error_code", 0)
    told = [event for proxy in apart for event in proxy.events]
    assert len(told) == 10
    for event, alone in zip(together.events, told, strict=True):
        alone.at = event.at
        assert event == alone


def appended(version: int, topic: str, partition: int, offset: int) -> dict[str, Any]:
    named = {"name": topic} if version < 13 else {"topic_id": ID}
    return {"responses": [{**named, "partition_responses": [{"index": partition, "base_offset": offset}]}]}


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.GATED])
def test_exchanges_like_one_before_are_not_read(version: int, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def counted(*args: Any) -> Any:
        reads.append(1)
        return request_facts(*args)

    request_facts = pairing_module.request_facts
    monkeypatch.setattr(pairing_module, "request_facts", counted)
    proxy = Proxy()
    topics = ["by-id"] if version >= 13 else ["by-id", "another"]
    for number in range(1, 301):
        topic, partition = topics[number % len(topics)], number % 3
        proxy.ask(ApiKey.PRODUCE, version, produced((topic, partition, batch(number % 5 + 1)), version=version), number)
        proxy.answer(ApiKey.PRODUCE, version, appended(version, topic, partition, 1000 + number), kind, number)
        if kind is Kind.GATED:
            proxy.tell(Kind.SENT, correlation_id=number)
        event = proxy.events[-1]
        assert (event.topic, event.partition, event.base_offset) == (topic, partition, 1000 + number)
        assert (event.records, event.correlation_id) == (number % 5 + 1, number)
        assert event.gate_us == (1000 if kind is Kind.GATED else 0)
    assert len(proxy.events) == 300
    assert len(reads) <= 6, "once for each partition"


def test_who_authenticates_again_is_named_from_then_on() -> None:
    proxy = Proxy()
    for name in ("ann", "ben"):
        proxy.tell(Kind.PRINCIPAL, name.encode())
        for offset in (7, 8):
            proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, batch(1))))
            proxy.answer(ApiKey.PRODUCE, 9, appended(9, "t", 0, offset))
    assert [(event.principal, event.base_offset) for event in proxy.events] == [
        ("ann", 7),
        ("ann", 8),
        ("ben", 7),
        ("ben", 8),
    ]


def test_another_producer_of_the_same_connection_is_told_from_the_first() -> None:
    proxy = Proxy()
    for producer_id in (9, 9, 10, 10, 9):
        header = BatchHeader(0, 0, 0, 2, 0, 0, 0, 1, 1, producer_id, 3, 40, 1)
        records = encode_batch([Record(0, 1, b"key", b"value")], header)
        proxy.ask(ApiKey.PRODUCE, 9, produced(("t", 0, records)))
        proxy.answer(ApiKey.PRODUCE, 9, appended(9, "t", 0, 5))
    assert [event.producer_id for event in proxy.events] == [9, 9, 10, 10, 9]
