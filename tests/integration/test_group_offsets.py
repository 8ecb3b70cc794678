"""Group offsets where each broker has a proxy of its own, which tells of the groups that its broker coordinates."""

from __future__ import annotations

import pytest
from support.groups import commit, group_status, offsets
from support.kafka import unique
from support.links import linked, sidecars, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(120)]

GROUPS = 8


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
def test_groups_of_every_coordinator_arrive_and_a_killed_proxy_goes_on(
    kafka_three: KafkaCluster, kafka: KafkaCluster
) -> None:
    with linked(kafka_three, kafka, a_proxies=sidecars(kafka_three)) as pair:
        pair.attach()
        groups, there = unique("app-") + "-", unique("far-") + "-"
        pair.attach(groups, there, "--type", "consumer-group", "--disable-transaction-verification")
        topic, remote = pair.local + "t", pair.remote + "t"
        pair.a.create_topic(topic)
        pair.a.produce(topic, [b"x"] * 50)
        pair.wait_end(remote, 50)

        def arrived(offset: int) -> bool:
            return all(offsets(pair.b, f"{there}{number}") == {(remote, 0): offset} for number in range(GROUPS))

        for number in range(GROUPS):
            commit(pair.a, f"{groups}{number}", {(topic, 0): 10})
        until("all positions arrived", lambda: arrived(10), 20)
        told = {
            number: [
                proxy.name
                for proxy in pair.a.proxies
                if any(each["group"] == f"{groups}{number}" for each in pair.a.link(pair.name, proxy)["groups"])
            ]
            for number in range(GROUPS)
        }
        assert all(len(proxies) == 1 for proxies in told.values()), told
        assert len({name for proxies in told.values() for name in proxies}) > 1, "one proxy coordinates all groups"

        killed = pair.a.proxies[0]
        killed.kill()
        for number in range(GROUPS):
            commit(pair.a, f"{groups}{number}", {(topic, 0): 20}, direct=True)
        killed.spawn()
        killed.wait_ready()
        until("all positions arrived again", lambda: arrived(20), 30)
        until("nothing waits", lambda: (group_status(pair.b, pair.name, there + "0") or {}).get("pending") == 0, 20)
        assert pair.verify()["equal"]
