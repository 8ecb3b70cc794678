"""A partition that comes into being on a synchronous link: acks wait from its first record on, whoever dies."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import simulated_now
from support.pushing import KEY, PLACE, TOPIC, Source, Stream, on_source, produced
from support.replicas import LINK

from isthmus_control.commands import AttachNamespace, DetachNamespace, PartitionSync, RecordSync
from isthmus_control.demands import Confirm, Demands
from isthmus_control.levels import FROM_FIRST
from isthmus_control.model import LinkMode, SyncState
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.progress import Progress
from isthmus_plugins.replication.sync.quorums import Quorum

TIMEOUT_S = 10.0
REQUEST_TIMED_OUT = 7


async def empty(source: Source) -> None:
    """The link is synchronous, and the cluster was seen without the topic, by a process that knows who holds acks."""
    source.ends.discovery.led = {}
    source.ends.pushed = None
    source.mode(LinkMode.SYNCHRONOUS)
    source.ends.discovery.leader_epochs = {}
    for _ in range(8):
        await look(source, {})
    await asyncio.sleep(1.0)


async def look(source: Source, topics: dict[str, Any]) -> None:
    source.ends.discovery.topics = topics
    source.ends.discovery.looks += 1
    await asyncio.sleep(0.3)


async def found(source: Source) -> None:
    """The next look finds the topic; the target has made it, but for what ``pushed`` says."""
    source.ends.discovery.led = {KEY: None}
    source.ends.discovery.leader_epochs = {PLACE: 0}
    await look(source, dict(await source.cluster.topics()))


def pushed(source: Source) -> None:
    source.ends.pushed = source.stream
    source.confirm(0)


def status(source: Source) -> tuple[str, bool]:
    found = source.sync.partitions.sync_of(KEY)
    return found.state, found.from_first


def test_its_first_ack_waits_for_its_record_and_the_other_side() -> None:
    async def work(source: Source) -> None:
        await empty(source)
        first = source.produce()  # this proxy has not even seen the topic
        await asyncio.sleep(1.0)
        assert produced(first) is None
        assert status(source) == ("In-Sync", True)
        await found(source)
        record = source.recorded()
        assert record is not None
        assert (record.state, record.reached, record.from_first) == (SyncState.IN_SYNC, False, True)
        assert produced(first) is None, "the target does not have the topic"
        pushed(source)
        await asyncio.sleep(1.0)
        assert produced(first) is None
        assert not await source.lease(), "nothing is promised before it is known what is in the log"
        source.confirm()
        assert produced(first) == 0
        await source.until("In-Sync", source.in_sync)
        assert await source.lease()
        assert status(source) == ("In-Sync", False)
        record = source.recorded()
        assert record is not None
        assert (record.reached, record.from_first) == (True, False)

    on_source(work)


def test_the_other_side_is_told_that_a_topic_is_new_until_it_has_leases() -> None:
    """It asks for these now and then: what was level before the first of them was Out-Of-Sync there in between."""

    async def work(source: Source) -> None:
        await empty(source)
        await found(source)
        pushed(source)
        [info] = [each for each in (await source.cluster.topics()).values() if each.name == TOPIC]
        await source.until("In-Sync", source.in_sync)
        assert status(source) == ("In-Sync", False)
        await asyncio.sleep(1.0)
        assert source.sync.partitions.holds_from_first(LINK, info)
        assert await source.lease()
        await source.until("it is told no more", lambda: not source.sync.partitions.holds_from_first(LINK, info))

    on_source(work)


def test_that_a_topic_is_in_sync_from_its_first_record_is_a_promise() -> None:
    """A namespace that asks for one of two links from then on: acks went with the other one, for as long as the
    target of this one said In-Sync."""

    async def work(source: Source) -> None:
        await empty(source)
        await found(source)
        pushed(source)

        async def never(offset: int) -> None:
            await asyncio.Event().wait()

        source.control.enforced = never  # type: ignore[method-assign]
        source.produce()
        await asyncio.sleep(4.0)  # until then what the process before may have promised counts
        asked = calls.SyncLease((source.stream.stream_id,))
        said = await source.sync.grants.on_sync_lease(source.connection, asked)
        assert said.states[source.stream.stream_id].from_first

        record, other = source.recorded(), LinkPartition("other", *PLACE)
        assert record is not None
        any_of = Demands(confirm=Confirm(1, (LINK, other.link)))
        source.sync._quorums.demands = lambda topic, scope=None: any_of  # type: ignore[method-assign]
        source.sync.links.records = lambda place: {LINK: record, other.link: record}  # type: ignore[method-assign]
        source.sync.requirements.changed()

        def needed() -> set[Quorum]:
            source.sync.partitions.progress[other] = Progress(float("-inf"), 0)  # known for long
            return set(source.sync.requirements.needed(PLACE, False))

        one_of_two = Quorum(1, (KEY, other))
        assert needed() == {one_of_two, Quorum(1, (KEY,))}
        await asyncio.sleep(LEASE_S + LEASE_MARGIN_S)
        assert needed() == {one_of_two}

    on_source(work)


def test_no_ack_goes_before_it_is_recorded_even_where_the_other_side_has_it() -> None:
    async def work(source: Source) -> None:
        await empty(source)
        append = source.control.append

        async def away(body: object) -> None:
            raise BrokerUnavailable("the control log does not answer")

        source.control.append = away  # type: ignore[method-assign]
        await found(source)
        pushed(source)
        first = source.produce()
        source.confirm()
        await asyncio.sleep(3.0)
        assert produced(first) is None, "who leads it next would not know that acks are held"
        source.control.append = append  # type: ignore[method-assign]
        await source.until("acked", lambda: produced(first) == 0)

    on_source(work)


def test_what_is_part_of_a_transaction_is_acked_when_every_proxy_holds_its_commit() -> None:
    """EndTxn goes to another proxy, which would not wait for the decision before it knows of the partition."""

    async def work(source: Source) -> None:
        await empty(source)
        enforced, all_know = source.control.enforced, asyncio.Event()

        async def waits(offset: int) -> None:
            await all_know.wait()
            await enforced(offset)

        source.control.enforced = waits  # type: ignore[method-assign]
        await found(source)
        pushed(source)
        plain, in_transaction = source.produce(), source.produce(transactional=True)
        source.confirm()
        await asyncio.sleep(3.0)
        assert produced(plain) == 0
        assert produced(in_transaction) is None
        all_know.set()
        await source.until("acked", lambda: produced(in_transaction) == 0, 2.0)

    on_source(work)


def test_a_proxy_that_does_not_push_it_holds_no_commit_before_it_knows_of_it() -> None:
    """Why acks of records in transactions wait for every proxy: EndTxn may come to this one."""

    async def work(source: Source) -> None:
        await empty(source)
        topics = dict(await source.cluster.topics())
        (info,) = topics[TOPIC].partitions
        source.context.brokers = source.context.fronted_brokers = frozenset({1})
        await look(source, {TOPIC: topics[TOPIC]._replace(partitions=(info._replace(leader=9),))})
        await asyncio.sleep(5.0)  # until then it holds whatever the process before may have promised
        assert not list(source.sync.requirements.commit_needed(PLACE))
        link_id, topic_id = source.control.state.links[LINK].link_id, uuid.UUID(bytes=topics[TOPIC].topic_id)
        entry = PartitionSync(TOPIC, str(topic_id), 0, 0)
        source.control.apply(RecordSync(LINK, link_id, SyncState.IN_SYNC, (entry,), from_first=True))
        assert list(source.sync.requirements.commit_needed(PLACE)) == [Quorum(1, (KEY,))]

    on_source(work)


def test_it_is_out_of_sync_before_an_ack_goes_alone() -> None:
    """One that has been In-Sync is no more Syncing: strict and transactional producers wait."""

    async def work(source: Source) -> None:
        await empty(source)
        first, in_transaction = source.produce(), source.produce(transactional=True)
        await found(source)
        took = await source.until("acked", lambda: produced(first) is not None)
        assert produced(first) == 0
        assert TIMEOUT_S - 1 <= took < TIMEOUT_S + 5
        record = source.recorded()
        assert record is not None
        assert (record.state, record.reached, record.from_first) == (SyncState.OUT_OF_SYNC, True, False)
        assert status(source) == ("Out-Of-Sync", False)
        assert produced(in_transaction) is None
        pushed(source)
        source.confirm()
        assert produced(in_transaction) == 0
        await source.until("In-Sync", source.in_sync)

    on_source(work)


def test_what_was_there_before_is_syncing_and_waits_for_nothing() -> None:
    async def work(source: Source) -> None:
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        topics = dict(await source.cluster.topics())
        for _ in range(8):
            await look(source, topics)
        await asyncio.sleep(5.0)  # until then it holds whatever the process before may have promised
        assert produced(source.produce()) == 0
        assert status(source) == ("Syncing", False)
        # A partition that is added is new, the others are not; nor is a topic that takes a name that was there.
        assert source.sync.links.waits_for_record((TOPIC, 1))
        assert not source.sync.links.waits_for_record(PLACE)
        await look(source, {TOPIC: topics[TOPIC]._replace(topic_id=bytes(16))})
        assert source.recorded() is None
        assert not source.sync.links.waits_for_record(PLACE)

    on_source(work)


def test_what_came_to_be_while_nobody_looked_may_have_been_acked_alone() -> None:
    async def work(source: Source) -> None:
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        source.ends.discovery.led = {}
        topics = dict(await source.cluster.topics())
        for number in range(8):
            await look(source, {} if number < 4 else topics)
        assert not source.sync.links.new.is_new(LINK, PLACE)

    on_source(work)


@pytest.mark.parametrize("what", ["another leader", "led elsewhere"])
def test_what_another_process_may_have_acked_is_not_new(what: str) -> None:
    async def work(source: Source) -> None:
        await empty(source)
        topics = dict(await source.cluster.topics())
        (info,) = topics[TOPIC].partitions
        other = info._replace(leader_epoch=1) if what == "another leader" else info._replace(leader=9)
        source.context.brokers = frozenset({1})
        source.context.fronted_brokers = frozenset({1})
        await look(source, {TOPIC: topics[TOPIC]._replace(partitions=(other,))})
        assert not source.sync.links.waits_for_record(PLACE)
        assert source.recorded() is None

    on_source(work)


def test_a_pair_that_is_attached_again_and_a_lost_lease_begin_anew() -> None:
    async def work(source: Source) -> None:
        await empty(source)
        assert source.sync.links.waits_for_record(PLACE)
        link = source.control.state.links[LINK]
        (mapping,) = link.mappings
        source.control.apply(DetachNamespace(LINK, mapping.type, mapping.local_prefix))
        source.control.apply(
            AttachNamespace(LINK, mapping.type, mapping.local_prefix, mapping.remote_prefix, mapping.role)
        )
        assert not source.sync.links.waits_for_record(PLACE), "acks went alone meanwhile"
        for _ in range(8):
            await look(source, {})
        assert source.sync.links.waits_for_record(PLACE)
        source.context.lease_deadline = 0.0
        await asyncio.sleep(0.5)
        assert not source.sync.links.waits_for_record(PLACE), "another process may have acked it"

    on_source(work)


def test_a_lease_that_was_lost_while_this_proxy_recorded_something_begins_anew_too() -> None:
    """The control log took no records so long: no look came while it had no lease."""

    async def work(source: Source) -> None:
        await empty(source)
        assert source.sync.links.waits_for_record(PLACE)
        source.context.lease_deadline = simulated_now() + 3.0
        append, answers = source.control.append, asyncio.Event()

        async def late(body: Any) -> Any:
            await answers.wait()
            return await append(body)

        source.control.append = late  # type: ignore[method-assign]
        await found(source)
        await asyncio.sleep(5.0)
        source.context.lease_deadline = simulated_now() + 3.0
        answers.set()
        await asyncio.sleep(0.5)
        assert not source.sync.links.waits_for_record((TOPIC, 1)), "another process may have acked it"

    on_source(work)


def test_the_first_ack_of_a_partition_is_no_other_epochs() -> None:
    """The request came before this proxy had seen it: a plain producer that sent it again stored it twice."""

    async def work(source: Source) -> None:
        await empty(source)
        first = source.produce()
        await found(source)
        assert produced(first) is None
        pushed(source)
        source.confirm()
        assert produced(first) == 0

    on_source(work)


def test_a_process_that_has_just_started_does_not_know_what_is_new() -> None:
    async def work(source: Source) -> None:
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        assert not source.sync.links.waits_for_record(PLACE), "nobody has looked yet"
        enforced = source.control.enforced
        waiting = asyncio.Event()

        async def waits(offset: int) -> None:
            await waiting.wait()
            await enforced(offset)

        source.control.enforced = waits  # type: ignore[method-assign]
        for _ in range(8):
            await look(source, {})
        assert not source.sync.links.waits_for_record(PLACE), "some proxy may ack without the other side"
        waiting.set()

    on_source(work)


def test_a_log_of_an_older_level_knows_of_none() -> None:
    async def work(source: Source) -> None:
        source.control.state = source.control.state.evolve(level=FROM_FIRST - 1)
        await empty(source)
        assert not source.sync.links.waits_for_record(PLACE)
        assert produced(source.produce()) == 0

    on_source(work)


@pytest.mark.parametrize("killed", ["before it is recorded", "after"])
def test_who_leads_it_next_holds_it_if_anything_was_acked(killed: str) -> None:
    async def work(source: Source) -> None:
        await empty(source)
        first = source.produce()
        if killed == "after":
            await found(source)
            pushed(source)
            source.confirm()
            assert produced(first) == 0
        record = source.recorded()
        other = Source()
        other.control.state = replace(source.control.state, sync_records=source.control.state.sync_records)
        other.start()
        other.ends.pushed = None
        await asyncio.sleep(5.0)  # until then it holds whatever the process before may have promised
        held = produced(other.produce()) is None
        assert held == (record is not None) == (killed == "after")
        await other.stop()

    on_source(work)


@pytest.mark.parametrize("was_in_sync", [True, False])
def test_a_process_that_starts_while_the_link_is_down_knows_what_is_new(was_in_sync: bool) -> None:
    """By what has been In-Sync. Where nothing was, the other cluster may not know yet that the link is synchronous."""

    async def work(source: Source) -> None:
        if was_in_sync:
            await source.synchronous()
        else:
            source.mode(LinkMode.SYNCHRONOUS)
        other = Source()
        other.control.state = source.control.state
        other.agrees = False
        other.start()
        other.ends.pushed = None
        for _ in range(8):
            await look(other, dict(await other.cluster.topics()))
        added = TOPIC, 1
        assert other.sync.links.waits_for_record(added) is was_in_sync
        assert other.sync.links.new.is_new(LINK, added) is was_in_sync
        await other.stop()

    on_source(work)


def test_the_record_of_it_is_no_other_proxys_to_take_back() -> None:
    async def work(source: Source) -> None:
        await empty(source)
        await found(source)
        link = source.control.state.links[LINK]
        record = source.recorded()
        assert record is not None
        entry = PartitionSync(TOPIC, record.topic_id, 0, 0)
        again = RecordSync(LINK, link.link_id, SyncState.IN_SYNC, (entry,), from_first=True)
        await source.control.append(again)
        assert source.recorded() == record

    on_source(work)


def make_anew(source: Source) -> None:
    """The topic is deleted, and another one made under its name; no look has shown that yet."""
    topic = source.cluster.add_topic(TOPIC)
    source.log = topic.partitions[0]
    source.stream = Stream(topic.topic_id, source.connection)


async def found_anew(source: Source) -> None:
    """A look shows the other one; the target does not have it."""
    source.ends.discovery.topic_ids = {TOPIC: source.stream.topic_id}
    source.ends.pushed = None
    await found(source)


async def in_sync_once(source: Source) -> None:
    """The topic came to be under the link, and was seen at the other side."""
    await empty(source)
    await found(source)
    pushed(source)
    source.confirm()
    await source.until("In-Sync", source.in_sync)


async def out_of_sync(source: Source) -> None:
    """The other side confirms nothing, until acks go without it."""
    source.ends.pushed = None
    first = source.produce()
    await source.until("acked alone", lambda: produced(first) is not None)
    assert produced(first) == 0
    assert status(source)[0] == "Out-Of-Sync"


async def look_on(source: Source, topics: dict[str, Any]) -> None:
    for _ in range(4):
        await look(source, topics)


async def held_from_first(source: Source) -> None:
    """The topic that took the name is recorded as a new one, and no ack of it goes before the other side has it."""
    record = source.recorded()
    assert record is not None
    assert record.topic_id == str(uuid.UUID(bytes=source.stream.topic_id))
    assert (record.state, record.reached, record.from_first) == (SyncState.IN_SYNC, False, True)
    assert status(source) == ("In-Sync", True)
    first = source.produce()
    await asyncio.sleep(1.0)
    assert produced(first) is None
    pushed(source)
    await asyncio.sleep(1.0)
    assert produced(first) is None
    source.confirm()
    assert produced(first) == 0
    await source.until("In-Sync", source.in_sync)


async def held_before_it_is_found(source: Source, found_after_s: float) -> None:
    """The topic is made anew and written to; a look shows the other one only then."""
    make_anew(source)
    first = source.produce()
    await asyncio.sleep(found_after_s)
    assert produced(first) is None
    await found_anew(source)
    await held_from_first(source)
    assert produced(first) == 0


def test_a_topic_that_takes_the_name_of_one_that_was_in_sync_is_new() -> None:
    """A client that asks about what it has deleted has it made again."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        await look_on(source, dict(await source.cluster.topics()))
        make_anew(source)
        await found_anew(source)
        await held_from_first(source)

    on_source(work)


def test_a_topic_that_was_there_before_the_mode_and_is_made_anew_is_new() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        await look_on(source, dict(await source.cluster.topics()))
        await look_on(source, dict(await source.cluster.topics()))
        make_anew(source)
        await found_anew(source)
        await held_from_first(source)

    on_source(work)


def test_the_record_of_a_topic_that_was_deleted_lets_no_ack_of_the_next_one_go() -> None:
    """It was Out-Of-Sync: the first acks of what took its name went alone, and status said that they did not."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        await out_of_sync(source)
        source.ends.discovery.led = {}
        await look_on(source, {})
        make_anew(source)
        first, in_transaction = source.produce(), source.produce(transactional=True)
        await asyncio.sleep(1.0)
        assert produced(first) is None, "this proxy has not even seen the topic"
        await found_anew(source)
        await held_from_first(source)
        assert (produced(first), produced(in_transaction)) == (0, 0)

    on_source(work)


def test_nor_does_it_where_something_of_the_one_before_was_acked_after_it_was_deleted() -> None:
    """What that needed was remembered, and stood for what took its name."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        await out_of_sync(source)
        source.ends.discovery.led = {}
        await look(source, {})
        assert produced(source.produce()) == 0, "an answer that took its time"
        await look_on(source, {})
        await held_before_it_is_found(source, 1.0)

    on_source(work)


@pytest.mark.parametrize("was", ["Out-Of-Sync", "In-Sync"])
def test_what_was_acked_before_anybody_saw_that_it_is_another_topic_is_not_held_from_the_first(was: str) -> None:
    """Its acks went as those of the one before: alone, or by what the other side had of that one."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        source.log.write_values(*[b"v"] * 5)
        source.confirm()
        if was == "Out-Of-Sync":
            await out_of_sync(source)
        await look_on(source, dict(await source.cluster.topics()))
        make_anew(source)
        assert produced(source.produce()) == 0
        await found_anew(source)
        assert status(source) == ("Syncing", False)
        record = source.recorded()
        assert record is not None
        assert not record.from_first
        pushed(source)
        source.confirm()
        await source.until("In-Sync", source.in_sync)

    on_source(work)


def test_what_was_confirmed_of_a_topic_that_its_broker_does_not_have_any_more_lets_no_ack_of_the_next_one_go() -> None:
    """The read of its log is answered so as soon as it is deleted, before a look shows which topic has the name."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        source.log.write_values(*[b"v"] * 5)
        source.confirm()
        await look_on(source, dict(await source.cluster.topics()))
        source.sync.on_gone(source.stream)  # type: ignore[arg-type]
        source.ends.pushed = None
        await held_before_it_is_found(source, 0.2)

    on_source(work)


def test_a_broker_that_lags_shows_no_new_topic() -> None:
    """It shows the one that was deleted: what is recorded of the one that is there stays."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        await look_on(source, before := dict(await source.cluster.topics()))
        make_anew(source)
        await found_anew(source)
        await held_from_first(source)
        record = source.recorded()
        await look_on(source, before)
        assert not source.sync.links.new.is_new(LINK, PLACE)
        assert source.recorded() == record

    on_source(work)


def test_what_another_proxy_records_of_a_topic_that_this_one_has_not_seen_yet_counts() -> None:
    """Else decisions about it would wait here until it is seen."""

    async def work(source: Source) -> None:
        await in_sync_once(source)
        await look_on(source, {})
        link_id, topic_id = source.control.state.links[LINK].link_id, str(uuid.uuid4())
        entry = PartitionSync(TOPIC, topic_id, 0, 0)
        source.control.apply(RecordSync(LINK, link_id, SyncState.IN_SYNC, (entry,), from_first=True))
        assert list(source.sync.requirements.commit_needed(PLACE)) == [Quorum(1, (KEY,))]

    on_source(work)


def test_what_the_first_leader_records_late_does_not_say_that_the_next_one_held_all() -> None:
    """The broker that led it died, and so the record took its time: the next leader acked alone, and status said
    In-Sync of that."""

    async def work(source: Source) -> None:
        await empty(source)
        topics = dict(await source.cluster.topics())
        (info,) = topics[TOPIC].partitions
        source.ends.discovery.led = {KEY: None}
        source.ends.discovery.leader_epochs, source.stream.leader_epoch = {PLACE: 1}, 1
        source.stream.close = False
        await look(source, {TOPIC: topics[TOPIC]._replace(partitions=(info._replace(leader_epoch=1),))})
        await asyncio.sleep(5.0)
        assert produced(source.produce()) == 0
        assert status(source) == ("Syncing", False)
        link_id, topic_id = source.control.state.links[LINK].link_id, str(uuid.UUID(bytes=source.stream.topic_id))
        entry = PartitionSync(TOPIC, topic_id, 0, 0)
        source.control.apply(RecordSync(LINK, link_id, SyncState.IN_SYNC, (entry,), from_first=True))
        assert status(source) == ("Out-Of-Sync", False)
        assert not source.sync.partitions.holds_from_first(LINK, topics[TOPIC])
        pushed(source)
        await asyncio.sleep(1.0)
        assert status(source) == ("Out-Of-Sync", False)
        source.confirm()
        await source.until("In-Sync", source.in_sync)
        assert status(source) == ("In-Sync", False)

    on_source(work)


def test_names_of_topics_that_are_no_more_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_plugins.replication.sync.new_partitions.NAMES_MAX", 10)

    async def work(source: Source) -> None:
        await empty(source)
        (info,) = (await source.cluster.topics())[TOPIC].partitions
        known = (await source.cluster.topics())[TOPIC]
        for number in range(40):
            name = f"local-{number}"
            await look(source, {name: known._replace(name=name, topic_id=uuid.uuid4().bytes, partitions=(info,))})
            source.sync.links.new.acked((name, 0))
        assert len(source.sync.links.new._named) <= 14
        assert len(source.sync.links.new._acked) <= 14

    on_source(work)
