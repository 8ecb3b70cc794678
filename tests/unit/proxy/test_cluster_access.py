"""The access to its cluster is all that plugins are promised: nobody checks its structure where it is passed on."""

from __future__ import annotations

import asyncio
import gc
import inspect
import uuid
from typing import Any

import pytest
from support.scripted_broker import Peer, ScriptedBroker

from isthmus.cluster_access import ClusterAccess, FetchOverConnection, ProduceOverConnection
from isthmus.kafka.client import BrokerConnection, ClusterClient
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    ClusterApi,
    FetchConnection,
    FetchPartition,
    KafkaRefused,
    ProduceConnection,
)
from isthmus_protocol.bodies import error_code
from isthmus_protocol.schema import ApiKey


@pytest.mark.parametrize(
    ("own", "promised"),
    [(ClusterAccess, ClusterApi), (ProduceOverConnection, ProduceConnection), (FetchOverConnection, FetchConnection)],
)
def test_nothing_is_missing(own: type, promised: type) -> None:
    names = [name for name, _ in inspect.getmembers(promised, inspect.isfunction) if not name.startswith("_")]
    assert names
    for name in names:
        wanted, found = (inspect.signature(getattr(each, name)).parameters for each in (promised, own))
        assert list(found) == list(wanted), name


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_burst_whose_connection_is_lost_fails_once(cancelled: bool) -> None:
    """Of the answers that nobody waits for any more, nothing is said."""
    said: list[Any] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        taken = asyncio.Event()

        async def lost(peer: Peer, head: Any, request: Any) -> None:
            taken.set()
            if not cancelled:
                peer.close()

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.PRODUCE, lost)
            connection = await BrokerConnection.connect(broker.host, broker.port)
            batches = [{("t", 0): b"first"}, {("t", 0): b"second"}, {("t", 0): b"third"}]
            burst = ProduceOverConnection(connection).produce(batches, 1000)
            produced = asyncio.get_running_loop().create_task(burst)
            await taken.wait()
            if cancelled:
                produced.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else BrokerUnavailable):
                await produced
            await connection.close()
        gc.collect()

    asyncio.run(test())
    assert said == []


@pytest.mark.fails_on_purpose
def test_an_answer_that_nobody_foresaw_is_a_broker_that_cannot_be_used_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(self: ClusterClient, *asked: object) -> None:
        raise KeyError("t-0")

    monkeypatch.setattr(ClusterClient, "refresh", odd)
    with pytest.raises(BrokerUnavailable, match=r"not understood: KeyError\('t-0'\)"):
        asyncio.run(ClusterAccess(ClusterClient(["localhost:1"])).topics())


@pytest.mark.parametrize("only_changes", [False, True])
def test_a_throttled_read_says_nothing_of_the_logs_and_is_done_again(only_changes: bool) -> None:
    topic_id = uuid.UUID(int=7)
    throttled_s = 0.2

    async def test() -> None:
        loop = asyncio.get_running_loop()
        asked: list[tuple[float, int, int]] = []

        async def fetched(peer: Peer, head: Any, request: Any) -> None:
            asked.append((loop.time(), request.session_id, request.session_epoch))
            values: dict[str, Any] = {"throttle_time": int(throttled_s * 1000), "session_id": request.session_id}
            if len(asked) != 2:
                part = {"partition_index": 0, "high_watermark": 5, "last_stable_offset": 5, "records": b""}
                values = {"responses": [{"topic_id": topic_id, "partitions": [part]}], "session_id": 9 * only_changes}
            peer.send(peer.answer(head, values))

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.FETCH, fetched)
            connection = await BrokerConnection.connect(broker.host, broker.port)
            fetch = FetchOverConnection(connection)
            for offset in (0, 1):
                wanted = [FetchPartition(topic_id.bytes, 0, offset, 100)]
                (part,) = await fetch.fetch(wanted, 0, 100, only_changes=only_changes)
                assert part.high_watermark == 5
            await connection.close()
        assert len(asked) == 3
        assert asked[2][0] - asked[1][0] >= 0.9 * throttled_s
        sessions = [session for _, *session in asked]
        assert sessions == ([[0, 0], [9, 1], [9, 2]] if only_changes else [[0, -1]] * 3)

    asyncio.run(test())


def test_a_read_that_lacks_partitions_is_no_read() -> None:
    async def test() -> None:
        async with ScriptedBroker() as broker:
            broker.answers(ApiKey.FETCH, {})
            connection = await BrokerConnection.connect(broker.host, broker.port)
            with pytest.raises(BrokerUnavailable, match="answers without some partitions"):
                await FetchOverConnection(connection).fetch([FetchPartition(bytes(16), 0, 0, 100)], 0, 100)
            await connection.close()

    asyncio.run(test())


def test_a_topic_that_this_proxy_may_not_be_told_of_is_not_taken_for_one_that_there_is_not() -> None:
    async def test() -> None:
        code = 29

        async def told(peer: Peer, head: Any, request: Any) -> None:
            topics = [{"name": "t", "error_code": error_code(code), "partitions": []}] if request.topics else []
            peer.send(peer.answer(head, {"topics": topics}))

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.METADATA, told)
            async with ClusterClient([f"{broker.host}:{broker.port}"]) as client:
                access = ClusterAccess(client)
                for _ in range(2):
                    with pytest.raises(KafkaRefused, match="TOPIC_AUTHORIZATION_FAILED"):
                        await access.topic("t")
                code = 3
                assert await access.topic("t") is None
                code = 29
                with pytest.raises(KafkaRefused, match="TOPIC_AUTHORIZATION_FAILED"):
                    await access.topic("t")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("code", "raises"),
    [
        (0, None),
        (51, None),  # CONCURRENT_TRANSACTIONS: it is being ended
        (90, None),  # PRODUCER_FENCED: the id is another producer's
        (47, None),  # INVALID_PRODUCER_EPOCH
        (53, KafkaRefused),  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        (16, BrokerUnavailable),  # NOT_COORDINATOR
    ],
)
def test_a_transaction_is_fenced_by_one_request_that_names_its_producer(
    code: int, raises: type[Exception] | None
) -> None:
    asked: list[tuple[str, int, int]] = []

    async def test() -> None:
        async def init(peer: Peer, head: Any, request: Any) -> None:
            asked.append((request.transactional_id, request.producer_id, request.producer_epoch))
            peer.send(peer.answer(head, {"error_code": error_code(code), "producer_id": 7, "producer_epoch": 4}))

        async with ScriptedBroker() as broker:
            here = {"node_id": 1, "host": broker.host, "port": broker.port}
            broker.answers(ApiKey.METADATA, {"brokers": [{**here, "rack": None}], "controller_id": 1})
            broker.answers(ApiKey.FIND_COORDINATOR, {"coordinators": [{**here, "key": "app"}]})
            broker.on(ApiKey.INIT_PRODUCER_ID, init)
            async with ClusterClient([f"{broker.host}:{broker.port}"]) as client:
                fence = ClusterAccess(client).fence_transaction("app", 7, 3)
                if raises is None:
                    await fence
                else:
                    with pytest.raises(raises):
                        await fence

    asyncio.run(test())
    assert asked == [("app", 7, 3)]
