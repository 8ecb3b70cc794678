"""Groups move between the clusters of a tree, and go on there by time: at least once, near the margin."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from support import groups
from support.client_readers import reader
from support.distributing import ANY_MARK, MARK, PLUGINS, Distributing, before_later, distributing, wait_set
from support.kafka import NOW_MS, Clusters, unique
from support.links import Read, Side, until, whole
from support.source_topics import alter_topic

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_plugins.distribution.by_key import partition_of

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

MARGIN_MS = 10_000
STEP_MS = 500
BEGAN_MS = NOW_MS - 3_600_000


@pytest.fixture
def two(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path) -> Iterator[Distributing]:
    """Two clusters, each with one proxy."""
    clusters = dict(zip(("one", "other"), kafka_pair, strict=True))
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as both:
        yield both


def apply(clusters: Distributing, tree: Sequence[object], groups: str, margin_ms: int = MARGIN_MS) -> None:
    clusters.apply(clusters.document(tree, groups=[groups], margin_ms=margin_ms))
    clusters.wait_distributing()
    for name in clusters.sides:
        until("offsets are distributed", lambda name=name: clusters.offsets(name)["state"] == "Distributing")


def produce(side: Side, topic: str, numbers: range) -> list[bytes]:
    """Messages half a second from each other, in the past; each a batch of its own: a batch has one time for all."""
    producer = side.producer(batch_num_messages=1)
    for number in numbers:
        producer.produce(topic, b"%d" % number, partition=0, timestamp=BEGAN_MS + number * STEP_MS)
    assert producer.flush(60) == 0
    return [b"%d" % number for number in numbers]


def time_of(number: int) -> int:
    return BEGAN_MS + number * STEP_MS


def test_a_group_moves_to_the_other_cluster_and_back(two: Distributing) -> None:
    """It reads again what is within the margin, and nothing else; its own metadata is kept."""
    one, other = two.sides.values()
    topic, of_tests = two.create_topic(1), unique("moves-")
    place = topic, 0
    apply(two, ["one", "other"], of_tests)
    moving, still = of_tests + "-moving", of_tests + "-still"
    read_first = produce(one, topic, range(200))
    with reader("aiokafka", DEFAULT_VERSION, topic, moving, one.bootstrap) as before:
        until("it has read", lambda: len(before.read) == 200)
    two.wait_values(topic, 1, read_first + produce(one, topic, range(200, 400)))

    position = wait_set(other, moving, topic, time_of(200), MARGIN_MS)
    with groups.member(other, still, topic):
        groups.commit(one, still, {place: 300}, "the application's own")
        until("members are waited for", lambda: two.waiting("other", still) == {place: "MEMBERS"})
        assert place not in groups.committed(other, still)
    still_at = wait_set(other, still, topic, time_of(300), MARGIN_MS, "the application's own")
    assert groups.committed(other, still, direct=False)[place] == (still_at, "the application's own")
    assert groups.committed(one, still, direct=False)[place] == (300, "the application's own")

    expected = [each.value for each in other.read(topic, direct=True) if each.offset >= position]
    with reader("aiokafka", DEFAULT_VERSION, topic, moving, other.bootstrap) as after:
        until("it has read", lambda: len(after.read) == len(expected))
    assert [value for _, value in before.read] == [b"%d" % number for number in range(200)]
    assert [value for _, value in after.read] == expected
    # Read twice are 20 of the margin, 2 of its tenth, and one before if no marker stands there.
    assert expected == [b"%d" % number for number in range(400 - len(expected), 400)]
    assert 219 <= len(expected) <= 222
    # It came to the end there, so here it goes on at the last one's time, with no marker in between.
    assert 377 <= wait_set(one, moving, topic, time_of(399) + 1, MARGIN_MS) <= 379
    assert two.waiting("one", moving) == two.waiting("other", moving) == {}

    # A group that went on by itself is put back if that is asked for.
    groups.commit(one, still, {place: 390})
    wait_set(other, still, topic, time_of(390), MARGIN_MS)
    groups.commit(other, still, {place: before_later(other, topic, time_of(350) - 1) + 1})
    until("it is not put back", lambda: two.waiting("one", still) == {place: "WENT_ON"})
    assert groups.committed(one, still)[place] == (390, "")
    one.proxy.cli("tree", "go-back", still)
    position, metadata = groups.committed(one, still)[place]
    assert (328 <= position <= 330, metadata) == (True, MARK)
    assert two.waiting("one", still) == {}
    shown = one.proxy.cli("tree", "show")["offsets"]
    assert (shown["groups"], shown["margin_ms"], shown["reason"]) == ([of_tests], MARGIN_MS, None)
    assert shown["lag_ms"] < MARGIN_MS


@pytest.mark.suite("stories")
def test_a_group_moves_where_partitions_were_added_since_its_time_was_told(two: Distributing) -> None:
    """What it has not read in another partition goes by its key, among what is earlier than that time."""
    one, other = two.sides.values()
    topic, group = two.create_topic(2), unique("moves-")
    place = topic, 0
    keys = {partition_of(key, 0, 3): key for key in (b"%d" % number for number in range(100))}
    """By the partition to which one goes, of three."""
    alter_topic(other, topic, {"max.message.bytes": "1000"})
    apply(two, ["one", "other"], group)

    def send(side: Side, partition: int, number: int, size: int = 10, goes_to: int = 0) -> bytes:
        producer, value = side.producer(batch_num_messages=1), b"%d " % number + os.urandom(size)
        producer.produce(topic, value, keys[goes_to], partition, timestamp=time_of(number))
        assert producer.flush(60) == 0
        return value

    def offsets_of(value: bytes) -> list[int]:
        found = other.read(topic, direct=True, isolation="read_committed")
        return [each.offset for each in found if each.value == value]

    def of_level(name: str) -> set[object]:
        return {each[name] for each in two.levels("one")[4]["partitions"] if each["topic"] == topic}

    first = send(one, 0, 0)
    until("it is given", lambda: offsets_of(first))
    unread, late = send(one, 1, 10, size=2_000), send(one, 0, 99, size=50_000, goes_to=1)
    until("the rest is late", lambda: of_level("reason_code") == {"TARGET_REFUSES_RECORDS"})
    groups.commit(one, group, {place: 2, (topic, 1): 0})
    until("it is told", lambda: two.waiting("other", group).get(place) == "NOT_REACHED")

    other.add_partitions(topic, 3)
    until("that is seen", lambda: of_level("target_partitions") == {3})
    alter_topic(other, topic, {"max.message.bytes": "20000"})
    until("it is given by its key", lambda: offsets_of(unread), 90)
    (at,) = offsets_of(unread)
    *_, last = [send(other, 0, number) for number in (30, 31, 100)]
    assert before_later(other, topic, time_of(99) + 1 - MARGIN_MS) > at, "its time would leave it out"
    until("the time is reached", lambda: two.waiting("other", group).get(place) != "NOT_REACHED")
    assert groups.committed(other, group).get(place, (0, ""))[0] <= at

    alter_topic(other, topic, {"max.message.bytes": "1000000"})
    one.add_partitions(topic, 3)
    until(
        "it is told anew",
        lambda: place in groups.committed(other, group) and not two.waiting("other", group).get(place),
    )
    assert groups.committed(other, group)[place][0] <= at
    with reader("aiokafka", DEFAULT_VERSION, topic, group, other.bootstrap) as reads:
        until("it has read all", lambda: {value for _, value in reads.read} >= {unread, late, last})


PACE_S = 0.05
SHORT_MARGIN_MS = 5_000
SLACK_MS = 10_000
"""How much earlier than the margin a group may go on, as logs are merged while the machine is busy."""


@contextmanager
def writing(clusters: Distributing, topic: str, direct: bool = False) -> Iterator[list[bytes]]:
    """Each cluster takes messages until the block ends; those that were written. ``direct``: by its brokers."""
    written: list[bytes] = []
    ended = Event()

    def write(name: str, side: Side) -> None:
        producer = side.producer(direct)
        for number in itertools.count():
            if ended.wait(PACE_S):
                break
            producer.produce(topic, value := b"%s %d" % (name.encode(), number), partition=0)
            written.append(value)
        assert producer.flush(60) == 0

    with ThreadPoolExecutor() as threads:
        writers = [threads.submit(write, name, side) for name, side in clusters.sides.items()]
        try:
            yield written
        finally:
            ended.set()
            for each in writers:
                each.result()


def run_for_a_while(
    clusters: Distributing, name: str, kind: str, topic: str, group: str, written: list[bytes]
) -> list[bytes]:
    """What a group reads at a cluster until it has read what was written in 10 s since: twice the margin, so it gets
    beyond where it was."""
    before, count = frozenset(written), int(10 / PACE_S) * len(clusters.sides)
    with reader(kind, DEFAULT_VERSION, topic, group, clusters.sides[name].bootstrap) as reads:
        until("it has read for a while", lambda: len({value for _, value in reads.read} - before) >= count)
    return [value for _, value in reads.read]


def next_unread(side: Side, group: str, topic: str) -> Read:
    position = groups.offsets(side, group)[topic, 0]

    def unread() -> Read | None:
        return next((each for each in side.read(topic, direct=True) if each.offset >= position), None)

    found: Read = until("there is more to read", unread)
    return found


def wait_set_near(side: Side, group: str, topic: str, unread_ms: int) -> None:
    """Until a group is set to the margin before what is unread, about."""

    def is_set() -> bool:
        position, metadata = groups.committed(side, group).get((topic, 0), (0, ""))
        following = next(each for each in side.read(topic) if each.offset > position)
        return metadata.startswith(ANY_MARK) and following.timestamp[1] > unread_ms - SHORT_MARGIN_MS - SLACK_MS // 2

    until("it is set", is_set, interval_s=0.3)


@pytest.mark.suite("stories")
@pytest.mark.parametrize("kind", ["aiokafka", "librdkafka", "java"])
def test_a_group_moves_while_both_clusters_take_messages(two: Distributing, kind: str) -> None:
    """Twice, with clients of each library: nothing is left out, and what is read twice is near the margin."""
    topic, group = two.create_topic(1), unique("lives-")
    apply(two, ["one", "other"], group, SHORT_MARGIN_MS)
    read: list[bytes] = []
    unread_ms: list[int] = []
    """By move: the timestamp of what was to be read next."""
    with writing(two, topic) as written:
        for here, there in (("one", "other"), ("other", "one")):
            read += run_for_a_while(two, here, kind, topic, group, written)
            unread_ms.append(next_unread(two.sides[here], group, topic).timestamp[1])
            wait_set_near(two.sides[there], group, topic, unread_ms[-1])
    check_read_on(two, "one", kind, topic, group, written, read, unread_ms)


def check_read_on(
    clusters: Distributing,
    name: str,
    kind: str,
    topic: str,
    group: str,
    written: list[bytes],
    read: list[bytes],
    unread_ms: list[int],
    late_ms: int = 0,
) -> None:
    """A group reads the rest at a cluster: then it has left out nothing, and what it has read twice is near the margin.

    ``unread_ms``: by move, the timestamp of what was to be read next. ``late_ms``: what a proxy holds up while it is
    away is merged so late among what is newer.
    """
    clusters.wait_values(topic, 1, written)
    last = clusters.sides[name]
    with reader(kind, DEFAULT_VERSION, topic, group, last.bootstrap) as reads:
        until("it has read all", lambda: reads.read and reads.read[-1][0] == last.read(topic)[-1].offset)
    read = read + [value for _, value in reads.read]

    assert set(read) == set(written)
    timestamps = {each.value: each.timestamp[1] for each in last.read(topic)}
    twice = [value for value, count in Counter(read).items() if count > 1]
    # What was merged out of order may have been read before what was unread, and be later.
    early = [min((at - timestamps[value] for at in unread_ms if timestamps[value] < at), default=0) for value in twice]
    print(f"{kind}: {len(twice)} of {len(written)} read twice, up to {max(early)} ms before what was unread")
    assert SHORT_MARGIN_MS // 2 < max(early) < SHORT_MARGIN_MS + SLACK_MS + late_ms


@pytest.mark.suite("stories")
@pytest.mark.parametrize("dies", ["other", "one", "third"])
def test_a_group_moves_two_hops_away_and_back_while_a_proxy_dies(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], shared_kafka: Clusters, tmp_path: Path, dies: str
) -> None:
    """From ``other`` to ``third``, whose messages and times come back by ``one``. The proxy that tells, passes on or
    sets where the group has read is killed as soon as it has stopped, while all clusters take messages."""
    clusters = dict(zip(("one", "other", "third"), (*kafka_pair, shared_kafka(role="third")), strict=True))
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with distributing(clusters, proxies, tmp_path) as three:
        topic, group = three.create_topic(1), unique("lives-")
        apply(three, [["one", "other"], "third"], group, SHORT_MARGIN_MS)
        assert three.levels("third")[8]["target"] == "one"
        killed = three.sides[dies].proxy
        read: list[bytes] = []
        unread_ms: list[int] = []
        late_s = 0.0
        with writing(three, topic, direct=True) as written:
            for here, there in (("other", "third"), ("third", "other")):
                read += run_for_a_while(three, here, "aiokafka", topic, group, written)
                killed.kill()
                killed_at = time.monotonic()
                unread_ms.append(next_unread(three.sides[here], group, topic).timestamp[1])
                killed.start()
                wait_set_near(three.sides[there], group, topic, unread_ms[-1])
                late_s = max(late_s, time.monotonic() - killed_at)
        check_read_on(three, "other", "aiokafka", topic, group, written, read, unread_ms, round(late_s * 1000))
