"""Links with a proxy for each broker on either side."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaException
from support.kafka import unique
from support.links import Side, linked, sidecars, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers


@pytest.mark.one_in_ci("stories", of="faults of steps")
@pytest.mark.parametrize("sidecars_lead", [True, False])
def test_sidecars(kafka_three: KafkaCluster, kafka: KafkaCluster, sidecars_lead: bool) -> None:
    """Three brokers with a proxy each on one side, one proxy on the other, in both roles."""
    three, one = sidecars(kafka_three), [whole(kafka)]
    a, b = (kafka_three, kafka) if sidecars_lead else (kafka, kafka_three)
    with linked(a, b, a_proxies=three if sidecars_lead else one, b_proxies=one if sidecars_lead else three) as link:
        link.attach()
        name = unique("sidecar")
        source, target = link.local + name, link.remote + name
        link.a.create_topic(source, 6)
        for partition in range(6):
            link.a.produce(source, [b"%d" % number for number in range(100)], partition)
        for partition in range(6):
            link.wait_end(target, 100, partition)
        link.wait_following()
        side = link.a if sidecars_lead else link.b
        topic = source if sidecars_lead else target
        spread = [
            len([each for each in side.link(link.name, proxy)["partitions"] if each["topic"] == topic])
            for proxy in three
        ]
        assert sum(spread) == 6
        assert sum(count > 0 for count in spread) >= 2
        assert link.verify()["equal"]

        # One of them goes, and its broker's partitions wait for it; the others go on.
        three[1].kill()
        for partition in range(6):
            link.a.produce(source, [b"more"], partition, direct=True)
        with_proxy = [p for p in range(6) if leader_of(side, topic, p) != kafka_three.broker_ids[1]]
        for partition in with_proxy:
            link.wait_end(target, 101, partition)
        three[1].start()
        for partition in range(6):
            link.wait_end(target, 101, partition)
        link.wait_following()
        link.detach()
        with pytest.raises(KafkaException):
            link.b.produce(target, [b"reserved"])
        link.attach()
        link.wait_following()
        assert link.verify()["equal"]


def leader_of(side: Side, topic: str, partition: int) -> int:
    return int(side.admin(direct=True).list_topics(topic, timeout=20).topics[topic].partitions[partition].leader)
