"""A source's log holds batches that are larger than its limits are by now."""

from __future__ import annotations

import pytest
from support.links import linked, truncated, until
from support.source_topics import alter_topic

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="settings that are refused")]
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
