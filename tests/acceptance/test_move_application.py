"""User story: an application that consumes, transforms and produces exactly once moves from A to B in mid-work.

Writers are stopped and the link is drained first; application and proxies are killed with kill -9 at random, before and
during the promotion. ISTHMUS_MOVES is how often it moves (1), ISTHMUS_SEED what the kills come from.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kafka import unique
from support.links import Linked, Side, linked, until
from support.transforming import Application, committed, writing

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers

MOVES = int(os.environ.get("ISTHMUS_MOVES", "1"))
SEED = int(os.environ.get("ISTHMUS_SEED", str(random.SystemRandom().randrange(10**6))))
BEFORE, AFTER = 300, 60
"""Input records written at A, and at B."""


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


def restart(side: Side) -> None:
    side.proxy.kill()
    side.proxy.start()


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
@pytest.mark.parametrize("move", range(MOVES))
def test_nothing_is_lost_and_nothing_is_done_twice(link: Linked, move: int, tmp_path: Path) -> None:
    rng = random.Random(SEED + move)
    print(f"ISTHMUS_SEED={SEED} move {move}")
    prefix = unique("app-") + "-"
    consent = "--disable-transaction-verification"
    link.attach(prefix, prefix, consent)
    link.attach(prefix, prefix, "--type", "consumer-group", consent)
    for name in ("input", "output"):
        link.a.create_topic(prefix + name, 2)

    with (
        writing(link.a, prefix + "input", range(BEFORE)) as writer,
        Application(link.a, prefix, tmp_path / "application-a.log") as application,
    ):
        while writer.is_alive():
            time.sleep(rng.uniform(0.2, 1.5))
            victim = rng.choice(("application", "application", "a", "b", "both", "nobody"))
            if victim == "application":
                application.kill()
            if victim in ("a", "both"):
                restart(link.a)
            if victim in ("b", "both"):
                restart(link.b)
        until("it has begun", lambda: committed(link.a, prefix + "output"))
        time.sleep(rng.uniform(0.0, 0.5))

    def promoted() -> bool:
        arguments = ("--local", prefix, "--local-group", prefix)
        killer = threading.Timer(rng.uniform(0.0, 3.0), link.b.proxy.kill)
        if rng.random() < 0.3:
            killer.start()
        try:
            link.b.proxy.cli("link", "promote", link.name, *arguments)
        except ProxyFailed:  # not drained yet, or killed: what was begun goes on by itself
            if killer.is_alive() or killer.finished.is_set():
                killer.join()
                link.b.proxy.start()
            state = link.b.proxy.get(f"/v1/namespaces/topic?prefix={prefix}")["state"]
            groups = link.b.proxy.get(f"/v1/namespaces/consumer-group?prefix={prefix}")["state"]
            return bool(state == groups == "open")
        finally:
            if killer.is_alive():
                killer.cancel()
                killer.join()
        return True

    until("promoted", promoted, 120, 0.3)

    with (
        Application(link.b, prefix, tmp_path / "application-b.log"),
        writing(link.b, prefix + "input", range(BEFORE, BEFORE + AFTER)),
    ):
        expected = sorted(
            b"%d:%d" % (partition, offset) for partition in range(2) for offset in range((BEFORE + AFTER) // 2)
        )
        until("all is done", lambda: len(committed(link.b, prefix + "output")) >= len(expected), 120, 0.3)
    assert sorted(committed(link.b, prefix + "output")) == expected
