"""A namespace on several synchronous links, between real clusters: whom acks wait for, and for how long."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer, TopicPartition
from support.groups import group_status, member, offsets
from support.kafka import unique
from support.links import Linked, Side, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

CONFIRM_TIMEOUT_MS = "8000"
"""The same for both: else the one that is to stay might stay for that alone."""


@dataclass
class Several:
    """A leads to B over one link and to C over the other one."""

    link: Linked
    c: Side
    other: str
    all_of: str
    """A topic whose acks wait for both."""
    any_of: str
    """For one of them."""
    degrading: str
    """For both, and for no longer than some seconds."""

    @property
    def a(self) -> Side:
        return self.link.a

    @property
    def b(self) -> Side:
        return self.link.b

    @property
    def topics(self) -> tuple[str, ...]:
        return self.all_of, self.any_of, self.degrading

    @property
    def names(self) -> tuple[str, str]:
        return self.link.name, self.other

    def partition(self, name: str, topic: str) -> dict[str, Any]:
        return self.a.partition(name, topic) or {}

    def is_connected(self, name: str) -> bool:
        return bool(self.a.link(name)["state"] != "Disconnected")

    def is_in(self, state: str, name: str, topic: str) -> bool:
        return bool(self.partition(name, topic).get("state") == state)

    def wait_in_sync(self, name: str) -> None:
        until("In-Sync", lambda: all(self.is_in("In-Sync", name, topic) for topic in self.topics))


@pytest.fixture(scope="module")
def several(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Several]:
    with linked(*kafka_pair) as link, KafkaCluster(name="several-c") as kafka, whole(kafka) as proxy:
        proxy.wait_ready()
        prefixes = [unique(name) + "-" for name in ("all", "any", "degrading")]
        kinds = "topic", "consumer-group"
        topics = [prefix + "t" for prefix in prefixes]
        found = Several(link, Side(kafka, [proxy]), unique("other"), *topics)
        a = found.a.proxy
        a.cli("link", "create", found.other, "--remote", proxy.link_address)
        options = ((), ("--confirm", f"ANY 1 ({', '.join(found.names)})"), ("--degrade-after", "4s"))
        for prefix, topic, asked in zip(prefixes, topics, options, strict=True):
            for kind in kinds:
                a.cli("namespace", "create", prefix, "--type", kind, *asked)
            found.a.create_topic(topic)
        for name in found.names:
            until("connected", partial(found.is_connected, name))
            for prefix, kind in itertools.product(prefixes, kinds):
                attach = "--type", kind, "--local", prefix, "--remote", prefix, "--role", "leader"
                a.cli("link", "attach", name, *attach, "--disable-transaction-verification")
            for topic in topics:
                until("it follows", partial(found.is_in, "Following", name, topic))
            mode = "link", "set-mode", name, "synchronous", "--confirm-timeout-ms", CONFIRM_TIMEOUT_MS
            until("accepted", partial(a.cli, *mode))
            found.wait_in_sync(name)
        yield found
        for name in found.names:  # A and B are others', too: B's brokers check transactions again
            a.cli("link", "set-mode", name, "asynchronous")
            for prefix, kind in itertools.product(prefixes, kinds):
                a.cli("link", "detach", name, "--type", kind, "--local", prefix)
        a.cli("link", "delete", found.other)


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_acks_wait_for_every_link_and_one_that_stands_still_leaves_alone(several: Several) -> None:
    a, b, c, topic = several.a, several.b, several.c, several.all_of
    for number in range(20):
        (offset,) = a.produce(topic, [b"%d" % number])
        assert min(b.end(topic), c.end(topic)) > offset, "acked before both have it"
    since = several.partition(several.link.name, topic)["sync"]["since_ms"]
    c.proxy.pause()
    try:
        (offset,) = a.produce(topic, [b"meanwhile"])
        assert several.is_in("Out-Of-Sync", several.other, topic), "acked without C, and C is not out of sync"
        assert b.end(topic) > offset
        for number in range(20):
            (offset,) = a.produce(topic, [b"%d" % number])
            assert b.end(topic) > offset, "acked before B has it"
        sync = several.partition(several.link.name, topic)["sync"]
        assert (sync["state"], sync["since_ms"]) == ("In-Sync", since), "B left as well"
    finally:
        c.proxy.resume()
    several.wait_in_sync(several.other)
    (offset,) = a.produce(topic, [b"both"])
    assert min(b.end(topic), c.end(topic)) > offset


def transact(topic: str, producer: Producer) -> None:
    """One transaction of one record, acked."""
    producer.begin_transaction()
    producer.produce(topic, b"x")
    producer.commit_transaction(60)


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_one_of_a_set_is_enough_and_a_link_that_is_away_for_long_is_not_waited_for(several: Several) -> None:
    a, b, c, any_of, degrading = several.a, several.b, several.c, several.any_of, several.degrading
    told = until("B says what acks mean", lambda: (b.partition(several.link.name, any_of) or {})["sync"]["any_of"])
    assert (told["count"], told["links"].keys()) == (1, set(several.names))
    producer = a.producer(transactional_id=unique("txn-"), linger_ms=0)
    producer.init_transactions(30)
    transact(degrading, producer)
    c.proxy.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            commit = pool.submit(transact, degrading, producer)
            began, acked = time.monotonic(), 0
            while several.is_in("In-Sync", several.other, any_of):
                (offset,) = a.produce(any_of, [b"x"])
                assert b.end(any_of) > offset, "acked, and neither has it"
                acked += 1
                assert time.monotonic() - began < 60, "C lacks what is acked, and is In-Sync"
            assert acked > 2, "acks waited for C"
            assert several.is_in("Out-Of-Sync", several.other, any_of)
            assert several.is_in("In-Sync", several.link.name, any_of)
            commit.result(60)
        sync = several.partition(several.other, degrading)["sync"]
        assert sync["degraded_since_ms"] is not None, "acked without C before that was recorded"
        assert "acked without it" in sync["message"]
        for topic in (any_of, degrading):
            transact(topic, producer)
    finally:
        c.proxy.resume()
    several.wait_in_sync(several.other)
    assert several.partition(several.other, degrading)["sync"]["degraded_since_ms"] is None
    transact(degrading, producer)
    ends = [side.end(degrading) for side in (a, b, c)]
    assert min(ends[1:]) >= ends[0] - 1, "acked, and its records are not on both sides"


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_commits_of_groups_wait_for_one_of_a_set_and_not_for_ever(several: Several) -> None:
    a, b, c = several.a, several.b, several.c
    chosen, waiting = (topic.removesuffix("t") + "group" for topic in (several.any_of, several.degrading))

    def sync(group: str, link: str) -> dict[str, Any]:
        return (group_status(a, link, group) or {}).get("sync") or {}

    def is_in(state: str, group: str) -> bool:
        return all(sync(group, link).get("state") == state for link in several.names)

    def claim(group: str) -> dict[str, Any] | None:
        """What B says of acks to the groups of a namespace, without A."""
        asked = "link", "failover", several.link.name, "--local-group", group.removesuffix("group"), "--dry-run"
        (namespace,) = b.proxy.cli(*asked)["namespaces"]
        return next((each for each in namespace["group_claims"] if each["group"] == group), None)

    for topic in (several.any_of, several.degrading):  # what is committed beyond a log's end waits at B for the data
        a.produce(topic, [b"x"] * 20)
    with member(a, chosen, several.any_of) as fast, member(a, waiting, several.degrading) as slow:
        fast.commit({(several.any_of, 0): 0})
        slow.commit({(several.degrading, 0): 0})
        until("In-Sync", lambda: is_in("In-Sync", chosen) and is_in("In-Sync", waiting))
        assert sync(chosen, several.other)["any_of"]["count"] == 1
        told = until("B says what acks mean", lambda: (claim(chosen) or {}).get("any_of"))
        assert (told["count"], told["links"].keys()) == (1, set(several.names))
        assert until("B says it of the others", lambda: claim(waiting))["degrade_after_ms"] == 4000
        producer = a.producer(transactional_id=unique("txn-"), linger_ms=0)
        producer.init_transactions(30)
        c.proxy.pause()
        try:
            for offset in range(1, 20):
                fast.commit({(several.any_of, 0): offset})
                assert offsets(b, chosen)[several.any_of, 0] == offset, "acked, and neither has it"
            producer.begin_transaction()
            position = TopicPartition(several.degrading, 0, 1)
            producer.send_offsets_to_transaction([position], slow.group_metadata, 60)
            assert sync(waiting, several.other)["degraded_since_ms"] is not None, "acked before that was recorded"
            producer.commit_transaction(60)
            until("B's coordinator has it", lambda: offsets(b, waiting)[several.degrading, 0] == 1)
            metrics = httpx.get(f"{a.proxy.url}/metrics", trust_env=False).text
            assert f'isthmus_link_groups_degraded{{link="{several.other}"}} 1.0' in metrics
        finally:
            c.proxy.resume()
        until("In-Sync again", lambda: is_in("In-Sync", chosen) and is_in("In-Sync", waiting))
        assert sync(waiting, several.other)["degraded_since_ms"] is None
        assert offsets(c, waiting)[several.degrading, 0] == 1
        slow.commit({(several.degrading, 0): 2})
        assert [offsets(side, waiting)[several.degrading, 0] for side in (b, c)] == [2, 2]
