"""Batches that are larger than their topic's limits: lowered at the source since, or raised there a moment ago."""

from __future__ import annotations

import time

import pytest
from support.links import linked, truncated, until
from support.source_topics import alter_topic

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="settings that are refused")]
RAISED_BYTES = 5_000_000
LOWERED = {"max.message.bytes": "1000000", "segment.bytes": "1048576"}


@pytest.mark.parametrize("limit", sorted(LOWERED))
def test_they_are_copied_and_survive_a_truncation(kafka_pair: tuple[KafkaCluster, KafkaCluster], limit: str) -> None:
    with linked(*kafka_pair) as link:
        source, target = link.names("large")
        link.a.create_topic(source, config={"max.message.bytes": "8000000"}, direct=True)
        link.a.produce(source, [b"x"], direct=True)
        link.a.produce(source, [b"x" * 6_000_000], direct=True, message_max_bytes=8_000_000)
        link.a.produce(source, [b"x"] * 10, direct=True)
        alter_topic(link.a, source, {limit: LOWERED[limit]})
        link.attach()
        link.wait_end(target, 12)
        raised = int(link.b.topic_config(target)[limit])
        assert raised >= 6_000_000
        assert link.b.proxy.get(f"/v1/topics/{target}")["overrides"][limit] == str(raised)
        link.wait_following()
        assert link.verify()["equal"]

        link.b.produce(target, [b"a stranger's"], direct=True)
        link.a.produce(source, [b"goes on"], direct=True)
        told = truncated(link, target)
        assert told["messages_truncated"] in (1, 2), "the stranger's, and what may have come behind it"
        assert told["refills_failed"] == 0
        link.wait_end(target, 13)
        link.wait_following()
        assert link.verify()["equal"]
        assert len(link.b.proxy.get(f"/v1/links/{link.name}/truncations")["items"]) == 1

        until("promoted", lambda: link.b.proxy.cli("link", "promote", link.name, "--local", link.remote), 20)
        ours, theirs = link.b.topic_config(target), link.a.topic_config(source)
        assert {name: ours[name] for name in LOWERED} == {name: theirs[name] for name in LOWERED}


def test_a_limit_that_is_raised_under_load_keeps_the_link_in_sync(
    kafka_pair: tuple[KafkaCluster, KafkaCluster],
) -> None:
    """Large records wait for the operator; the target has the lower limit when they come."""
    with linked(*kafka_pair) as link:
        source, target = link.names("raised")
        link.a.create_topic(source, config={"max.message.bytes": "100000"})
        link.attach()
        link.wait_following()
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("In-Sync", lambda: [each["state"] for each in link.a.partitions(link.name)] == ["In-Sync"])
        writing = link.a.producer(linger_ms=0, message_max_bytes=2 * RAISED_BYTES)
        failed: list[str] = []
        sent = 0

        def send(value: bytes) -> None:
            nonlocal sent
            writing.produce(
                source, value, partition=0, on_delivery=lambda error, _: failed.append(str(error)) if error else None
            )
            sent += 1

        for _ in range(20):
            send(b"load")
        alter_topic(link.a, source, {"max.message.bytes": str(RAISED_BYTES)})
        until("the source takes them", lambda: link.a.topic_config(source)["max.message.bytes"] == str(RAISED_BYTES))
        began = time.monotonic()
        for _ in range(3):
            send(b"x" * (RAISED_BYTES - 100_000))
            for _ in range(20):
                send(b"load")
        while writing.flush(0.05):
            (told,) = link.a.partitions(link.name)
            assert told["state"] == "In-Sync", told
            assert time.monotonic() - began < 30
        assert not [each for each in failed if "MSG_SIZE" not in each]  # its broker may hear of it late, too
        link.wait_end(target, link.a.end(source))
        (told,) = link.a.partitions(link.name)
        assert told["state"] == "In-Sync"
        until("the source's", lambda: link.b.topic_config(target)["max.message.bytes"] == str(RAISED_BYTES), 30)
        assert "max.message.bytes" not in link.b.proxy.get(f"/v1/topics/{target}")["overrides"]
        assert link.verify()["equal"]
