"""The control log on real brokers: two makers, leases, faults, and everything that must stop a proxy."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.kafka import Clusters

from isthmus import control_log, control_topic, lease_clocks
from isthmus.control_log import AppendUnresolved, ControlLog, ControlLogHalted, LeaseSpec
from isthmus.control_topic import TOPIC
from isthmus.errors import ConfigurationError
from isthmus.kafka.client import EARLIEST, ClusterClient, NewTopic, ResourceType, TopicPartition
from isthmus_bench.kafka import KafkaCluster
from isthmus_control import anchors, replica
from isthmus_control import apply as rules
from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import FROM_FIRST, ORIGINS, with_known_level
from isthmus_control.model import BrokerClaim, LinkMode, Role, SyncState, TopicState
from isthmus_control.model import ResourceType as Kind
from isthmus_control.origins import Origin, OriginRange
from isthmus_control.outcome import Accepted, Change, LeaseChanged, NamespaceChanged, Outcome, Rejected, Rejection
from isthmus_control.rules.proxies import LEASE_MS_MAX
from isthmus_plugins.clock import monotonic
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import PLAIN_HEADER

pytestmark = pytest.mark.brokers

LEASE_MS = 2_000
AT_ONCE_S = 20
"""On a busy machine; renewals of the longest lease are 40 s apart."""


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaCluster]:
    """One broker of this module's own: the log is one for each cluster."""
    with KafkaCluster(name="control") as cluster:
        yield cluster


@asynccontextmanager
async def client_of(cluster: KafkaCluster) -> AsyncIterator[ClusterClient]:
    async with ClusterClient(cluster.bootstrap_servers.split(",")) as client:
        yield client


@asynccontextmanager
async def empty(cluster: KafkaCluster) -> AsyncIterator[ClusterClient]:
    """A client of the cluster without a control topic."""
    async with client_of(cluster) as client:
        await delete_topic(client)
        yield client


async def delete_topic(client: ClusterClient) -> None:
    await client.delete_topics([TOPIC])
    while TOPIC in await client.refresh([TOPIC]):  # noqa: ASYNC110 - nothing tells when a deletion has spread
        await asyncio.sleep(0.05)


class Proxy:
    """A control log with a client of its own, and what it told."""

    def __init__(self, log: ControlLog) -> None:
        self.log = log
        self.failures: list[Exception] = []
        self.failed = asyncio.Event()
        self.states: list[ControlState] = []
        self.changes: list[tuple[tuple[Change, ...], int]] = []
        log._on_failure = self._failed
        log.subscribe(self.states.append)
        log.watch(lambda state, changes, offset: self.changes.append((changes, offset)))

    def _failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.failed.set()

    async def claim(self, *brokers: int, **more: Any) -> Outcome:
        claims = tuple(BrokerClaim(number, "localhost", 9000 + number) for number in brokers)
        return await self.log.claim(LeaseSpec(claims, lease_ms=LEASE_MS, version="test", **more))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await self.log._change(1.0)

    async def until_lost(self, reason: str) -> None:
        async with asyncio.timeout(30):
            while self.log.halted is None:  # noqa: ASYNC110 - a halt is not told to anybody
                await asyncio.sleep(0.05)
        assert self.log.halted.reason == reason


@asynccontextmanager
async def proxy(cluster: KafkaCluster, name: str, *, release: bool = True, **more: Any) -> AsyncIterator[Proxy]:
    async with client_of(cluster) as client:
        one = Proxy(ControlLog(client, name, supervision=Supervision(), **more))
        try:
            await one.log.start()
            yield one
        finally:
            await one.log.close(release=release)


def namespace(prefix: str, reserved: bool = False) -> c.CreateNamespace:
    return c.CreateNamespace(Kind.TOPIC, prefix, reserved)


def test_two_proxies_make_it_at_once_and_agree(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker) as client, client_of(broker) as one_client, client_of(broker) as two_client:
            one, two = (
                Proxy(ControlLog(one_client, "one", supervision=Supervision())),
                Proxy(ControlLog(two_client, "two", supervision=Supervision())),
            )
            await asyncio.gather(one.log.start(), two.log.start())
            entries = (await client.describe_configs(ResourceType.TOPIC, [TOPIC]))[TOPIC].entries
            assert {name: entries[name].value for name in control_topic.settings(1)} == control_topic.settings(1)

            outcomes = await asyncio.gather(one.log.append(namespace("a-")), two.log.append(namespace("a-")))
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Accepted", "Rejected"]
            rejected = next(outcome for outcome in outcomes if isinstance(outcome, Rejected))
            assert rejected.code is Rejection.ALREADY_EXISTS

            many = await asyncio.gather(*(one.log.append(namespace(f"n{number}-")) for number in range(100)))
            assert all(isinstance(outcome, Accepted) for outcome in many)
            await two.until(lambda: two.log.state.applied_offset == one.log.state.applied_offset)
            assert two.log.state == one.log.state
            # Each was told of each change once, in order, and the last state is the one.
            assert one.changes == two.changes
            assert [offset for _, offset in one.changes] == sorted({offset for _, offset in one.changes})
            assert len([change for changes, _ in one.changes for change in changes]) == 101
            assert isinstance(one.changes[0][0][0], NamespaceChanged)
            assert one.states[-1] == one.log.state

            async with proxy(broker, "late") as late:
                assert late.log.state == one.log.state
            await asyncio.gather(one.log.close(), two.log.close())

    asyncio.run(run())


def test_a_command_counts_once_however_often_it_is_appended(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two") as two:
            command = c.Command(str(uuid.uuid4()), 1, "one", -1, namespace("a-"))
            first = await one.log.append(command)
            assert isinstance(first, Accepted)
            assert await one.log.append(command) == first
            await one.log.append(c.DeleteNamespace(Kind.TOPIC, "a-"))
            # Not even by another proxy, which cannot know what came of it.
            outcome = await two.log.append(command)
            assert not isinstance(outcome, Rejected)
            assert two.log.state.namespaces == {}

    asyncio.run(run())


def test_a_fresh_proxy_starts_from_a_snapshot(broker: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rules, replica, control_topic):
        monkeypatch.setattr(module, "SNAPSHOT_INTERVAL", 32)
    monkeypatch.setattr(control_log, "SNAPSHOT_DELAY_S_MAX", 0.2)
    monkeypatch.setattr(control_log, "RECORDS_KEPT", 16)

    async def run() -> None:
        async with empty(broker) as client, proxy(broker, "one") as one, proxy(broker, "two") as two:
            await one.claim(1)
            await two.claim(2)
            for number in range(70):
                await one.log.append(namespace(f"n{number}-"))
            await one.until(lambda: one.log.state.snapshot_offset >= 63)
            # What stands far before the snapshot is not needed any more, and goes.
            place = TopicPartition(TOPIC, 0)
            async with asyncio.timeout(30):
                while (await client.list_offsets({place: EARLIEST}))[place].offset < one.log.state.snapshot_offset - 16:
                    await one.log._change(0.1)
            assert (await client.list_offsets({place: EARLIEST}))[place].offset > 0
            # Whoever reads is not overtaken: 16 records are a few seconds of leases.
            monkeypatch.setattr(control_log, "RECORDS_KEPT", 10_000)
            async with proxy(broker, "late") as late:
                assert len(late.log.state.namespaces) == 70
                await two.until(lambda: two.log.state.applied_offset >= late.log.state.applied_offset)
                await late.until(lambda: late.log.state.applied_offset >= two.log.state.applied_offset)
            assert not one.failures
            assert not two.failures

    asyncio.run(run())


def test_a_second_proxy_for_a_broker_is_refused_while_the_first_lives(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "one", release=False) as one, proxy(broker, "two") as two:
            assert not one.log.vouching
            assert isinstance(await one.claim(1), Accepted)
            assert one.log.vouching
            started = monotonic()
            refused = await two.claim(1)
            assert isinstance(refused, Rejected)
            assert "'one'" in refused.message
            assert monotonic() - started < 2 * LEASE_MS / 1000
            assert not two.log.vouching

            # It goes without a word: its lease is waited out, and not a moment less.
            until = one.log.lease_deadline
            await one.log.close(release=False)
            assert isinstance(await two.claim(1), Accepted)
            assert monotonic() > until
            assert two.log.vouching
            # It keeps it.
            await two.until(lambda: monotonic() > until + LEASE_MS / 1000)
            assert two.log.vouching

    asyncio.run(run())


def test_a_lease_is_lost_at_once_when_the_wall_clock_ran_ahead(broker: KafkaCluster) -> None:
    """The VM was paused: others may have seen the lease run out. It is renewed as soon as that is noticed."""
    paused_s = 0.0

    def clocks() -> lease_clocks.Clocks:
        moment = lease_clocks.now()
        return moment._replace(wall=moment.wall + paused_s)

    async def run() -> None:
        nonlocal paused_s
        async with empty(broker), proxy(broker, "one", clocks=clocks) as one:
            await one.claim(1)
            assert one.log.vouching
            paused_s = 0.5
            assert one.log.vouching, "within the margin"
            paused_s = 60.0
            assert not one.log.vouching
            assert one.log.lease_deadline == float("-inf")
            began = monotonic()
            await one.until(lambda: one.log.vouching)
            assert monotonic() - began < LEASE_MS / 1000
            assert not one.failures

    asyncio.run(run())


def test_a_lease_given_back_is_free_at_once(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "two") as two:
            async with proxy(broker, "one") as one:
                await one.claim(1)
            started = monotonic()
            assert isinstance(await two.claim(1), Accepted)
            assert monotonic() - started < 1
            ended = [change for changes, _ in two.changes for change in changes if isinstance(change, LeaseChanged)]
            assert [change.after is None for change in ended] == [False, True, False]

    asyncio.run(run())


def test_a_newer_process_takes_over_the_name(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as old:
            await old.claim(1)
            async with proxy(broker, "one") as new:
                assert isinstance(await new.claim(1), Accepted)
                async with asyncio.timeout(60):
                    await old.failed.wait()
                assert "newer process" in str(old.failures[0])
                assert not old.log.vouching
                assert new.log.vouching
                # A reservation waits for the old process, which may still have writes under way.
                started = monotonic()
                await new.log.append(namespace("a-", reserved=True))
                assert new.log.leases.waiting_for(new.log.state.applied_offset, monotonic()) == ("one",)
                async with asyncio.timeout(60):
                    await new.log.enforced(new.log.state.applied_offset)
                assert monotonic() - started > 1

    asyncio.run(run())


def test_a_reservation_is_made_when_everybody_has_passed_the_fence(broker: KafkaCluster) -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def fence() -> None:
            await gate.wait()

        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two", fence=fence) as two:
            await one.claim(1)
            await two.claim(2)
            await one.log.append(namespace("a-", reserved=True))
            offset = one.log.state.applied_offset
            waiting = asyncio.gather(one.log.enforced(offset), two.log.enforced(offset))
            # Two renews all the time, so that it is not its lease that is waited for.
            await one.until(lambda: one.log.state.applied_offset > offset + 8)
            assert not waiting.done()
            assert one.log.leases.waiting_for(offset, monotonic()) == ("two",)
            released = monotonic()
            gate.set()
            async with asyncio.timeout(60):
                await waiting
            # Told at once, not with the next renewal in turn.
            assert monotonic() - released < 0.5

    asyncio.run(run())


def test_that_a_partition_is_new_is_known_to_everybody_at_once(broker: KafkaCluster) -> None:
    """Acks of transactions in it wait for that: not for the renewal in turn, which is 40 s away."""

    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two") as two:
            for number, each in enumerate((one, two), 1):
                claims = (BrokerClaim(number, "localhost", 9000 + number),)
                lease = LeaseSpec(claims, lease_ms=LEASE_MS_MAX, version="test")
                assert isinstance(await each.log.claim(lease), Accepted)
            link_id, topic_id = str(uuid.uuid4()), str(uuid.uuid4())
            for body in (
                c.RaiseLevel(FROM_FIRST),
                c.CreateLink("ab", link_id, "B", False),
                c.AttachNamespace("ab", Kind.TOPIC, "out-", "in-", Role.LEADER, create_missing=True),
                c.AlterLink("ab", LinkMode.SYNCHRONOUS),
            ):
                outcome = await one.log.append(body)
                assert isinstance(outcome, Accepted), outcome
            entry = c.PartitionSync("out-t", topic_id, 0, 0)
            new = c.RecordSync("ab", link_id, SyncState.IN_SYNC, (entry,), from_first=True)
            assert isinstance(await one.log.append(new), Accepted)
            async with asyncio.timeout(AT_ONCE_S):
                await one.log.enforced(one.log.state.applied_offset)

    asyncio.run(run())


def test_that_a_reservation_ends_is_known_to_everybody_at_once(broker: KafkaCluster) -> None:
    """Operators wait for that, and clients that were refused: not for the renewal in turn, which is 40 s away."""

    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two") as two:
            for number, each in enumerate((one, two), 1):
                claims = (BrokerClaim(number, "localhost", 9000 + number),)
                assert isinstance(
                    await each.log.claim(LeaseSpec(claims, lease_ms=LEASE_MS_MAX, version="test")), Accepted
                )
            for body in (
                namespace("a-", reserved=True),
                c.AlterNamespace(Kind.TOPIC, "a-", False),
                c.DeleteNamespace(Kind.TOPIC, "a-"),
            ):
                outcome = await one.log.append(body)
                assert isinstance(outcome, Accepted), outcome
                async with asyncio.timeout(AT_ONCE_S):
                    await one.log.enforced(one.log.state.applied_offset)

    asyncio.run(run())


def test_that_a_promotion_begins_is_known_to_everybody_at_once(broker: KafkaCluster) -> None:
    """What another proxy had detached is waited for then: not for the renewal in turn, which is 40 s away."""

    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two") as two:
            for number, each in enumerate((one, two), 1):
                claims = (BrokerClaim(number, "localhost", 9000 + number),)
                assert isinstance(
                    await each.log.claim(LeaseSpec(claims, lease_ms=LEASE_MS_MAX, version="test")), Accepted
                )
            for body in (
                c.CreateLink("ab", str(uuid.uuid4()), "A", False),
                c.AttachNamespace("ab", Kind.TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True),
                c.BeginPromotion("ab", Kind.TOPIC, "in-", {}, one.log.incarnation, without_source=True),
            ):
                outcome = await one.log.append(body)
                assert isinstance(outcome, Accepted), outcome
            async with asyncio.timeout(AT_ONCE_S):
                await one.log.enforced(one.log.state.applied_offset)

    asyncio.run(run())


def test_where_what_is_pushed_on_comes_from_is_known_to_everybody_at_once(broker: KafkaCluster) -> None:
    """What comes to the middle of a chain waits for that: not for the renewal in turn, which is 40 s away."""

    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one, proxy(broker, "two") as two:
            for number, each in enumerate((one, two), 1):
                claims = (BrokerClaim(number, "localhost", 9000 + number),)
                lease = LeaseSpec(claims, lease_ms=LEASE_MS_MAX, version=with_known_level("test"))
                assert isinstance(await each.log.claim(lease), Accepted)
            topic_id = str(uuid.uuid4())
            ranges = (OriginRange(Origin("A", topic_id, str(uuid.uuid4())), 0, None, 5),)
            for body in (
                c.RaiseLevel(ORIGINS),
                c.CreateLink("ab", str(uuid.uuid4()), "A", False),
                c.CreateLink("bc", str(uuid.uuid4()), "C", False),
                c.AttachNamespace("ab", Kind.TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True),
                c.AttachNamespace("bc", Kind.TOPIC, "in-", "last-", Role.LEADER),
                c.SetFollowerTopic("ab", "in-t", "out-t", topic_id, TopicState.FOLLOWING, topic_id),
                c.RecordOrigins("ab", (c.ToldTopic("in-t", topic_id, (c.ToldPartition(0, 0, ranges),)),)),
            ):
                outcome = await one.log.append(body)
                assert isinstance(outcome, Accepted), outcome
            async with asyncio.timeout(AT_ONCE_S):
                await one.log.enforced(one.log.state.applied_offset)

    asyncio.run(run())


def test_a_reservation_does_not_wait_for_the_dead(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one:
            await one.claim(1)
            async with proxy(broker, "two", release=False) as two:
                await two.claim(2)
            await one.log.append(namespace("a-", reserved=True))
            async with asyncio.timeout(LEASE_MS / 1000 + 3):
                await one.log.enforced(one.log.state.applied_offset)
            await one.until(lambda: "two" not in one.log.state.proxies)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("partitions", "configs", "words"),
    [
        (2, {}, "2 partitions"),
        (1, {}, "retention.ms"),
        (1, {"retention.ms": "-1", "cleanup.policy": "compact"}, "cleanup.policy"),
        (1, {"retention.ms": "-1"}, "max.message.bytes"),
    ],
)
def test_an_unfit_topic_is_refused_by_name(
    broker: KafkaCluster, partitions: int, configs: dict[str, str], words: str
) -> None:
    async def run() -> None:
        async with empty(broker) as client:
            await client.create_topics([NewTopic(TOPIC, partitions, 1, configs)])
            with pytest.raises(ConfigurationError, match=words) as caught:
                async with proxy(broker, "one"):
                    pass
            assert TOPIC in str(caught.value)

    asyncio.run(run())


async def write_raw(client: ClusterClient, value: bytes) -> None:
    batch = encode_batch([Record(0, 0, None, value)], PLAIN_HEADER)
    produced = await client.produce_raw({TopicPartition(TOPIC, 0): batch})
    assert produced[TopicPartition(TOPIC, 0)].error is None


def test_junk_is_passed_over_and_a_newer_command_halts(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker) as client, proxy(broker, "one") as one:
            await one.claim(1)
            await write_raw(client, b"junk")
            assert isinstance(await one.log.append(namespace("a-")), Accepted)
            assert one.log.vouching

            newer = json.loads(c.encode(c.Command(str(uuid.uuid4()), 1, "new", -1, namespace("b-"))))
            newer["v"] = c.CreateNamespace.VERSION + 1
            await write_raw(client, json.dumps(newer).encode())
            async with asyncio.timeout(60):
                await one.failed.wait()
            assert isinstance(one.failures[0], ControlLogHalted)
            assert one.log.halted is not None
            assert one.log.halted.reason == replica.NEWER_VERSION
            assert not one.log.vouching
            assert one.log.state.namespace(Kind.TOPIC, "a-") is not None
            for call in (one.log.append(namespace("c-")), one.log.enforced(10_000)):
                with pytest.raises(ControlLogHalted, match="upgrade this proxy"):
                    await call
            # Nor does a fresh one come up.
            with pytest.raises(ControlLogHalted, match="upgrade this proxy"):
                async with proxy(broker, "two"):
                    pass

    asyncio.run(run())


def test_a_topic_that_was_replaced_halts(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker) as client, proxy(broker, "one") as one:
            await one.claim(1)
            await one.log.append(namespace("a-"))
            await delete_topic(client)
            await client.create_topics([NewTopic(TOPIC, 1, 1, control_topic.settings(1))])
            await one.until_lost(anchors.TOPIC_REPLACED)
            assert not one.log.vouching
            # It is no fault of this process, which remembers what was in the log.
            assert one.log.state.namespace(Kind.TOPIC, "a-") is not None
            assert not one.failures

    asyncio.run(run())


def test_a_subscriber_that_fails_stops_the_proxy(broker: KafkaCluster) -> None:
    async def run() -> None:
        async with empty(broker), proxy(broker, "one") as one:
            await one.claim(1)
            one.log.subscribe(lambda state: 1 / 0)
            with pytest.raises(ControlLogHalted, match="ZeroDivisionError"):
                await one.log.append(namespace("a-"))
            assert not one.log.vouching

    asyncio.run(run())


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_kill_freeze_and_restart_of_brokers(kafka_cluster: Clusters) -> None:
    """Commands go on through faults of the log's leader; each counts once, and leases are kept or taken again."""
    cluster = kafka_cluster(brokers=3, name="control-faults")

    async def run() -> None:
        async with proxy(cluster, "one") as one, proxy(cluster, "two") as two:
            info = await one.log._client.leader(TOPIC, 0)
            assert len(info.replicas) == 3
            await one.claim(1)
            await two.claim(2)
            stop = asyncio.Event()
            accepted: list[str] = []

            async def write(which: Proxy) -> None:
                number = 0
                while not stop.is_set():
                    prefix = f"{which.log.name}-{number}-"
                    number += 1
                    command: c.Body | c.Command = namespace(prefix)
                    while True:
                        try:
                            outcome = await which.log.append(command, timeout_s=20)
                        except AppendUnresolved as unresolved:
                            command = unresolved.command
                            continue
                        assert isinstance(outcome, Accepted), outcome
                        accepted.append(prefix)
                        break

            async def progress(more: int = 20) -> None:
                target = len(accepted) + more
                async with asyncio.timeout(60):
                    while len(accepted) < target:
                        await one.log._change(1.0)

            tasks = Tasks("test", Supervision())
            writers = [tasks.start(each.log.name, write(each)) for each in (one, two)]
            await progress()
            leader = (await one.log._client.leader(TOPIC, 0)).leader
            await asyncio.to_thread(cluster.kill, leader)
            await progress()
            await asyncio.to_thread(cluster.start_broker, leader)
            await progress()
            leader = (await one.log._client.leader(TOPIC, 0)).leader
            await asyncio.to_thread(cluster.pause, leader)
            await progress()
            await asyncio.to_thread(cluster.resume, leader)
            await progress()
            stop.set()
            await asyncio.gather(*writers)

            await one.until(lambda: one.log.vouching)
            await two.until(lambda: two.log.vouching)
            names = {key.prefix for key in one.log.state.namespaces}
            assert names == set(accepted)
            assert len(accepted) == len(names)
            async with proxy(cluster, "late") as late:
                await one.until(lambda: one.log.state.applied_offset >= late.log.state.applied_offset)
                assert {key.prefix for key in late.log.state.namespaces} == names
            assert not one.failures
            assert not two.failures

    asyncio.run(run())
