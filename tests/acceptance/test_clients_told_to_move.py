"""User story: clients go on at the cluster that leads now without a restart, since the one that led tells them to.

Before the command their bootstrap servers' name begins to lead to the other cluster. Those that know what they are told
move by themselves; the others stay where they are, and are made anew. Each kind of client writes with and without
idempotence and in transactions, and reads as the member of a group that moves, too. What was acked is counted at the
cluster that leads: nothing is lost by a reversal, and what a failover loses is what the old source alone has. Whatever
is there is read, by either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from support.client_readers import Reader, reader
from support.client_steps import TOLD_OF_ANOTHER_COORDINATOR, Steps, committed_by, steps
from support.client_writers import Writer, runs_here, writer
from support.groups import offsets
from support.kafka import unique
from support.links import Linked, Side, linked, taking_transactions, until
from support.relay import Relay

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]  # of Java there are four processes, or eight

METADATA_AGE_MS = 1_000
"""So that clients ask soon, as they would within 5 minutes."""
MORE = 50
"""Records after which it goes on."""
MOVE_FOR = {True: "60s", False: "8s"}
"""For how long clients are told: those that stay do so until it is over."""


@dataclass(frozen=True)
class Client:
    """``version``: of Java. ``moves``: by itself. ``protocol``: of its group ("consumer": KIP-848)."""

    kind: str
    moves: bool
    version: str = DEFAULT_VERSION
    protocol: str = "classic"


CLIENTS = {
    "java": Client("java", True),
    "java, KIP-848": Client("java", True, protocol="consumer"),
    "java of 3.9": Client("java", False, "3.9.2"),
    "librdkafka": Client("librdkafka", True),
    "librdkafka, KIP-848": Client("librdkafka", True, protocol="consumer"),
    "aiokafka": Client("aiokafka", False),
    "kafka-python": Client("kafka-python", False),
}


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, taking_transactions(pair.a, pair.b):
        pair.raise_levels()
        yield pair


class Application:
    """Clients of one kind, all of one name, that write to topics of a namespace and read as a group.

    ``stack`` ends them.
    """

    def __init__(self, client: Client, prefix: str, group: str, name: str, stack: ExitStack) -> None:
        chosen, age = (client.kind, client.version), {"metadata_age_ms": METADATA_AGE_MS}
        idempotent, plain = prefix + "idempotent", prefix + "plain"
        self.writers: dict[str, Writer] = {
            idempotent: stack.enter_context(writer(*chosen, idempotent, name, **age)),
            plain: stack.enter_context(writer(*chosen, plain, name, idempotent=False, **age)),
        }
        self.reader: Reader = stack.enter_context(reader(*chosen, plain, group, name, protocol=client.protocol, **age))
        self.transactions: Steps = stack.enter_context(steps(*chosen, name, f"{prefix}app", **age))
        assert self.transactions.ask("init") == "done"


@pytest.mark.one_in_ci("clients", of="clients that are told to move")
@pytest.mark.parametrize("how", ["reverse", "failover"])
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_clients_go_on_at_the_cluster_that_leads(link: Linked, client: Client, how: str) -> None:
    if not runs_here(client.kind, client.version):
        pytest.skip("Java comes without a compiler here")
    link_name, prefix, group = unique("moving"), unique("told-") + "-", unique("readers") + "-"
    topics = idempotent, plain, transactions = [prefix + each for each in ("idempotent", "plain", "transactions")]
    _lead(link, link_name, prefix, group, topics)
    with Relay(_address(link.a)) as name, ExitStack() as stack:
        before = Application(client, prefix, group, name.address, stack)
        assert committed_by(before.transactions, transactions, "before") == ["done"] * 3
        until("they write", lambda: all(len(each.acked) > MORE for each in before.writers.values()))
        until("B has the group", lambda: offsets(link.b, group).get((plain, 0), 0) > 0)
        until("B has the transaction", lambda: link.b.end(transactions, isolation="read_committed") > 0)

        name.target = _address(link.b)
        _have_b_lead(link, link_name, how, prefix, group, "--move-clients", MOVE_FOR[client.moves])
        began = time.monotonic()
        led_from = {each: _led_from(link.b, each) for each in (idempotent, plain)}
        if client.moves:
            until("it writes at B", lambda: link.b.end(plain) > led_from[plain] + MORE, interval_s=0.2)
            wrote_s = time.monotonic() - began
            other = before.writers[idempotent]
            until("so does the other one", lambda: _goes_on(link.b, idempotent, other, led_from[idempotent], how))
            until("it reads at B", lambda: offsets(link.b, group)[plain, 0] > led_from[plain] + MORE, 120)
            print(f"{how}: wrote there after {wrote_s:.1f} s, read after {time.monotonic() - began:.1f} s")
            told = until("so is whoever did nothing meanwhile", lambda: (told := _told(link.a, prefix)) >= 4 and told)
            said = committed_by(before.transactions, transactions, "moved")
            print(f"{how}: told {told} times; the transactional producer says {said}")
            assert any(TOLD_OF_ANOTHER_COORDINATOR[client.kind] in each for each in said), said
            after = before
        else:
            after = _made_anew(link, client, how, before, (prefix, group, name.address), stack)
        again = stack.enter_context(steps(client.kind, client.version, name.address, f"{prefix}app"))
        assert again.ask("init") == "done"
        assert committed_by(again, transactions, "after") == ["done"] * 3
        _count_reads(link.b, plain, how, led_from[plain], before.reader, after.reader)
    for topic, end in led_from.items():
        writers = [each.writers[topic] for each in dict.fromkeys((before, after))]
        _count(link, topic, how, end, writers)
    assert [each.value for each in link.b.read_decided(transactions)] == [b"before", b"after"]


@pytest.mark.suite("stories")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("kind", ["java", "librdkafka"])
def test_clients_that_wait_go_on_at_what_is_promoted(link: Linked, kind: str, protocol: str) -> None:
    """Its writers write nothing for so long, and stay connected, as their readers do."""
    if not runs_here(kind, DEFAULT_VERSION):
        pytest.skip("Java comes without a compiler here")
    link_name, prefix, group = unique("promoted"), unique("waits-") + "-", unique("readers") + "-"
    topic, chosen, at_a = prefix + "t", (kind, DEFAULT_VERSION), _address(link.a)
    age = {"metadata_age_ms": METADATA_AGE_MS}
    _lead(link, link_name, prefix, group, [topic])
    with Relay(at_a) as writes_by, Relay(at_a) as reads_by, ExitStack() as stack:
        write = stack.enter_context(steps(*chosen, writes_by.address, None, **age)).ask
        reads = stack.enter_context(reader(*chosen, topic, group, reads_by.address, protocol=protocol, **age))
        assert [write(f"send {topic} {number}") for number in range(3)] == ["done"] * 3
        until("B has the group where it is", lambda: offsets(link.b, group).get((topic, 0)) == 3)
        known = writes_by.accepted, reads_by.accepted
        writes_by.target = reads_by.target = _address(link.b)
        named = ("--local", prefix, "--local-group", group)
        link.b.proxy.cli("link", "promote", link_name, *named, "--move-clients", MOVE_FOR[True])
        began = time.monotonic()
        until("the writer has asked its bootstrap servers", lambda: writes_by.accepted > known[0])
        assert [write(f"send {topic} {number}") for number in range(3, 6)] == ["done"] * 3
        until("so has the reader", lambda: reads_by.accepted > known[1])
        until("the group reads there", lambda: offsets(link.b, group)[topic, 0] == 6)
        print(f"read within {time.monotonic() - began:.1f} s")
    expected = _numbered(6)
    assert [(each.offset, each.value) for each in link.b.read(topic)] == expected
    assert link.a.end(topic) == 3, "what it had when it led"
    print(f"read again: {len(reads.read) - 6}")
    assert sorted(set(reads.read)) == expected
    assert not reads.failed


@pytest.mark.suite("stories")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("kind", ["java", "librdkafka"])
def test_consumers_of_a_source_that_is_gone_go_on(link: Linked, kind: str, protocol: str) -> None:
    """Nobody tells them: they look for another cluster since theirs does not answer, and join it before it leads."""
    if not runs_here(kind, DEFAULT_VERSION):
        pytest.skip("Java comes without a compiler here")
    link_name, prefix, group = unique("gone"), unique("gone-") + "-", unique("readers") + "-"
    topic, age = prefix + "t", {"metadata_age_ms": METADATA_AGE_MS}
    _lead(link, link_name, prefix, group, [topic])
    with Relay(_address(link.a)) as name, ExitStack() as stack:
        reads = stack.enter_context(reader(kind, DEFAULT_VERSION, topic, group, name.address, protocol=protocol, **age))
        link.a.produce(topic, [value for _, value in _numbered(3)])
        until("B has the group where it is", lambda: offsets(link.b, group).get((topic, 0)) == 3)
        known = name.accepted
        name.target = _address(link.b)
        link.a.proxy.kill()
        try:
            until("it has asked its bootstrap servers", lambda: name.accepted > known)
            named = ("--local", prefix, "--local-group", group)
            until("failed over", lambda: link.b.proxy.cli("link", "failover", link_name, *named), 90)
            link.b.produce(topic, [value for _, value in _numbered(6)[3:]])
            until("the group reads there", lambda: offsets(link.b, group)[topic, 0] == 6)
        finally:
            link.a.proxy.start()
    print(f"read again: {len(reads.read) - 6}; {reads.failed}")
    assert sorted(set(reads.read)) == _numbered(6)


def _numbered(count: int) -> list[tuple[int, bytes]]:
    """Offsets, and values that say them."""
    return [(number, b"%d" % number) for number in range(count)]


def _made_anew(
    link: Linked, client: Client, how: str, before: Application, where: tuple[str, str, str], stack: ExitStack
) -> Application:
    """See that clients stay at A, and have others write and read at B."""
    prefix, group, _ = where
    idempotent, plain, transactions = [prefix + each for each in ("idempotent", "plain", "transactions")]
    said = committed_by(before.transactions, transactions, "stayed")
    if how == "reverse":
        until("they are refused", lambda: all(each.failed for each in before.writers.values()), 150)
        assert said != ["done"] * 3
    else:
        _until_they_write(link.a, {each: link.a.end(each) for each in (idempotent, plain)})
        assert said == ["done"] * 3, "A takes writes, too"
    failed = {name: each.failed[:1] for name, each in before.writers.items()}
    print(f"{how}: stays; told {_told(link.a, prefix)} times; failed: {failed}; says {said}")
    read, ends = len(before.reader.read), {each: link.b.end(each) for each in (idempotent, plain)}
    after = Application(client, *where, stack)
    _until_they_write(link.b, ends)
    until("it reads at B", lambda: offsets(link.b, group)[plain, 0] > ends[plain] + MORE, 120)
    until("who stayed reads on at A", lambda: len(before.reader.read) > read + MORE)
    return after


def _lead(link: Linked, name: str, prefix: str, group: str, topics: list[str]) -> None:
    """Have A lead topics and a group over a link of that name; who follows may lead, and the other way."""
    link.a.proxy.cli("link", "create", name, "--remote", link.b.proxy.link_address)
    for side in (link.a, link.b):
        side.proxy.cli("link", "grant", name, "--may", "follow:,lead:,follow:consumer-group:,lead:consumer-group:")
    link.a.proxy.cli("link", "attach", name, "--local", prefix, "--remote", prefix, "--role", "leader")
    link.a.proxy.cli(
        *("link", "attach", name, "--type", "consumer-group", "--local", group, "--remote", group, "--role", "leader")
    )
    for topic in topics:
        link.a.create_topic(topic)
    until("B has the topics", lambda: set(topics) <= link.b.topics().keys())


def _have_b_lead(link: Linked, name: str, how: str, prefix: str, group: str, *moving: str) -> None:
    named = ("--local", prefix, "--local-group", group)
    if how == "failover":
        link.b.proxy.cli("link", "failover", name, *named, "--yes", *moving)  # A is there, and takes writes after it
        return
    # Where many tests run a broker may take seconds for what takes milliseconds.
    report = link.a.proxy.cli("link", "reverse", name, *named, "--hold", "45", *moving)
    assert report["reversed"]


def _goes_on(side: Side, topic: str, by: Writer, end: int, how: str) -> bool:
    """Whether an idempotent producer does, or knows that what it wrote last is lost: then another one has to."""
    knows = how == "failover" and any("sequence" in each.lower() for each in by.failed)
    return knows or side.end(topic) > end + MORE


def _until_they_write(side: Side, ends: dict[str, int]) -> None:
    """Wait until a side's logs have become longer."""
    until("they write", lambda: all(side.end(topic) > end + MORE for topic, end in ends.items()), interval_s=0.2)


def _told(side: Side, prefix: str) -> int:
    """How often clients were told to move, as the proxy's metrics say."""
    wanted = f'isthmus_clients_told_to_move_total{{namespace="{prefix}"}} '
    metrics = httpx.get(f"{side.proxy.url}/metrics", trust_env=False).text
    found = [line for line in metrics.splitlines() if line.startswith(wanted)]
    return int(float(found[0].removeprefix(wanted))) if found else 0


def _led_from(side: Side, topic: str) -> int:
    """Where what a topic has of the other cluster ends, and so where the side that leads it began to."""
    (partition,) = side.proxy.get(f"/v1/topics/{topic}")["partitions"]
    return int(partition["provenance"][-1]["end_offset"])


def _count_reads(side: Side, topic: str, how: str, led_from: int, before: Reader, after: Reader) -> None:
    """See that all is read that is there, and what is read besides."""
    there = [(each.offset, each.value or b"") for each in side.read(topic)]
    until("its end is read", lambda: there[-1] in after.read)
    read = [*before.read, *([] if after is before else after.read)]
    unread, elsewhere = set(there) - set(read), set(before.read) - set(there)
    print(f"{how}: {len(there)} to read; {len(read) - len(set(read))} read again, {len(elsewhere)} that are not there")
    print(f"it raised {before.failed[:3]}")
    assert not unread, f"not read: {min(unread)} to {max(unread)}"
    # By who stays, that is what was written since, or what A alone has.
    assert all(offset >= (led_from if how == "failover" else len(there)) for offset, _ in elsewhere)


def _count(link: Linked, topic: str, how: str, led_from: int, writers: list[Writer]) -> None:
    """Compare what was acked with what is at B, once all have ended."""
    acked = Counter(value for each in writers for value in each.acked)
    failed = Counter(line.partition(" ")[0].encode() for each in writers for line in each.failed)
    found = Counter(each.value or b"" for each in link.b.read(topic))
    lost, twice = acked - found, found - acked - failed
    print(f"{topic}: {acked.total()} acked, {failed.total()} failed, {lost.total()} lost, {twice.total()} twice")
    if how == "failover":  # what A had not sent yet, and what it took after B led
        of_a_alone = {each.offset: each.value for each in link.a.read(topic, direct=True) if each.offset >= led_from}
        acked_there = [value for each in writers for value, at in each.acked.items() if of_a_alone.get(at) == value]
        assert lost.keys() <= set(acked_there)
    else:
        assert not lost
    if topic.endswith("idempotent"):
        assert not twice


def _address(side: Side) -> tuple[str, int]:
    host, _, port = side.bootstrap.rpartition(":")
    return host, int(port)
