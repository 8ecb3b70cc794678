"""The load generator's reading of answers, its requests, and the canned broker that answers them."""

from __future__ import annotations

import random
import socket
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from isthmus_bench import canned_broker
from isthmus_bench.children import Child, cpu_seconds, open_descriptors, resident_bytes
from isthmus_bench.load import (
    FRAMES,
    Flow,
    Load,
    LoadError,
    RawClient,
    Target,
    batch,
    drive,
    newest_versions,
    produce_values,
    topic_id,
)
from isthmus_protocol import peeks, records
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.schema import ApiKey


def answer(number: int, body: bytes) -> bytes:
    return (4 + len(body)).to_bytes(4, "big") + number.to_bytes(4, "big") + body


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_answers_are_counted_however_they_arrive(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = [f"request {number}".encode() for number in range(3)]
    stream = b"".join(answer(number % 3, b"body") for number in range(9))
    rng = random.Random(1)
    for _ in range(200):
        flow = Flow(pair[0], frames, len(answer(0, b"body")), 9)
        assert pair[1].recv(1000) == b"".join(frames * 3)
        cuts = sorted(rng.sample(range(1, len(stream)), rng.randint(1, 20)))
        latencies = array("q")
        complete = 0
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            complete += flow.received(memoryview(stream)[start:end], latencies)
        assert complete == len(latencies) == 9
        assert flow.in_flight == 0


@pytest.mark.parametrize("wrong", [answer(0, b"longer body"), answer(1, b"body")], ids=["size", "order"])
def test_a_wrong_answer_is_an_error(pair: tuple[socket.socket, socket.socket], wrong: bytes) -> None:
    flow = Flow(pair[0], [b"request", b"other"], len(answer(0, b"body")), 1)
    with pytest.raises(LoadError):
        flow.received(memoryview(wrong), array("q"))


def test_batches_hold_what_a_broker_expects() -> None:
    made = batch(16, 1024)
    records.verify_crc(made)
    decoded = decode_records(made)
    assert [record.offset for record in decoded] == list(range(16))
    assert {record.value for record in decoded} == {b"v" * 1024}
    values = produce_values("t", canned_broker.TOPIC_ID, made)
    for version in (9, 13):
        frame = encode_request(build_request(ApiKey.PRODUCE, version, values), 1, "bench")
        acks, _, topics = peeks.produce_topics(version, frame)
        assert (acks, topics) == (-1, [b"t"] if version < 13 else [canned_broker.TOPIC_ID.bytes])


def test_a_canned_broker_answers_the_whole_conversation() -> None:
    with Child("isthmus_bench.canned_broker", "bench", "--fetched-bytes", "5000") as broker:
        target = Target("127.0.0.1", broker.port, "bench")
        raw = RawClient(target)
        try:
            versions = newest_versions(raw)
            assert topic_id(raw, versions, "bench") == canned_broker.TOPIC_ID
        finally:
            raw.close()
        for load in (Load("produce", depth=3, seconds=0.05), Load("fetch", seconds=0.05, connections=3)):
            said = drive(load, target, broker.pid)
            while said["requests"] <= FRAMES or not said["cpu_seconds"]:  # until the ring of frames has come round
                assert load.seconds < 20, said
                load = replace(load, seconds=2 * load.seconds)
                said = drive(load, target, broker.pid)
            assert 0 < said["p50_us"] <= said["p99_us"]
        assert said["answer_bytes"] > 5_000


def test_a_child_tells_its_port_is_measured_and_ends() -> None:
    with Child("isthmus_bench.canned_broker", "bench", "--fetched-bytes", "1000") as child:
        assert child.port > 0
        assert cpu_seconds(child.pid) > 0
        assert resident_bytes(child.pid) > 1_000_000
        assert open_descriptors(child.pid) > 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", child.port))
