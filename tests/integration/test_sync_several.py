"""A namespace on several synchronous links, between real clusters: an ack waits for all that are in sync."""

from __future__ import annotations

from typing import Any

import pytest
from support.kafka import unique
from support.links import Side, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

CONFIRM_TIMEOUT_MS = "8000"
"""The same for both: else the one that is to stay might stay for that alone."""


def test_acks_wait_for_every_link_and_one_that_stands_still_leaves_alone(
    kafka_pair: tuple[KafkaCluster, KafkaCluster],
) -> None:
    with linked(*kafka_pair) as link, KafkaCluster(name="several-c") as kafka, whole(kafka) as proxy:
        proxy.wait_ready()
        a, b, c = link.a, link.b, Side(kafka, [proxy])
        other, prefix = unique("other"), unique("both-") + "-"
        topic = prefix + "t"
        a.proxy.cli("link", "create", other, "--remote", c.proxy.link_address)
        a.create_topic(topic)

        def partition(name: str) -> dict[str, Any]:
            found = a.partition(name, topic)
            return found or {}

        for name in (link.name, other):
            until("connected", lambda name=name: a.link(name)["state"] != "Disconnected", 60)
            a.proxy.cli("link", "attach", name, "--local", prefix, "--remote", prefix, "--role", "leader")
            until("it follows", lambda name=name: partition(name).get("state") == "Following", 60)
            mode = "link", "set-mode", name, "synchronous", "--confirm-timeout-ms", CONFIRM_TIMEOUT_MS
            until("accepted", lambda mode=mode: a.proxy.cli(*mode), 60)
            until("In-Sync", lambda name=name: partition(name).get("state") == "In-Sync", 60)

        for number in range(20):
            (offset,) = a.produce(topic, [b"%d" % number])
            assert min(b.end(topic), c.end(topic)) > offset, "acked before both have it"
        since = partition(link.name)["sync"]["since_ms"]
        c.proxy.pause()
        try:
            (offset,) = a.produce(topic, [b"meanwhile"])
            assert partition(other)["state"] == "Out-Of-Sync", "acked without C, and C is not out of sync"
            assert b.end(topic) > offset
            for number in range(20):
                (offset,) = a.produce(topic, [b"%d" % number])
                assert b.end(topic) > offset, "acked before B has it"
            assert partition(link.name)["sync"]["state"] == "In-Sync"
            assert partition(link.name)["sync"]["since_ms"] == since, "B left as well"
        finally:
            c.proxy.resume()
        until("In-Sync again", lambda: partition(other).get("state") == "In-Sync", 60)
        (offset,) = a.produce(topic, [b"both"])
        assert min(b.end(topic), c.end(topic)) > offset
