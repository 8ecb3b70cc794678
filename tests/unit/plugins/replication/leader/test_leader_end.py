"""The leader end: whole ends against a model cluster on a simulated clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_cluster import FakeFetchConnection
from support.partition_log import batch
from support.replicas import LINK, Replicas, on_replicas, records_of

from isthmus_control.commands import (
    AlterLink,
    AttachNamespace,
    BeginTerm,
    DetachNamespace,
    OpenProvenance,
    TermStart,
)
from isthmus_control.model import LinkMode, ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import Fetched, TransactionMarkers
from isthmus_plugins.replication.follower.log import StopReason
from isthmus_plugins.replication.leader import leader_end as module
from isthmus_plugins.replication.leader import tail
from isthmus_plugins.replication.leader.discovery import DISCOVERY_INTERVAL_S
from isthmus_plugins.replication.leader.stream import IN_FLIGHT_BYTES_MIN, REOPEN_DELAY_S
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.records import CONTROL_BIT, TRANSACTIONAL_BIT

KEY = LinkPartition(LINK, "local-t", 0)


async def stopped(replicas: Replicas, code: str) -> module.Stopped:
    leader = replicas.ends["A"].leader
    await replicas.until(code, lambda: KEY in leader.stopped and leader.stopped[KEY].code == code, 30)
    return leader.stopped[KEY]


def acked(replicas: Replicas) -> int | None:
    alone = replicas.ends["A"].leader.lag_without_stream.of(KEY)
    return alone.acked if alone is not None else None


def test_terms_of_a_new_topic_are_recorded_together_while_the_target_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        topic = replicas.a.add_topic("local-t", 3)
        commands = {name: replicas.controls[name].commands for name in "AB"}

        def begun() -> list[BeginTerm]:
            return [each for each in commands["A"] if isinstance(each, BeginTerm)]

        await replicas.until("its terms are recorded", begun)
        assert not any(isinstance(each, OpenProvenance) for each in commands["B"]), "the target has not made it yet"
        topic.partitions[1].write_values(b"a")
        await replicas.until("copied", replicas.equal)
        (terms,) = begun()
        assert [(each.topic, dict(each.starts)) for each in terms.topics] == [
            ("local-t", dict.fromkeys(range(3), TermStart(0, 0)))
        ]

    on_replicas(monkeypatch, work)


def test_a_stop_is_kept_until_the_partition_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"a", b"b")
        source.write(batch(2, [b"x"], attributes=CONTROL_BIT))  # control records of a kind that nobody knows
        source.write_values(b"after")
        why = await stopped(replicas, ReasonCode.UNSUPPORTED_MESSAGE_FORMAT)
        alone = replicas.ends["A"].leader.lag_without_stream.of(KEY)
        assert alone is not None
        assert (alone.acked, alone.source_end, alone.lag) == (2, 4, 2)
        opened = 0
        for _ in range(300):  # it is tried again, and shows as stopped all the time
            await asyncio.sleep(0.1)
            assert replicas.ends["A"].leader.stopped[KEY].code == why.code
            follower = replicas.ends["B"].follower.streams()[0]
            assert follower.reason is not None
            assert follower.reason.code == why.code
            opened = max(opened, follower.stream_id)
        assert 3 <= opened <= 6
        # Supported now, as far as the follower can tell: the source has plain records there.
        source.log[1], source.headers[1] = batch(2, [b"x"]), source.headers[1]._replace(attributes=0)
        await replicas.until("it goes on", replicas.equal, 30)
        await replicas.until("the leader knows", lambda: KEY not in replicas.ends["A"].leader.stopped, 1)
        assert replicas.ends["B"].follower.streams()[0].reason is None

    on_replicas(monkeypatch, work)


def test_a_stop_says_nothing_of_another_topic_that_takes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write(batch(0, [b"x"], attributes=CONTROL_BIT))  # control records of a kind that nobody knows
        await stopped(replicas, ReasonCode.UNSUPPORTED_MESSAGE_FORMAT)
        replicas.a.add_topic("local-t")
        await asyncio.sleep(2.0)
        why = replicas.ends["A"].leader.stopped[KEY]
        assert why.code == ReasonCode.SOURCE_TOPIC_ID_CHANGED
        assert why.retry_at <= asyncio.get_running_loop().time() + REOPEN_DELAY_S

    on_replicas(monkeypatch, work)


@pytest.mark.parametrize(
    ("mode", "together"),
    [(LinkMode.ASYNCHRONOUS, True), (LinkMode.SYNCHRONOUS, False), (LinkMode.SYNCHRONOUS, True)],
)
def test_what_comes_soon_after_a_read_is_read_together_but_where_acks_wait_and_the_peer_is_near(
    mode: LinkMode, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(replicas: Replicas) -> None:
        reads: list[int] = []
        real = FakeFetchConnection.fetch

        async def fetch(*args: Any, **options: Any) -> list[Fetched]:
            found = await real(*args, **options)
            reads.extend(len(each.records) for each in found if each.records)
            return found

        monkeypatch.setattr(FakeFetchConnection, "fetch", fetch)
        monkeypatch.setattr(tail, "GATHERING_S", 0.2)  # much longer than a request takes here
        monkeypatch.setattr(tail, "BUSY_WAIT_MS", 500)  # and shorter than a read that finds nothing
        monkeypatch.setattr(tail, "READS_AT_ONCE", 2)
        monkeypatch.setattr(tail, "GATHERING_OF_ROUND_TRIP", 1e9 if together else 1e-3)
        replicas.controls["A"].apply(AlterLink(LINK, mode=mode))
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        reads.clear()
        began = asyncio.get_running_loop().time()
        for _ in range(100):
            source.write_values(b"x")
            await asyncio.sleep(0.001)
        await replicas.until("copied", replicas.equal)
        took = asyncio.get_running_loop().time() - began
        pace = took / tail.GATHERING_S + 2
        assert len(reads) <= pace + tail.READS_AT_ONCE if together else len(reads) > 2 * pace
        await asyncio.sleep(2 * tail.READS_AT_ONCE * tail.GATHERING_S)
        reads.clear()
        for _ in range(tail.READS_AT_ONCE):  # a few do not wait for each other
            began = asyncio.get_running_loop().time()
            source.write_values(b"x")
            await replicas.until("copied", replicas.equal)
            assert asyncio.get_running_loop().time() - began < tail.GATHERING_S / 2

    on_replicas(monkeypatch, work)


def test_a_partition_that_wakes_up_does_not_wait_for_the_read_of_another_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(replicas: Replicas) -> None:
        busy, quiet = replicas.a.add_topic("local-t", 2).partitions
        busy.write_values(b"first")
        quiet.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        await asyncio.sleep(3 * tail.BUSY_S)
        took = []
        for _ in range(20):
            busy.write_values(b"x")
            await replicas.until("copied", replicas.equal)
            await asyncio.sleep(0.02)  # the read of the busy partition is under way
            for _ in range(2):
                began = asyncio.get_running_loop().time()
                quiet.write_values(b"x")
                await replicas.until("copied", replicas.equal)
                took.append(asyncio.get_running_loop().time() - began)
            await asyncio.sleep(tail.BUSY_S / 2)
            busy.write_values(b"x")  # stays busy
            await asyncio.sleep(tail.BUSY_S)
        assert max(took) < tail.TAIL_WAIT_MS / 1000 / 2, sorted(took)

    on_replicas(monkeypatch, work)


def test_a_partition_of_which_much_is_on_its_way_does_not_wait_for_the_read_of_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(replicas: Replicas) -> None:
        quiet, other = replicas.a.add_topic("local-t", 2).partitions
        took = []
        for _ in range(7):
            for _ in range(3):  # both are busy
                quiet.write_values(b"x")
                other.write_values(b"x")
                await replicas.until("copied", replicas.equal)
            began = asyncio.get_running_loop().time()
            for _ in range(3 * IN_FLIGHT_BYTES_MIN // 100_000):
                other.write_values(bytes(100_000))
            await replicas.until("copied", replicas.equal)
            took.append(asyncio.get_running_loop().time() - began)
            await asyncio.sleep(2 * tail.BUSY_S)
        # It was waited for in half of them, where the busy one could go on before the read of the other had begun.
        assert max(took) < tail.TAIL_WAIT_MS / 1000, took

    on_replicas(monkeypatch, work)


def test_first_records_of_partitions_do_not_wait_for_each_others_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was behind the record of one's origins waited for the next read of the others: half a second."""

    async def work(replicas: Replicas) -> None:
        partitions = replicas.a.add_topic("local-t", 12).partitions
        await replicas.until("followed", lambda: len(replicas.ends["B"].follower.streams()) == len(partitions))
        await asyncio.sleep(3)
        took = []
        for first, second in zip(partitions[::2], partitions[1::2], strict=True):
            began = asyncio.get_running_loop().time()
            first.write_values(b"x")
            second.write_values(b"x")
            await replicas.until("copied", replicas.equal)
            took.append(asyncio.get_running_loop().time() - began)
        assert max(took) < tail.TAIL_WAIT_MS / 1000, took

    on_replicas(monkeypatch, work)


def test_a_stream_that_the_follower_ends_while_it_is_opened_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        ended = False

        async def objection_to(*args: Any) -> tuple[str, str] | None:
            nonlocal ended
            if not ended:
                ended = True
                follower = replicas.ends["B"].follower
                # As a proxy makes it that has not heard yet that it leads the partition no more.
                why = StopReason(reasons.CLOSED, "another stream of the partition was opened")
                await follower._end(follower.streams()[0], why)
                await asyncio.sleep(0.1)  # it is told so
            return await real(*args)

        real = module.objection_to
        monkeypatch.setattr(module, "objection_to", objection_to)
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"a", b"b")
        await replicas.until("ended", lambda: ended)
        await replicas.until("copied", replicas.equal, 5)

    on_replicas(monkeypatch, work)


def test_batches_of_an_old_format_stop_after_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        for number in range(20):
            source.write_values(b"%d" % number)
        old = bytearray(batch(20, [b"old"]))
        source.write(bytes(old))
        old[16] = 1  # magic
        source.log[-1] = bytes(old)
        why = await stopped(replicas, ReasonCode.UNSUPPORTED_MESSAGE_FORMAT)
        assert acked(replicas) == 20
        assert replicas.b.partition("remote-t").end == 20
        assert "format 1" in why.message

    on_replicas(monkeypatch, work)


@pytest.mark.parametrize("follower_has", [0, 2])
def test_a_log_that_starts_beyond_the_followers_end(follower_has: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        if follower_has:
            source.write_values(*[b"x"] * follower_has)
            await replicas.until("copied", replicas.equal)
        await replicas.stop("A")
        for _ in range(10):
            source.write_values(b"x")
        source.start = 7
        replicas.start("A")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        await replicas.until("trimmed", lambda: replicas.b.partition("remote-t").start == 7)
        assert KEY not in replicas.ends["A"].leader.stopped

    on_replicas(monkeypatch, work)


def test_a_log_that_is_empty_but_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(*[b"x"] * 5)
        source.start = 5
        await replicas.until("copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        await replicas.until("trimmed", lambda: replicas.b.partition("remote-t").start == 5)
        source.write_values(b"y")
        await replicas.until("it goes on", replicas.equal)

    on_replicas(monkeypatch, work)


def test_transactions_are_copied_with_their_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        for number in range(6):
            source.transact(number % 2, [b"%d" % number] * 3, committed=number % 3 != 0)
        source.produce(
            batch(0, [b"open"], producer_id=9, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT)
        )
        await replicas.until("copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        target = replicas.b.partition("remote-t")
        assert [each[1:] for each in target.aborted] == [each[1:] for each in source.aborted]
        assert target.last_stable_offset == source.end - 1

    on_replicas(monkeypatch, work)


def test_committed_records_of_a_compacted_topic_need_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        topic = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact"})
        source = topic.partitions[0]
        source.transact(1, [b"a"] * 3, committed=True)
        source.transact(2, [b"b"] * 3, committed=False)
        source.transact(1, [b"c"] * 3, committed=True)
        source.clean({3, 9, 10})  # the first marker, and a record of the last transaction
        source.produce(
            batch(
                0,
                [b"open"],
                keys=[b"open"],
                producer_id=9,
                producer_epoch=0,
                base_sequence=0,
                attributes=TRANSACTIONAL_BIT,
            )
        )
        await replicas.until("copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        target = replicas.b.partition("remote-t")
        assert [each[1:] for each in target.aborted] == [(4, 7)]
        assert target.last_stable_offset == source.end - 1
        assert records_of(target, 0, 8) == records_of(source, 0, 8)
        source.mark(TransactionMarkers("", 0, 9, 0, True, 0))
        source.transact(2, [b"d"] * 3, committed=True)
        await replicas.until("it goes on", replicas.equal)
        assert target.last_stable_offset == source.end

    on_replicas(monkeypatch, work)


def test_what_is_led_no_more_once_its_stream_is_open_is_not_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        control, leader = replicas.controls["A"], replicas.ends["A"].leader
        control.apply(AttachNamespace(LINK, ResourceType.TOPIC, "more-", "far-", Role.LEADER, create_missing=True))
        opened, goes_on = asyncio.Event(), asyncio.Event()

        async def held(connection: LinkConnection, question: calls.OpenStream) -> calls.OpenStreamAnswer:
            answer = await replicas.ends["B"].follower.open_stream(connection, question)
            opened.set()
            await goes_on.wait()
            return answer

        replicas.ends["B"].instead(calls.OpenStream, held)
        replicas.a.add_topic("local-t").partitions[0].write_values(b"a")
        await opened.wait()
        control.apply(DetachNamespace(LINK, ResourceType.TOPIC, "local-"))
        await asyncio.sleep(2 * DISCOVERY_INTERVAL_S)
        goes_on.set()
        for _ in range(100):
            await asyncio.sleep(0.01)
            assert leader.stream(KEY) is None
        assert replicas.b.partition("remote-t", 0).end == 0

    on_replicas(monkeypatch, work)


def test_an_idle_topic_that_becomes_compacted_is_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        topic = replicas.a.add_topic("local-t")
        leader = replicas.ends["A"].leader
        await replicas.until("pushed", lambda: leader.stream(KEY))
        stream = leader.stream(KEY)
        assert stream is not None
        await replicas.until("idle", lambda: not stream.busy)
        await asyncio.sleep(1)
        topic.configs["cleanup.policy"] = "compact"
        await replicas.until("known to be compacted", lambda: stream.compacted)
        await replicas.until("nothing that has ended is left", lambda: not stream.read_committed, 1)
        topic.partitions[0].transact(1, [b"a"] * 3, committed=True)
        await replicas.until("copied", replicas.equal)

    on_replicas(monkeypatch, work)


def test_a_marker_that_the_cleaner_took_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next marker of the producer belongs to other records, and may be of the other kind."""

    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact"}).partitions[0]
        header = {"producer_id": 9, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT}
        source.produce(batch(0, [b"aborted"], keys=[b"aborted"], base_sequence=0, **header))
        await replicas.until("the open one is copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        await replicas.stop("A")
        source.mark(TransactionMarkers("", 0, 9, 0, False, 0))
        source.produce(batch(0, [b"committed"], keys=[b"committed"], base_sequence=1, **header))
        source.clean({0, 1})
        source.mark(TransactionMarkers("", 0, 9, 0, True, 0))
        replicas.start("A")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        target = replicas.b.partition("remote-t")
        assert [each[1:] for each in target.aborted] == [(0, 1)]
        assert target.last_stable_offset == source.end

    on_replicas(monkeypatch, work)


def test_a_transaction_with_records_left_keeps_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact"}).partitions[0]
        header = {"producer_id": 9, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT}
        source.produce(batch(0, [b"a", b"b"], keys=[b"a", b"b"], base_sequence=0, **header))
        await replicas.until("the open one is copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        await replicas.stop("A")
        source.write_values(b"c")
        source.write_values(b"d")
        source.mark(TransactionMarkers("", 0, 9, 0, True, 0))
        source.clean({0, 2})
        replicas.start("A")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        target = replicas.b.partition("remote-t")
        assert target.aborted == []
        assert target.last_stable_offset == source.end

    on_replicas(monkeypatch, work)


def test_a_leader_of_the_past_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that was cut off may show a shorter log than the one that leads by now."""

    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.leader_epoch = 5
        for _ in range(3):
            source.write_values(b"x")
        await replicas.until("copied", lambda: "remote-t" in replicas.b.found and replicas.equal())
        await replicas.stop("A")
        source.leader_epoch = 4
        replicas.start("A")
        await replicas.connect()
        why = await stopped(replicas, reasons.SOURCE_UNAVAILABLE)
        assert "epoch 4" in why.message
        source.leader_epoch = 6
        source.write_values(b"y")
        await replicas.until("it goes on", replicas.equal)

    on_replicas(monkeypatch, work)


def test_a_source_that_lost_records_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        for _ in range(5):
            source.write_values(b"x")
        await replicas.until("copied", replicas.equal)
        source.cut(3)
        source.move(1)
        await stopped(replicas, ReasonCode.UNEXPECTED_TRUNCATION)
        assert acked(replicas) == 5
        # It grows again, with other records: that is found as well, by the follower's last batch.
        for _ in range(5):
            source.write_values(b"other")
        source.move(1)
        await asyncio.sleep(30)
        assert replicas.ends["A"].leader.stopped[KEY].code == ReasonCode.UNEXPECTED_TRUNCATION
        assert replicas.b.partition("remote-t").end == 5

    on_replicas(monkeypatch, work)


def test_a_log_that_was_cut_and_grew_between_two_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        for _ in range(5):
            source.write_values(b"x")
        await replicas.until("copied", replicas.equal)
        # In one moment, under the same broker: nothing but the leader epoch tells.
        source.cut(3)
        source.move(1)
        for _ in range(4):
            source.write_values(b"other")
        await stopped(replicas, ReasonCode.TARGET_WRITTEN_BY_OTHERS)
        assert replicas.b.partition("remote-t").end == 5
        follower = replicas.ends["B"].follower
        await replicas.until("B knows", lambda: follower.streams()[0].follower_log.reason is not None, 1.0)

    on_replicas(monkeypatch, work)


def test_a_partition_without_leader_is_told_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"x")
        await replicas.until("copied", replicas.equal)
        source.move(-1)
        await stopped(replicas, ReasonCode.NO_LOCAL_LEADER)
        source.move(1)
        source.write_values(b"y")
        await replicas.until("it goes on", replicas.equal)

    on_replicas(monkeypatch, work)


def test_a_follower_is_trimmed_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        for _ in range(9):
            source.write_values(b"x")
        await replicas.until("copied", replicas.equal)
        source.start = 6
        await replicas.until("trimmed", lambda: replicas.b.partition("remote-t").start == 6, 10)

    on_replicas(monkeypatch, work)


def test_an_idle_link_asks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        for number in range(10):
            replicas.a.add_topic(f"local-{number}", 10)
        await replicas.until("all follow", lambda: len(replicas.ends["B"].follower.streams()) == 100)
        await asyncio.sleep(5)
        before = replicas.a.requests + replicas.b.requests
        await asyncio.sleep(10)
        # Reads, discovery, preparation, checks: none of it by partition. Each poll counts twice or so in this model.
        assert replicas.a.requests + replicas.b.requests - before < 10 * 30

    on_replicas(monkeypatch, work)


def test_nothing_is_pushed_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"x")
        await replicas.until("copied", replicas.equal)
        replicas.ends["A"].context.lease_deadline = 0.0
        await asyncio.sleep(1)
        source.write_values(b"y")
        await asyncio.sleep(5)
        assert replicas.b.partition("remote-t").end == 1
        replicas.ends["A"].context.lease_deadline = float("inf")
        await replicas.until("it goes on", replicas.equal)

    on_replicas(monkeypatch, work)
