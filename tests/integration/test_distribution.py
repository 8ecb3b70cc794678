"""Distribution over a tree of real clusters: every message on every cluster once, whoever is killed meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import groups
from support.distributing import HEADER, PLUGINS, Distributing, distributing, flags, wait_set
from support.kafka import NOW_MS, Clusters, unique
from support.links import Read, Side, sidecars, until, whole
from support.power_loss import lose_end
from support.raw_log import delete_records
from support.source_topics import alter_topic
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_plugins.distribution.by_key import partition_of
from isthmus_plugins.distribution.kept import given_group, read_given

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

PARTITIONS = 2


@pytest.fixture
def two(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path) -> Iterator[Distributing]:
    """Two clusters, each with one proxy."""
    clusters = dict(zip(("one", "other"), kafka_pair, strict=True))
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as both:
        yield both


def produce(clusters: Distributing, name: str, topic: str, first: int, count: int, padding: bytes = b"") -> list[bytes]:
    """Messages of a cluster, over its partitions in turn; what they hold, which no others do."""
    values = [b"%s %d%s" % (name.encode(), first + number, padding) for number in range(count)]
    producer = clusters.sides[name].producer()
    for number, value in enumerate(values):
        headers = [("kept", b"as it is"), ("kept", None)]
        producer.produce(topic, value, b"key-%d" % number, number % PARTITIONS, headers=headers)
    assert producer.flush(60) == 0
    return values


def produce_in_transactions(side: Side, topic: str, name: bytes) -> list[bytes]:
    """Messages of a transaction that commits, among those of one that aborts."""
    values = []
    for ending in (b"aborted", b"committed"):
        producer = side.producer(transactional_id=unique("transactional-"))
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(20):
            producer.produce(topic, b"%s %s %d" % (name, ending, number), partition=number % PARTITIONS)
        assert producer.flush(30) == 0
        if ending == b"committed":
            producer.commit_transaction(30)
            values = [b"%s %s %d" % (name, ending, number) for number in range(20)]
        else:
            producer.abort_transaction(30)
    return values


def check_once(found: dict[str, list[list[Read]]], expected: Sequence[bytes]) -> None:
    """Every message is on every cluster once, in its partition, with all that it had."""
    for name, logs in found.items():
        counted = Counter(each.value for reads in logs for each in reads)
        assert counted == Counter(expected), (name, counted - Counter(expected), Counter(expected) - counted)
    first, *others = (
        {
            each.value: (partition, each.key, each.timestamp, [each for each in each.headers if each[0] != HEADER])
            for partition, reads in enumerate(logs)
            for each in reads
        }
        for logs in found.values()
    )
    assert all(each == first for each in others)


def test_every_message_gets_to_both_clusters_once(two: Distributing) -> None:
    """Distributors are killed, their messages are not: transactions, flags that a client hands on, a log of before."""
    one, other = two.sides.values()
    topic = two.create_topic(PARTITIONS)
    small = f"{two.prefix}small"
    one.create_topic(small)
    other.create_topic(small, config={"max.message.bytes": "2000"})
    for number in range(5):
        producer = one.producer()
        producer.produce(small, b"%d" % number * 1000, partition=0)
        assert producer.flush(30) == 0
    expected = produce(two, "one", topic, 0, 200)
    file = two.document(["one", "other"])
    planned = one.proxy.cli("tree", "apply", str(file), "--dry-run")
    assert (planned["before"], planned["plan"]["leaf"]) == (None, "one")
    assert "level 4  mask 1111" in planned["plan"]["drawing"]
    with pytest.raises(ProxyFailed, match="in no tree"):
        one.proxy.cli("tree", "show")
    one.proxy.cli("tree", "apply", str(file))

    def waits() -> bool:
        status = two.levels("one")[4]
        return (status["state"], status["reason_code"]) == ("Waiting", "TARGET_AT_ANOTHER_VERSION")

    until("the target is to have the tree, too", waits)
    assert one.proxy.cli("tree", "show", check=False)["distributors"][0]["state"] == "Waiting"
    two.apply(file)
    two.wait_distributing()
    expected += produce(two, "other", topic, 0, 200)
    two.wait_values(topic, PARTITIONS, expected)

    for number in range(2):
        expected += produce(two, "one", topic, 1000 * (number + 1), 300)
        expected += produce(two, "other", topic, 1000 * (number + 1), 300)
        side = (one, other)[number]
        side.proxy.kill()
        side.proxy.start()
    expected += produce_in_transactions(one, topic, b"one")
    expected += produce_in_transactions(other, topic, b"other")
    producer = other.producer()
    for codec in ("none", "zstd"):
        producer = other.producer(compression_type=codec)
        handed_on = [("before", b"1"), (HEADER, b"\x00" * 7 + b"\x08"), ("behind", b"2")]
        producer.produce(topic, b"handed on " + codec.encode(), headers=handed_on, partition=0)
        producer.produce(topic, b"beside it " + codec.encode(), partition=0)
        assert producer.flush(30) == 0
        expected += [b"handed on " + codec.encode(), b"beside it " + codec.encode()]

    found = two.wait_values(topic, PARTITIONS, expected)
    check_once(found, expected)
    own = {b"one": "one", b"other": "other"}
    for name, logs in found.items():
        for read in (each for reads in logs for each in reads):
            assert read.value is not None
            origin = own.get(read.value.split()[0])
            if origin is not None:
                assert flags(read) == (None if origin == name else 0b1000), (name, read)
            if read.value.startswith(b"handed on"):
                assert flags(read) == (None if name == "other" else 0b1000), (name, read)
                kept = [each for each in read.headers if each[0] != HEADER]
                assert kept == [("before", b"1"), ("behind", b"2")]
    two.wait_settled(topic)
    assert one.proxy.cli("tree", "show")["distributors"][0]["given"] > 0
    # The target takes these one by one, and not joined.
    kept = [b"%d" % number * 1000 for number in range(5)]
    check_once(two.wait_values(small, 1, kept), kept)
    with pytest.raises(ProxyFailed, match=r"version 3 cannot follow 1|write `version: 2`"):
        one.proxy.cli("tree", "apply", str(two.document(["one", "other"], version=3)))


@pytest.mark.one_in_ci("stories", of="a tree that changes")
def test_a_cluster_comes_and_another_one_goes(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], shared_kafka: Clusters, tmp_path: Path
) -> None:
    """Two clusters become three, the third once it is empty. The proxy that fills it is killed; then its cluster is
    taken out.
    """
    clusters = dict(zip(("one", "other", "third"), (*kafka_pair, shared_kafka(role="third")), strict=True))
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as three:
        third = three.sides.pop("third")
        one, other = three.sides.values()
        topic = three.create_topic(PARTITIONS)
        three.apply(three.document(["one", "other"]))
        three.wait_distributing()
        expected = produce(three, "one", topic, 0, 3_000, b"x" * 1_000)
        expected += produce(three, "other", topic, 0, 3_000, b"x" * 1_000)
        three.wait_values(topic, PARTITIONS, expected)
        with Wire(clusters["other"].bootstrap_servers) as wire:
            assert delete_records(wire, topic, 10) == (0, 10)
        gone = {each.value for each in one.read(topic, direct=True)} - {
            each.value for each in other.read(topic, direct=True)
        }
        assert len(gone) == 10

        three.sides["third"] = third
        third.create_topic(topic)
        third.produce(topic, [b"of before"])
        held = {"third": [f"{topic}-0 has offsets 0 to 0"]}
        file = three.document(["one", ["other", "third"]], version=2)
        tried = one.proxy.cli("tree", "apply", str(file), "--dry-run")
        assert (tried["added"], tried["removed"], tried["blocked"]) == ({"third": "other"}, [], [])
        assert tried["not_empty"] == held
        for side in (one, other):
            side.proxy.cli("tree", "apply", str(file))
        with pytest.raises(ProxyFailed, match="isthmus tree document"):
            third.proxy.cli("tree", "apply", str(file))
        told = tmp_path / "told.yaml"
        told.write_text(json.dumps(other.proxy.cli("tree", "document")))
        expected += produce(three, "one", topic, 10_000, 100)
        assert third.proxy.cli("tree", "apply", str(told), "--dry-run", check=False)["not_empty"] == held
        with pytest.raises(ProxyFailed, match="third is new, and not empty"):
            third.proxy.cli("tree", "apply", str(told))
        third.delete_topic(topic)
        until("it is gone", lambda: topic not in third.topics())
        (made,) = third.proxy.cli("tree", "apply", str(told))["topics"]
        assert (made["topic"], made["like"], made["partitions"]) == (topic, "one", PARTITIONS)
        until("it is being filled", lambda: any(third.end(topic, partition) for partition in range(PARTITIONS)))
        other.proxy.kill()
        other.proxy.start()
        for name in three.sides:
            expected += produce(three, name, topic, 20_000, 100)
        three.wait_distributing()
        everywhere = [each for each in expected if each not in gone]
        found = three.wait_values(topic, PARTITIONS, everywhere)
        assert Counter(each.value for reads in found["third"] for each in reads) == Counter(everywhere)
        for reads in found["third"]:
            filled = {flags(each) for each in reads if each.value.endswith(b"x")}
            assert filled == {2**63 - 1}
        for name in ("one", "other"):
            assert {each.value for reads in found[name] for each in reads} >= {*everywhere}
            assert sum(map(len, found[name])) == len(expected) - (len(gone) if name == "other" else 0)

        # It has all: so it may be a target, and the one that has filled it may go.
        one.proxy.cli("tree", "target", "one", "4", "third")
        for name in three.sides:
            expected += produce(three, name, topic, 30_000, 100)
        everywhere = [each for each in expected if each not in gone]
        three.wait_values(topic, PARTITIONS, everywhere)
        del three.sides["other"]
        file = three.document(["one", "third"], version=3)

        def blocked() -> list[str]:
            found: list[str] = one.proxy.cli("tree", "apply", str(file), "--dry-run", check=False)["blocked"]
            return found

        until("nobody lacks what it has", lambda: not blocked())
        three.apply(file)
        assert other.proxy.cli("tree", "leave")["lacking"] == []
        expected += produce(three, "one", topic, 40_000, 100) + produce(three, "third", topic, 40_000, 100)
        everywhere = [each for each in expected if each not in gone]
        found = three.wait_values(topic, PARTITIONS, everywhere)
        assert Counter(each.value for reads in found["third"] for each in reads) == Counter(everywhere)
        assert Counter(each.value for reads in found["one"] for each in reads) == Counter(expected)
        three.wait_settled(topic)


@pytest.mark.one_in_ci("stories", of="a tree that changes")
def test_messages_go_by_their_keys_where_partition_counts_differ(two: Distributing) -> None:
    """Two partitions at one cluster and three at the other, then as many; proxies are killed on the way."""
    one, other = two.sides.values()
    topic = unique(two.prefix)
    one.create_topic(topic, 2)
    other.create_topic(topic, 3)
    applied = one.proxy.cli("tree", "apply", str(two.document(["one", "other"])), "--dry-run")
    assert [(each["topic"], each["elsewhere"]) for each in applied["topics"]] == [(topic, {"other": 3})]
    two.apply(two.document(["one", "other"]))
    two.wait_distributing()
    assert {each["target_partitions"] for each in two.levels("one")[4]["partitions"]} == {3}
    expected: list[bytes] = []
    for number, side in enumerate((one, other)):
        expected += produce(two, "one", topic, 1_000 * number, 300) + produce(two, "other", topic, 1_000 * number, 300)
        side.proxy.kill()
        side.proxy.start()
    with_none = [b"none %d" % number for number in range(30)]
    producer = other.producer()
    for number, value in enumerate(with_none):
        producer.produce(topic, value, partition=number % 3)
    assert producer.flush(30) == 0
    expected += with_none

    def logs() -> dict[str, list[list[Read]]] | None:
        found = {
            name: [side.read(topic, each, direct=True, isolation="read_committed") for each in range(count)]
            for name, side, count in (("one", one, 2), ("other", other, 3))
        }
        values = [{each.value for reads in logs for each in reads} for logs in found.values()]
        return found if all({*expected} <= each for each in values) else None

    found = until("every message is on both clusters", logs, interval_s=0.3)
    origin = {"one": found["one"], "other": found["other"]}
    for name, count in (("one", 2), ("other", 3)):
        counted = Counter(each.value for reads in found[name] for each in reads)
        assert counted == Counter(expected)
        came = [(partition, each) for partition, reads in enumerate(found[name]) for each in reads if flags(each)]
        there = {
            each.value: number
            for number, reads in enumerate(origin["other" if name == "one" else "one"])
            for each in reads
        }
        assert {partition_of(each.key, there[each.value], count) - partition for partition, each in came} == {0}
        assert all(("kept", b"as it is") in each.headers for _, each in came if each.key is not None)
    until("everything is settled", lambda: settled(two, topic))
    one.add_partitions(topic, 3)

    def as_many() -> bool:
        partitions = two.levels("one")[4]["partitions"]
        return [each["target_partitions"] for each in partitions] == [None] * 3

    until("both have as many", as_many)
    expected += produce(two, "one", topic, 5_000, 100) + produce(two, "other", topic, 5_000, 100)
    two.wait_values(topic, 3, expected)
    two.wait_settled(topic)
    # What was kept beside another partition is not left out when that one's goes on: the third got nothing since.
    kept = groups.committed(one, given_group("other", 4))
    assert {each for (name, at), found in kept.items() if name == topic for each in read_given(at, *found)} == {0, 1, 2}


MARGIN_MS = 10_000


@pytest.mark.one_in_ci("stories", of="a tree that changes")
def test_clusters_call_the_same_topic_differently(two: Distributing) -> None:
    """It is made at the other cluster by its name there; a group moves, and proxies are killed. What has no name there
    stays.
    """
    one, other = two.sides.values()
    names = {"one": f"{two.prefix}{{environment}}-{{topic}}", "other": f"{two.prefix}main-{{topic}}.{{environment}}"}
    topics = {"one": f"{two.prefix}dev-orders", "other": f"{two.prefix}main-orders.dev"}
    unfit, group = f"{two.prefix}scratch", unique("named-")
    one.create_topic(topics["one"], PARTITIONS)
    one.create_topic(unfit)
    expected, began_ms = [b"timed %d" % number for number in range(40)], NOW_MS - 3_600_000
    producer = one.producer(batch_num_messages=1)
    for number, value in enumerate(expected):
        producer.produce(topics["one"], value, partition=0, timestamp=began_ms + number * 500)
    assert producer.flush(60) == 0
    file = two.document(["one", "other"], names=names, groups=[group], margin_ms=MARGIN_MS)
    assert one.proxy.cli("tree", "apply", str(file), "--dry-run")["names_unfit"] == [unfit]
    (made,) = other.proxy.cli("tree", "apply", str(file), "--dry-run")["topics"]
    assert (made["topic"], made["like"], made["partitions"]) == (topics["other"], "one", PARTITIONS)
    two.apply(file)

    def logs() -> dict[str, list[list[Read]]] | None:
        found = {
            name: [side.read(topics[name], each, direct=True, isolation="read_committed") for each in range(PARTITIONS)]
            for name, side in two.sides.items()
        }
        values = [{each.value for reads in logs for each in reads} for logs in found.values()]
        return found if all({*expected} <= each for each in values) else None

    until("the other cluster has what was there", logs, interval_s=0.3)
    groups.commit(one, group, {(topics["one"], 0): 30})
    position = wait_set(other, group, topics["other"], began_ms + 30 * 500, MARGIN_MS)
    read_on = [each.value for each in other.read(topics["other"], direct=True) if each.offset >= position]
    assert read_on == expected[-len(read_on) :]

    for number, side in enumerate((one, other)):
        for name in two.sides:
            expected += produce(two, name, topics[name], 1_000 * number, 200)
        side.proxy.kill()
        side.proxy.start()
    expected += [each for name in two.sides for each in produce(two, name, topics[name], 5_000, 100)]
    found = until("every message is on both clusters", logs, interval_s=0.3)
    counted = {name: Counter(each.value for reads in of for each in reads) for name, of in found.items()}
    assert counted["one"] == counted["other"] == Counter(expected)
    until("all is settled", lambda: all(settled(two, topic) for topic in topics.values()))
    places = {
        name: [(each["topic"], each["reason_code"]) for each in two.levels(name)[4]["partitions"]] for name in topics
    }
    in_both = ("__isthmus_tree_times", None)
    assert places["one"] == [in_both, *[(topics["one"], None)] * PARTITIONS, (unfit, "NAME_DOES_NOT_FIT")]
    assert places["other"] == [in_both, *[(topics["other"], None)] * PARTITIONS]
    renamed = {**names, "other": f"{two.prefix}{{topic}}.{{environment}}"}
    with pytest.raises(ProxyFailed, match="other gets others by being taken out"):
        one.proxy.cli("tree", "apply", str(two.document(["one", "other"], version=2, names=renamed)), "--dry-run")


def settled(clusters: Distributing, topic: str) -> bool:
    """Whether everything in a topic was given, and is settled, whatever its partitions."""
    return all(
        (each["lag"], each["settled"]) == (0, side.end(topic, each["partition"], "read_committed"))
        for name, side in clusters.sides.items()
        for status in clusters.levels(name).values()
        for each in status["partitions"]
        if each["topic"] == topic
    )


BALANCED = {"level": 3, "sides": [{"level": 1, "sides": ["c1", "c2"]}, {"level": 1, "sides": ["c3", "c4"]}]}
UNBALANCED = {
    "level": 3,
    "sides": [
        {"level": 2, "sides": ["c1", {"level": 1, "sides": ["c2", "c3"]}]},
        {"level": 1, "sides": ["c4", "c5"]},
    ],
}
"""Both pictures of document 000."""


@pytest.mark.suite("stories")
@pytest.mark.parametrize(
    ("picture", "former", "chosen", "exactly_once"),
    [(BALANCED, "c3", "c4", True), (BALANCED, "c3", "c4", False), (UNBALANCED, "c4", "c5", True)],
    ids=["four", "four-at-least-once", "five"],
)
def test_every_message_gets_to_every_cluster_of_a_tree(
    kafka_cluster: Clusters, tmp_path: Path, picture: Any, former: str, chosen: str, exactly_once: bool
) -> None:
    """Another target is chosen meanwhile; a proxy is killed and does not come back: another one has its levels."""
    names = [f"c{number}" for number in range(1, 5 if picture is BALANCED else 6)]
    clusters = {name: kafka_cluster(brokers=2 if name == "c1" else 1, name=name) for name in names}
    proxies = {
        name: sidecars(kafka, **PLUGINS) if name == "c1" else [whole(kafka, **PLUGINS)]
        for name, kafka in clusters.items()
    }
    with distributing(clusters, proxies, tmp_path) as all_of_them:
        topic = all_of_them.create_topic(PARTITIONS)
        all_of_them.apply(all_of_them.document(picture, exactly_once=exactly_once))
        all_of_them.wait_distributing()
        first = all_of_them.sides["c1"]
        expected = [value for name in names for value in produce(all_of_them, name, topic, 0, 200)]
        assert all_of_them.levels("c1")[3]["target"] == former
        first.proxy.cli("tree", "target", "c1", "3", chosen)
        expected += [value for name in names for value in produce(all_of_them, name, topic, 1000, 200)]

        def switched() -> bool:
            status = all_of_them.levels("c1")[3]
            return (status["target"], status["state"]) == (chosen, "Distributing")

        until("the target is switched", switched)
        dies = next(each for each in first.proxies if each.name == all_of_them.levels("c1")[3]["proxy"])
        dies.kill()
        first.proxies.remove(dies)
        for number in range(2, 5):
            for name in names[1:]:
                expected += produce(all_of_them, name, topic, 1000 * number, 100)
        until("another proxy distributes", switched)
        found = all_of_them.wait_values(topic, PARTITIONS, expected)
        all_of_them.wait_settled(topic)
        if exactly_once:
            check_once(found, expected)
        check_ways(found, picture)


@pytest.mark.suite("stories")
def test_a_target_that_is_lost_is_given_up_and_takes_nothing_with_it(kafka_cluster: Clusters, tmp_path: Path) -> None:
    """What c3 was given, and has not passed on to c4, is in nobody's log but c1's when c3 is gone."""
    clusters = {name: kafka_cluster(name=name) for name in ("c1", "c3", "c4")}
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as three:
        topic = three.create_topic(PARTITIONS)
        three.apply(three.document(["c1", ["c3", "c4"]]))
        three.wait_distributing()
        expected = produce(three, "c1", topic, 0, 100)
        three.wait_values(topic, PARTITIONS, expected)
        lost = three.sides["c3"]
        lost.proxy.kill()
        expected += produce(three, "c1", topic, 1000, 100)

        def given() -> bool:
            partitions = three.levels("c1")[8]["partitions"]
            return [each["lag"] for each in partitions] == [0] * PARTITIONS

        until("c3 was given everything", given)
        assert sum(map(len, three.read(topic, PARTITIONS)["c4"])) == 100
        clusters["c3"].stop()
        del three.sides["c3"]
        first = three.sides["c1"]
        first.proxy.cli("tree", "target", "c1", "8", "c4")
        until("it waits for what c3 says", lambda: three.levels("c1")[8]["reason_code"] == "FORMER_TARGET_UNREACHABLE")
        first.proxy.cli("tree", "target", "c1", "8", "c4", "--give-up")
        expected += produce(three, "c1", topic, 2000, 100)
        found = three.wait_values(topic, PARTITIONS, expected)
        assert Counter(each.value for reads in found["c1"] for each in reads) == Counter(expected)


def one_by_one(side: Side, topic: str, values: Sequence[bytes]) -> list[bytes]:
    """Messages of one partition, each a batch of its own; the brokers have all."""
    producer = side.producer(direct=True, linger_ms=0)
    for value in values:
        producer.produce(topic, value, partition=0)
        assert producer.flush(30) == 0
    return [*values]


@pytest.mark.suite("stories")
def test_a_log_that_lost_its_end_or_its_beginning_is_gone_on_with(
    kafka: KafkaCluster, kafka_cluster: Clusters, tmp_path: Path
) -> None:
    """By a power loss, and by retention, while nobody distributes; what was given before stays with the other."""
    own = kafka_cluster(name="one")
    clusters = {"one": own, "other": kafka}
    proxies = {name: [whole(each, **PLUGINS)] for name, each in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as two:
        one = two.sides["one"]
        topic = two.create_topic(1)
        two.apply(two.document(["one", "other"]))
        two.wait_distributing()
        given = one_by_one(one, topic, [b"given %d" % number for number in range(10)])
        two.wait_values(topic, 1, given)
        two.wait_settled(topic)
        one.proxy.kill()
        own.kill(1)
        lose_end(own, 1, topic, batches=4)
        own.start_broker(1)
        new = one_by_one(one, topic, [b"new %d" % number for number in range(7)])
        assert [each.value for each in one.read(topic, direct=True)] == given[:6] + new
        one.proxy.start()
        until("it goes on", lambda: set(new) <= {each.value for each in two.read(topic, 1)["other"][0]})
        assert [each.value for each in two.read(topic, 1)["other"][0]] == given + new
        assert reason(two, "one", topic) == "MESSAGES_LOST"
        (partition,) = two.levels("one")[4]["partitions"]
        assert "lost offsets 6 to 9 of it after they were given" in partition["reason"]
        two.wait_settled(topic)

        one.proxy.kill()
        kept = one_by_one(one, topic, [b"kept %d" % number for number in range(5)])
        with Wire(own.bootstrap_servers) as wire:
            assert delete_records(wire, topic, 15) == (0, 15)
        one.proxy.start()
        until("it goes on", lambda: set(kept[2:]) <= {each.value for each in two.read(topic, 1)["other"][0]})
        assert [each.value for each in two.read(topic, 1)["other"][0]] == given + new + kept[2:]
        assert two.levels("one")[4]["lost"] == 2
        two.wait_settled(topic)

        # Of a topic that is made anew nobody was given anything, whatever the other cluster remembers.
        one.delete_topic(topic)
        until("it is gone", lambda: topic not in one.topics())
        one.create_topic(topic)
        again = one_by_one(one, topic, [b"again %d" % number for number in range(3)])
        until("it is given", lambda: set(again) <= {each.value for each in two.read(topic, 1)["other"][0]})
        two.wait_settled(topic)

        more = unique(two.prefix)
        one.create_topic(more)
        values = one_by_one(one, more, [b"more"])
        until("the other one lacks it", lambda: reason(two, "one", more) == "TOPIC_MISSING")
        # Whoever applies the tree again makes it there.
        (made,) = two.sides["other"].proxy.cli("tree", "apply", str(two.document(["one", "other"])))["topics"]
        assert (made["topic"], made["partitions"], made["like"]) == (more, 1, "one")
        two.wait_values(more, 1, values)


@pytest.mark.suite("stories")
@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_message_that_the_target_refuses_keeps_its_partition_waiting_and_no_other(
    two: Distributing, exactly_once: bool
) -> None:
    """In the middle of a batch of which the target takes what is before it."""
    one, other = two.sides.values()
    topic, elsewhere = two.create_topic(PARTITIONS), two.create_topic(1)
    alter_topic(other, topic, {"max.message.bytes": "20000"})
    before = [b"before %d" % number for number in range(50)]
    refused, behind = [b"refused" + b"x" * 40_000], [b"behind %d" % number for number in range(50)]
    two.apply(two.document(["one", "other"], exactly_once=exactly_once))
    two.wait_distributing()
    one.produce(topic, [*before, *refused, *behind], direct=True)
    until("its partition waits", lambda: reason(two, "one", topic) == "TARGET_REFUSES_RECORDS")

    def is_at_it() -> bool:
        (partition,) = (
            each for each in two.levels("one")[4]["partitions"] if (each["topic"], each["partition"]) == (topic, 0)
        )
        return bool(partition["position"] == len(before) and partition["reason"])

    until("what is before it is given", is_at_it)
    going_on = [b"going on %d" % number for number in range(20)]
    for name, partition in ((topic, 1), (elsewhere, 0)):
        one.produce(name, going_on, partition, direct=True)
        until(
            "others go on",
            lambda name=name, partition=partition: (
                other.read(name, partition, direct=True, isolation="read_committed")[-1:]
                and other.read(name, partition, direct=True, isolation="read_committed")[-1].value == going_on[-1]
            ),
        )
        assert [each.value for each in other.read(name, partition, direct=True, isolation="read_committed")] == going_on
    status = two.levels("one")[4]
    assert (status["state"], status["reason"]) == ("Distributing", None)
    assert one.proxy.cli("tree", "show", check=False)["distributors"][0]["state"] == "Distributing"
    with pytest.raises(ProxyFailed):
        one.proxy.cli("tree", "show")

    one.proxy.kill()
    one.proxy.start()
    until("it waits again", lambda: reason(two, "one", topic) == "TARGET_REFUSES_RECORDS")
    alter_topic(other, topic, {"max.message.bytes": "1000000"})
    found = two.wait_values(topic, PARTITIONS, [*before, *refused, *behind, *going_on])
    values = [each.value for each in found["other"][0]]
    assert [*dict.fromkeys(values)] == [*before, *refused, *behind]
    assert len(values) == len(set(values)) or not exactly_once
    two.wait_settled(topic)


def reason(clusters: Distributing, name: str, topic: str) -> str | None:
    """Why a cluster's only level leaves a topic's first partition out."""
    partitions = clusters.levels(name)[4]["partitions"]
    return next((each["reason_code"] for each in partitions if (each["topic"], each["partition"]) == (topic, 0)), None)


def check_ways(found: dict[str, list[list[Read]]], picture: Any) -> None:
    """Each copy has the bits of levels at which its way has parted, and the lowest of them is where it came by."""
    for name, logs in found.items():
        for read in (each for reads in logs for each in reads):
            assert read.value is not None
            origin, has = read.value.split()[0].decode(), flags(read)
            if origin == name:
                assert has is None
                continue
            assert has is not None
            levels = [level for level in (1, 2, 3) if has & 1 << (level - 1)]
            assert max(levels) == parting(picture, origin, name), (origin, name, levels)


def parting(side: Any, one: str, other: str) -> int:
    """The level at which two clusters part."""
    for each in side["sides"]:
        inside = leaves(each)
        if one in inside and other in inside:
            return parting(each, one, other)
    return int(side["level"])


def leaves(side: Any) -> list[str]:
    return [side] if isinstance(side, str) else [leaf for each in side["sides"] for leaf in leaves(each)]
