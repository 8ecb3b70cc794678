"""Offsets by time of follower topics: the source's own answers, or what can be found without it; errors stay."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeContext
from support.partition_log import Producer, control_batch
from support.records import NOW, large_inside
from support.replicas import Replicas

from isthmus_control.commands import CloseProvenance, OpenProvenance, PartitionOffset, SetFollowerTopic
from isthmus_control.model import TopicState
from isthmus_plugins.api import Client, Hold, Replace, Request
from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.replication.client_views import time_offsets
from isthmus_plugins.replication.client_views.time_offsets import MAX_TIMESTAMP, TimeOffsets
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkLost
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.records import Compression, rebase
from isthmus_protocol.schema import ApiKey, response_type, supported

LATE = 10_000
"""When the target wrote its markers."""
PLACE = ("remote-t", 0)
VERSIONS = range(max(1, supported()[ApiKey.LIST_OFFSETS][0]), supported()[ApiKey.LIST_OFFSETS][1] + 1)


class Peer:
    """The connection to the source's proxy."""

    def __init__(self, answers: dict[int, tuple[int, int]] | None) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    async def call(self, question: calls.OffsetsForTimes, timeout_s: float) -> calls.OffsetsForTimesAnswer:
        self.asked.append(question)
        if self.answers is None:
            raise LinkLost("gone")
        found = (calls.FoundAtTime(partition, *self.answers[time]) for partition, time in question.partitions)
        return calls.OffsetsForTimesAnswer(tuple(found))


class Peers:
    def __init__(self, peer: Peer | None) -> None:
        self.peer = peer

    def connections(self, link: str) -> list[Peer]:
        return [self.peer] if self.peer is not None else []


def following(
    work: Callable[[TimeOffsets, Replicas], Awaitable[None]], peer: Peer | None = None, detached: bool = False
) -> None:
    """``remote-t`` at B: records of times 100, 200 (and its marker), 300 (and its marker), 400."""

    async def run() -> None:
        replicas = Replicas(random.Random(4))
        control = replicas.controls["B"]
        replicas.b.on_new_partition = lambda *about: None  # it has no source here to be compared with
        topic = replicas.b.add_topic("remote-t")
        source_id, topic_id = str(uuid.UUID(int=5)), str(uuid.UUID(bytes=topic.topic_id))
        for state in (TopicState.CREATING, TopicState.FOLLOWING):
            control.apply(SetFollowerTopic("a-to-b", "remote-t", "local-t", source_id, state, topic_id))
        control.apply(OpenProvenance("a-to-b", (PartitionOffset("remote-t", topic_id, 0, 0),)))
        log = topic.partitions[0]
        log.write_values(b"0", timestamp=100)
        for time in (200, 300):
            log.write_values(b"x", timestamp=time, producer_id=7, producer_epoch=0, base_sequence=0, attributes=0x10)
            log.write(control_batch(log.end, True, producer_id=7, producer_epoch=0, timestamp=LATE))
        log.write_values(b"5", b"6", timestamp=400)
        if detached:
            control.apply(CloseProvenance((PartitionOffset("remote-t", topic_id, 0, 7),)))
        context: Any = FakeContext(replicas.b, control)
        peers: Any = Peers(peer)
        await work(TimeOffsets(context, peers), replicas)

    asyncio.run(run())


def request(version: int, times: dict[TopicPartition, int]) -> Request:
    topics: dict[str, list[dict[str, int]]] = {}
    for (topic, partition), time in times.items():
        topics.setdefault(topic, []).append({"partition_index": partition, "timestamp": time})
    payload = build_request(
        ApiKey.LIST_OFFSETS,
        version,
        {"replica_id": -1, "topics": [{"name": name, "partitions": each} for name, each in topics.items()]},
    )
    frame = encode_request(payload, 9, "client")
    return Request(frame, True, ApiKey.LIST_OFFSETS, version, 9, 0.0, Client(1, "h:1", 1))


@pytest.mark.parametrize(
    "times",
    [
        {PLACE: -1},
        {PLACE: -2},
        {("other", 0): 200},
        {("other", 0): MAX_TIMESTAMP, PLACE: -1},
    ],
)
def test_what_needs_no_correction_passes_untouched(times: dict[TopicPartition, int]) -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        for version in VERSIONS:
            assert offsets.on_list_offsets(request(version, times)) is None

    following(work)


def test_the_brokers_own_answer_is_too_early() -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        assert replicas.b.partition("remote-t").offset_for_time(400) == (2, LATE)

    following(work)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize(
    ("time", "expected"),
    [(0, (0, 100)), (150, (1, 200)), (201, (3, 300)), (301, (5, 400)), (400, (5, 400)), (401, (-1, -1))],
)
def test_without_the_source_the_records_are_searched(time: int, expected: tuple[int, int], detached: bool) -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        assert await offsets.answer({PLACE: time}, False) == {PLACE: expected}
        assert offsets.unsure == 0

    following(work, detached=detached)


def test_a_batch_that_holds_much_is_searched_too() -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        log = replicas.b.partition("remote-t")
        log.write(control_batch(log.end, True, producer_id=7, producer_epoch=0, timestamp=NOW))
        log.write(rebase(large_inside(Compression.ZSTD), log.end))
        assert await offsets.answer({PLACE: 500}, False) == {PLACE: (8, NOW + 9)}

    following(work)


def test_markers_of_this_clusters_own_transactions_count() -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        log = replicas.b.partition("remote-t")
        log.write(control_batch(log.end, True, producer_id=7, producer_epoch=0, timestamp=LATE + 1))
        assert await offsets.answer({PLACE: 401}, False) == {PLACE: (7, LATE + 1)}

    following(work, detached=True)


def test_the_sources_answer_is_taken() -> None:
    peer = Peer({250: (2, 260), 350: (4, 360), 380: (8, 500), MAX_TIMESTAMP: (4, 360), 900: (-1, -1)})

    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        for time, expected in ((250, (2, 260)), (350, (4, 360)), (MAX_TIMESTAMP, (4, 360)), (900, (-1, -1))):
            assert await offsets.answer({PLACE: time}, False) == {PLACE: expected}
        assert await offsets.answer({PLACE: 380}, False) == {PLACE: (-1, -1)}  # that record is not here yet
        assert peer.asked[0] == calls.OffsetsForTimes("local-t", (calls.AtTime(0, 250),))
        # What read_committed consumers cannot read yet does not exist for them.
        log = replicas.b.partition("remote-t")
        log.producers[7] = Producer(transaction_start=3)
        assert await offsets.answer({PLACE: 250}, True) == {PLACE: (2, 260)}
        assert await offsets.answer({PLACE: 350}, True) == {PLACE: (-1, -1)}

    following(work, peer)


def test_what_cannot_be_told_stays_the_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        assert await offsets.answer({PLACE: 250}, False) == {}
        assert offsets.unsure == 1

    following(work, Peer(None))

    async def too_long(offsets: TimeOffsets, replicas: Replicas) -> None:
        monkeypatch.setattr(time_offsets, "SCAN_S", -1.0)
        assert await offsets.answer({PLACE: 250, ("remote-t", 0): 250}, False) == {}
        assert offsets.unsure == 1

    following(too_long)


def test_an_answer_is_corrected_where_the_broker_allows_it() -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        for version in VERSIONS:
            asked = request(version, {PLACE: 301, ("remote-t", 1): -1, ("other", 0): 5})
            verdict = offsets.on_list_offsets(asked)
            assert isinstance(verdict, Hold)
            replaced: Any = await verdict.verdict
            assert isinstance(replaced, Replace)
            assert replaced.frame == asked.frame
            for error_code in (0, 29):
                answer = _answer(version, error_code)
                corrected: Any = decode_response(ApiKey.LIST_OFFSETS, version, replaced.on_response(answer))[1]
                first, second = corrected.topics[0].partitions
                if error_code:
                    assert (first.error_code, first.offset) == (29, 2)
                else:
                    assert (first.offset, first.timestamp, getattr(first, "leader_epoch", -1)) == (5, 400, -1)
                assert second.offset == 7
                assert corrected.topics[1].partitions[0].offset == 6

    following(work)


def _answer(version: int, error_code: int) -> bytes:
    partition = {"error_code": error_code, "timestamp": LATE, "offset": 2, "leader_epoch": 3}
    topics = [
        {
            "name": "remote-t",
            "partitions": [
                {"partition_index": 0, **partition},
                {"partition_index": 1, **partition, "error_code": 0, "offset": 7},
            ],
        },
        {"name": "other", "partitions": [{"partition_index": 0, **partition, "error_code": 0, "offset": 6}]},
    ]
    return encode_response(build(response_type(ApiKey.LIST_OFFSETS, version), {"topics": topics}), 9)


def test_a_broker_that_does_not_answer_is_no_reason_to_fail() -> None:
    async def work(offsets: TimeOffsets, replicas: Replicas) -> None:
        async def down(*args: Any) -> Any:
            raise BrokerUnavailable("down")

        replicas.b.offsets_for_times = down  # type: ignore[method-assign]
        verdict = offsets.on_list_offsets(request(7, {PLACE: 301}))
        assert isinstance(verdict, Hold)
        replaced: Any = await verdict.verdict
        assert replaced.on_response is None
        assert offsets.unsure == 1

    following(work)
