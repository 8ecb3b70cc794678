"""User story: each cluster's producers have topics of their own there, and both clusters read all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kafka import unique
from support.links import Linked, relayed, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, another_link, delete_link, kills

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

RECORDS = [b"%d" % number for number in range(100)]
WELL = {"Following", "In-Sync"}
"""Each of two links may be synchronous already."""


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    with relayed(*kafka_pair) as (pair, relay):
        pair.raise_levels()
        yield pair, relay


def names() -> dict[str, str]:
    return {"from-a-": unique("from-a-") + "-", "from-b-": unique("from-b-") + "-"}


def write_both(pair: Linked, from_a: str, from_b: str) -> None:
    """A topic of each side with records, which have been copied to the other one."""
    for side, topic in ((pair.a, from_a + "t"), (pair.b, from_b + "t")):
        side.create_topic(topic)
        side.produce(topic, RECORDS, acks="all")
    for side, topic in ((pair.b, from_a + "t"), (pair.a, from_b + "t")):
        until(f"{topic} is there", lambda side=side, topic=topic: side.end(topic) == len(RECORDS))


def check_equal(pair: Linked, from_a: str, from_b: str) -> None:
    """Both sides have each record once, and nothing more comes."""
    for topic in (from_a + "t", from_b + "t"):
        assert pair.a.read(topic) == pair.b.read(topic)
        assert [record.value for record in pair.a.read(topic)] == RECORDS


@pytest.mark.parametrize("kill", kills("active-active"))
def test_over_one_link(scene: tuple[Linked, Relay], kill: Kill) -> None:
    pair, relay = scene
    chosen = names()
    with another_link(pair, relay) as link, Runbook("active-active", link, relay, chosen, kill, {"Following"}) as book:
        book.step("Attach what A writes")
        book.step("Attach what B writes")
        write_both(link, *chosen.values())
        assert "equal" in book.step("Compare")
        check_equal(link, *chosen.values())
        assert {each["local"]: each["role"] for each in link.a.link(link.name)["mappings"]} == {
            link.local: "leader",
            chosen["from-a-"]: "leader",
            chosen["from-b-"]: "follower",
        }


@pytest.mark.parametrize("kill", kills("active-active-synchronous"))
def test_over_two_synchronous_links(scene: tuple[Linked, Relay], kill: Kill) -> None:
    """An ack of either side means both; and each side goes on alone with its own when the other one is away."""
    pair, relay = scene
    from_a, from_b = (chosen := names()).values()
    second = unique("b-to-a")
    try:
        with another_link(pair, relay) as link:
            of_page = {**chosen, "b-to-a": second}
            with Runbook("active-active-synchronous", link, relay, of_page, kill, WELL) as book:
                book.step("Make a second link")
                book.step("Attach what A writes")
                book.step("Attach what B writes")
                write_both(link, from_a, from_b)
                book.step("Make both synchronous")
                book.step("And the other one")
            check_equal(link, from_a, from_b)
            for side, other, topic in ((link.a, link.b, from_a + "t"), (link.b, link.a, from_b + "t")):
                assert side.produce(topic, [b"acked"], acks="all") == [len(RECORDS)]
                assert [record.value for record in other.read(topic)] == [*RECORDS, b"acked"]
    finally:
        delete_link(pair, second)
