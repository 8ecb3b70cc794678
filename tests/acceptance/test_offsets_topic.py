"""The source's offsets topic on the target: whole, redacted to groups, encrypted for groups (KIP-986)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from support.kafka import unique
from support.links import Linked, Side, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.offsets_cipher import MAGIC, with_new_key

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(90)]

OFFSETS = "__consumer_offsets"
WAIT_S = 30.0


class Keyrings:
    """The keyring files of both sides."""

    def __init__(self, directory: Path) -> None:
        self.source, self.target = directory / "source.json", directory / "target.json"
        self.clear()

    def clear(self) -> None:
        for path in (self.source, self.target):
            path.write_text('{"groups": {}}')

    def add(self, pattern: str, disclosed: bool) -> str:
        """A new current key at the source, that the target gets if it is ``disclosed``."""
        text, key_id = with_new_key(self.source.read_text(), pattern)
        if disclosed:
            ring = json.loads(self.target.read_text())
            ring["groups"][pattern] = json.loads(text)["groups"][pattern]
            self.target.write_text(json.dumps(ring))
        self.source.write_text(text)
        return key_id


class Copies:
    """A link, groups of A, and the copy of A's offsets topic at B."""

    def __init__(self, pair: Linked, keyrings: Keyrings) -> None:
        self.pair = pair
        self.keyrings = keyrings
        self.topic = unique("t")
        self.name = f"{OFFSETS}_{pair.a.link(pair.name)['local_cluster_id']}"
        pair.a.create_topic(self.topic)

    def choose(self, form: str, *groups: str) -> None:
        chosen = [argument for group in groups for argument in ("--offsets-group", group)]
        self.pair.a.proxy.cli("link", "alter", self.pair.name, "--offsets-topic", form, *chosen)

    def commit(self, group: str, offset: int, metadata: str = "") -> None:
        commit(self.pair.a, group, self.topic, offset, metadata)

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = self.pair.b.proxy.get(f"/v1/links/{self.pair.name}/offsets")
        return found

    def committed_at(self, group: str) -> tuple[int, str] | None:
        """Where a group is, as the copy says."""
        for each in self.view()["groups"]:
            for committed in each["offsets"]:
                if (each["group"], committed["topic"]) == (group, self.topic):
                    # librdkafka ends metadata with a zero byte.
                    return committed["offset"], committed["metadata"].rstrip("\0")
        return None

    def wait_committed(self, group: str, committed: tuple[int, str] | None) -> None:
        until(f"{group} is at {committed} in the copy", lambda: self.committed_at(group) == committed, WAIT_S, 0.2)

    def wait_equal_ends(self) -> None:
        partitions = self.pair.a.topics()[OFFSETS]
        until(
            "the copy is complete",
            lambda: all(
                self.pair.b.end(self.name, each) == self.pair.a.end(OFFSETS, each) for each in range(partitions)
            ),
            WAIT_S,
            0.3,
        )

    def raw(self) -> bytes:
        """All that stands in the copy at B's brokers."""
        found = b""
        for partition in range(self.pair.b.topics()[self.name]):
            for record in self.pair.b.read(self.name, partition, direct=True):
                found += (record.key or b"") + b"|" + (record.value or b"") + b"|"
        return found


def commit(side: Side, group: str, topic: str, offset: int, metadata: str = "") -> None:
    consumer = Consumer({"bootstrap.servers": side.bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        (done,) = consumer.commit(offsets=[TopicPartition(topic, 0, offset, metadata)], asynchronous=False)
        assert done.error is None
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def link(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Linked, Keyrings]]:
    keyrings = Keyrings(tmp_path_factory.mktemp("keyrings"))
    proxies = [
        whole(kafka, replication={"offsets_keyring_file": str(path)})
        for kafka, path in zip(kafka_pair, (keyrings.source, keyrings.target), strict=True)
    ]
    with linked(*kafka_pair, a_proxies=proxies[:1], b_proxies=proxies[1:]) as pair:
        yield pair, keyrings


@pytest.fixture
def copied(link: tuple[Linked, Keyrings]) -> Iterator[Copies]:
    """No copy yet, and no keys."""
    pair, keyrings = link
    keyrings.clear()
    made = Copies(pair, keyrings)
    yield made
    made.choose("off")
    if made.name in pair.b.topics():
        pair.b.delete_topic(made.name, direct=True)
        until("the copy is gone", lambda: made.name not in pair.b.topics())


def test_the_whole_topic_is_copied_offset_by_offset(copied: Copies) -> None:
    """Commits before and after the choice, of a transaction, deleted ones; it verifies, and no client writes it."""
    first, second = unique("app-"), unique("other-")
    copied.commit(first, 5, "before")
    copied.choose("whole")
    copied.wait_committed(first, (5, "before"))
    copied.commit(second, 6, "after")
    copied.commit(first, 7)
    copied.wait_committed(second, (6, "after"))
    producer = Producer({"bootstrap.servers": copied.pair.a.bootstrap, "transactional.id": unique("txn-")})
    producer.init_transactions(30)
    consumer = Consumer({"bootstrap.servers": copied.pair.a.bootstrap, "group.id": first})
    for offset, end in ((50, producer.abort_transaction), (60, producer.commit_transaction)):
        producer.begin_transaction()
        place = TopicPartition(copied.topic, 0, offset)
        producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), 30)
        end(30)
    consumer.close()
    copied.wait_committed(first, (60, ""))
    copied.pair.a.admin().delete_consumer_groups([second])[second].result(30)
    copied.wait_committed(second, None)
    copied.wait_equal_ends()
    assert copied.pair.b.topics()[copied.name] == copied.pair.a.topics()[OFFSETS]
    assert copied.pair.b.topic_config(copied.name)["cleanup.policy"] in ("compact,delete", "delete,compact")
    with pytest.raises(KafkaException):
        copied.pair.b.produce(copied.name, [b"x"])
    report = copied.pair.verify()
    assert report["equal"]
    assert {each["topic"] for each in report["partitions"]} == {OFFSETS}
    (status,) = copied.pair.b.link(copied.pair.name)["offsets_topics"]
    assert (status["role"], status["form"], status["topic"]) == ("follower", "whole", copied.name)


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_a_copy_that_somebody_else_wrote_waits_until_it_is_made_anew(copied: Copies) -> None:
    group = unique("app-")
    copied.choose("whole")
    copied.commit(group, 5)
    copied.wait_committed(group, (5, ""))
    rogue = copied.pair.b.producer(direct=True)
    rogue.produce(copied.name, b"rogue", key=b"rogue", partition=0)
    assert rogue.flush(30) == 0
    copied.pair.wait_state(copied.name, "Diverged")
    assert copied.pair.b.proxy.get(f"/v1/links/{copied.pair.name}/truncations")["items"] == []
    copied.pair.b.proxy.cli("topic", "recreate", copied.name)
    until("the copy follows", lambda: copied.pair.follower_state(copied.name) == "Following", WAIT_S, 0.2)
    copied.wait_committed(group, (5, ""))
    copied.wait_equal_ends()
    assert b"rogue" not in copied.raw()
    assert copied.pair.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_a_redacted_copy_has_the_chosen_groups_and_the_same_offsets(copied: Copies) -> None:
    shown, named, hidden = unique("app-"), unique("billing-"), unique("hidden-")
    for offset in range(3):
        for group in (hidden, shown, named):
            copied.commit(group, offset, f"{group}-metadata")
    copied.choose("redacted", "app-*", named)
    for group in (shown, named):
        copied.wait_committed(group, (2, f"{group}-metadata"))
    copied.wait_equal_ends()
    copied.commit(hidden, 9)
    copied.commit(shown, 9)
    copied.wait_committed(shown, (9, ""))
    copied.wait_equal_ends()
    assert copied.committed_at(hidden) is None
    raw = copied.raw()
    assert hidden.encode() not in raw
    assert shown.encode() in raw
    report = copied.pair.verify()
    assert report["equal"]
    assert all("redacted" in each["note"] for each in report["partitions"])

    for side in (copied.pair.a, copied.pair.b):
        side.proxy.kill()
    for side in (copied.pair.a, copied.pair.b):
        side.proxy.spawn()
    for side in (copied.pair.a, copied.pair.b):
        side.proxy.wait_ready()
    copied.commit(shown, 10, "after the kill")
    copied.wait_committed(shown, (10, "after the kill"))

    # Another choice holds from then on, and for all that there is once the copy is made anew.
    copied.choose("redacted", hidden)
    copied.commit(shown, 11)
    copied.commit(hidden, 11)
    copied.wait_committed(hidden, (11, ""))
    assert copied.committed_at(shown) == (10, "after the kill")
    decision = copied.pair.b.proxy.cli("topic", "recreate", copied.name)
    assert decision["action"] == "recreate"
    until(
        "the copy is made anew", lambda: copied.committed_at(shown) is None and copied.committed_at(hidden), WAIT_S, 0.2
    )
    copied.wait_equal_ends()
    assert shown.encode() not in copied.raw()
    assert copied.pair.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_an_encrypted_copy_is_read_as_far_as_keys_were_given(copied: Copies) -> None:
    """A key that the target has, one that it has not, a group without one; rotation; a copy put together anew."""
    shown, closed, none = unique("app-"), unique("secret-"), unique("nokey-")
    old_id = copied.keyrings.add("app-*", disclosed=True)
    closed_id = copied.keyrings.add("secret-*", disclosed=False)
    for group in (shown, closed, none):
        copied.commit(group, 1, f"{group}-metadata")
    copied.choose("encrypted")
    copied.wait_committed(shown, (1, f"{shown}-metadata"))
    copied.wait_equal_ends()
    view = copied.view()
    assert closed not in {each["group"] for each in view["groups"]}
    assert view["unreadable_records"] >= 1
    assert view["unreadable_key_ids"] == [closed_id]

    new_id = copied.keyrings.add("app-*", disclosed=True)
    copied.commit(shown, 2, "rotated")
    copied.wait_committed(shown, (2, "rotated"))
    lost = json.loads(copied.keyrings.target.read_text())
    ring = json.loads(json.dumps(lost))
    del ring["groups"]["app-*"]
    copied.keyrings.target.write_text(json.dumps(ring))
    assert copied.committed_at(shown) is None
    assert set(copied.view()["unreadable_key_ids"]) == {closed_id, old_id, new_id}
    copied.keyrings.target.write_text(json.dumps(lost))
    assert copied.committed_at(shown) == (2, "rotated")

    copied.pair.a.admin().delete_consumer_groups([shown])[shown].result(30)
    copied.wait_committed(shown, None)
    copied.wait_equal_ends()
    raw = copied.raw()
    for plain in (shown, closed, none, copied.topic, "metadata", "rotated"):
        assert plain.encode() not in raw
    assert MAGIC in raw
    for log in (copied.pair.a.proxy.log, copied.pair.b.proxy.log):
        for entry in json.loads(copied.keyrings.source.read_text())["groups"].values():
            assert not any(key in log for key in entry["keys"].values())
    assert copied.pair.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_without_a_usable_keyring_nothing_leaves(copied: Copies) -> None:
    group = unique("app-")
    copied.keyrings.add("app-*", disclosed=True)
    copied.choose("encrypted")
    copied.commit(group, 1)
    copied.wait_committed(group, (1, ""))
    good = copied.keyrings.source.read_text()
    copied.keyrings.source.write_text("{")
    copied.commit(group, 2)

    def stopped() -> list[Any]:
        found = copied.pair.a.partitions(copied.pair.name, OFFSETS)
        return [each for each in found if each["reason"] == "KEYRING_UNUSABLE" and each["state"] == "Stopped"]

    (partition, *_) = until("the copy has stopped", stopped, WAIT_S)
    assert "not JSON" in partition["message"]
    copied.keyrings.source.write_text(good)
    copied.wait_committed(group, (2, ""))
