"""Leaders of a side's topics: who they are, and how they move."""

from __future__ import annotations

from isthmus_protocol.schema import ApiKey
from support.links import Side, until
from support.wire import Wire


def described(side: Side, topic: str) -> dict[int, tuple[int, list[int]]]:
    """By partition: the leader, and the replicas with the preferred one first."""
    partitions = side.admin(direct=True).list_topics(topic, timeout=20).topics[topic].partitions
    return {index: (info.leader, list(info.replicas)) for index, info in partitions.items()}


def move_leaders(side: Side, topic: str) -> None:
    """Every partition is led by its next replica."""
    before = described(side, topic)
    wanted = {index: [*replicas[1:], replicas[0]] for index, (_, replicas) in before.items()}
    order = [{"partition_index": index, "replicas": replicas} for index, replicas in wanted.items()]
    chosen = {"election_type": 0, "topic_partitions": [{"topic": topic, "partitions": list(wanted)}]}
    with Wire(side.kafka.bootstrap_servers.split(",")[0]) as wire:
        topics = [{"name": topic, "partitions": order}]
        assert wire.request(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, {"topics": topics}).error_code == 0
        assert wire.request(ApiKey.ELECT_LEADERS, 2, chosen).error_code == 0
    leaders = {index: replicas[0] for index, replicas in wanted.items()}
    until("they lead", lambda: {index: leader for index, (leader, _) in described(side, topic).items()} == leaders, 30)
