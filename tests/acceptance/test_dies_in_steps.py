"""User story: clusters of three brokers die under transactions, broker by broker or all at once, and the target takes
over: every unanswered transaction has one outcome in all partitions and groups.

The source's brokers and proxies die in any order, with pauses of up to so long that others lead what the first one
led; brokers and proxies of the target die before or meanwhile, or all at once, with the ends of their logs (a power
loss). ISTHMUS_STEPS is how often all that happens to the clusters of each case (1), ISTHMUS_STEPS_CASES how many cases
there are (2), and ISTHMUS_SEED what it comes from.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewTopic
from support.in_steps import Found, Place, Transfers, die, in_sync, kill, revive, transferring
from support.kafka import unique
from support.links import VERIFICATION, Linked, linked, sidecars, until, whole
from support.power_loss import lose_end

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.replication.in_doubt.store import TOPIC as STORE

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(2700)]

ROUNDS: Final = int(os.environ.get("ISTHMUS_STEPS", "1"))
SEED: Final = int(os.environ.get("ISTHMUS_SEED", str(random.SystemRandom().randrange(10**6))))
CASES: Final = int(os.environ.get("ISTHMUS_STEPS_CASES", "2"))
TRANSFERS: Final = 5
TRANSACTIONS: Final = 5


@contextmanager
def three_by_three(proxy_for_each: bool) -> Iterator[Linked]:
    """Two clusters of three brokers, linked synchronously."""
    with ExitStack() as stack:
        a = stack.enter_context(KafkaCluster(name="steps-a", brokers=3))
        b = stack.enter_context(KafkaCluster(name="steps-b", brokers=3, settings={VERIFICATION: "false"}))
        proxies = sidecars if proxy_for_each else lambda kafka: [whole(kafka)]
        yield stack.enter_context(linked(a, b, a_proxies=proxies(a), b_proxies=proxies(b)))


class Round:
    """Namespaces of its own, over the one link, from when they are attached until the target has taken over."""

    def __init__(self, link: Linked, rng: random.Random) -> None:
        self.link = link
        self.random = rng
        self.prefix = unique("steps-") + "-"
        self.topics = {self.prefix + "t": 2, self.prefix + "u": 1}
        self.places: list[Place] = [(name, index) for name, count in self.topics.items() for index in range(count)]
        self.groups = [f"{self.prefix}{number}" for number in range(TRANSFERS)]
        self.told: list[str] = []

    def attach(self) -> None:
        self.link.attach(self.prefix, self.prefix)
        self.link.attach(self.prefix, self.prefix, "--type", "consumer-group")
        for name, count in self.topics.items():
            self.link.a.create_topic(name, count, replicas=self.random.choice((1, 3, 3)))
        until("synchronous", lambda: self.link.a.proxy.cli("link", "set-mode", self.link.name, "synchronous"))

    def detach(self) -> None:
        for more in ((), ("--type", "consumer-group")):
            self.link.a.proxy.cli("link", "detach", self.link.name, "--local", self.prefix, *more)

    def run(self) -> int:
        """How many transactions were in doubt."""
        with transferring(self.link.a, self.groups, self.places, self.random) as running:
            self._acked(running)
            self._target_dies(running)
            time.sleep(self.random.uniform(0.0, 1.0))
            helper = threading.Thread(target=self._target_dies_meanwhile)
            helper.start()
            self.told += die(self.link.a, self.random)
            helper.join()
        revive(self.link.b)
        self._fail_over()
        found = Found(self.link.b, self.places)
        return sum(found.check(each, self.places[0]) for each in running)

    def _acked(self, running: list[Transfers]) -> None:
        """Commits are acked, and mean both sides."""
        began, before = time.monotonic(), {each: len(each.acked) for each in running}
        until("acks mean both sides", lambda: in_sync(self.link, self.topics, self.groups), 120)
        until("commits are acked", lambda: all(len(each.acked) > before[each] for each in running), 120)
        self.told.append(f"acked after {time.monotonic() - began:.1f} s")

    def _target_dies(self, running: list[Transfers]) -> None:
        """Now and then, before the source does, which holds what the target lost."""
        b, what = self.link.b, self.random.choice(("nothing", "nothing", "broker", "proxy", "power"))
        self.told.append(f"target: {what}")
        if what == "broker":
            kill(b.kafka, self.random.choice(b.kafka.broker_ids))
        elif what == "proxy":
            self.random.choice(b.proxies).kill()
        elif what == "power":
            for broker_id in b.kafka.broker_ids:
                kill(b.kafka, broker_id)
            lost = self.random.choice(((STORE, 0), *self.places))
            for broker_id in b.kafka.broker_ids:
                if has(b.kafka, broker_id, lost):
                    lose_end(b.kafka, broker_id, *lost)
            self.told.append(f"lost: {lost}")
        if what in ("proxy", "power") or (what == "broker" and self.random.random() < 0.5):
            revive(b)
            self._acked(running)

    def _target_dies_meanwhile(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.uniform(0.0, 3.0))
            broker_id = self.random.choice(self.link.b.kafka.broker_ids)
            self.told.append(f"meanwhile: the target's broker {broker_id}")
            kill(self.link.b.kafka, broker_id)

    def _fail_over(self) -> None:
        def failed_over() -> Any:
            more = ("--local", self.prefix, "--local-group", self.prefix)
            return self.link.b.proxy.cli("link", "failover", self.link.name, *more)

        until("failed over", failed_over, 120, 1.0)


def has(kafka: KafkaCluster, broker_id: int, place: Place) -> bool:
    """Whether a broker has records of a partition on its disk."""
    directory = kafka.directory / f"broker-{broker_id}" / "data" / f"{place[0]}-{place[1]}"
    return any(segment.stat().st_size for segment in directory.glob("*.log"))


@pytest.mark.suite("failovers")
@pytest.mark.parametrize("case", range(CASES))
def test_unanswered_transactions_have_one_outcome_whatever_dies_in_which_order(case: int) -> None:
    with three_by_three(proxy_for_each=case % 2 == 1) as link:
        in_doubt = 0
        for number in range(ROUNDS):
            began, seed = time.monotonic(), SEED + 1000 * case + number
            current = Round(link, random.Random(seed))
            current.attach()
            try:
                in_doubt += current.run()
            finally:
                print(
                    f"case {case}, seed {seed}, {time.monotonic() - began:.0f} s:",
                    *current.told,
                    sep="\n  ",
                    flush=True,
                )
            if number + 1 < ROUNDS:
                revive(link.a)
                current.detach()
        print(f"{in_doubt} transactions were in doubt")


def replicas_on(link: Linked, topic: str, *brokers: int) -> None:
    """Create a topic, each partition with one replica, on these brokers."""
    made = NewTopic(topic, num_partitions=len(brokers), replica_assignment=[[broker_id] for broker_id in brokers])
    link.a.admin().create_topics([made])[topic].result(30)


@pytest.mark.one_in_ci("stories", of="source losses")
def test_a_partition_that_has_no_leader_when_its_transaction_commits() -> None:
    """The rest of the source dies before it has one."""
    with (
        KafkaCluster(name="leaderless-a", brokers=3) as a,
        KafkaCluster(name="leaderless-b", settings={VERIFICATION: "false"}) as b,
        linked(a, b) as link,
    ):
        link.attach()
        (t, far_t), (u, far_u) = link.names("t"), link.names("u")
        first, second, third = a.broker_ids
        replicas_on(link, t, first, second)
        replicas_on(link, u, third)
        places: list[Place] = [(t, 0), (t, 1), (u, 0)]
        link.wait_following(2)
        until("synchronous", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("In-Sync", lambda: in_sync(link, {t: 2, u: 1}, ()))
        producers = [open_transaction(link, places, b"%d" % number) for number in range(TRANSACTIONS)]
        a.kill(third)
        committing = [threading.Thread(target=commit, args=(each,), daemon=True) for each in producers]
        for thread in committing:
            thread.start()
        until("it is decided", lambda: len(link.a.read(t, isolation="read_committed")) > 0)
        time.sleep(5.0)
        for broker_id in (first, second):
            a.kill(broker_id)
        link.a.proxy.kill()
        link.b.proxy.cli("link", "failover", link.name, "--local", link.remote)
        far: list[Place] = [(far_t, 0), (far_t, 1), (far_u, 0)]
        found = {place: {each.value for each in link.b.read(*place, isolation="read_committed")} for place in far}
        assert found[far[0]] == found[far[1]] == found[far[2]], found
        assert found[far[0]], "none was decided"


def open_transaction(link: Linked, places: list[Place], value: bytes) -> Producer:
    """A producer whose transaction has the value in all of these, acked."""
    producer = link.a.producer(transactional_id=unique("open-"))
    producer.init_transactions(30)
    producer.begin_transaction()
    for topic, partition in places:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0
    return producer


def commit(producer: Producer) -> None:
    """Ask until nobody answers any more."""
    for _ in range(5):
        try:
            producer.commit_transaction(2)
            return
        except KafkaException:
            continue
