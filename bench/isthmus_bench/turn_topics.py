"""Topics of one turn of a benchmark, which go soon after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from isthmus_bench.load import RawClient, Target, newest_versions, wait_for_topic
from isthmus_protocol.schema import ApiKey

TOPIC_SETTINGS: Final = {"file.delete.delay.ms": "1000"}


def create(target: Target, partitions: int, replicas: Sequence[int] = ()) -> None:
    """``replicas``: on these brokers, led by the first; else on one for each partition."""
    chosen = {**TOPIC_SETTINGS, "min.insync.replicas": str(min(2, max(1, len(replicas))))}
    settings = [{"name": name, "value": value} for name, value in chosen.items()]
    topic: dict[str, Any] = {"name": target.topic, "configs": settings}
    if replicas:
        entries = [{"partition_index": index, "broker_ids": list(replicas)} for index in range(partitions)]
        topic |= {"num_partitions": -1, "replication_factor": -1, "assignments": entries}
    else:
        topic |= {"num_partitions": partitions, "replication_factor": 1}
    _ask(target, ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 30_000})
    wait_for_topic(target)


def delete(target: Target) -> None:
    topic = {"name": target.topic, "topic_id": None}
    _ask(target, ApiKey.DELETE_TOPICS, {"topics": [topic], "topic_names": [target.topic], "timeout": 30_000})


def _ask(target: Target, api_key: ApiKey, values: Mapping[str, Any]) -> None:
    client = RawClient(target)
    try:
        client.ask(api_key, newest_versions(client)[api_key], values)
    finally:
        client.close()
