"""User story: a cluster follows one that follows another one, and later the first one follows the second one back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from support import groups
from support.kafka import unique
from support.links import WAIT_S, Linked, Read, Side, linked, taking_transactions, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_plugins.replication.operations.rings import LOOK_S

pytestmark = pytest.mark.brokers

OF_GROUPS = ("--type", "consumer-group", "--disable-transaction-verification")


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, taking_transactions(pair.a, pair.b):
        pair.attach()
        yield pair


def write(side: Side, topic: str, round_: int) -> None:
    """Plain records, an idempotent producer's, and transactions of both outcomes."""
    side.produce(topic, [b"plain %d" % round_] * 3)
    side.produce(topic, [b"idempotent %d" % round_] * 3, enable_idempotence=True)
    producer = Producer({"bootstrap.servers": side.bootstrap, "transactional.id": unique("tx")})
    producer.init_transactions(30)
    for commit in (True, False, True):
        producer.begin_transaction()
        producer.produce(topic, b"committed %d" % round_ if commit else b"aborted %d" % round_, partition=0)
        assert producer.flush(30) == 0
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)


def reads(side: Side, topic: str) -> list[list[Read]]:
    return [side.read(topic, isolation=isolation) for isolation in ("read_uncommitted", "read_committed")]


@pytest.mark.one_in_ci("stories", of="chains and reversals")
def test_a_chain(link: Linked) -> None:
    """C follows B, which follows A, with groups, and A does not follow C as well."""
    topic, group = unique("t"), unique("group")
    source, middle = link.local + topic, link.remote + topic
    link.a.create_topic(source)
    write(link.a, source, 1)
    link.attach(group, group, *OF_GROUPS)
    groups.commit(link.a, group, {(source, 0): 2}, "of before")
    with KafkaCluster(name="chain-c") as kafka, whole(kafka) as proxy:
        c = Side(kafka, [proxy])
        c.verify_transactions(False)
        name, ring, last = unique("b-to-c"), unique("c-to-a"), unique("last-") + "-"
        link.b.proxy.cli("link", "create", name, "--remote", proxy.link_address)
        attach = ("link", "attach", name, "--role", "leader")
        link.b.proxy.cli(*attach, "--local", link.remote, "--remote", last)
        link.b.proxy.cli(*attach, "--local", group, "--remote", group, *OF_GROUPS)
        try:
            here = last + topic, 0
            until("C has what the group had read", lambda: groups.committed(c, group) == {here: (2, "of before")})
            write(link.a, source, 2)
            end = link.a.end(source)
            until("C has everything", lambda: last + topic in c.topics() and c.end(last + topic) == end)
            expected = reads(link.a, source)
            assert reads(link.b, middle) == expected
            assert reads(c, last + topic) == expected
            report = link.b.proxy.cli("verify", name, check=False)
            verdict = next(each for each in report["partitions"] if each["topic"] == middle)
            assert verdict["equal"], verdict

            with groups.member(link.a, group, source) as joined:
                producer = link.a.producer(transactional_id=unique("tx"))
                producer.init_transactions(30)
                for offset, commits in ((4, True), (5, False)):
                    producer.begin_transaction()
                    producer.send_offsets_to_transaction([TopicPartition(source, 0, offset)], joined.group_metadata, 30)
                    (producer.commit_transaction if commits else producer.abort_transaction)(30)
            until("C has what a transaction committed", lambda: groups.offsets(c, group) == {here: 4})
            with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
                groups.commit(c, group, {here: 9})
            assert groups.offsets(c, group) == {here: 4}

            proxy.cli("link", "create", ring, "--remote", link.a.proxy.link_address)
            for side, *names in ((c, last, link.local, "leader"), (link.a, link.local, last, "follower")):
                asked = ("--local", names[0], "--remote", names[1], "--role", names[2])
                with pytest.raises(ProxyFailed, match="which follows this one: a ring"):
                    side.proxy.cli("link", "attach", ring, *asked)
            proxy.cli("link", "delete", ring)
        finally:
            link.b.proxy.cli("link", "delete", name)
            link.a.proxy.cli("link", "detach", link.name, "--local", group, "--type", "consumer-group")


@pytest.mark.suite("stories")
def test_a_ring_that_was_closed_while_nobody_could_see_it(link: Linked) -> None:
    """C comes to lead what it has from A while B, which is in between, is away: all three say so once B is back."""
    first, middle, last = (unique(each) + "-" for each in ("first", "middle", "last"))
    link.attach(first, middle)
    with KafkaCluster(name="ring-c") as kafka, whole(kafka) as proxy:
        c = Side(kafka, [proxy])
        second, ring = unique("b-to-c"), unique("c-to-a")
        link.b.proxy.cli("link", "create", second, "--remote", proxy.link_address)
        link.b.proxy.cli("link", "attach", second, "--local", middle, "--remote", last, "--role", "leader")
        proxy.cli("link", "create", ring, "--remote", link.a.proxy.link_address)
        following = ((link.a, ring, first), (link.b, link.name, middle), (c, second, last))

        def reasons() -> list[str | None]:
            return [
                next(each["reason"] for each in side.link(name)["mappings"] if each["local"] == prefix)
                for side, name, prefix in following
            ]

        try:
            link.b.proxy.stop()
            proxy.cli("link", "attach", ring, "--local", last, "--remote", first, "--role", "leader")
            link.b.proxy.start()
            until("all of them say it", lambda: reasons() == ["FOLLOWS_ITSELF"] * 3, 2 * LOOK_S + WAIT_S)
            for side, name, _ in following:
                found = side.link(name)
                assert (found["state"], found["reason"]) == ("Catching Up", "FOLLOWS_ITSELF")
            proxy.cli("link", "detach", ring, "--local", last)
            link.a.proxy.cli("namespace", "alter", first, "--no-reserved")
            following = following[1:]
            until("nobody says it", lambda: reasons() == [None, None], 2 * LOOK_S + WAIT_S)
            link.a.create_topic(first + "t")
            assert link.a.produce(first + "t", [b"led again"]) == [0]
            until("C has it", lambda: last + "t" in c.topics() and c.end(last + "t") == 1)
        finally:
            if not link.b.proxy.running:
                link.b.proxy.start()
            proxy.cli("link", "delete", ring, check=False)
            link.b.proxy.cli("link", "delete", second)
            link.detach(first)


@pytest.mark.one_in_ci("stories", of="chains and reversals")
def test_a_reversal(link: Linked) -> None:
    """Records and producer ids that come home are what they were; the old leader's own producers go on after."""
    topic = unique("back")
    there, back = link.remote + topic, unique("home-") + "-"
    link.a.create_topic(link.local + topic)
    write(link.a, link.local + topic, 1)
    link.wait_end(there, link.a.decided_end(link.local + topic))
    link.detach()
    link.a.proxy.cli("link", "attach", link.name, "--local", back, "--remote", link.remote, "--role", "follower")
    end = link.b.end(there)
    until("A has it twice", lambda: back + topic in link.a.topics() and link.a.end(back + topic) == end)
    assert reads(link.a, back + topic) == reads(link.b, there)
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == back + topic)
    assert verdict["equal"], verdict
    link.detach(back)
    link.a.proxy.cli("namespace", "alter", back, "--no-reserved")
    before = len(link.a.read(back + topic))
    write(link.a, back + topic, 2)
    assert len(link.a.read(back + topic)) == before + 9
