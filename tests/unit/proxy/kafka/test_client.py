"""The Kafka client against a scripted peer: what it does when brokers do what they should not."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.scripted_broker import Peer, ScriptedBroker, metadata_of

from isthmus.cluster_access import ClusterAccess
from isthmus.errors import ConfigurationError
from isthmus.kafka.client import (
    LATEST,
    LOG_END,
    AuthenticationFailed,
    BrokerConnection,
    ClusterClient,
    ConnectionLost,
    FetchFrom,
    KafkaError,
    NewTopic,
    RequestTimedOut,
    ResourceType,
    SecuritySpec,
    TopicPartition,
    UnsupportedVersion,
    decode_fetch,
    parse_address,
)
from isthmus.kafka.cluster_connections import SAME_ANSWERS_MAX
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import RequestHead, build_request, encode_response
from isthmus_protocol.schema import ApiKey, response_type, supported
from isthmus_protocol.throttling import throttle_ms

HEARTBEAT: dict[str, Any] = {"group_id": "g", "member_id": "m"}


loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy runs on uvloop, tools on asyncio's own."""
    if request.param == "uvloop":
        monkeypatch.setattr(sys.modules[__name__], "loop_factory", uvloop.new_event_loop)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


async def connect(broker: ScriptedBroker, **options: Any) -> BrokerConnection:
    return await BrokerConnection.connect(broker.host, broker.port, **options)


def heartbeat() -> Any:
    return build_request(ApiKey.HEARTBEAT, 4, HEARTBEAT)


# --- One connection ---


def test_the_highest_common_version_is_used() -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.versions[ApiKey.HEARTBEAT] = (1, 3)
            broker.versions[ApiKey.METADATA] = (0, 99)
            broker.versions[ApiKey.SYNC_GROUP] = (90, 99)
            del broker.versions[ApiKey.LEAVE_GROUP]
            broker.answers(ApiKey.HEARTBEAT, {"error_code": 27})
            connection = await connect(broker)
            assert connection.version(ApiKey.HEARTBEAT) == 3
            assert connection.version(ApiKey.HEARTBEAT, at_most=2) == 2
            assert connection.version(ApiKey.METADATA) == 13
            for refused in (ApiKey.SYNC_GROUP, ApiKey.LEAVE_GROUP, 999):
                with pytest.raises(UnsupportedVersion):
                    connection.version(refused)
            with pytest.raises(UnsupportedVersion):
                connection.version(ApiKey.HEARTBEAT, at_most=0)
            answer = await connection.call(ApiKey.HEARTBEAT, HEARTBEAT, at_most=2)
            assert (answer.__version__, answer.error_code) == (2, 27)
            await connection.close()

    run(test)


def test_a_broker_that_does_not_know_our_api_versions_says_which_it_knows() -> None:
    async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
        ranges = [{"api_key": 18, "min_version": 0, "max_version": 2}]
        unknown = head.version > 2
        values = {"error_code": 35 if unknown else 0, "api_keys": ranges}
        peer.send(peer.answer(head, values, version=0 if unknown else head.version))

    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.on(ApiKey.API_VERSIONS, handler)
            connection = await connect(broker)
            assert connection.versions == {18: (0, 2)}
            assert [head.version for head, _ in broker.requests] == [4, 2]
            await connection.close()

    run(test)


def test_requests_are_pipelined_and_answered_in_order() -> None:
    async def test() -> None:
        held: list[bytes] = []

        async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
            held.append(peer.answer(head, {"error_code": int(request.member_id)}))
            if len(held) == 100:
                data = b"".join(held)
                for start in range(0, len(data), 7):  # cut anywhere
                    peer.send(data[start : start + 7])
                    await peer.writer.drain()

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, handler)
            connection = await connect(broker)
            answers = await asyncio.gather(
                *(connection.call(ApiKey.HEARTBEAT, {**HEARTBEAT, "member_id": str(n)}) for n in range(100))
            )
            assert [int(answer.error_code) for answer in answers] == list(range(100))
            assert connection.in_flight == 0
            await connection.close()

    run(test)


@pytest.mark.parametrize("size", [10, 32 * 1024 - 40, 32 * 1024, 100_000, 5_000_000])
def test_frames_of_any_size_arrive_whole(size: int) -> None:
    records = bytes(range(256)) * (size // 256 + 1)

    async def test() -> None:
        async with ScriptedBroker() as broker:
            values = {"responses": [{"topic": "t", "partitions": [{"partition_index": 0, "records": records[:size]}]}]}
            broker.answers(ApiKey.FETCH, values)
            connection = await connect(broker)
            payload = build_request(ApiKey.FETCH, 12, {"topics": []})
            frames = await asyncio.gather(*(connection.request_raw(payload) for _ in range(3)))
            answer = await connection.request(payload)
            for frame in frames:
                assert len(frame) == 4 + int.from_bytes(frame[:4], "big")
                assert records[:size] in frame
            assert answer.responses[0].partitions[0].records == records[:size]
            await connection.close()

    run(test)


def test_a_body_that_is_encoded_already() -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.answers(ApiKey.HEARTBEAT, {"error_code": 0})
            connection = await connect(broker, client_id="ä")
            body = struct.pack(">h1sih1sh", 1, b"g", 5, 1, b"m", -1)
            frame = await connection.send_body(ApiKey.HEARTBEAT, 3, [body[:4], memoryview(body)[4:]])
            assert len(frame) == 4 + 4 + 4 + 2
            compact = b"\x02g" + struct.pack(">i", 5) + b"\x02m\x00\x00"
            await connection.send_body(ApiKey.HEARTBEAT, 4, [compact])
            (_, first), (head, second) = broker.requests[1:]
            assert (first.group_id, first.generation_id, first.member_id) == ("g", 5, "m")
            assert (second.group_id, second.generation_id, second.member_id) == ("g", 5, "m")
            assert head.client_id == "ä"
            await connection.close()

    run(test)


def test_a_lost_connection_fails_everything_at_once() -> None:
    async def test() -> None:
        async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
            if len(peer.broker.seen(ApiKey.HEARTBEAT)) == 3:
                peer.close()

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, handler)
            connection = await connect(broker)
            told: list[ConnectionLost] = []
            connection.on_lost = told.append
            results = await asyncio.gather(*(connection.request(heartbeat()) for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [ConnectionLost] * 3
            assert len({id(result) for result in results}) == 3
            assert len(told) == 1
            assert not connection.is_open
            assert broker.address in str(told[0])
            with pytest.raises(ConnectionLost):
                connection.send(heartbeat())
            with pytest.raises(ConnectionLost):
                await connection.drained()
            await connection.close()
            assert len(told) == 1

    run(test)


def test_closing_fails_what_is_outstanding() -> None:
    async def test() -> None:
        async def silent(peer: Peer, head: RequestHead, request: Any) -> None:
            return

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, silent)
            connection = await connect(broker)
            answer = connection.send(heartbeat())
            await connection.close()
            await connection.close()
            with pytest.raises(ConnectionLost, match="closed by this side"):
                await answer

    run(test)


def test_a_request_without_an_answer_closes_the_connection() -> None:
    async def test() -> None:
        async def silent(peer: Peer, head: RequestHead, request: Any) -> None:
            return

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, silent)
            connection = await connect(broker)
            first = connection.send(heartbeat(), timeout=0.05)
            second = connection.send(heartbeat())
            with pytest.raises(RequestTimedOut):
                await first
            with pytest.raises(ConnectionLost, match="not answered"):
                await second
            assert not connection.is_open

    run(test)


def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
            await released.wait()
            peer.send(peer.answer(head, {"error_code": 0}))

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, handler)
            connection = await connect(broker)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await connection.request(heartbeat())
            second = connection.send(heartbeat())
            released.set()
            await second
            assert connection.is_open
            await connection.close()

    run(test)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">ii", 4, 999), "answer 999 in the place of"),
        (b"HTTP/1.1 400 Bad Request\r\n", "is this a Kafka broker"),
        (struct.pack(">i", -1), "is this a Kafka broker"),
        (struct.pack(">i", 3), "is this a Kafka broker"),
        (b"", "malformed answer"),
    ],
)
def test_nonsense_ends_the_connection(data: bytes, reason: str) -> None:
    async def test() -> None:
        async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
            peer.send(data or struct.pack(">iib", 5, head.correlation_id, 0))

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, handler)
            connection = await connect(broker)
            with pytest.raises(ConnectionLost, match=reason):
                await connection.request(heartbeat())
            assert not connection.is_open

    run(test)


def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    async def test() -> None:
        async def twice(peer: Peer, head: RequestHead, request: Any) -> None:
            peer.send(peer.answer(head, {}) * 2)

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.HEARTBEAT, twice)
            connection = await connect(broker)
            lost: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
            connection.on_lost = lost.set_result
            await connection.request(heartbeat())
            assert "in the place of none" in str(await lost)

    run(test)


def test_writing_more_than_the_socket_takes_can_be_waited_for() -> None:
    async def test() -> None:
        reading = asyncio.Event()

        async def slow(peer: Peer, head: RequestHead, request: Any) -> None:
            await reading.wait()
            peer.send(peer.answer(head, {}))

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.PRODUCE, slow)
            connection = await connect(broker)
            await connection.drained()
            body = b"\x00\x00" + struct.pack(">hi", 1, 1000) + b"\x02\x02t\x02" + struct.pack(">i", 0)
            records = bytes(8_000_000)
            length = len(records) + 1
            varint = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80, length >> 21])
            body = b"\x00" + struct.pack(">hi", 1, 1000) + b"\x02\x02t\x02" + struct.pack(">i", 0) + varint
            answers = [connection.send_body(ApiKey.PRODUCE, 9, [body, records, b"\x00\x00\x00"]) for _ in range(4)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await connection.drained()
            reading.set()
            await connection.drained()
            await asyncio.gather(*answers)
            assert len(broker.seen(ApiKey.PRODUCE)[0].topic_data[0].partition_data[0].records) == len(records)
            await connection.close()

    run(test)


def test_nobody_listens() -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            pass
        with pytest.raises(ConnectionLost, match=broker.address):
            await connect(broker)

    run(test)


def test_a_peer_that_says_nothing() -> None:
    async def test() -> None:
        async def silent(peer: Peer, head: RequestHead, request: Any) -> None:
            return

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.API_VERSIONS, silent)
            with pytest.raises(ConnectionLost, match=r"not connected within 0\.05 s"):
                await connect(broker, timeout=0.05)

    run(test)


# --- SASL ---


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> SecuritySpec:
    monkeypatch.setenv("SECRET", "hunter2")
    return SecuritySpec(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="alice", password_env="SECRET"
    )


def test_plain(plain: SecuritySpec) -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.answers(ApiKey.SASL_HANDSHAKE, {"mechanisms": ["PLAIN"]})
            broker.answers(ApiKey.SASL_AUTHENTICATE, {"session_lifetime": 60_000})
            connection = await connect(broker, security=plain)
            assert broker.seen(ApiKey.SASL_HANDSHAKE)[0].mechanism == "PLAIN"
            assert broker.seen(ApiKey.SASL_AUTHENTICATE)[0].auth_bytes == b"\0alice\0hunter2"
            now = asyncio.get_running_loop().time()
            assert connection.expires_at is not None
            assert 50 < connection.expires_at - now < 60.001
            await connection.close()

    run(test)


def test_refused_credentials_are_said_without_the_secret(plain: SecuritySpec) -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.answers(ApiKey.SASL_HANDSHAKE, {"mechanisms": ["PLAIN"]})
            broker.answers(
                ApiKey.SASL_AUTHENTICATE, {"error_code": 58, "error_message": "Invalid username or password"}
            )
            with pytest.raises(AuthenticationFailed, match="Invalid username or password") as caught:
                await connect(broker, security=plain)
            assert "hunter2" not in str(caught.value)
            broker.answers(ApiKey.SASL_HANDSHAKE, {"error_code": 33, "mechanisms": ["GSSAPI"]})
            with pytest.raises(AuthenticationFailed, match="offers GSSAPI, not PLAIN"):
                await connect(broker, security=plain)

    run(test)


# --- A cluster ---

TOPIC_ID = uuid.UUID(int=77)
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class World:
    """Two brokers that agree on their metadata."""

    def __init__(self, one: ScriptedBroker, two: ScriptedBroker) -> None:
        self.brokers = [one, two]
        self.topics: dict[str, dict[str, Any]] = {"t": {"topic_id": TOPIC_ID, "leaders": {0: (1, 5), 1: (2, 5)}}}
        for broker in self.brokers:
            broker.answers(ApiKey.METADATA, self.metadata)

    def metadata(self, request: Any) -> dict[str, Any]:
        assert request.allow_auto_topic_creation is False
        names = self.topics if request.topics is None else [topic.name for topic in request.topics]
        unknown: dict[str, Any] = {"error_code": 3}
        return metadata_of(self.brokers, {name: self.topics.get(name, unknown) for name in names})


def in_world(test: Callable[[World, ClusterClient], Awaitable[None]]) -> None:
    async def started() -> None:
        async with ScriptedBroker(1) as one, ScriptedBroker(2) as two:
            world = World(one, two)
            async with ClusterClient([one.address], request_timeout_s=5, retry_deadline_s=5) as cluster:
                await test(world, cluster)

    run(started)


def test_metadata_is_cached() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one, two = world.brokers
        assert cluster.cluster_id == "scripted"
        assert cluster.controller_id == 1
        assert [broker.port for broker in cluster.brokers.values()] == [one.port, two.port]
        assert cluster.topics["t"].topic_id == TOPIC_ID
        assert cluster.topic_name(TOPIC_ID) == "t"
        assert (await cluster.leader("t", 1)).leader == 2
        assert len(one.seen(ApiKey.METADATA)) == 1
        with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            await cluster.topic("other")
        with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            await cluster.leader("t", 9)
        world.topics["other"] = {"leaders": {0: (-1, 1)}}
        with pytest.raises(KafkaError, match="LEADER_NOT_AVAILABLE"):
            await cluster.leader("other", 0)
        del world.topics["t"]
        assert list(await cluster.refresh(["t", "other"])) == ["other"]
        assert list(cluster.topics) == ["other"]
        assert cluster.topic_name(TOPIC_ID) is None

    in_world(test)


def test_of_addresses_that_are_gone_nothing_is_kept() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one, two = world.brokers
        old = await cluster.to(2, "lane")
        cluster._note_throttled(two.address, ApiKey.FETCH, 0.5)
        cluster._note_throttled(one.address, ApiKey.FETCH, 0.5)
        await two.stop()
        while old.is_open:  # noqa: ASYNC110 - its end comes over the socket
            await asyncio.sleep(0.01)
        async with ScriptedBroker(2) as anew:
            anew.answers(ApiKey.METADATA, world.metadata)
            world.brokers[1] = anew
            await cluster.refresh()
            assert (await cluster.to(2, "lane")).address == anew.address
            assert {key[:2] for key in cluster._slots} == {(each.host, each.port) for each in (one, anew)}
            assert {address for address, _ in cluster.throttled_s} == {one.address}
            assert set(cluster._open) == {one.address, anew.address}

    in_world(test)


def test_an_answer_that_says_what_is_known_is_not_decoded() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        before = dict(await cluster.refresh())
        assert dict(await cluster.refresh()) == before
        assert cluster.topics["t"] is before["t"]
        world.topics["t"]["leaders"] = {0: (2, 6), 1: (2, 5)}
        assert (await cluster.refresh())["t"].partitions[0].leader == 2
        # What was read by name is newer than the whole answer before: that one, once more, is read anew.
        world.topics["t"]["leaders"] = {0: (1, 7), 1: (2, 5)}
        assert (await cluster.refresh(["t"]))["t"].partitions[0].leader == 1
        world.topics["u"] = {"leaders": {0: (1, 1)}}
        assert set(await cluster.refresh()) == {"t", "u"}
        del world.topics["u"]
        assert set(await cluster.refresh()) == {"t"}
        assert cluster.topics["t"].partitions[0].leader == 1
        # The same of what is read by name, which says nothing of other names.
        named = (await cluster.refresh(["t"]))["t"]
        assert (await cluster.refresh(["t"]))["t"] is named
        world.topics["u"] = {"leaders": {0: (1, 1)}}
        assert set(await cluster.refresh(["t", "u"])) == {"t", "u"}
        known = dict(world.topics)
        for _ in range(2):
            del world.topics["u"]
            assert not await cluster.refresh(["u"])
            assert not await cluster.refresh(["u"])
            assert set(await cluster.refresh(["t", "u"])) == {"t"}
            world.topics.update(known)
            assert set(await cluster.refresh(["u"])) == {"u"}
            assert set(await cluster.refresh(["t", "u"])) == {"t", "u"}
        # However many are read by name, the answer about all topics, which may be large, is known still.
        whole = (await cluster.refresh())["t"]
        for number in range(2 * SAME_ANSWERS_MAX):
            await cluster.refresh([f"none-{number}"])
        assert (await cluster.refresh())["t"] is whole
        assert len(cluster._same_answers) <= SAME_ANSWERS_MAX

    in_world(test)


def test_of_all_topics_those_alone_are_decoded_that_are_new_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[set[str]] = []
    decode = BrokerConnection.decode

    def noted(connection: BrokerConnection, api_key: int, version: int, frame: bytes) -> Any:
        answer = decode(connection, api_key, version, frame)
        if api_key == ApiKey.METADATA:
            decoded.append({each.name for each in answer.topics})
        return answer

    monkeypatch.setattr(BrokerConnection, "decode", noted)

    async def test(world: World, cluster: ClusterClient) -> None:
        world.topics |= {f"t{n}": {"leaders": {0: (1, 3)}} for n in range(5)}
        before = dict(await cluster.refresh())
        decoded.clear()
        world.topics["new"] = {"leaders": {0: (2, 1)}}
        world.topics["t3"]["leaders"] = {0: (2, 4)}
        found = dict(await cluster.refresh())
        assert decoded == [{"new", "t3"}]
        assert (set(found), found["t3"].partitions[0].leader) == (set(before) | {"new"}, 2)
        assert all(found[name] is before[name] for name in set(before) - {"t3"})
        # What was read by name since is newer than the entry, which may come once more from a broker that lags behind.
        world.topics["t1"]["leaders"] = {0: (2, 4)}
        await cluster.refresh(["t1"])
        world.topics["t1"]["leaders"] = {0: (1, 3)}
        del world.topics["t2"]
        decoded.clear()
        found = dict(await cluster.refresh())
        assert decoded == [{"t1"}]
        assert (found["t1"].partitions[0].leader, "t2" in found) == (2, False)
        world.topics["t2"] = {"leaders": {0: (1, 3)}}
        assert dict(await cluster.refresh())["t2"].partitions[0].leader == 1

    in_world(test)


def test_refreshes_at_once_are_one_request() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        before = sum(len(broker.seen(ApiKey.METADATA)) for broker in world.brokers)
        await asyncio.gather(*(cluster.refresh() for _ in range(20)))
        assert sum(len(broker.seen(ApiKey.METADATA)) for broker in world.brokers) - before <= 2

    in_world(test)


def test_what_many_ask_of_topics_at_the_same_time_goes_in_few_requests() -> None:
    """Thousands of topics are followed, or compared, each by itself: their questions meet here."""

    def limits(request: Any) -> dict[str, Any]:
        return {
            "topics": [
                {
                    "name": topic.name,
                    "partitions": [
                        {"partition_index": each.partition_index, "error_code": 0, "offset": int(topic.name)}
                        for each in topic.partitions
                    ],
                }
                for topic in request.topics
            ]
        }

    def producers(request: Any) -> dict[str, Any]:
        return {
            "topics": [
                {"name": topic.name, "partitions": [{"partition_index": index} for index in topic.partition_indexes]}
                for topic in request.topics
            ]
        }

    def configs(request: Any) -> dict[str, Any]:
        return {
            "results": [
                {"error_code": 0, "resource_type": 2, "resource_name": each.resource_name, "configs": []}
                for each in request.resources
            ]
        }

    def epochs(request: Any) -> dict[str, Any]:
        return {
            "topics": [
                {
                    "topic": topic.topic,
                    "partitions": [
                        {
                            "partition": 0,
                            "error_code": 0,
                            "leader_epoch": part.leader_epoch,
                            "end_offset": int(topic.topic),
                        }
                        for part in topic.partitions
                    ],
                }
                for topic in request.topics
            ]
        }

    def created(request: Any) -> dict[str, Any]:
        return {"topics": [{"name": topic.name, "topic_id": uuid.uuid4(), "error_code": 0} for topic in request.topics]}

    async def test(world: World, cluster: ClusterClient) -> None:
        def seen(api_key: int) -> list[Any]:
            return [request for broker in world.brokers for request in broker.seen(api_key)]

        for broker in world.brokers:
            broker.answers(ApiKey.LIST_OFFSETS, limits)
            broker.answers(ApiKey.DESCRIBE_PRODUCERS, producers)
            broker.answers(ApiKey.OFFSET_FOR_LEADER_EPOCH, epochs)
            broker.answers(ApiKey.DESCRIBE_CONFIGS, configs)
            broker.answers(ApiKey.CREATE_TOPICS, created)
        names = [str(number) for number in range(250)]
        world.topics |= {name: {"leaders": {0: (1 + int(name) % 2, 1)}} for name in names}
        before = len(seen(ApiKey.METADATA))
        found = await asyncio.gather(*(cluster.refresh([name]) for name in names))
        assert [list(each) for each in found] == [[name] for name in names]
        assert len(seen(ApiKey.METADATA)) - before <= 2
        await cluster.to(2)
        places = [TopicPartition(name, 0) for name in names]
        ends = await asyncio.gather(*(cluster.list_offsets({place: LATEST}) for place in places))
        assert [each[place].offset for each, place in zip(ends, places, strict=True)] == list(range(250))
        assert len(seen(ApiKey.LIST_OFFSETS)) <= 4, "two of each leader"
        states = await asyncio.gather(*(cluster.describe_producers([place]) for place in places))
        assert all(each[place].error is None for each, place in zip(states, places, strict=True))
        assert len(seen(ApiKey.DESCRIBE_PRODUCERS)) <= 4
        epochs_end = await asyncio.gather(*(cluster.epoch_end(*place, 3) for place in places))
        assert epochs_end == [(3, number) for number in range(250)]
        assert len(seen(ApiKey.OFFSET_FOR_LEADER_EPOCH)) <= 4
        described = await asyncio.gather(*(cluster.describe_configs(ResourceType.TOPIC, [name]) for name in names))
        assert [list(each) for each in described] == [[name] for name in names]
        assert len(seen(ApiKey.DESCRIBE_CONFIGS)) <= 7
        made = await asyncio.gather(*(cluster.create_topics([NewTopic(f"new-{name}", 1, 1)]) for name in names))
        assert [list(each) for each in made] == [[f"new-{name}"] for name in names]
        sizes = [len(request.topics) for request in seen(ApiKey.CREATE_TOPICS)]
        assert sum(sizes) == 250, "each once"
        assert len(sizes) <= 4
        assert max(sizes) == 100

    in_world(test)


def test_of_many_new_topics_that_no_broker_leads_yet_all_are_asked_about_together_again() -> None:
    """A broker that is busy takes seconds to lead what was made: thousands of partitions wait for it at a time."""
    led = asyncio.Event()

    def limits(request: Any) -> dict[str, Any]:
        code = 0 if led.is_set() else 6
        answered = [
            {
                "name": topic.name,
                "partitions": [{"partition_index": 0, "error_code": code, "offset": 7} for _ in topic.partitions],
            }
            for topic in request.topics
        ]
        return {"topics": answered}

    async def test(world: World, cluster: ClusterClient) -> None:
        one, _ = world.brokers
        one.answers(ApiKey.LIST_OFFSETS, limits)
        places = [TopicPartition(str(number), 0) for number in range(100)]
        world.topics |= {place.topic: {"leaders": {0: (1, 1)}} for place in places}
        asyncio.get_running_loop().call_later(0.7, led.set)

        async def asked(place: TopicPartition) -> int:
            await asyncio.sleep(int(place.topic) / 1000)  # as they are made one after the other
            return (await cluster.list_offsets({place: LATEST}))[place].offset

        assert await asyncio.gather(*map(asked, places)) == [7] * 100
        assert len(one.seen(ApiKey.LIST_OFFSETS)) < 200, "some 500 if each tried again at a time of its own"

    in_world(test)


def test_what_became_of_one_of_many_is_told_to_who_asked_for_it() -> None:
    def limits(request: Any) -> dict[str, Any]:
        answered = [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": each.partition_index, "error_code": 29 if topic.name == "1" else 0, "offset": 7}
                    for each in topic.partitions
                ],
            }
            for topic in request.topics
            if topic.name != "2"
        ]
        return {"topics": answered}

    async def test(world: World, cluster: ClusterClient) -> None:
        for broker in world.brokers:
            broker.answers(ApiKey.LIST_OFFSETS, limits)
        places = [TopicPartition(str(number), 0) for number in range(4)]
        world.topics |= {place.topic: {"leaders": {0: (1, 1)}} for place in places}
        asked = (cluster.list_offsets({place: LATEST}, deadline_s=0.2) for place in places)
        found = [each[place] for each, place in zip(await asyncio.gather(*asked), places, strict=True)]
        errors = [None if each.error is None else each.error.name for each in found]
        assert errors == [None, "TOPIC_AUTHORIZATION_FAILED", "NETWORK_EXCEPTION", None]
        assert [found[index].offset for index in (0, 3)] == [7, 7]

    in_world(test)


def test_an_older_leader_epoch_is_not_believed() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        world.topics["t"]["leaders"] = {0: (2, 4), 1: (1, 6)}
        found = (await cluster.refresh(["t"]))["t"].partitions
        assert [(info.leader, info.leader_epoch) for info in found.values()] == [(1, 5), (1, 6)]
        # A topic that was deleted and made again starts anew.
        world.topics["t"] = {"topic_id": uuid.UUID(int=78), "leaders": {0: (2, 0)}}
        found = (await cluster.refresh(["t"]))["t"].partitions
        assert [(info.leader, info.leader_epoch) for info in found.values()] == [(2, 0)]

    in_world(test)


def test_connections_are_shared_in_a_lane_and_not_between_lanes() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        same = await asyncio.gather(*(cluster.to(2) for _ in range(5)))
        assert len({id(connection) for connection in same}) == 1
        other = await cluster.to(2, "fetch")
        assert other is not same[0]
        assert world.brokers[1].connections == 2
        await other.close()
        assert await cluster.to(2, "fetch") is not other
        with pytest.raises(ConnectionLost, match="broker 9 is not known"):
            await cluster.to(9)

    in_world(test)


def list_offsets_answer(request: Any, error_code: int = 0) -> dict[str, Any]:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": one.partition_index,
                        "error_code": error_code,
                        "offset": 40 + one.partition_index,
                    }
                    for one in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


def test_a_moved_leader_is_found() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one, two = world.brokers

        def moved(request: Any) -> dict[str, Any]:
            world.topics["t"]["leaders"][0] = (2, 6)
            return list_offsets_answer(request, error_code=6)

        one.answers(ApiKey.LIST_OFFSETS, moved)
        two.answers(ApiKey.LIST_OFFSETS, list_offsets_answer)
        listed = await cluster.list_offsets({T0: LATEST, T1: LATEST})
        assert {key: (value.offset, value.error) for key, value in listed.items()} == {T0: (40, None), T1: (41, None)}
        assert len(one.seen(ApiKey.LIST_OFFSETS)) == 1
        # What was answered is not asked again.
        assert [len(request.topics[0].partitions) for request in two.seen(ApiKey.LIST_OFFSETS)] == [1, 1]

    in_world(test)


def test_errors_that_last_stand_in_the_results() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one, two = world.brokers
        one.answers(ApiKey.LIST_OFFSETS, lambda request: list_offsets_answer(request, error_code=6))
        two.answers(ApiKey.LIST_OFFSETS, lambda request: list_offsets_answer(request, error_code=29))
        listed = await cluster.list_offsets({T0: LATEST, T1: LATEST}, deadline_s=1.0)
        assert {key: value.error.code for key, value in listed.items() if value.error} == {T0: 6, T1: 29}
        assert len(one.seen(ApiKey.LIST_OFFSETS)) > 1
        assert len(two.seen(ApiKey.LIST_OFFSETS)) == 1

    in_world(test)


def test_the_log_end_is_asked_with_the_leader_epoch() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one = world.brokers[0]
        one.answers(ApiKey.LIST_OFFSETS, list_offsets_answer)
        await cluster.list_offsets({T0: LATEST}, isolation=LOG_END)
        await cluster.list_offsets({T0: LATEST}, isolation=1)
        log_end, committed = one.seen(ApiKey.LIST_OFFSETS)
        assert (log_end.replica_id, log_end.isolation_level) == (-2, 0)
        assert log_end.topics[0].partitions[0].current_leader_epoch == 5
        assert (committed.replica_id, committed.isolation_level) == (-1, 1)

    in_world(test)


def test_request_leader_repeats_while_the_leader_moves_and_not_for_other_errors() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        asked: list[int] = []

        async def attempt(connection: BrokerConnection, info: Any) -> str:
            asked.append(connection.port)
            if info.leader == 1:
                world.topics["t"]["leaders"][0] = (2, 6)
                raise KafkaError(74)
            return "done"

        assert await cluster.request_leader("t", 0, attempt) == "done"
        assert asked == [broker.port for broker in world.brokers]

        async def refused(connection: BrokerConnection, info: Any) -> str:
            raise KafkaError(29, "not yours")

        with pytest.raises(KafkaError, match=r"TOPIC_AUTHORIZATION_FAILED \(29\): not yours"):
            await cluster.request_leader("t", 0, refused)

    in_world(test)


def test_a_dead_broker_is_given_up_at_the_deadline() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        await world.brokers[1].stop()

        async def attempt(connection: BrokerConnection, info: Any) -> str:
            raise AssertionError("there is no connection")

        started = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionLost):
            await cluster.request_leader("t", 1, attempt, deadline_s=0.5)
        assert asyncio.get_running_loop().time() - started < 2
        # The other broker still answers what any of them can.
        assert (await cluster.any()).port == world.brokers[0].port

    in_world(test)


def test_a_broker_that_comes_back_is_used_again() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        two = world.brokers[1]
        two.answers(ApiKey.LIST_OFFSETS, list_offsets_answer)
        await cluster.list_offsets({T1: LATEST})
        await two.stop()
        waiting = asyncio.gather(cluster.list_offsets({T1: LATEST}, deadline_s=10))
        await asyncio.sleep(0.3)
        async with two:
            ((listed,)) = await waiting
            assert listed[T1].offset == 41

    in_world(test)


def test_bootstrap_goes_on_to_the_next_address() -> None:
    async def test() -> None:
        async with ScriptedBroker(1) as dead:
            pass
        async with ScriptedBroker(1) as one, ScriptedBroker(2) as two:
            World(one, two)
            async with ClusterClient([dead.address, one.address]) as cluster:
                assert set(cluster.brokers) == {1, 2}
        with pytest.raises(ConnectionLost, match="no broker can be reached"):
            async with ClusterClient([dead.address, dead.address]):
                pass

    run(test)


def test_wrong_credentials_are_not_tried_again(plain: SecuritySpec) -> None:
    async def test() -> None:
        async with ScriptedBroker(1) as one:
            one.answers(ApiKey.SASL_HANDSHAKE, {"mechanisms": ["PLAIN"]})
            one.answers(ApiKey.SASL_AUTHENTICATE, {"error_code": 58})
            with pytest.raises(AuthenticationFailed, match="SASL_AUTHENTICATION_FAILED"):
                async with ClusterClient([one.address], plain):
                    pass
            assert one.connections == 1

    run(test)


def test_a_password_file_that_is_away_for_a_moment_is_a_lost_connection_and_no_wrong_configuration(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        password = tmp_path / "password"
        password.write_text("hunter2")
        spec = SecuritySpec(
            security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="alice", password_file=password
        )
        async with ScriptedBroker(1) as one, ScriptedBroker(2) as two:
            World(one, two)
            for broker in (one, two):
                broker.answers(ApiKey.SASL_HANDSHAKE, {"mechanisms": ["PLAIN"]})
                broker.answers(ApiKey.SASL_AUTHENTICATE, {})
            async with ClusterClient([one.address], spec) as cluster:
                password.unlink()  # as who replaces it does
                with pytest.raises(ConnectionLost, match=r"password_file.* cannot be read"):
                    await cluster.to(2)
                password.write_text("hunter2")
                await cluster.to(2)
            password.unlink()
            with pytest.raises(ConfigurationError, match="cannot be read"):  # at the start it is the operator's to see
                async with ClusterClient([one.address], spec):
                    pass

    run(test)


def test_a_connection_whose_authentication_ends_is_replaced(plain: SecuritySpec) -> None:
    async def test() -> None:
        released = asyncio.Event()

        async def slow(peer: Peer, head: RequestHead, request: Any) -> None:
            await released.wait()
            peer.send(peer.answer(head, {}))

        async with ScriptedBroker(1) as one, ScriptedBroker(2) as two:
            World(one, two)
            for broker in (one, two):
                broker.answers(ApiKey.SASL_HANDSHAKE, {"mechanisms": ["PLAIN"]})
                broker.answers(ApiKey.SASL_AUTHENTICATE, {"session_lifetime": 5_200})
                broker.on(ApiKey.HEARTBEAT, slow)
            async with ClusterClient([one.address], plain) as cluster:
                first = await cluster.to(2)
                answer = first.send(heartbeat())
                await asyncio.sleep(0.3)
                second = await cluster.to(2)
                assert second is not first
                released.set()
                await answer  # the old one finishes what it has

    run(test)


def produced(request: Any, error_code: int = 0) -> dict[str, Any]:
    return {
        "responses": [
            {
                "name": topic.name,
                "partition_responses": [
                    {"index": one.index, "error_code": error_code, "base_offset": 7} for one in topic.partition_data
                ],
            }
            for topic in request.topic_data
        ]
    }


def test_a_broker_that_throttles_is_known_and_its_time_does_not_count() -> None:
    """A broker that throttles answers at once and reads the next request when that is over (KIP-219)."""

    async def test() -> None:
        muted_s = 0.6

        async def listed(peer: Peer, head: RequestHead, request: Any) -> None:
            if len(one.seen(ApiKey.LIST_GROUPS)) == 1:
                peer.send(peer.answer(head, {"throttle_time": int(muted_s * 1000)}))
                await asyncio.sleep(muted_s)  # it reads no more for so long
            else:
                peer.send(peer.answer(head, {}))

        async with ScriptedBroker(1) as one, ScriptedBroker(2) as two:
            World(one, two)
            one.on(ApiKey.LIST_GROUPS, listed)
            async with ClusterClient([one.address]) as cluster:
                assert cluster.throttled() == []
                connection = await cluster.to(1)
                await connection.call(ApiKey.LIST_GROUPS, {}, timeout=0.3)
                assert cluster.throttled() == [(one.address, ApiKey.LIST_GROUPS)]
                assert cluster.throttled_s == {(one.address, ApiKey.LIST_GROUPS): muted_s}
                await connection.call(ApiKey.LIST_GROUPS, {}, timeout=0.3)  # in time, from when it is read
                said = ClusterAccess(cluster).throttled()
                assert said is not None
                assert f"broker {one.address} on LIST_GROUPS" in said

    run(test)


@pytest.mark.parametrize("version", [3, 8, 9, 11, 13])
def test_throttle_time_of_a_produce_stands_behind_its_partitions(version: int) -> None:
    values = {"responses": [{"name": "t", "partition_responses": [{"index": 0}]}], "throttle_time": 1234}
    frame = encode_response(build(response_type(ApiKey.PRODUCE, version), values), 7)
    assert throttle_ms(ApiKey.PRODUCE, version, frame) == 1234


def test_addresses_of_new_leaders_behind_it_are_no_throttle_time() -> None:
    """Ports stood where it was looked for: a partition's move was a quota, and its connection mute for an hour."""
    leader = {"node_id": 2, "host": "127.0.0.1", "port": 24623}
    refused = {"index": 0, "error_code": 6, "current_leader": {"leader_id": 2, "leader_epoch": 3}}
    for throttled_ms in (0, 1234):
        values = {
            "responses": [{"name": "t", "partition_responses": [refused]}],
            "throttle_time": throttled_ms,
            "node_endpoints": [leader],
        }
        frame = encode_response(build(response_type(ApiKey.PRODUCE, 10), values), 7)
        assert throttle_ms(ApiKey.PRODUCE, 10, frame) == throttled_ms


def test_throttle_time_is_read_in_every_version_of_every_api() -> None:
    seen = 0
    for api_key, (lowest, highest) in supported().items():
        for version in range(lowest, highest + 1):
            kind = response_type(api_key, version)
            names = [each.name for each in dataclasses.fields(kind)]
            has = names[:1] == ["throttle_time"]
            frame = encode_response(build(kind, {"throttle_time": 77} if has else {}), 1)
            assert throttle_ms(api_key, version, frame) == (77 if has else 0), (api_key, version)
            seen += has
    assert seen > 100


def test_a_produce_is_never_repeated() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        one, two = world.brokers

        async def drop(peer: Peer, head: RequestHead, request: Any) -> None:
            peer.close()

        one.on(ApiKey.PRODUCE, drop)
        two.answers(ApiKey.PRODUCE, produced)
        results = await cluster.produce_raw({T0: b"batch0", T1: b"batch1"})
        assert (results[T1].base_offset, results[T1].error) == (7, None)
        assert results[T0].error is not None
        assert results[T0].error.name == "NETWORK_EXCEPTION"
        assert len(one.seen(ApiKey.PRODUCE)) == 1
        assert one.requests[-1][0].version == 11
        two.answers(ApiKey.PRODUCE, lambda request: produced(request, error_code=6))
        results = await cluster.produce_raw({T1: b"batch1"})
        assert results[T1].error is not None
        assert results[T1].error.code == 6
        assert len(two.seen(ApiKey.PRODUCE)) == 2
        with pytest.raises(ValueError, match="acks=0"):
            await cluster.produce_raw({T1: b""}, acks=0)

    in_world(test)


@pytest.mark.parametrize("at_most", [12, 13, 18])
def test_fetches_by_name_and_by_id(at_most: int) -> None:
    def answer(request: Any) -> dict[str, Any]:
        (topic,) = request.topics
        identity = {"topic": topic.topic} if hasattr(topic, "topic") else {"topic_id": topic.topic_id}
        assert identity in ({"topic": "t"}, {"topic_id": TOPIC_ID})
        (one,) = topic.partitions
        partition = {
            "partition_index": one.partition,
            "high_watermark": 9,
            "last_stable_offset": 8,
            "log_start_offset": 2,
            "records": b"batches from %d" % one.fetch_offset,
            "aborted_transactions": [{"producer_id": 5, "first_offset": 3}],
        }
        return {"responses": [{**identity, "partitions": [partition]}]}

    async def test(world: World, cluster: ClusterClient) -> None:
        one = world.brokers[0]
        one.answers(ApiKey.FETCH, answer)
        raw = await cluster.fetch_raw(1, [FetchFrom("t", 0, 3)], at_most=at_most)
        assert raw.version == at_most
        fetched = decode_fetch(raw)[T0]
        assert fetched == (b"batches from 3", 9, 8, 2, ((5, 3),), None, None)

    in_world(test)


def test_a_fetch_that_names_what_was_read_is_told_where_the_log_is_another_one() -> None:
    def answer(request: Any) -> dict[str, Any]:
        (topic,) = request.topics
        (one,) = topic.partitions
        partition = {"partition_index": one.partition, "diverging_epoch": {"epoch": 3, "end_offset": 17}}
        return {"responses": [{"topic_id": topic.topic_id, "partitions": [partition]}]}

    async def test(world: World, cluster: ClusterClient) -> None:
        one = world.brokers[0]
        one.answers(ApiKey.FETCH, answer)
        fetched = await cluster.fetch("t", 0, 20, fetched_epoch=4)
        (asked,) = one.seen(ApiKey.FETCH)
        assert asked.topics[0].partitions[0].last_fetched_epoch == 4
        assert (fetched.diverging, fetched.records, fetched.error) == ((3, 17), b"", None)

    in_world(test)


def test_fetch_tells_errors_that_are_not_about_the_leader() -> None:
    async def test(world: World, cluster: ClusterClient) -> None:
        world.brokers[0].answers(
            ApiKey.FETCH,
            {"responses": [{"topic_id": TOPIC_ID, "partitions": [{"partition_index": 0, "error_code": 1}]}]},
        )
        fetched = await cluster.fetch("t", 0, 1000)
        assert fetched.error is not None
        assert fetched.error.name == "OFFSET_OUT_OF_RANGE"

    in_world(test)


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("a:1", ("a", 1)), ("[::1]:9092", ("::1", 9092)), ("127.0.0.1:65535", ("127.0.0.1", 65535))],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:b", "a:0", "a:65536"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(address)


def test_unknown_error_codes_have_a_name() -> None:
    assert (KafkaError(4711).code, KafkaError(4711).name) == (4711, "UNKNOWN_ERROR_CODE_4711")
    assert KafkaError(6).retriable
    assert str(KafkaError(44, "no")) == "POLICY_VIOLATION (44): no"
