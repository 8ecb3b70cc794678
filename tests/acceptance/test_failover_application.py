"""User story: the whole source cluster dies under an application that consumes, transforms and produces exactly once.

The link is synchronous. Brokers and proxy of A are killed with kill -9 at a random moment of the application's
transactions; B takes over, and the application goes on there. Whatever was acked while In-Sync is there: records,
commits, positions; nothing is there twice, and no transaction is torn, acked or not. The clocks of A's brokers and
proxy, and of who writes there, are an hour ahead of B's, or behind, or the same, in turn. ISTHMUS_FAILOVERS is how
often (2) and ISTHMUS_SEED what the moments come from.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from support.clocks import HOUR_S, apart, brokers_apart
from support.kafka import unique
from support.links import Linked, Side, linked, until, whole
from support.transforming import Application, committed, writing

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

FAILOVERS = int(os.environ.get("ISTHMUS_FAILOVERS", "2"))
SEED = int(os.environ.get("ISTHMUS_SEED", str(random.SystemRandom().randrange(10**6))))
AFTER = 40
"""Input records written at B."""
CLOCKS_S = HOUR_S, -HOUR_S, 0
"""How far A's are ahead."""


@pytest.fixture(scope="module")
def b() -> Iterator[KafkaCluster]:
    """Where all the applications go on."""
    with KafkaCluster(name="failover-b") as cluster:
        yield cluster


class Input:
    """Records that are written at a side until it is gone, and which of them were acked."""

    def __init__(self, side: Side, topic: str, clock_s: int) -> None:
        self._topic = topic
        self._clock_s = clock_s
        self._producer = side.producer(acks="all", enable_idempotence=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.acked: set[tuple[int, int, bytes]] = set()
        """Partition, offset and value."""

    def _write(self) -> None:
        number = 0
        while not self._ended.is_set():
            self._producer.produce(
                self._topic,
                b"%d" % number,
                partition=number % 2,
                timestamp=int((time.time() + self._clock_s) * 1000),
                on_delivery=self._delivered,
            )
            self._producer.poll(0.003)
            number += 1

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acked.add((message.partition(), message.offset(), message.value()))

    def __enter__(self) -> Input:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(60)
        self._producer.purge()
        self._producer.flush(10)


def in_sync(link: Linked, prefix: str) -> bool:
    """Whether acks mean both sides: of the application's topics, and of the groups' positions."""
    status: dict[str, Any] = link.a.link(link.name)
    topics = {each["topic"] for each in status["partitions"]}
    groups = {each["group"]: each["sync"] for each in status["groups"]}
    return (
        {prefix + "input", prefix + "output"} <= topics
        and status["state"] == "In-Sync"
        and groups.get(prefix + "group", {}).get("state") == "In-Sync"
    )


def check_clock(side: Side, clock_s: int) -> None:
    """Its brokers' clock is so far ahead of the machine's."""
    topic = unique("clock-")
    side.create_topic(topic, config={"message.timestamp.type": "LogAppendTime"})
    side.produce(topic, [b"x"])
    (record,) = side.read(topic)
    assert abs(record.timestamp[1] / 1000 - time.time() - clock_s) < 60


def kill_cluster(side: Side, rng: random.Random) -> None:
    """Brokers and proxies, in any order, within a moment."""
    victims = [side.proxy.kill, *(lambda each=each: side.kafka.kill(each) for each in side.kafka.broker_ids)]
    rng.shuffle(victims)
    for victim in victims:
        victim()
        time.sleep(rng.choice((0.0, 0.0, 0.005, 0.05)))


def fail_over(link: Linked, prefix: str, *options: str) -> dict[str, Any]:
    report: dict[str, Any] = link.b.proxy.cli(
        "link", "failover", link.name, "--local", prefix, "--local-group", prefix, *options
    )
    return report


def claims_of(report: dict[str, Any]) -> list[int | None]:
    """Until when all that was acked is there: of two topics with two partitions, of the group, and of all groups."""
    topics, groups = sorted(report["namespaces"], key=lambda each: str(each["type"]), reverse=True)
    untils = [each["in_sync_until_ms"] for each in (*topics["claims"], *groups["group_claims"])]
    assert len(untils) == 5, report
    return [*untils, groups["all_groups_until_ms"]]


def check_claims(report: dict[str, Any], killed_ms: float) -> None:
    """All was there until about when the source was killed, by B's clock."""
    for until_ms in claims_of(report):
        assert until_ms is not None, report
        assert abs(until_ms - killed_ms) < 30_000, (killed_ms, report)


@pytest.mark.one_in_ci("failovers")
@pytest.mark.parametrize("failover", range(FAILOVERS))
def test_what_was_acked_is_there_once(b: KafkaCluster, failover: int, tmp_path: Path) -> None:
    rng = random.Random(SEED + failover)
    clock_s = CLOCKS_S[failover % len(CLOCKS_S)]
    print(f"ISTHMUS_SEED={SEED} failover {failover}")
    prefix = unique("app-") + "-"
    names = prefix + "input", prefix + "output"
    with (
        KafkaCluster(name="failover-a", jvm_flags=brokers_apart(clock_s, tmp_path)) as a,
        linked(a, b, a_proxies=[whole(a, apart(clock_s))]) as link,
    ):
        check_clock(link.a, clock_s)
        consent = "--disable-transaction-verification"
        link.attach(prefix, prefix, consent)
        link.attach(prefix, prefix, "--type", "consumer-group", consent)
        for name in names:
            link.a.create_topic(name, 2)
        until("synchronous", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        application = Application(link.a, prefix, tmp_path / "application-a.log")
        with Input(link.a, names[0], clock_s) as written, application:
            until("commits are acked", lambda: application.acked)
            until("acks mean both sides", lambda: in_sync(link, prefix))
            until("B knows it", lambda: None not in claims_of(fail_over(link, prefix, "--dry-run")))
            before = len(application.acked)
            until("commits are acked that mean both sides", lambda: len(application.acked) > before)
            time.sleep(rng.uniform(0.0, 1.0))
            if rng.random() < 0.3:
                application.kill()
                time.sleep(rng.uniform(0.0, 1.0))
            kill_cluster(link.a, rng)
            killed_ms = time.time() * 1000
        check_claims(fail_over(link, prefix), killed_ms)
        there = {
            (partition, record.offset, record.value)
            for partition in range(2)
            for record in link.b.read(names[0], partition)
        }
        assert written.acked <= there, f"acked and lost: {sorted(written.acked - there)[:5]}"
        lost = application.acked - set(committed(link.b, names[1]))
        assert not lost, f"acked commits that are lost: {sorted(lost)[:5]}"

        with (
            Application(link.b, prefix, tmp_path / "application-b.log", batch=100),
            writing(link.b, names[0], range(AFTER)) as writer,
        ):
            writer.join()
            inputs = [
                b"%d:%d" % (partition, record.offset)
                for partition in range(2)
                for record in link.b.read(names[0], partition)
            ]
            until("all is done", lambda: set(committed(link.b, names[1])) >= set(inputs), 120, 0.3)
        assert Counter(committed(link.b, names[1])) == Counter(inputs)
