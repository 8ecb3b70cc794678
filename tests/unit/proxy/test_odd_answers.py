"""Whatever a broker answers to what the proxy asks: a value, or one of the two errors that all are prepared for."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import uvloop
from support.scripted_broker import Peer, ScriptedBroker, metadata_of

from isthmus import cluster_access
from isthmus.cluster_access import ClusterAccess
from isthmus.kafka import group_existence
from isthmus.kafka.client import ClusterClient
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    CommittedOffset,
    FetchPartition,
    KafkaRefused,
    NewTopic,
    TransactionMarkers,
)
from isthmus_protocol.messages import RequestHead
from isthmus_protocol.schema import ApiKey

TOPIC_ID: Final = uuid.UUID(int=77)
PLACE: Final = ("t", 0)
DEADLINE_S: Final = 0.3
"""How long is asked again, where that may help."""


async def _fetched(cluster: ClusterAccess) -> Any:
    connection = await cluster.fetch_connection(1, "lane")
    return await connection.fetch([FetchPartition(TOPIC_ID.bytes, 0, 0, 100)], 0, 100)


async def _fetched_changes(cluster: ClusterAccess) -> Any:
    connection = await cluster.fetch_connection(1, "lane")
    wanted = [FetchPartition(TOPIC_ID.bytes, 0, 0, 100)]
    return [await connection.fetch(wanted, 0, 100, only_changes=True) for _ in range(2)]


async def _produced(cluster: ClusterAccess) -> Any:
    connection = await cluster.produce_connection(1, "lane")
    return await connection.produce([{PLACE: b"batch"}], 1000)


async def _marked(cluster: ClusterAccess) -> Any:
    connection = await cluster.produce_connection(1, "lane")
    return await connection.write_markers([TransactionMarkers("t", 0, 1, 0, True, 0, 1)], 1000)


ASKED: Final[dict[str, Callable[[ClusterAccess], Awaitable[Any]]]] = {
    "topics": lambda cluster: cluster.topics(),
    "topic": lambda cluster: cluster.topic("t"),
    "unknown_topics": lambda cluster: cluster.unknown_topics([TOPIC_ID.bytes], "cluster"),
    "leader_of": lambda cluster: cluster.leader_of("t", 0),
    "broker_racks": lambda cluster: cluster.broker_racks(),
    "reassigned": lambda cluster: cluster.reassigned(),
    "reassign": lambda cluster: cluster.reassign({PLACE: [1, 2]}),
    "topic_configs": lambda cluster: cluster.topic_configs("t"),
    "effective_configs": lambda cluster: cluster.effective_configs(["t"]),
    "create_topic": lambda cluster: cluster.create_topic("t", 1, 1, {}),
    "try_topics": lambda cluster: cluster.try_topics([NewTopic("t", 1, 1, {})]),
    "delete_topic_id": lambda cluster: cluster.delete_topic_id(TOPIC_ID.bytes),
    "create_partitions": lambda cluster: cluster.create_partitions("t", 2),
    "alter_topic_configs": lambda cluster: cluster.alter_topic_configs("t", {"retention.ms": "1"}),
    "broker_configs": lambda cluster: cluster.broker_configs("log.dirs"),
    "cluster_config": lambda cluster: cluster.cluster_config("a"),
    "alter_cluster_config": lambda cluster: cluster.alter_cluster_config("a", "b"),
    "log_end": lambda cluster: cluster.log_end("t", 0),
    "high_watermark": lambda cluster: cluster.high_watermark("t", 0),
    "last_stable_offset": lambda cluster: cluster.last_stable_offset("t", 0),
    "offsets_for_times": lambda cluster: cluster.offsets_for_times({PLACE: 1}),
    "log_start": lambda cluster: cluster.log_start("t", 0),
    "log_ends": lambda cluster: cluster.log_ends([PLACE]),
    "high_watermarks": lambda cluster: cluster.high_watermarks([PLACE]),
    "epoch_end": lambda cluster: cluster.epoch_end("t", 0, 1),
    "delete_records": lambda cluster: cluster.delete_records("t", 0, 1),
    "producers": lambda cluster: cluster.producers("t", 0),
    "completing_transactions": lambda cluster: cluster.completing_transactions(),
    "fence_transaction": lambda cluster: cluster.fence_transaction("id", 1, 0),
    "groups": lambda cluster: cluster.groups(),
    "committed_offsets": lambda cluster: cluster.committed_offsets(["g"]),
    "commit_offsets": lambda cluster: cluster.commit_offsets("g", {PLACE: CommittedOffset(1, "")}),
    "delete_offsets": lambda cluster: cluster.delete_offsets("g", [PLACE]),
    "delete_group": lambda cluster: cluster.delete_group("g"),
    "group_exists": lambda cluster: cluster.group_exists("g"),
    "acls": lambda cluster: cluster.acls(),
    "fetch": _fetched,
    "fetch only_changes": _fetched_changes,
    "produce": _produced,
    "write_markers": _marked,
}


def _whole(peer: Peer, head: RequestHead, **values: Any) -> bytes:
    return peer.answer(head, values)


def empty(peer: Peer, head: RequestHead) -> bytes:
    return _whole(peer, head)


def throttled(peer: Peer, head: RequestHead) -> bytes:
    """Nothing, and a time: what is asked is not done (KIP-219 has Fetch answered so)."""
    answer = bytearray(_whole(peer, head))
    if len(answer) >= 16:
        answer[8:12] = b"\x00\x00\x00\x01"
    return bytes(answer)


def unknown_code(peer: Peer, head: RequestHead) -> bytes:
    """An error of the whole that no version of the protocol has, where the answer has a place for one."""
    answer = _whole(peer, head)
    with contextlib.suppress(TypeError, LookupError, ValueError):
        return _whole(peer, head, error_code=31_999)
    return answer


def short(peer: Peer, head: RequestHead) -> bytes:
    """A frame that ends in the middle of what it says."""
    answer = _whole(peer, head)
    kept = answer[4 : max(9, len(answer) - 3)]
    return len(kept).to_bytes(4, "big") + kept


def garbage(peer: Peer, head: RequestHead) -> bytes:
    body = head.correlation_id.to_bytes(4, "big") + b"\x7f\xff\xff\xff" * 8
    return len(body).to_bytes(4, "big") + body


@pytest.mark.fails_on_purpose
@pytest.mark.parametrize("odd", [empty, throttled, unknown_code, short, garbage], ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("asked", ASKED)
def test_it_is_a_value_or_an_error_that_everybody_knows(
    asked: str, odd: Callable[[Peer, RequestHead], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_access, "POSITION_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(cluster_access, "THROTTLED_MAX_S", DEADLINE_S)
    monkeypatch.setattr(group_existence, "EXISTS_DEADLINE_S", DEADLINE_S)

    async def work() -> None:
        async with ScriptedBroker(1) as broker:
            answers_metadata = True

            async def answer(peer: Peer, head: RequestHead, request: Any) -> None:
                if head.api_key == ApiKey.METADATA and answers_metadata:
                    topics = {"t": {"topic_id": TOPIC_ID, "leaders": {0: (1, 5)}}}
                    peer.send(peer.answer(head, metadata_of([broker], topics)))
                elif head.api_key == ApiKey.FIND_COORDINATOR and asked != "group_exists":
                    found = {"key": "g", "node_id": 1, "host": broker.host, "port": broker.port}
                    peer.send(peer.answer(head, {"coordinators": [found]}))
                else:
                    peer.send(odd(peer, head))

            for api_key in broker.versions:
                if api_key != ApiKey.API_VERSIONS:
                    broker.on(api_key, answer)
            client = ClusterClient([broker.address], request_timeout_s=DEADLINE_S, retry_deadline_s=DEADLINE_S)
            async with client, asyncio.timeout(20):
                cluster = ClusterAccess(client)
                answers_metadata = asked not in ("topics", "topic", "leader_of")
                with contextlib.suppress(BrokerUnavailable, KafkaRefused):
                    await ASKED[asked](cluster)

    uvloop.run(work())
