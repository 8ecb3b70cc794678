"""Consumers of a follower on a synchronous link wait until it was In-Sync once."""

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
    AttachNamespace,
    CreateLink,
    DetachNamespace,
    MergeLink,
    PartitionSync,
    RecordSync,
    SetFollowerTopic,
)
from isthmus_control.model import LinkMode, LinkSettings, ResourceType, Role, SyncState, TopicState
from isthmus_control.outcome import Accepted, Rejected
from isthmus_plugins.api import Answer, Client, Hold, Replace, Request
from isthmus_plugins.replication.client_views.syncing_topics import SyncingTopics
from isthmus_protocol.messages import build_request, decode_request, decode_response, encode_request
from isthmus_protocol.refusals import offset_not_available
from isthmus_protocol.schema import ApiKey

LINK_ID, T_ID, U_ID = (str(uuid.UUID(int=number, version=4)) for number in (1, 2, 3))
SYNC, ASYNC = LinkMode.SYNCHRONOUS, LinkMode.ASYNCHRONOUS


class Scene:
    """B follows ``r-t`` and ``r-u`` over a link."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.control = FakeControl("B", rng)
        self.context: Any = FakeContext(FakeCluster(rng, [1]), self.control)
        self.topics = SyncingTopics(self.context)
        self.control.subscribe(self.topics.control_changed)
        self.written = 0
        self.control.apply(CreateLink("l", LINK_ID, "A", False, ("a:1",)))
        self.attach()

    def attach(self) -> None:
        self.control.apply(AttachNamespace("l", ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, create_missing=True))
        for name, topic_id in (("t", T_ID), ("u", U_ID)):
            for state in (TopicState.CREATING, TopicState.FOLLOWING):
                followed = SetFollowerTopic("l", f"r-{name}", f"l-{name}", topic_id, state)
                outcome = self.control.apply(
                    replace(followed, topic_id=topic_id if state is TopicState.FOLLOWING else None)
                )
                assert isinstance(outcome, Accepted), outcome

    def mode(self, mode: LinkMode) -> None:
        self.written += 1
        settings = LinkSettings(Register(mode, Hlc(self.written, 0, "A")), {}, {})
        outcome = self.control.apply(MergeLink("l", LINK_ID, settings))
        assert isinstance(outcome, Accepted), outcome

    async def reached(self, *partitions: int, topic_id: str = T_ID) -> None:
        self.topics.reached("l", [("r-t", topic_id, partition) for partition in partitions])
        for task in list(self.topics._tasks._tasks):
            if task.get_name().endswith("record"):
                await task

    async def waits(self) -> bool:
        verdict = self.fetch(17, t=(0,))
        if isinstance(verdict, Hold):
            await verdict.verdict
        return verdict is not None

    def fetch(self, version: int, **places: tuple[int, ...]) -> Any:
        ids = {"t": T_ID, "u": U_ID, "other": str(uuid.UUID(int=9))}
        topics = [
            {
                **({"topic": f"r-{name}"} if version < 13 else {"topic_id": uuid.UUID(ids[name])}),
                "partitions": [{"partition": partition} for partition in partitions],
            }
            for name, partitions in places.items()
        ]
        return self._ask(ApiKey.FETCH, version, {"max_wait": 50, "session_epoch": 0, "topics": topics})

    def list_offsets(self, version: int, *partitions: int) -> Any:
        asked = [{"partition_index": partition, "timestamp": -1} for partition in partitions]
        return self._ask(ApiKey.LIST_OFFSETS, version, {"topics": [{"name": "r-t", "partitions": asked}]})

    def _ask(self, api: ApiKey, version: int, values: dict[str, Any]) -> Any:
        frame = encode_request(build_request(api, version, values), 7, "client")
        request = Request(frame, True, api, version, 7, time.monotonic(), Client(3, "1.2.3.4", 1))
        return self.topics.on_fetch(request) if api is ApiKey.FETCH else self.topics.on_list_offsets(request)


def codes(api: ApiKey, version: int, frame: bytes) -> list[int]:
    _, payload = decode_response(api, version, frame)
    found: Any = payload
    topics = found.responses if api is ApiKey.FETCH else found.topics
    return [int(part.error_code) for topic in topics for part in topic.partitions]


@pytest.mark.parametrize("version", [4, 11, 13, 17])
def test_reads_wait_by_partition_until_it_was_in_sync_once(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        assert scene.fetch(version, t=(0, 1)) is None  # asynchronous: it may be read in part
        scene.mode(SYNC)
        held = scene.fetch(version, t=(0, 1))
        assert isinstance(held, Hold)
        answer = await held.verdict
        assert isinstance(answer, Answer)
        assert codes(ApiKey.FETCH, version, answer.frame) == [78, 78]
        assert scene.fetch(version, other=(0,)) is None
        await scene.reached(1)
        assert scene.fetch(version, t=(1,)) is None
        replaced = scene.fetch(version, t=(0, 1))
        assert isinstance(replaced, Replace)
        _, payload = decode_request(replaced.frame)
        sent: Any = payload
        assert [part.partition for topic in sent.topics for part in topic.partitions] == [1]
        assert getattr(sent, "session_epoch", -1) == -1
        await scene.reached(0)
        assert scene.fetch(version, t=(0, 1)) is None

    asyncio.run(work())


def test_a_read_that_waits_is_answered_when_it_is_in_sync() -> None:
    async def work() -> None:
        scene = Scene()
        scene.topics.start()
        scene.mode(SYNC)
        held = scene.fetch(17, t=(0,))
        async with asyncio.timeout(10):
            answer, _ = await asyncio.gather(held.verdict, scene.reached(0))
        assert isinstance(answer, Answer)

    asyncio.run(work())


@pytest.mark.parametrize("version", [1, 4, 10])
def test_the_end_of_what_is_syncing_is_not_told(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        assert scene.list_offsets(version, 0) is None
        scene.mode(SYNC)
        answer = scene.list_offsets(version, 0)
        assert isinstance(answer, Answer)
        assert codes(ApiKey.LIST_OFFSETS, version, answer.frame) == [offset_not_available(version)]
        await scene.reached(0)
        assert scene.list_offsets(version, 0) is None

    asyncio.run(work())


def test_what_was_reached_ends_with_the_mode_and_with_the_topic() -> None:
    async def work() -> None:
        scene = Scene()
        scene.mode(SYNC)
        await scene.reached(0, topic_id=U_ID)
        assert await scene.waits()  # another topic's
        await scene.reached(0)
        assert not await scene.waits()
        scene.mode(SYNC)  # it was asynchronous meanwhile, and nobody here has heard of that
        assert await scene.waits()
        await scene.reached(0)
        scene.mode(ASYNC)
        assert not await scene.waits()
        scene.mode(SYNC)
        assert await scene.waits()
        await scene.reached(0)
        scene.control.apply(DetachNamespace("l", ResourceType.TOPIC, "r-"))
        assert not await scene.waits()
        assert not scene.control.state.sync_records
        scene.attach()
        assert await scene.waits()

    asyncio.run(work())


def test_a_target_records_nothing_but_what_was_reached() -> None:
    scene = Scene()
    scene.mode(SYNC)
    outcome = scene.control.apply(RecordSync("l", LINK_ID, SyncState.IN_SYNC, (PartitionSync("r-t", T_ID, 0, 0),)))
    assert isinstance(outcome, Rejected)
    assert "the source's" in outcome.message


def test_topics_are_looked_at_once_however_many_records_came() -> None:
    async def work() -> None:
        scene = Scene()
        scene.mode(SYNC)
        looks, look = 0, scene.topics._look

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        scene.topics._look = counted  # type: ignore[method-assign]
        scene.topics.start()
        await asyncio.sleep(0)
        for number in range(50):
            topic_id = str(uuid.UUID(int=100 + number, version=4))
            scene.control.apply(
                SetFollowerTopic("l", f"r-{number}", f"l-{number}", topic_id, TopicState.FOLLOWING, topic_id)
            )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert looks <= 2
        assert scene.topics._holds("r-49", 0)
        await scene.topics.stop()

    asyncio.run(work())
