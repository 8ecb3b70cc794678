"""Keys that are deleted while a link is away, whose tombstones the source's cleaner has taken before it is back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from support import raw_log
from support.equality import latest
from support.links import Linked, Side, cleaning_often, linked, truncated, until
from support.source_topics import CLEANED_OFTEN
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_control.states import ReasonCode

pytestmark = pytest.mark.brokers
COMPACTED = {**CLEANED_OFTEN, "cleanup.policy": "compact"}


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, cleaning_often(pair.a, pair.b):
        pair.attach()
        yield pair


def log_of(side: Side, topic: str) -> raw_log.RawLog:
    with Wire(side.kafka.bootstrap_servers) as wire:
        return raw_log.read_log(wire, topic)


def put(link: Linked, topic: str, *keys: bytes, value: bytes | None = b"value") -> None:
    producer = link.a.producer(direct=True, batch_num_messages=1, linger_ms=0)
    for key in keys:
        producer.produce(topic, key=key, value=value)
    assert producer.flush(30) == 0


def settled(link: Linked, target: str) -> bool:
    found = link.b.partition(link.name, target)
    return found is not None and found["state"] == "Following" and found["reason"] is None and not found["lag_seconds"]


def copied(link: Linked, source: str, target: str, *keys: bytes) -> None:
    """A topic with these keys follows, and nothing is doubted."""
    link.a.create_topic(source, config=COMPACTED, direct=True)
    put(link, source, *keys)
    end = link.a.end(source)
    link.wait_end(target, end)
    until("it is settled", lambda: settled(link, target))


def while_away(link: Linked, source: str, gone: Callable[[set[bytes | None]], bool]) -> None:
    """Write to a topic until its cleaner has taken what is meant, as (all its records' keys, tombstones' too) show."""
    numbers = itertools.count()

    def cleaned() -> bool:
        put(link, source, b"rolls-%d" % (next(numbers) % 3))  # the active segment is never cleaned
        keys = {record.key for record in link.a.read(source, direct=True)}
        return gone(keys)

    until("the cleaner has been there", cleaned, 60, 0.3)


def assert_same(link: Linked, source: str, target: str) -> None:
    until("all is there", lambda: link.b.end(target) == link.a.end(source), 40)
    until("it is settled", lambda: settled(link, target), 40)
    until("both have the same", lambda: latest(log_of(link.a, source)) == latest(log_of(link.b, target)), 20)
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == source)
    assert verdict["equal"], verdict


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("killed", ["a", "b"])
def test_a_key_that_was_deleted_while_the_link_was_away_goes(link: Linked, killed: str) -> None:
    source, target = link.names("missed")
    copied(link, source, target, b"kept", b"deleted", b"other")
    proxy = getattr(link, killed).proxy
    proxy.kill()
    put(link, source, b"deleted", value=None)
    while_away(link, source, lambda keys: b"deleted" not in keys)
    assert b"deleted" in {record.key for record in link.b.read(target, direct=True)}
    proxy.start()
    told = truncated(link, target)
    assert told["reason"] == ReasonCode.DELETIONS_MISSED
    assert told["messages_truncated"] > 0
    assert_same(link, source, target)
    assert b"deleted" not in latest(log_of(link.b, target))
    assert latest(log_of(link.b, target)).keys() >= {b"kept", b"other"}
    truncations = link.b.proxy.get(f"/v1/links/{link.name}/truncations")["items"]
    assert len([each for each in truncations if each["topic"] == target]) == 1


def test_nothing_is_cut_where_no_deletion_was_missed(link: Linked) -> None:
    source, target = link.names("late")
    copied(link, source, target, b"kept", b"again")
    link.b.proxy.kill()
    put(link, source, b"unknown")
    put(link, source, b"unknown", value=None)
    put(link, source, b"again")
    while_away(link, source, lambda keys: b"unknown" not in keys)
    link.b.proxy.start()
    until("it was compared", lambda: target in compared(link), 40)
    assert_same(link, source, target)
    truncations = link.b.proxy.get(f"/v1/links/{link.name}/truncations")["items"]
    assert target not in {each["topic"] for each in truncations}


def compared(link: Linked) -> str:
    """The lines of B's log about comparisons in which nothing was missed."""
    return "\n".join(line for line in link.b.proxy.log.splitlines() if "no deletion missed" in line)
