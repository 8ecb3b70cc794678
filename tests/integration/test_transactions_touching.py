"""What a transaction may touch: topics of no link, one, two; groups that follow over one of them, another, none.

Each combination is acked when what follows of it is there, and keeps no link from being In-Sync.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from support.groups import committed
from support.kafka import unique
from support.links import Linked, Side, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="topics that are new on a synchronous link")]

TOPICS = (), ("none",), ("one",), ("two",), ("none", "one", "two")
GROUPS = (None, "none", "one", "other")
ACKED_S = 20.0
"""How long a commit may take on a machine that is busy; what nobody answers is never acked."""


@dataclass
class Three:
    """A leads ``one`` and ``two`` to B, ``two`` to C; groups ``one`` to B, ``other`` to C; all has the same prefix."""

    link: Linked
    c: Side
    other: str
    prefix: str

    def named(self, what: str) -> str:
        return f"{self.prefix}{what}-x"

    def states(self) -> list[str]:
        return [str(self.link.a.link(name)["state"]) for name in (self.link.name, self.other)]


@pytest.fixture(scope="module")
def three(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Three]:
    with linked(*kafka_pair) as link, KafkaCluster(name="touching-c", brokers=1) as kafka, whole(kafka) as proxy:
        proxy.wait_ready()
        found = Three(link, Side(kafka, [proxy]), unique("other"), unique("touching") + "-")
        a = link.a.proxy
        a.cli("link", "create", found.other, "--remote", proxy.link_address)
        pairs = [
            (link.name, "topic", "one"),
            (link.name, "topic", "two"),
            (link.name, "consumer-group", "one"),
            (found.other, "topic", "two"),
            (found.other, "consumer-group", "other"),
        ]
        for what in ("none", "one", "two"):
            link.a.create_topic(found.named(what), direct=True)
        for name, kind, what in pairs:
            until("connected", lambda name=name: link.a.link(name)["state"] != "Disconnected")
            prefix = f"{found.prefix}{what}-"
            attach = "--type", kind, "--local", prefix, "--remote", prefix, "--role", "leader"
            a.cli("link", "attach", name, *attach, "--disable-transaction-verification")
        for name in (link.name, found.other):
            until("it follows", lambda name=name: link.a.link(name)["state"] == "Following")
            until("accepted", partial(a.cli, "link", "set-mode", name, "synchronous"))
        until("In-Sync", lambda: found.states() == ["In-Sync", "In-Sync"])
        yield found
        for name, kind, what in reversed(pairs):
            a.cli("link", "set-mode", name, "asynchronous")
            a.cli("link", "detach", name, "--type", kind, "--local", f"{found.prefix}{what}-")
        a.cli("link", "delete", found.other)


def test_every_combination_is_acked_when_what_follows_of_it_is_there(three: Three) -> None:
    a, b, c = three.link.a, three.link.b, three.c
    producer = Producer({"bootstrap.servers": a.bootstrap, "transactional.id": unique("touching")})
    producer.init_transactions(30)
    consumers: dict[str, Consumer] = {}
    ends = dict.fromkeys(("none", "one", "two"), 0)
    positions = dict.fromkeys(("none", "one", "other"), 0)
    for number, (topics, group) in enumerate(itertools.product(TOPICS, GROUPS), 1):
        if not topics and group is None:
            continue
        producer.begin_transaction()
        for what in topics:
            producer.produce(three.named(what), b"%d" % number)
            ends[what] += 2  # and the marker
        if group is not None:
            consumer = consumers.get(group)
            if consumer is None:
                consumer = consumers[group] = Consumer(
                    {"bootstrap.servers": a.bootstrap, "group.id": three.named(group), "enable.auto.commit": False}
                )
            positions[group] = ends["two"]
            position = TopicPartition(three.named("two"), 0, ends["two"])
            producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), 30)
        began = time.monotonic()
        producer.commit_transaction(ACKED_S)
        assert time.monotonic() - began < ACKED_S, (topics, group)
        values = b"%d" % number
        for what, sides in (("one", (b,)), ("two", (b, c))):
            if what in topics:
                for side in sides:
                    until("its marker is there", lambda s=side, w=what: s.end(three.named(w)) == ends[w])
                    last = side.read(three.named(what), isolation="read_committed")[-1]
                    assert last.value == values, (topics, group)
        for what, side in (("one", b), ("other", c)):
            if group == what:
                place = three.named("two"), 0

                def there(side: Side = side, what: str = what, place: tuple[str, int] = place) -> bool:
                    found = committed(side, three.named(what)).get(place)
                    return found is not None and found[0] == positions[what]

                until("its committed offset is there", there)
        assert three.states() == ["In-Sync", "In-Sync"], (topics, group)
    for consumer in consumers.values():
        consumer.close()
    assert three.link.verify()["equal"]
