"""Large batches over a thin line: the acks of other topics do not wait for them."""

from __future__ import annotations

import os
import time
from typing import Final

import pytest
from confluent_kafka import KafkaError, Message
from support.links import relayed, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

BYTES_PER_S: Final = 6_000_000
LARGE_BYTES: Final = 20_000_000
LARGE: Final = 2
"""So many large batches at once, each of a partition of its own: alone they take seven seconds."""
CONFIRM_TIMEOUT_MS: Final = 5000


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_large_batches_of_one_topic_keep_no_ack_of_another(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    with relayed(*kafka_pair, bytes_per_s=BYTES_PER_S) as (link, _):
        (large, large_remote), (small, small_remote) = link.names("large"), link.names("small")
        link.a.create_topic(large, LARGE, config={"max.message.bytes": str(2 * LARGE_BYTES)})
        link.a.create_topic(small)
        link.attach()
        link.wait_following(2)
        timeout = "--confirm-timeout-ms", str(CONFIRM_TIMEOUT_MS)
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous", *timeout))
        until("In-Sync", lambda: {each["state"] for each in link.a.partitions(link.name)} == {"In-Sync"})

        pushing = link.a.producer(linger_ms=0, message_max_bytes=2 * LARGE_BYTES, queue_buffering_max_kbytes=100_000)
        large_acked: list[KafkaError | None] = []
        for partition in range(LARGE):
            pushing.produce(
                large,
                os.urandom(LARGE_BYTES),
                partition=partition,
                on_delivery=lambda error, _: large_acked.append(error),
            )
        pushing.poll(0)
        until("the source has them", lambda: [link.a.end(large, each) for each in range(LARGE)] == [1] * LARGE)
        sent = before = 0
        took = []
        writing = link.a.producer(linger_ms=0, acks="all")
        while len(large_acked) < LARGE:
            at = time.monotonic()
            acked: list[Message] = []
            writing.produce(small, b"x", partition=0, on_delivery=lambda _, message, to=acked: to.append(message))
            assert writing.flush(10) == 0
            assert acked[0].error() is None
            sent += 1
            took.append(time.monotonic() - at)
            before += not large_acked
            found = link.a.partition(link.name, small)
            assert found is not None
            assert found["state"] == "In-Sync", (found, took)
            pushing.poll(0)
        assert before > 1, f"acked with the large ones: {took}"
        link.wait_end(small_remote, sent)
        for partition in range(LARGE):
            link.wait_end(large_remote, 1, partition)
