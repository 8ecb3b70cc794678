"""What a power loss takes from a broker: the ends of logs that were not flushed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.records import BatchHeader, walk
from support.links import Linked, linked, taking_transactions, until

FIRST: Final = 5
"""Records of a topic before its link is synchronous."""


def lose_end(kafka: KafkaCluster, broker_id: int, topic: str, partition: int = 0, batches: int = 1) -> BatchHeader:
    """Cut the last batches off a log of a broker that was killed; the header of the first of them.

    Started again, the broker takes the log as it finds it: it ended without having said that it ends well.
    """
    assert not kafka.alive(broker_id)
    directory = kafka.directory / f"broker-{broker_id}" / "data" / f"{topic}-{partition}"
    segment = max(directory.glob("*.log"))
    found = list(walk(memoryview(segment.read_bytes())))
    start, _, header = found[-batches]
    with segment.open("r+b") as file:
        file.truncate(start)
    return header


@contextmanager
def in_sync(source: KafkaCluster, target: KafkaCluster) -> Iterator[tuple[Linked, str, str]]:
    """A synchronous link, and its topic at both ends, with some records."""
    with linked(source, target) as link, taking_transactions(link.b):
        link.raise_levels()
        link.attach()
        here, there = link.names("power")
        link.a.create_topic(here)
        link.a.produce(here, [b"first"] * FIRST)
        link.wait_end(there, FIRST)
        link.wait_following()
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("In-Sync", lambda: link.a.link(link.name)["state"] == link.b.link(link.name)["state"] == "In-Sync")
        yield link, here, there


def one_by_one(link: Linked, topic: str, count: int) -> None:
    """Records that are acked, each a batch of its own."""
    producer = link.a.producer(enable_idempotence=True, linger_ms=0)
    for number in range(count):
        producer.produce(topic, b"%d" % number)
        assert producer.flush(30) == 0
