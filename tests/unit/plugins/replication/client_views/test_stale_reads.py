"""Consumers of a follower wait while it may be older than its source, where its namespace says so."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl

from isthmus_control.clock import Hlc, Register
from isthmus_control.commands import (
    AlterDemands,
    AttachNamespace,
    CreateLink,
    DetachNamespace,
    MergeLink,
    SetFollowerTopic,
)
from isthmus_control.levels import STALE_READS
from isthmus_control.model import LinkMode, LinkSettings, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted
from isthmus_plugins.api import Answer, Client, Hold, Replace, Request
from isthmus_plugins.replication.client_views.stale_reads import StaleReads
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE, OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import (
    build_request,
    build_response,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.schema import ApiKey

LINK_ID, T_ID, OTHER_ID = (str(uuid.UUID(int=number, version=4)) for number in (1, 2, 3))
TOPIC = ResourceType.TOPIC
SYNC, ASYNC = LinkMode.SYNCHRONOUS, LinkMode.ASYNCHRONOUS


class Scene:
    """B follows ``r-t`` over a synchronous link, and has leases of some partitions, since some time."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.control = FakeControl("B", rng)
        self.context: Any = FakeContext(FakeCluster(rng, [1]), self.control)
        self.reads = StaleReads(self.context)
        self.leases: dict[int, float] = {}
        self.reads.has_all_since = lambda topic, topic_id, partition: self.leases.get(partition)
        self.control.subscribe(self.reads.control_changed)
        self.written = 0
        assert self.control.state.level >= STALE_READS
        self.apply(CreateLink("l", LINK_ID, "A", False, ("a:1",)))
        self.apply(AttachNamespace("l", TOPIC, "r-", "l-", Role.FOLLOWER, create_missing=True))
        followed = SetFollowerTopic("l", "r-t", "l-t", T_ID, TopicState.CREATING)
        self.apply(followed)
        self.apply(replace(followed, state=TopicState.FOLLOWING, topic_id=T_ID))
        self.mode(SYNC)
        self.apply(AlterDemands(TOPIC, "r-", stale_reads=False))

    def apply(self, body: Any) -> None:
        outcome = self.control.apply(body)
        assert isinstance(outcome, Accepted), outcome

    def mode(self, mode: LinkMode) -> None:
        self.written += 1
        self.apply(MergeLink("l", LINK_ID, LinkSettings(Register(mode, Hlc(self.written, 0, "A")), {}, {})))

    def lease(self, partition: int) -> None:
        self.leases[partition] = self.context.clock.monotonic()
        self.reads.granted([("r-t", T_ID, partition)])

    def fetch(self, version: int, *partitions: int, name: str = "t", epoch: int = 0) -> Any:
        ids = {"t": T_ID, "other": OTHER_ID}
        topic = {
            **({"topic": f"r-{name}"} if version < 13 else {"topic_id": uuid.UUID(ids[name])}),
            "partitions": [{"partition": partition} for partition in partitions],
        }
        values = {"max_wait": 50, "session_epoch": epoch, "topics": [topic], "rack_id": "near"}
        return self._ask(ApiKey.FETCH, version, values)

    def list_offsets(self, version: int, *partitions: int) -> Any:
        asked = [{"partition_index": partition, "timestamp": -1} for partition in partitions]
        return self._ask(ApiKey.LIST_OFFSETS, version, {"topics": [{"name": "r-t", "partitions": asked}]})

    def _ask(self, api: ApiKey, version: int, values: dict[str, Any]) -> Any:
        frame = encode_request(build_request(api, version, values), 7, "client")
        request = Request(frame, True, api, version, 7, time.monotonic(), Client(3, "1.2.3.4", 1))
        return self.reads.on_fetch(request) if api is ApiKey.FETCH else self.reads.on_list_offsets(request)


def fetched(version: int, *partitions: int) -> bytes:
    """What a broker answers: a record or two of each."""
    parts = [
        {"partition_index": each, "error_code": 0, "high_watermark": 9, "last_stable_offset": 9, "records": b"r"}
        for each in partitions
    ]
    named = {"topic": "r-t"} if version < 13 else {"topic_id": uuid.UUID(T_ID)}
    answer = build_response(ApiKey.FETCH, version, {"responses": [{**named, "partitions": parts}]})
    return encode_response(answer, 7)


def listed(version: int, *partitions: int) -> bytes:
    parts = [{"partition_index": each, "error_code": 0, "offset": 9, "timestamp": 5} for each in partitions]
    answer = build_response(ApiKey.LIST_OFFSETS, version, {"topics": [{"name": "r-t", "partitions": parts}]})
    return encode_response(answer, 7)


def codes(api: ApiKey, version: int, frame: Any) -> dict[int, int]:
    _, payload = decode_response(api, version, frame)
    found: Any = payload
    topics = found.responses if api is ApiKey.FETCH else found.topics
    return {part.partition_index: int(part.error_code) for topic in topics for part in topic.partitions}


@pytest.mark.parametrize("version", [4, 11, 13, 17])
def test_reads_wait_by_partition_while_there_is_no_lease(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        held = scene.fetch(version, 0, 1)
        assert isinstance(held, Hold)
        answer = await held.verdict
        assert isinstance(answer, Answer)
        assert codes(ApiKey.FETCH, version, answer.frame) == {0: OFFSET_NOT_AVAILABLE, 1: OFFSET_NOT_AVAILABLE}
        scene.lease(1)
        some = scene.fetch(version, 0, 1)
        assert isinstance(some, Replace)
        _, payload = decode_request(some.frame)
        sent: Any = payload
        assert [part.partition for topic in sent.topics for part in topic.partitions] == [1]
        assert getattr(sent, "session_epoch", -1) == -1
        assert getattr(sent, "rack_id", "") == ""
        assert some.on_response is not None
        told = some.on_response(fetched(version, 1))
        assert codes(ApiKey.FETCH, version, told) == {0: OFFSET_NOT_AVAILABLE, 1: 0}

    asyncio.run(work())


@pytest.mark.parametrize("version", [4, 13, 17])
def test_what_a_broker_answers_when_the_lease_is_over_or_another_one_is_not_shown(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        over = scene.context.clock.monotonic() + 1_000
        for lost in (lambda: scene.leases.pop(0), lambda: scene.leases.update({0: over})):
            scene.leases = {0: 0.0, 1: 0.0}
            read, searched = scene.fetch(version, 0, 1), scene.list_offsets(6, 0, 1)
            assert codes(ApiKey.FETCH, version, read.on_response(fetched(version, 0, 1))) == {0: 0, 1: 0}
            lost()
            after = read.on_response(fetched(version, 0, 1))
            assert codes(ApiKey.FETCH, version, after) == {0: OFFSET_NOT_AVAILABLE, 1: 0}
            _, payload = decode_response(ApiKey.FETCH, version, after)
            answered: Any = payload
            assert [part.records for topic in answered.responses for part in topic.partitions] == [b"", b"r"]
            told = searched.on_response(listed(6, 0, 1))
            assert codes(ApiKey.LIST_OFFSETS, 6, told) == {0: OFFSET_NOT_AVAILABLE, 1: 0}
            scene.leases = {0: 0.0, 1: 0.0}
            older = scene.list_offsets(4, 0, 1)
            lost()
            assert codes(ApiKey.LIST_OFFSETS, 4, older.on_response(listed(4, 0, 1))) == {0: LEADER_NOT_AVAILABLE, 1: 0}

    asyncio.run(work())


def test_a_read_that_waits_is_answered_when_there_is_a_lease() -> None:
    async def work() -> None:
        scene = Scene()
        held = scene.fetch(17, 0)
        released = scene.reads._released
        scene.lease(1)
        assert not released.is_set()
        scene.lease(0)
        assert released.is_set()
        assert isinstance(await held.verdict, Answer)
        assert isinstance(scene.fetch(17, 0), Replace)

    asyncio.run(work())


def test_searches_wait_as_well() -> None:
    async def work() -> None:
        scene = Scene()
        scene.lease(1)
        told = scene.list_offsets(6, 0)
        assert isinstance(told, Answer)
        assert codes(ApiKey.LIST_OFFSETS, 6, told.frame) == {0: OFFSET_NOT_AVAILABLE}
        some = scene.list_offsets(6, 0, 1)
        assert isinstance(some, Replace)
        assert some.on_response is not None
        assert codes(ApiKey.LIST_OFFSETS, 6, some.on_response(listed(6, 1))) == {0: OFFSET_NOT_AVAILABLE, 1: 0}

    asyncio.run(work())


def test_nothing_waits_where_stale_reads_are_asked_for_or_nothing_follows_over_a_synchronous_link() -> None:
    async def work() -> None:
        scene = Scene()
        assert scene.fetch(17, 0, name="other") is None
        scene.apply(AlterDemands(TOPIC, "r-", stale_reads=True))
        assert (scene.fetch(17, 0), scene.list_offsets(6, 0)) == (None, None)
        scene.apply(AlterDemands(TOPIC, "r-", stale_reads=False))
        scene.lease(0)
        assert scene.fetch(17, 0) is not None
        released = scene.reads._released
        scene.mode(ASYNC)
        assert (scene.fetch(17, 0), released.is_set()) == (None, True)
        scene.mode(SYNC)
        assert scene.fetch(17, 0) is not None
        scene.apply(DetachNamespace("l", TOPIC, "r-"))
        assert scene.fetch(17, 0) is None

    asyncio.run(work())


def test_a_fetch_session_that_may_hold_such_a_topic_ends_once() -> None:
    async def work() -> None:
        scene = Scene()
        scene.lease(0)
        assert isinstance(scene.fetch(17, epoch=5), Answer)
        assert scene.fetch(17, name="other", epoch=6) is None

    asyncio.run(work())
