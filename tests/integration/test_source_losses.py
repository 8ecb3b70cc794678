"""A source that loses power after it acked In-Sync, on real brokers: cut or held as is set, told on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.groups import committed, member, offsets
from support.kafka import unique
from support.links import Linked, Read, until
from support.power_loss import in_sync, lose_end, one_by_one

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.offsets_salvage import read_offsets_salvage
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage

pytestmark = [
    pytest.mark.brokers,
    pytest.mark.timeout(240),
    pytest.mark.one_in_ci("stories", of="source losses"),
]

BROKER = 1
ACKED, LOST = 20, 4


@pytest.fixture(scope="module")
def source() -> Iterator[KafkaCluster]:
    """A cluster of this module's own: it loses power."""
    with KafkaCluster(name="lossy", brokers=1) as cluster:
        yield cluster


def lose_power(source: KafkaCluster, topic: str, partition: int = 0) -> int:
    """The source loses the last records of a log, and comes back; where the log ends then."""
    source.kill(BROKER)
    lost = lose_end(source, BROKER, topic, partition, batches=LOST)
    source.start_broker(BROKER)
    return lost.base_offset


def told(link: Linked, state: str) -> dict[str, Any]:
    """Wait until both sides tell one loss in this state; what the target says of it."""

    def both() -> dict[str, Any] | None:
        here, there = (side.link(link.name)["source_losses"] for side in (link.b, link.a))
        same = [(each["number"], each["state"]) for each in here] == [(each["number"], each["state"]) for each in there]
        return dict(here[0]) if same and [each["state"] for each in here] == [state] else None

    found = until(f"both sides tell what is {state}", both)
    assert [each["role"] for each in link.a.link(link.name)["source_losses"]] == ["leader"]
    return dict(found)


def acknowledged(link: Linked) -> None:
    """What is told survives the proxies, and ends when the source's operator knows."""
    for side in (link.a, link.b):
        side.proxy.kill()
        side.proxy.spawn()
        side.proxy.wait_ready()
    both = (link.a, link.b)
    until("still told", lambda: all(len(side.link(link.name)["source_losses"]) == 1 for side in both))
    until("In-Sync", lambda: link.a.link(link.name)["state"] == "In-Sync")
    assert link.a.proxy.cli("link", "acknowledge", link.name)["acknowledged"] == 1
    until("told no more", lambda: not any(side.link(link.name)["source_losses"] for side in both))


def state_of(link: Linked, role: str) -> tuple[str, str | None]:
    side = link.a if role == "leader" else link.b
    (found,) = side.link(link.name)["partitions"]
    return found["state"], found["reason"]


def values(read: list[Read]) -> list[bytes | None]:
    return [each.value for each in read]


def test_records_that_are_cut_are_salvaged_and_told(
    source: KafkaCluster, kafka_pair: tuple[KafkaCluster, KafkaCluster]
) -> None:
    with in_sync(source, kafka_pair[1]) as (link, here, there):
        one_by_one(link, here, ACKED)
        end = link.a.end(here)
        until("all is there", lambda: link.b.end(there) == end)
        acked = values(link.b.read(there))
        left = lose_power(source, here)
        loss = told(link, "cut")
        assert (loss["topic"], loss["from_offset"], loss["to_offset"], loss["count"]) == (there, left, end, LOST)
        salvage = read_salvage(Path(loss["salvage_file"]).read_bytes())
        lost = [record.value for batch, _ in salvage.batches() for record in decode_records(batch)]
        assert lost == acked[left:]
        until("In-Sync", lambda: link.a.link(link.name)["state"] == "In-Sync")
        one_by_one(link, here, 1)
        until("all is there", lambda: link.b.end(there) == left + 1)
        assert link.verify()["equal"]
        text = httpx.get(f"{link.a.proxy.url}/metrics", trust_env=False).text
        labels = f'link="{link.name}",role="leader",state="cut",type="topic"'
        assert f"isthmus_source_losses{{{labels}}} 1.0" in text
        acknowledged(link)


@pytest.mark.parametrize("decision", ["truncate", "failover"])
def test_records_that_are_held_stay_until_the_operator_decides(
    decision: str, source: KafkaCluster, kafka_pair: tuple[KafkaCluster, KafkaCluster]
) -> None:
    held = ("Diverged", "SOURCE_LOST_RECORDS")
    with in_sync(source, kafka_pair[1]) as (link, here, there):
        link.a.proxy.cli("link", "alter", link.name, "--local", link.local, "--on-source-loss", "hold")
        one_by_one(link, here, ACKED)
        end = link.a.end(here)
        until("all is there", lambda: link.b.end(there) == end)
        acked = values(link.b.read(there))
        left = lose_power(source, here)
        loss = told(link, "held")
        assert (loss["from_offset"], loss["to_offset"], loss["salvage_file"]) == (left, end, None)
        until("both show it", lambda: state_of(link, "leader") == state_of(link, "follower") == held)
        link.a.produce(here, [b"another"], direct=True)
        assert values(link.b.read(there)) == acked
        if decision == "truncate":
            planned = link.b.proxy.cli("topic", "truncate", there, "--dry-run")
            assert (planned["records_lost"], state_of(link, "follower")) == (LOST, held)
            link.b.proxy.cli("topic", "truncate", there)
            loss = told(link, "cut")
            assert read_salvage(Path(loss["salvage_file"]).read_bytes()).tail.records == LOST
            until("all is there", lambda: link.b.end(there) == left + 1)
            assert link.verify()["equal"]
            acknowledged(link)
            return
        link.a.proxy.kill()
        link.b.proxy.cli("link", "failover", link.name)
        link.b.produce(there, [b"after the failover"])
        assert values(link.b.read(there)) == [*acked, b"after the failover"]
        assert [each["state"] for each in link.b.link(link.name)["source_losses"]] == ["kept"]
        assert link.b.proxy.cli("link", "acknowledge", link.name)["acknowledged"] == 1
        assert link.b.link(link.name)["source_losses"] == []


@pytest.mark.parametrize("setting", ["cut", "hold"])
def test_committed_offsets_that_both_acked_do_not_go_back_without_a_trace(
    setting: str, source: KafkaCluster, kafka_pair: tuple[KafkaCluster, KafkaCluster]
) -> None:
    with in_sync(source, kafka_pair[1]) as (link, here, there):
        one_by_one(link, here, ACKED)
        local, remote = unique("app-") + "-", unique("far-") + "-"
        link.attach(local, remote, "--type", "consumer-group", "--on-source-loss", setting)
        group, far_group = local + "g", remote + "g"
        with member(link.a, group, here) as joined:
            joined.commit({(here, 0): 0})
            until("In-Sync", lambda: claim(link, remote)["in_sync_until_ms"] is not None)
            for offset in range(1, ACKED + 1):
                joined.commit({(here, 0): offset})
        until("left", lambda: not members(link, group))
        assert offsets(link.b, far_group)[there, 0] == ACKED
        partition = partition_of(group, link.a.topics()[OFFSETS_TOPIC])
        lose_power(source, OFFSETS_TOPIC, partition)
        left = committed(link.a, group)[here, 0][0]
        assert left < ACKED
        if setting == "hold":
            loss = told(link, "held")
            reasons = {side.link(link.name)["groups"][0]["reason"] for side in (link.a, link.b)}
            assert reasons == {"SOURCE_LOST_COMMITS"}
            assert offsets(link.b, far_group)[there, 0] == ACKED
            chosen = ("--local", remote, "--type", "consumer-group", "--on-source-loss", "cut")
            link.b.proxy.cli("link", "alter", link.name, *chosen)
        loss = told(link, "cut")
        until("put back", lambda: offsets(link.b, far_group)[there, 0] == left)
        assert (loss["type"], loss["topic"], loss["partition"]) == ("consumer-group", OFFSETS_TOPIC, partition)
        assert [(each["group"], each["offset"], each["source_offset"]) for each in loss["commits"]] == [
            (far_group, ACKED, left)
        ]
        (entry,) = read_offsets_salvage(Path(loss["salvage_file"]).read_bytes()).offsets
        assert (entry.group, entry.topic, entry.offset) == (far_group, there, ACKED)
        acknowledged(link)


def members(link: Linked, group: str) -> int:
    (found,) = link.a.admin(direct=True).describe_consumer_groups([group]).values()
    return len(found.result(30).members)


def claim(link: Linked, remote: str) -> Any:
    report: Any = link.b.proxy.cli("link", "failover", link.name, "--local-group", remote, "--dry-run")
    (found,) = report["namespaces"][0]["group_claims"]
    return found
