"""User story: the name that clients know leads to the other cluster after a failover, and they go on without a restart.

Their producers keep the numbers that the former cluster gave them. Both clusters here are new, so the brokers of both
have handed out the same ones. Each acked record is there once, at its offset: those that a client sends again since it
got no answer, those that it sends next, and those of producers that begin where the others came to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.client_steps import TOLD_OF_ANOTHER_COORDINATOR, Steps, committed_by, steps
from support.client_writers import KINDS, runs_here, writer
from support.kafka import unique
from support.links import Linked, Side, linked, until
from support.relay import Relay
from support.wire import PLAIN, Wire, batch_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import BROKER_IDS_MAX
from isthmus_protocol.error_codes import OUT_OF_ORDER_SEQUENCE_NUMBER
from isthmus_protocol.records import TRANSACTIONAL_BIT
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

ONE_IN_CI = pytest.mark.one_in_ci("clients", of="clients that move")
PREFIX = "moves-"
MARK = 1 << 28
"""From here on bits of a producer's id say whose proxies have handed it out, below them is the brokers' number."""


class RawProducer:
    """An idempotent producer of one partition that sends what it is told, to whom it is told.

    ``numbered_by_proxy``: it has its number from a proxy, as all have who know nothing else of the cluster.
    """

    def __init__(self, side: Side, topic: str, numbered_by_proxy: bool = True) -> None:
        self._topic = topic
        self._wires: dict[str, Wire] = {}
        with Wire(side.bootstrap if numbered_by_proxy else side.kafka.bootstrap_servers) as wire:
            asked = {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1}
            answer = until("there are producer ids", lambda: _given(wire, asked))
        self.number = int(answer.producer_id)
        self._like = PLAIN._replace(producer_id=self.number, producer_epoch=int(answer.producer_epoch))

    def send(self, side: Side, sequence: int, *values: bytes) -> tuple[int, int]:
        """Error code and base offset of one batch."""
        records = batch_of(values, self._like._replace(base_sequence=sequence))
        data = [{"name": self._topic, "partition_data": [{"index": 0, "records": records}]}]
        if side.bootstrap not in self._wires:
            self._wires[side.bootstrap] = Wire(side.bootstrap)
        asked = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": data}
        [answer] = self._wires[side.bootstrap].request(ApiKey.PRODUCE, 9, asked).responses
        [partition] = answer.partition_responses
        return int(partition.error_code), int(partition.base_offset)

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


def _given(wire: Wire, asked: dict[str, Any]) -> Any:
    answer = wire.request(ApiKey.INIT_PRODUCER_ID, 4, asked)
    return answer if answer.error_code == 0 else None


@contextmanager
def synchronous(*topics: str) -> Iterator[Linked]:
    """Two new clusters, and topics of A that are In-Sync at B, where they have the same names."""
    with (
        KafkaCluster(name="moved-a") as a,
        KafkaCluster(name="moved-b") as b,
        linked(a, b) as link,
    ):
        link.attach(PREFIX, PREFIX, "--disable-transaction-verification")
        for topic in topics:
            link.a.create_topic(topic)
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("acks mean both sides", lambda: _in_sync(link, topics))
        yield link


def _in_sync(link: Linked, topics: tuple[str, ...]) -> bool:
    status: dict[str, Any] = link.a.link(link.name)
    return status["state"] == "In-Sync" and {each["topic"] for each in status["partitions"]} >= set(topics)


@ONE_IN_CI
@pytest.mark.parametrize("numbered_by_proxy", [True, False], ids=["numbered by proxies", "numbered without"])
def test_there_and_back(numbered_by_proxy: bool) -> None:
    topic = PREFIX + "raw"
    with synchronous(topic) as link, ExitStack() as stack:

        def new(side: Side) -> RawProducer:
            made = RawProducer(side, topic, numbered_by_proxy)
            stack.callback(made.close)
            return made

        moving = new(link.a)
        assert [moving.send(link.a, sequence, b"a%d" % sequence) for sequence in range(3)] == [(0, 0), (0, 1), (0, 2)]
        link.b.proxy.cli("link", "promote", link.name, "--local", PREFIX)

        begun = new(link.b)
        while begun.number % MARK < moving.number % MARK:
            begun = new(link.b)
        assert begun.number % MARK == moving.number % MARK, "both clusters count from 0"
        assert (begun.number == moving.number) is not numbered_by_proxy
        assert moving.send(link.b, 2, b"a2") == (0, 2), "sent again, since it knew of no answer"
        assert begun.send(link.b, 0, b"b0") == (0, 3)
        assert moving.send(link.b, 3, b"a3") == (0, 4)
        assert [begun.send(link.b, sequence, b"b%d" % sequence) for sequence in range(1, 4)] == [(0, 5), (0, 6), (0, 7)]
        assert moving.send(link.b, 3, b"a3") == (0, 4)
        expected = [b"a0", b"a1", b"a2", b"b0", b"a3", b"b1", b"b2", b"b3"]
        assert [each.value for each in link.b.read(topic)] == expected

        # A follows B from its beginning, and leads again.
        link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")
        link.a.delete_topic(topic)
        attach = ("link", "attach", link.name, "--local", PREFIX, "--remote", PREFIX, "--role", "follower")
        link.a.proxy.cli(*attach, "--disable-transaction-verification")
        until("A has all", lambda: topic in link.a.topics() and link.a.end(topic) == 8)
        link.a.proxy.cli("link", "promote", link.name, "--local", PREFIX)
        assert moving.send(link.a, 3, b"a3") == (0, 4), "at home it is what it was"
        assert moving.send(link.a, 4, b"a4") == (0, 8)
        assert begun.send(link.a, 3, b"b3") == (0, 7)
        assert begun.send(link.a, 4, b"b4") == (0, 9)
        assert [each.value for each in link.a.read(topic)] == [*expected, b"a4", b"b4"]


def stand_in(stack: ExitStack, link: Linked) -> None:
    """A's names lead to B from now on: what a client knows of A's proxy is answered by B's."""
    (host, at), (_, instead) = (_address(side.bootstrap) for side in (link.a, link.b))
    for step in range(1 + BROKER_IDS_MAX):
        stack.enter_context(Relay((host, instead + step), at + step))


def _address(bootstrap: str) -> tuple[str, int]:
    host, _, port = bootstrap.rpartition(":")
    return host, int(port)


@ONE_IN_CI
def test_a_transactional_id_that_is_in_use_at_both_clusters() -> None:
    """Both have given it the same number and epoch: the target's coordinator takes the one that moved for its own."""
    topic, name = PREFIX + "both", unique("both-")
    with synchronous(topic) as link:

        def commit(side: Side, *values: bytes) -> tuple[int, int]:
            """Each in a transaction; the number and the epoch of the producer."""
            producer = side.producer(transactional_id=name, linger_ms=0)
            producer.init_transactions(60)
            for value in values:
                producer.begin_transaction()
                producer.produce(topic, value)
                producer.commit_transaction(60)
            with Wire(side.bootstrap) as wire:
                [known] = wire.request(
                    ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [name]}
                ).transaction_states
            return int(known.producer_id), int(known.producer_epoch)

        number, epoch = commit(link.a, b"a0", b"a1")
        link.b.proxy.cli("link", "promote", link.name, "--local", PREFIX)
        assert commit(link.b, b"b0", b"b1", b"b2", b"b3") == (number, epoch)
        identity = {"transactional_id": name, "producer_id": number, "producer_epoch": epoch}
        with Wire(link.b.bootstrap) as wire:
            adding = {f"v3_and_below_{field}": value for field, value in identity.items()}
            adding["v3_and_below_topics"] = [{"name": topic, "partitions": [0]}]
            added = wire.request(ApiKey.ADD_PARTITIONS_TO_TXN, 3, adding)
            assert added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
            third = PLAIN._replace(
                producer_id=number, producer_epoch=epoch, base_sequence=2, attributes=TRANSACTIONAL_BIT
            )
            data = [{"name": topic, "partition_data": [{"index": 0, "records": batch_of([b"a2"], third)}]}]
            asked = {"transactional_id": name, "acks": -1, "timeout": 30_000, "topic_data": data}
            [answer] = wire.request(ApiKey.PRODUCE, 9, asked).responses
            assert answer.partition_responses[0].error_code == OUT_OF_ORDER_SEQUENCE_NUMBER
            assert wire.request(ApiKey.END_TXN, 3, identity | {"committed": False}).error_code == 0
        assert commit(link.b, b"a2") > (number, epoch), "as its client does"
        found = [each.value for each in link.b.read_decided(topic)]
        assert found == [b"a0", b"a1", b"b0", b"b1", b"b2", b"b3", b"a2"]


@ONE_IN_CI
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_goes_on_where_its_name_leads(kind: str) -> None:
    topic = PREFIX + kind
    with synchronous(topic) as link, ExitStack() as stack:
        version = link.a.kafka.version
        if not runs_here(kind, version):
            pytest.skip("Java comes without a compiler here")
        with writer(kind, version, topic, link.a.bootstrap) as client:
            until("it writes", lambda: len(client.acked) > 100)
            link.a.proxy.kill()
            for broker in link.a.kafka.broker_ids:
                link.a.kafka.kill(broker)
            link.b.proxy.cli("link", "failover", link.name, "--local", PREFIX)
            begun = [RawProducer(link.b, topic) for _ in range(3)]
            for each in begun:
                stack.callback(each.close)
            assert [each.send(link.b, 0, b"begun here %d" % each.number)[0] for each in begun] == [0, 0, 0]
            before = len(client.acked)
            stand_in(stack, link)
            moved = time.monotonic()
            until("it goes on", lambda: len(client.acked) > before + 100, 90)
            print(f"{kind} went on within {time.monotonic() - moved:.1f} s; failed: {client.failed[:3]}")
        there = link.b.read(topic)
        at = {each.value: each.offset for each in there}
        lost = {value: offset for value, offset in client.acked.items() if at.get(value) != offset}
        assert not lost, f"acked, and not there: {list(lost.items())[:5]}"
        twice = [value for value, count in Counter(each.value for each in there).items() if count > 1]
        assert not twice, f"stored twice: {twice[:5]}"
        assert not client.failed
        assert {b"begun here %d" % each.number for each in begun} <= at.keys()


ABORTS_ALONE = {"librdkafka"}
"""The others take it for an error that only another producer gets over."""


@ONE_IN_CI
@pytest.mark.parametrize("kind", KINDS)
def test_a_transactional_producer_has_to_initialise_again(kind: str) -> None:
    """What it committed before, and what is committed after it was told so, is there once, and nothing else."""
    topic, transactional_id = PREFIX + "transactions", unique("app-")
    with synchronous(topic) as link, ExitStack() as stack:
        version, bootstrap = link.a.kafka.version, link.a.bootstrap
        if not runs_here(kind, version):
            pytest.skip("Java comes without a compiler here")

        def producer() -> Steps:
            return stack.enter_context(steps(kind, version, bootstrap, transactional_id))

        moved = producer()
        assert moved.ask("init") == "done"
        assert committed_by(moved, topic, "before") == ["done"] * 3
        link.a.proxy.kill()
        for broker in link.a.kafka.broker_ids:
            link.a.kafka.kill(broker)
        link.b.proxy.cli("link", "failover", link.name, "--local", PREFIX)
        stand_in(stack, link)
        said = committed_by(moved, topic, "moved")
        print(f"{kind} is told {said}")
        assert any(TOLD_OF_ANOTHER_COORDINATOR[kind] in each for each in said), said
        if kind in ABORTS_ALONE:
            assert moved.ask("abort") == "done"
        else:
            moved = producer()
            assert moved.ask("init") == "done"
        assert committed_by(moved, topic, "after") == ["done"] * 3
        committed = link.b.read_decided(topic)
        assert [each.value for each in committed] == [b"before", b"after"]
