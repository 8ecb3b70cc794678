"""User story: a synchronous link stays In-Sync while topics, groups and namespaces come and go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.groups import commit, delete_group, group_status, offsets
from support.kafka import unique
from support.links import Linked, relayed, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, Watching, another_link, kills

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    with relayed(*kafka_pair) as (pair, relay):
        pair.raise_levels()
        yield pair, relay


@pytest.mark.parametrize("kill", kills("selection"))
def test_what_comes_and_goes_while_it_is_in_sync(scene: tuple[Linked, Relay], kill: Kill) -> None:
    names = {"orders-": unique("orders-") + "-", "audit-": unique("audit-") + "-"}
    orders, audit = names.values()
    groups = unique("app-") + "-"
    group, topic = groups + "1", orders + "new"
    with another_link(*scene) as link:
        link.attach(orders, orders, "--on-source-delete", "delete")
        link.attach(groups, groups, "--type", "consumer-group", "--disable-transaction-verification")
        link.wait_following()
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("In-Sync", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
        with (
            Watching(link) as watching,
            Runbook("selection", link, scene[1], names, kill, {"In-Sync"}, watching) as book,
        ):
            book.step("Create a topic")
            assert link.a.produce(topic, [b"first"], acks="all") == [0]
            assert link.b.end(topic) == 1, "an ack means both"

            book.step("A group commits, and is deleted")
            commit(link.a, group, {(topic, 0): 1})
            assert offsets(link.b, group) == {(topic, 0): 1}, "an ack means both"
            delete_group(link.a, group)
            until("A has it no more", lambda: group_status(link.a, link.name, group) is None)

            assert watching.seen == {"In-Sync"}, watching.told
            book.step("Delete the topic")
            until("it is gone", lambda: topic not in link.b.topics())
            until("nothing is told of it", lambda: not link.b.partitions(link.name, topic))
            until("In-Sync", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
            assert watching.seen <= {"In-Sync", "Out-Of-Sync"}, watching.told  # until its deletion is certain
            watching.seen.clear()

            book.step("Attach another namespace")
            link.a.create_topic(audit + "t")
            assert link.a.produce(audit + "t", [b"first"], acks="all") == [0]
            assert link.b.end(audit + "t") == 1, "from its first record on"

            book.step("Detach it")
            assert watching.seen == {"In-Sync"}, watching.told
            with watching.looking_away():  # what B does not hear for long it does not know
                scene[1].stall()  # whatever waits for the other side would wait
                try:
                    assert link.a.produce(audit + "t", [b"alone"], acks="all") == [1]
                finally:
                    scene[1].release()
                until("In-Sync", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
            assert watching.seen == {"In-Sync"}, watching.told
        assert [record.value for record in link.b.read(audit + "t")] == [b"first"]
        assert offsets(link.b, group) == {}, "they go with the topic"
