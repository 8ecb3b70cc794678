"""Truncations when something else goes wrong, too: proxies killed, no room for salvage, a source that lost records."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import groups
from support.kafka import unique
from support.links import Linked, linked, truncated, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]


@pytest.fixture
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """A link of the test's own, with a pair of namespaces attached."""
    with linked(*kafka_pair) as pair:
        pair.attach()
        yield pair


def committed(link: Linked, group: str, topic: str) -> int | None:
    return groups.offsets(link.b, group).get((topic, 0))


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_a_proxy_that_is_killed_at_any_step_goes_on_where_it_was(link: Linked) -> None:
    rng = random.Random()
    source, target = link.local + "killed", link.remote + "killed"
    link.a.create_topic(source, 2)
    values = [b"%d" % number * 100 for number in range(1000)]
    link.a.produce(source, values, enable_idempotence=True)
    link.a.produce(source, values[:10], partition=1)
    link.wait_end(target, 1000)
    link.wait_end(target, 10, partition=1)
    positions = {unique("kept-"): 400, unique("moved-"): 1003}
    link.b.produce(target, [b"rogue"] * 5, direct=True)
    for group, offset in positions.items():
        groups.commit(link.b, group, {(target, 0): offset}, direct=True)
    until("it is truncated", lambda: link.follower_state(target) == "Diverged", 30)
    for _ in range(2):
        time.sleep(rng.uniform(0.0, 4.0))  # another step each time; tests/sim goes through all of them
        link.b.proxy.kill()
        link.b.proxy.start()
    link.a.produce(source, [b"more"] * 20)
    told = truncated(link, target)
    link.wait_end(target, 1020)
    link.wait_following()
    assert link.b.read(target) == link.a.read(source)
    assert link.b.read(target, 1) == link.a.read(source, 1)
    kept, moved = positions
    assert (committed(link, kept, target), committed(link, moved, target)) == (400, 1000)
    assert [(each["group"], each["offset"], each["moved_to"]) for each in told["moved_positions"]] == [
        (moved, 1003, 1000)
    ]
    assert told["messages_truncated"] == 5
    assert not [name for name in link.b.topics() if name.startswith("__isthmus_spool")]
    assert link.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_a_spool_that_somebody_deletes_is_made_up_for_by_the_source(link: Linked) -> None:
    source, target = link.local + "spooled", link.remote + "spooled"
    link.a.create_topic(source, config={"retention.ms": "-1"})
    link.a.produce(source, [b"%d" % number for number in range(3000)], batch_num_messages=1)
    link.wait_end(target, 3000)
    group = unique("lost-")
    link.b.produce(target, [b"rogue"] * 5, direct=True)
    groups.commit(link.b, group, {(target, 0): 400}, direct=True)

    def truncation() -> dict[str, Any]:
        found = link.b.proxy.get(f"/v1/links/{link.name}/truncations")["items"]
        return next((each for each in found if each["topic"] == target), {})

    until("it is refilled", lambda: truncation().get("phase") == "refilling", interval_s=0.01)
    link.b.proxy.pause()  # it would be done in a moment
    link.b.delete_topic(next(name for name in link.b.topics() if name.startswith("__isthmus_spool")), direct=True)
    link.b.proxy.resume()
    until("it is told", lambda: (told := truncation()).get("trouble") == "SPOOL_LOST" or told.get("positions_lost"))
    told = truncated(link, target)
    assert (told["messages_truncated"], told["positions_lost"], told["groups_lost"]) == (5, True, 1)
    assert committed(link, group, target) is None
    link.a.produce(source, [b"more"] * 10)
    link.wait_end(target, 3010)
    link.wait_following()
    assert link.b.read(target) == link.a.read(source)
    assert link.b.topic_config(target)["retention.ms"] == "-1"
    assert link.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_nothing_is_cut_while_there_is_no_room_for_salvage(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    proxy = whole(kafka_pair[1])
    directory = proxy.directory / f"{proxy.name}-data" / "salvage"
    with linked(*kafka_pair, b_proxies=[proxy]) as link:
        link.attach()
        source, target = link.local + "full", link.remote + "full"
        link.a.create_topic(source)
        link.a.produce(source, [b"x"] * 10)
        link.wait_end(target, 10)
        directory.parent.mkdir(exist_ok=True)
        directory.write_text("in the way of the directory")
        link.b.produce(target, [b"rogue"] * 5, direct=True)
        held = until(
            "it is held up",
            lambda: [
                each
                for each in link.b.partitions(link.name, target)
                if each["state"] == "Diverged" and each["reason"] == "SALVAGE_FAILED"
            ],
            30,
        )
        assert str(directory) in held[0]["message"]
        assert link.b.end(target) == 15
        directory.unlink()
        told = truncated(link, target)
        assert told["trouble"] is None
        link.wait_following()
        assert link.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_a_source_that_lost_records_by_an_unclean_election_is_followed_down(kafka: KafkaCluster) -> None:
    with KafkaCluster(name="unclean", brokers=3) as lossy, linked(lossy, kafka) as link:
        link.attach()
        source, target = link.local + "unclean", link.remote + "unclean"
        config = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
        link.a.create_topic(source, 1, config, direct=True, replicas=2)
        link.a.produce(source, [b"kept-%d" % number for number in range(100)], direct=True)
        link.wait_end(target, 100)
        info = link.a.admin(direct=True).list_topics(source, timeout=20).topics[source].partitions[0]
        leader, behind = info.leader, next(each for each in info.replicas if each != info.leader)
        lossy.kill(behind)
        link.a.produce(source, [b"lost-%d" % number for number in range(50)], direct=True, acks="1")
        link.wait_end(target, 150)
        lossy.kill(leader)
        lossy.start_broker(behind)
        link.a.produce(source, [b"new-%d" % number for number in range(20)], direct=True)

        told = truncated(link, target)
        (cut,) = told["partitions"]
        assert (cut["offset_truncated_to"], cut["messages_truncated"]) == (100, 50)
        salvage = read_salvage(Path(cut["salvage_file"]).read_bytes())
        records = [record.value for batch, _ in salvage.batches() for record in decode_records(batch)]
        assert records == [b"lost-%d" % number for number in range(50)]
        link.wait_end(target, 120)
        lossy.start_broker(leader)
        link.wait_following()
        assert link.b.read(target) == link.a.read(source, direct=True)
        assert link.verify()["equal"]
