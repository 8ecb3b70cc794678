"""Followers of compacted topics, which are compacted where they follow, too. Both clusters' cleaners come often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support import raw_log
from support.equality import latest, was_cleaned
from support.kafka import unique
from support.links import Linked, Read, Side, cleaning_often, linked, taking_transactions, truncated, until, whole
from support.source_topics import CLEANED_OFTEN, alter_topic
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.replication.logs.topic_settings import COMPACTED, OVERRIDES

pytestmark = pytest.mark.brokers
POLICY = "cleanup.policy"
POLICIES = set(COMPACTED.split(","))


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, cleaning_often(pair.a, pair.b):
        pair.attach()
        yield pair


class Written:
    """Writes records with few keys, in batches of their own."""

    def __init__(self, side: Side, topic: str) -> None:
        self.side = side
        self.topic = topic
        self.numbers = itertools.count()

    def __call__(self, count: int, keys: int = 5, tombstones: bool = True) -> None:
        producer = self.side.producer(direct=True, batch_num_messages=3, linger_ms=1)
        for number in itertools.islice(self.numbers, count):
            value = None if tombstones and number % 11 == 7 else b"value %d" % number
            producer.produce(self.topic, key=b"key-%d" % (number % keys), value=value)
        assert producer.flush(30) == 0


def compacted(link: Linked, target: str) -> bool:
    return set(link.b.topic_config(target)[POLICY].split(",")) == POLICIES


def wait_compacted(link: Linked, target: str) -> None:
    until(f"{target} is compacted", lambda: target in link.b.topics() and compacted(link, target), 30)


def wait_no_reason(link: Linked, target: str) -> None:
    """These topics keep tombstones for moments only: what was late is compared first."""

    def fine() -> bool:
        found = link.b.partition(link.name, target)
        return found is not None and found["reason"] is None

    until(f"nothing is amiss with {target}", fine)


def log_of(side: Side, topic: str) -> raw_log.RawLog:
    with Wire(side.kafka.bootstrap_servers) as wire:
        return raw_log.read_log(wire, topic)


def assert_latest_equal(link: Linked, source: str, target: str) -> None:
    """The latest record of each key is the same, by offset, however much each side's cleaner has taken."""

    def same() -> bool:
        theirs, ours = log_of(link.a, source), log_of(link.b, target)
        return theirs.high_watermark == ours.high_watermark and latest(theirs) == latest(ours)

    until(f"{target} equals {source}", same, 20)


def verified(link: Linked, source: str) -> list[dict[str, object]]:
    return [each for each in link.verify(check=False)["partitions"] if each["topic"] == source]


@pytest.mark.one_in_ci("stories", of="cleaned followers")
def test_a_follower_is_compacted_once_it_was_filled_and_stays_so(link: Linked) -> None:
    source, target = link.names("filled")
    link.a.create_topic(source, config={POLICY: "compact", **CLEANED_OFTEN}, direct=True)
    write = Written(link.a, source)
    write(40)
    wait_compacted(link, target)
    overrides = {**OVERRIDES, POLICY: COMPACTED}
    assert link.b.proxy.get(f"/v1/topics/{target}")["overrides"] == overrides

    def cleaned() -> bool:
        write(3)
        return was_cleaned(log_of(link.b, target)) and was_cleaned(log_of(link.a, source))

    until("the follower was cleaned", cleaned, 40, 0.3)
    link.wait_following()
    assert_latest_equal(link, source, target)
    assert all(each["equal"] for each in verified(link, source)), verified(link, source)
    # Whoever starts again reads the cleaned log's end and producers, and goes on.
    for side in (link.b, link.a):
        side.proxy.kill()
        write(20)
        side.proxy.start()
        assert compacted(link, target)
        end = link.a.end(source)
        until("it goes on", lambda end=end: link.b.end(target) >= end)
    assert compacted(link, target)
    assert_latest_equal(link, source, target)
    link.wait_following()
    assert all(each["equal"] for each in verified(link, source)), verified(link, source)
    wait_no_reason(link, target)


@pytest.mark.one_in_ci("stories", of="cleaned followers")
def test_records_without_a_key_are_taken_and_it_is_compacted_again_after(link: Linked) -> None:
    source, target = link.names("keyless")
    link.a.create_topic(source, config={POLICY: "compact", **CLEANED_OFTEN}, direct=True)
    write = Written(link.a, source)
    write(20)
    wait_compacted(link, target)
    link.b.proxy.kill()
    alter_topic(link.a, source, {POLICY: "delete"})
    until("it is not compacted", lambda: link.a.topic_config(source)[POLICY] == "delete")
    until("it takes them", lambda: link.a.produce(source, [b"no key"] * 5, direct=True))
    # The cleaner at the source would take them out before they are copied.
    alter_topic(link.a, source, {POLICY: "compact", "min.compaction.lag.ms": str(2**62)})
    until("it is compacted", lambda: link.a.topic_config(source)[POLICY] == "compact")
    write(10)
    assert any(record.key is None for record in link.a.read(source, direct=True))
    link.b.proxy.start()
    end = link.a.end(source)
    until("all is copied", lambda: link.b.end(target) >= end, 40)
    wait_compacted(link, target)
    assert "follower topic compaction" in link.b.proxy.log
    link.wait_following()
    write(5)
    assert_latest_equal(link, source, target)
    assert all(each["equal"] for each in verified(link, source)), verified(link, source)


def test_a_topic_that_becomes_compacted_and_is_not_any_more(link: Linked) -> None:
    source, target = link.names("policy")
    link.a.create_topic(source, direct=True)
    link.a.produce(source, [b"no key"] * 5, direct=True)
    link.wait_end(target, 5)
    alter_topic(link.a, source, {POLICY: "compact,delete"})
    wait_compacted(link, target)
    assert link.b.topic_config(target)["retention.ms"] == "-1"
    alter_topic(link.a, source, {POLICY: "delete"})
    until("it is not", lambda: link.b.topic_config(target)[POLICY] == "delete", 10)
    until("records follow", lambda: link.a.produce(source, [b"again"] * 5, direct=True))
    link.wait_end(target, 10)
    link.wait_following()
    assert [each.value for each in link.b.read(target)] == [each.value for each in link.a.read(source)]


@pytest.mark.one_in_ci("stories", of="cleaned followers")
def test_what_the_cleaner_took_for_a_rogue_record_is_there_after_the_truncation(link: Linked) -> None:
    """The rogue's record has a key of the source: the follower's own cleaner takes the source's record for it."""
    source, target = link.names("rogue")
    link.a.create_topic(source, config={POLICY: "compact", **CLEANED_OFTEN}, direct=True)
    write = Written(link.a, source)
    write(20, tombstones=False)
    wait_compacted(link, target)
    link.wait_end(target, link.a.end(source))
    theirs = latest(log_of(link.a, source))
    precious = theirs[b"key-1"]
    link.b.proxy.kill()
    rogue = Written(link.b, target)

    def taken() -> bool:
        rogue(5, tombstones=False)  # of all keys
        return precious.offset not in {each.offset for each in link.b.read(target, direct=True)}

    until("the follower's cleaner has taken the source's records", taken, 40, 0.3)
    link.b.proxy.start()
    write(1, keys=1, tombstones=False)
    told = truncated(link, target)
    assert told["messages_truncated"] > 0
    until("all is there again", lambda: link.b.end(target) == link.a.end(source), 40)
    assert_latest_equal(link, source, target)
    wait_compacted(link, target)
    link.wait_following()
    assert_latest_equal(link, source, target)
    assert all(each["equal"] for each in verified(link, source)), verified(link, source)


def committed(side: Side, topic: str) -> dict[bytes | None, Read]:
    """The latest record of each key, as consumers of committed records know it."""
    found = {each.key: each for each in side.read(topic, direct=True, isolation="read_committed")}
    return {key: each for key, each in found.items() if each.value is not None}


@pytest.mark.one_in_ci("stories", of="cleaned followers")
def test_a_chain_whose_middle_was_cleaned_before_and_is_while_it_goes_on(link: Linked) -> None:
    source, middle = link.names("chain")
    with taking_transactions(link.b), KafkaCluster(name="chain-c") as kafka, whole(kafka) as proxy:
        c = Side(kafka, [proxy])
        c.verify_transactions(False)
        c.alter_brokers({"log.cleaner.backoff.ms": "200"})
        link.a.create_topic(source, config={POLICY: "compact", **CLEANED_OFTEN}, direct=True)
        plain = Written(link.a, source)
        producer = link.a.producer(direct=True, transactional_id=unique("tx-"))
        producer.init_transactions(30)

        def write(number: int) -> None:
            for outcome in ("commit", "abort", "commit"):
                producer.begin_transaction()
                for key in range(3):
                    producer.produce(source, b"%s %d" % (outcome.encode(), number), key=b"tx-%d" % key)
                producer.commit_transaction(30) if outcome == "commit" else producer.abort_transaction(30)
            plain(5)

        write(0)
        wait_compacted(link, middle)
        numbers = itertools.count(1)

        def cleaned() -> bool:
            write(next(numbers))
            return was_cleaned(log_of(link.b, middle))

        until("the middle was cleaned", cleaned, 40, 0.3)
        name, prefix = unique("b-to-c"), unique("last-") + "-"
        last = prefix + middle.removeprefix(link.remote)
        link.b.proxy.cli("link", "create", name, "--remote", proxy.link_address)
        try:
            link.b.proxy.cli("link", "attach", name, "--local", link.remote, "--remote", prefix, "--role", "leader")
            for _ in range(5):
                write(next(numbers))

            def same() -> bool:
                ends = {side.end(topic) for side, topic in ((link.a, source), (link.b, middle), (c, last))}
                wanted = committed(link.a, source)
                return len(ends) == 1 and wanted == committed(link.b, middle) == committed(c, last)

            until("all three have the same", lambda: last in c.topics() and same(), 40, 0.3)
            until("the last one is compacted", lambda: set(c.topic_config(last)[POLICY].split(",")) == POLICIES, 30)
            write(next(numbers))
            until("they have the same", same, 30, 0.3)
            report = link.b.proxy.cli("verify", name, check=False)
            verdict = next(each for each in report["partitions"] if each["topic"] == middle)
            assert verdict["equal"], verdict
        finally:
            link.b.proxy.cli("link", "delete", name)


def test_promotion_gives_the_sources_policy_back(link: Linked) -> None:
    local, remote = unique("promoted-") + "-", unique("promoted-far-") + "-"
    link.attach(local, remote)
    link.a.create_topic(local + "t", config={POLICY: "compact", **CLEANED_OFTEN}, direct=True)
    write = Written(link.a, local + "t")
    write(20)
    wait_compacted(link, remote + "t")
    link.wait_end(remote + "t", link.a.end(local + "t"))
    wait_no_reason(link, remote + "t")
    link.b.proxy.cli("link", "promote", link.name, "--local", remote)
    assert link.b.topic_config(remote + "t")[POLICY] == "compact"
    assert "overrides" in link.b.proxy.get(f"/v1/topics/{remote}t")
    assert not link.b.proxy.get(f"/v1/topics/{remote}t")["overrides"]
