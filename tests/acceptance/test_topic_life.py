"""What happens to a topic at the source, and what the operator decides at the follower, on real clusters."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicCollection
from support.kafka import unique
from support.links import LEASE_S, Linked, Side, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.attach()
        yield pair


@pytest.fixture
def followed(link: Linked) -> tuple[str, str]:
    """A topic with three records, which has been copied: its names at both sides."""
    topic = unique("life")
    source, target = link.local + topic, link.remote + topic
    link.a.create_topic(source)
    link.a.produce(source, [b"old"] * 3)
    link.wait_end(target, 3)
    link.wait_state(target, "Following")
    return source, target


def soon(link: Linked, target: str, reason: str) -> dict[str, object]:
    """B tells the reason within two seconds (and what this machine takes to look)."""
    started = time.monotonic()
    until(reason, lambda: (link.b.partition(link.name, target) or {}).get("reason") == reason, 10, 0.02)
    assert time.monotonic() - started < 3
    found = link.b.partition(link.name, target)
    assert found is not None
    return found


def test_a_deleted_source_topic_and_what_the_operator_decides(link: Linked, followed: tuple[str, str]) -> None:
    source, target = followed
    for decision in ("forget", "recreate"):
        with pytest.raises(ProxyFailed, match="CONFLICT"):
            link.b.proxy.cli("topic", decision, target)
    link.a.delete_topic(source)
    found = soon(link, target, "SOURCE_TOPIC_MAY_BE_DELETED")
    assert found["state"] == "Stopped"
    assert link.b.end(target) == 3  # nothing is lost by itself
    with pytest.raises(ProxyFailed, match="CONFLICT"):
        link.b.proxy.cli("topic", "recreate", target)
    planned = link.b.proxy.cli("topic", "forget", target, "--delete", "--dry-run")
    assert (planned["source"], planned["records_lost"]) == ("deleted", 3)
    assert link.b.proxy.cli("topic", "forget", target, "--dry-run")["records_lost"] == 0
    link.b.proxy.cli("topic", "forget", target)
    assert link.b.end(target) == 3
    assert link.b.partition(link.name, target) is None
    origin = link.b.proxy.get(f"/v1/topics/{target}")["partitions"][0]["provenance"]
    assert [(each["start_offset"], each["end_offset"]) for each in origin] == [(0, 3)]


def test_forget_and_delete(link: Linked, followed: tuple[str, str]) -> None:
    source, target = followed
    link.a.delete_topic(source)
    soon(link, target, "SOURCE_TOPIC_MAY_BE_DELETED")
    link.b.proxy.cli("topic", "forget", target, "--delete")
    assert target not in link.b.topics()
    link.a.create_topic(source)
    link.a.produce(source, [b"new"])
    link.wait_end(target, 1)


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_a_source_topic_that_was_created_again(link: Linked, followed: tuple[str, str]) -> None:
    source, target = followed
    link.a.delete_topic(source)
    link.a.create_topic(source, 2)
    link.a.produce(source, [b"new"] * 2)
    found = soon(link, target, "SOURCE_TOPIC_ID_CHANGED")
    assert found["state"] == "Refused"
    assert "isthmus topic recreate" in str(found["message"])
    assert [record.value for record in link.b.read(target)] == [b"old"] * 3
    assert link.b.proxy.cli("topic", "recreate", target, "--dry-run")["records_lost"] == 3
    link.b.proxy.cli("topic", "recreate", target)
    until("it is the new one's", lambda: link.b.topics().get(target) == 2 and link.b.end(target) == 2)
    assert [record.value for record in link.b.read(target)] == [b"new"] * 2
    link.wait_state(target, "Following")


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_growth_deletion_and_creation_while_the_link_is_down(link: Linked, followed: tuple[str, str]) -> None:
    source, target = followed
    link.b.proxy.kill()
    link.a.delete_topic(source)
    link.a.create_topic(source)
    grown = unique("grown")
    link.a.create_topic(link.local + grown)
    link.a.add_partitions(link.local + grown, 3)
    link.b.proxy.start()
    until("B tells it", lambda: (link.b.partition(link.name, target) or {}).get("reason") == "SOURCE_TOPIC_ID_CHANGED")
    until("the other one has grown", lambda: link.b.topics().get(link.remote + grown) == 3)
    # Killed right after it was agreed: whoever comes next carries it out.
    link.b.proxy.cli("topic", "recreate", target)
    link.b.proxy.kill()
    link.b.proxy.start()
    until("it is empty", lambda: target in link.b.topics() and link.b.end(target) == 0)
    link.wait_state(target, "Following")


@pytest.fixture
def going(link: Linked) -> tuple[str, str]:
    """A topic of namespaces whose topics go with their source's, and the prefix of both. It has been copied."""
    link.raise_levels()
    prefix = unique("going-") + "-"
    link.attach(prefix, prefix, "--on-source-delete", "delete")
    link.a.create_topic(prefix + "t", 2)
    link.a.produce(prefix + "t", [b"old"] * 3)
    link.wait_end(prefix + "t", 3)
    return prefix + "t", prefix


@pytest.mark.one_in_ci("stories", of="the target's topics")
def test_a_topic_goes_with_its_sources(link: Linked, going: tuple[str, str]) -> None:
    """Whoever is killed; what is made again under its name is followed from its start; what is kept stays."""
    topic, prefix = going
    kept = prefix + "kept"
    link.a.create_topic(kept)
    link.wait_end(kept, 0)
    link.a.delete_topic(topic)
    soon(link, topic, "SOURCE_TOPIC_MAY_BE_DELETED")
    link.b.proxy.kill()
    link.b.proxy.start()
    until("it is gone", lambda: topic not in link.b.topics())
    until("nothing is told of it", lambda: link.b.partition(link.name, topic) is None)
    link.a.create_topic(topic)
    link.a.produce(topic, [b"new"])
    link.wait_end(topic, 1)
    former = topic_id(link.b, topic)
    link.a.delete_topic(topic)
    link.a.create_topic(topic, 3)
    link.a.produce(topic, [b"newer"] * 2, partition=2)
    until("it is another one", lambda: link.b.topics().get(topic) == 3 and topic_id(link.b, topic) != former)
    link.wait_end(topic, 2, partition=2)
    link.wait_state(topic, "Following")
    # Set to keep, it stays. And what is kept goes when that is set.
    link.b.proxy.cli("link", "alter", link.name, "--local", prefix, "--on-source-delete", "keep")
    link.a.delete_topic(kept)
    soon(link, kept, "SOURCE_TOPIC_MAY_BE_DELETED")
    time.sleep(3 * LEASE_S)  # longer than it takes to be certain
    assert kept in link.b.topics()
    link.a.proxy.cli("link", "alter", link.name, "--local", prefix, "--on-source-delete", "delete")
    until("it is gone", lambda: kept not in link.b.topics())
    assert topic in link.b.topics()


def topic_id(side: Side, topic: str) -> str:
    found = side.admin(direct=True).describe_topics(TopicCollection([topic]))[topic].result(30)
    return str(found.topic_id)
