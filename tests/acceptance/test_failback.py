"""User story: the old source comes back after a failover, ahead of what the other cluster has, and follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, linked, taking_transactions, until

from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

SHARED, AHEAD, NEW = 2000, 30, 20
RECORD_BYTES = 500


@pytest.fixture
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """The source is up again at the end."""
    source, _ = kafka_pair
    with linked(*kafka_pair) as pair, taking_transactions(pair.a, pair.b):
        pair.raise_levels()
        try:
            yield pair
        finally:
            if not source.alive(source.broker_ids[0]):
                source.start_broker(source.broker_ids[0])


def value(what: str, number: int) -> bytes:
    return (b"%s %d " % (what.encode(), number)).ljust(RECORD_BYTES, b".")


def values(what: str, count: int) -> list[bytes]:
    return [value(what, number) for number in range(count)]


def appended_bytes(link: Linked) -> float:
    """What the link has appended to A's logs."""
    lines = httpx.get(f"{link.a.proxy.url}/metrics", trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("isthmus_link_appended_bytes_total") and link.name in line]
    return sum(float(line.split()[-1]) for line in found)


def cut_at_a(link: Linked, topic: str) -> dict[str, Any] | None:
    """What is told of the truncation of a topic of A, when it is over."""
    found = link.a.proxy.get(f"/v1/links/{link.name}/truncations")["items"]
    return next((each for each in found if each["topic"] == topic and each["phase"] == "done"), None)


@pytest.mark.one_in_ci("stories", of="failbacks")
@pytest.mark.parametrize("asked_at", ["a", "b"])
def test_the_old_source_follows_from_where_both_part(link: Linked, asked_at: str) -> None:
    group, source = unique("app-"), link.a.kafka
    topic, same = link.local + "t", link.local + "same"
    there, same_there = link.remote + "t", link.remote + "same"
    link.attach()
    groups = "--type", "consumer-group", "--local", group, "--remote", group
    link.a.proxy.cli("link", "attach", link.name, *groups, "--role", "leader")
    for name in (topic, same):
        link.a.create_topic(name)
    link.a.produce(topic, values("shared", SHARED))
    link.a.produce(same, values("same", SHARED))
    link.wait_end(there, SHARED)
    link.wait_end(same_there, SHARED)
    commit(link.a, group, {(topic, 0): SHARED - 10})
    until("the position is there", lambda: offsets(link.b, group) == {(there, 0): SHARED - 10})

    # A is ahead of B when it dies, with a position that B never saw, and B goes on.
    link.b.proxy.kill()
    link.a.produce(topic, values("ahead", AHEAD))
    commit(link.a, group, {(topic, 0): SHARED + 7})
    link.a.proxy.kill()
    source.kill(source.broker_ids[0])
    link.b.proxy.start()
    until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name), 90)
    assert link.b.produce(there, values("new", NEW))[0] == SHARED
    commit(link.b, group, {(there, 0): SHARED + 3})

    source.start_broker(source.broker_ids[0])
    link.a.proxy.start()
    until("A is back", lambda: link.a.link(link.name)["state"] != "Disconnected")
    side = link.a if asked_at == "a" else link.b
    told = until("both sides answer", lambda: side.proxy.cli("link", "recover", link.name, "--dry-run"))
    plans = {each["topic"]: each for pair in told["namespaces"] for each in pair["topics"]}
    assert {name: each["action"] for name, each in plans.items()} == {topic: "refuse", same: "follow"}
    (partition,) = plans[topic]["partitions"]
    assert [partition[each] for each in ("shared", "end", "source_end")] == [SHARED, SHARED + AHEAD, SHARED + NEW]
    assert plans[topic]["groups_moved"] == [group]
    side.proxy.cli("link", "recover", link.name)
    done = until("A was cut", lambda: cut_at_a(link, topic))
    assert (done["messages_truncated"], done["partitions"][0]["offset_truncated_to"]) == (AHEAD, SHARED)
    until("A has what is new", lambda: topic in link.a.topics() and link.a.end(topic) == SHARED + NEW)
    assert link.a.read(topic) == link.b.read(there)
    assert link.a.read(same) == link.b.read(same_there)
    shown = ready_commands.run(["salvage", "show", done["partitions"][0]["salvage_file"], "--limit", "100"], 30).stdout
    assert shown.count("ahead") == AHEAD
    until("the position is B's", lambda: offsets(link.a, group) == {(topic, 0): SHARED + 3})
    assert appended_bytes(link) < 2 * NEW * RECORD_BYTES, "what both have was not copied again"

    # It goes on, and A is a follower like any other.
    link.b.produce(same_there, values("more", NEW))
    until("A goes on", lambda: link.a.end(same) == SHARED + NEW)
    verdicts = link.verify()["partitions"]
    assert all(each["equal"] for each in verdicts if each["topic"] in (topic, same, there, same_there))
