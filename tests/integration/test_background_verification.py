"""A byte that changes on a disk after it was found equal is told, on real brokers, whichever side's disk it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from support.links import Linked, Side, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.records import walk

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]
BATCHES, DAMAGED = 30, 17


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.raise_levels()
        pair.attach()
        pair.b.proxy.cli("link", "alter", pair.name, "--verify-every", "2s")
        yield pair


PLACES = {"value": -3, "crc": 17, "attributes": 22, "epoch of the producer": 52, "length": 9}
"""Bytes of a batch: before its end, or from its beginning."""


def flip(side: Side, topic: str, index: int, place: int) -> tuple[int, Callable[[], None]]:
    """Change a byte of a batch in the file from which the broker serves it; that batch's base offset, and what changes
    it back."""
    (segment,) = side.kafka.directory.glob(f"broker-*/data/{topic}-0/*.log")
    start, end, header = list(walk(memoryview(segment.read_bytes())))[index]

    def change() -> None:
        with segment.open("r+b") as file:
            at = file.seek(start + place if place >= 0 else end + place)
            was = file.read(1)[0]
            file.seek(at)
            file.write(bytes((was ^ 1,)))

    change()
    return header.base_offset, change


def copied(link: Linked, name: str) -> tuple[str, str]:
    """A topic at both sides, each record a batch of its own, that was found equal."""
    source, target = link.names(name)
    link.a.create_topic(source)
    producer = link.a.producer(batch_num_messages=1, linger_ms=0)
    for number in range(BATCHES):
        producer.produce(source, b"%d" % number * 100)
    assert producer.flush(30) == 0
    link.wait_end(target, BATCHES)
    return source, target


def equal(link: Linked, target: str) -> bool:
    found = link.b.partition(link.name, target)
    return found is not None and found["equal_until"] == BATCHES and found["verified_seconds"] is not None


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("place", PLACES)
def test_a_byte_that_changes_on_either_disk_after_it_was_found_equal_is_told(link: Linked, place: str) -> None:
    (_, here), (there, of_there) = copied(link, "follower"), copied(link, "source")
    until("both are equal", lambda: equal(link, here) and equal(link, of_there), 60)
    flipped = [flip(side, topic, DAMAGED, PLACES[place]) for side, topic in ((link.b, here), (link.a, there))]
    assert [offset for offset, _ in flipped] == [DAMAGED, DAMAGED]
    told = {here: "this cluster's log cannot be read", of_there: "the source's log cannot be read"}
    for target, words in told.items():
        until("it is told", lambda target=target: link.b.reason(link.name, target)[0] == "LOGS_DIFFER", 90)
        status = link.b.partition(link.name, target)
        assert status is not None
        assert (status["differs_at"], status["equal_until"], status["state"]) == (DAMAGED, DAMAGED, "Following")
        if place != "length":  # there the broker ends what it reads
            assert words in status["message"]
            assert "does not match its CRC" in status["message"]
    assert link.b.link(link.name)["reason"] == "LOGS_DIFFER"
    metrics = httpx.get(f"{link.b.proxy.url}/metrics", trust_env=False).text
    assert f'isthmus_link_partitions_differing{{link="{link.name}"}} 2.0' in metrics
    assert not link.verify(check=False)["equal"]
    for command in ("promote", "failover"):
        planned = link.b.proxy.cli("link", command, link.name, "--local", link.remote, "--dry-run")
        differ = planned["namespaces"][0]["logs_differ"]
        assert [each.partition(":")[0] for each in differ] == [f"{here}-0", f"{of_there}-0"]

    for _, change_back in flipped:
        change_back()
    assert link.b.proxy.cli("link", "acknowledge", link.name)["acknowledged"] == 2
    assert link.b.link(link.name)["reason"] != "LOGS_DIFFER"
    until("both are equal again", lambda: equal(link, here) and equal(link, of_there), 60)
    assert link.verify()["equal"]
