"""A synchronous link whose other cluster stands still: whom it keeps waiting, and what the proxy holds meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import KafkaError, Message, Producer
from support.kafka import unique
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

IN_FLIGHT_MAX: Final = 50
BIG: Final = os.urandom(256 * 1024)
PUSHERS: Final = 4
QUEUE_KB: Final = 24 * 1024
"""What a producer holds itself before it takes no more."""
HELD_MAX_BYTES: Final = 64 * 1024 * 1024
"""By how much the proxy of the source may grow: see docs/operations.md, *Memory*."""


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    a, b = kafka_pair
    with linked(a, b, a_proxies=[whole(a, client_listener={"in_flight_max": IN_FLIGHT_MAX})]) as pair:
        pair.attach()
        yield pair


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Pusher:
    """A producer on a connection of its own, and what became of its records."""

    def __init__(self, link: Linked, **settings: object) -> None:
        self.producer: Producer = link.a.producer(
            linger_ms=0, message_timeout_ms=120_000, request_timeout_ms=90_000, **settings
        )
        self.sent = 0
        self.acked: list[tuple[str, int]] = []
        self.errors: list[KafkaError] = []

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acked.append((message.topic(), message.offset()))
        else:
            self.errors.append(error)

    def send(self, topic: str, value: bytes) -> bool:
        """False: its queue is full."""
        self.producer.poll(0)
        try:
            self.producer.produce(topic, value, partition=0, on_delivery=self._delivered)
        except BufferError:
            return False
        self.sent += 1
        return True

    def wait(self, timeout_s: float = 60.0) -> None:
        assert self.producer.flush(timeout_s) == 0, f"{len(self.acked)} of {self.sent} acked; {self.errors}"


def test_who_writes_elsewhere_is_answered_and_what_the_proxy_holds_is_bounded(link: Linked) -> None:
    (topic, remote), (second, second_remote), other = link.names("t"), link.names("t"), unique("not-linked-")
    for name in (topic, second, other):
        link.a.create_topic(name)
    for name in (remote, second_remote):
        link.wait_end(name, 0)
    link.wait_following(2)
    command = "link", "set-mode", link.name, "synchronous", "--confirm-timeout-ms", "90000"
    until("accepted", lambda: link.a.proxy.cli(*command))
    until("In-Sync", lambda: [each["state"] for each in link.a.partitions(link.name)] == ["In-Sync"] * 2)

    big = [Pusher(link, acks="all", batch_size=len(BIG), queue_buffering_max_kbytes=QUEUE_KB) for _ in range(PUSHERS)]
    unacked = Pusher(link, acks=0, batch_size=len(BIG), queue_buffering_max_kbytes=QUEUE_KB)
    elsewhere, mixed = Pusher(link, acks="all"), Pusher(link, acks="all")
    for each in (*big, unacked):
        each.send(topic, b"before")
    mixed.send(second, b"before")
    for each in (elsewhere, mixed):
        each.send(other, b"before")
    for each in (*big, unacked, elsewhere, mixed):
        each.wait()
    before = resident_bytes(link.a.proxy.pid)
    most = before
    link.b.proxy.pause()
    try:
        full = 0
        while full < PUSHERS:  # until each of them is kept from sending more
            full = sum(not each.send(topic, BIG) for each in big)
            unacked.send(topic, BIG)
            most = max(most, resident_bytes(link.a.proxy.pid))
        mixed.send(second, b"waits")
        until("the broker has it", lambda: link.a.end(second) == 2)
        mixed.send(other, b"waits behind it")
        until("the broker has it, too", lambda: link.a.end(other) == 3)
        for _ in range(200):
            elsewhere.send(other, b"x")
            elsewhere.wait()
            most = max(most, resident_bytes(link.a.proxy.pid))
        for each in (*big, mixed):
            each.producer.poll(0.1)
        assert len(mixed.acked) == 2, "an answer went out before the one before it"
        assert [len(each.acked) for each in big] == [1] * PUSHERS, "acked, and the other side cannot have it"
        taken = link.a.end(topic) - unacked.sent
        assert taken < sum(each.sent for each in big), "nobody was kept from sending more"
        assert most - before < HELD_MAX_BYTES, f"grew by {(most - before) >> 20} MB"
    finally:
        link.b.proxy.resume()
    for each in (*big, unacked, elsewhere, mixed):
        each.wait()
        assert not each.errors
        assert len(each.acked) == each.sent
    link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")
