"""User story: after a cluster has followed another one, its own producers write, and none of their records is lost.

Every cluster hands out producer ids from 0 upwards. A copied batch with the id of a local producer would take the place
of that producer's batches: they would be acked, as duplicates, and not stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kafka import unique
from support.links import Linked, Side, linked, until
from support.wire import PLAIN, Wire, batch_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

FOR_EVER = {"retention.ms": "-1"}
"""The records are older than the default retention."""


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.attach()
        yield pair


def new_producer_id(side: Side, at_least: int = 0) -> int:
    """An id of this cluster's own."""
    asked = {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1}
    with Wire(side.kafka.bootstrap_servers.split(",")[0]) as wire:

        def given() -> Any:  # a broker that has just started has none for a moment
            answer = wire.request(ApiKey.INIT_PRODUCER_ID, 4, asked)
            return answer if answer.error_code == 0 else None

        while True:
            producer_id = int(until("there are producer ids", given).producer_id)
            if producer_id >= at_least:
                return producer_id


def produce(side: Side, topic: str, producer_id: int, value: bytes) -> tuple[int, int]:
    """The first batch of an idempotent producer: (error code, base offset)."""
    like = PLAIN._replace(producer_id=producer_id, producer_epoch=0, base_sequence=0)
    data = [{"name": topic, "partition_data": [{"index": 0, "records": batch_of([value], like)}]}]
    with Wire(side.bootstrap) as wire:
        values = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": data}
        [answer] = wire.request(ApiKey.PRODUCE, 9, values).responses
        [partition] = answer.partition_responses
        return int(partition.error_code), int(partition.base_offset)


def same_id(link: Linked) -> int:
    """A producer id that both clusters have handed out."""
    wanted = 0
    while True:
        ids = [new_producer_id(side, wanted) for side in (link.a, link.b)]
        if ids[0] == ids[1]:
            return ids[0]
        wanted = max(ids) + 1  # blocks of ids end: then the other cluster has to catch up


def test_without_translation_an_acked_record_is_lost(link: Linked) -> None:
    producer_id, topic = same_id(link), unique("copied-as-it-is")
    link.b.create_topic(topic, config=FOR_EVER)
    assert produce(link.b, topic, producer_id, b"copied from A") == (0, 0)
    assert produce(link.b, topic, producer_id, b"B's own") == (0, 0), "acked, as the duplicate of what it is not"
    assert [each.value for each in link.b.read(topic)] == [b"copied from A"]


def test_with_translation_both_are_there(link: Linked) -> None:
    producer_id, topic = same_id(link), unique("t")
    source, target = link.local + topic, link.remote + topic
    link.a.create_topic(source, config=FOR_EVER)
    assert produce(link.a, source, producer_id, b"copied from A") == (0, 0)
    link.wait_end(target, 1)
    link.detach()
    link.b.proxy.cli("namespace", "alter", link.remote, "--no-reserved")
    assert produce(link.b, target, producer_id, b"B's own") == (0, 1)
    assert [each.value for each in link.b.read(target)] == [b"copied from A", b"B's own"]
