"""What tails read and send: each record once and in order, nothing of another log, and what ends a stream says why.

The tail is real, and so are its reads on a model cluster; the leader end and the link are stood in for.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, FakeFetchConnection, run_simulated
from support.partition_log import Partition
from support.replicas import LINK

from isthmus_control.model import OffsetsCopy, OffsetsForm
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import Fetched, TransactionMarkers
from isthmus_plugins.replication.leader.stream import (
    IN_FLIGHT_BYTES_MIN,
    REOPEN_DELAY_S,
    SHARE_BYTES,
    STOPPED_RETRY_S,
    Flow,
    Lane,
    LeaderStream,
)
from isthmus_plugins.replication.leader.tail import BUSY_S, BUSY_WAIT_MS, TAIL_WAIT_MS, Tail
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.offsets_topic.leaving import OffsetsSource
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol import link
from isthmus_protocol.records import TRANSACTIONAL_BIT, BatchHeader, Frame, walk

READ_S = 2 * TAIL_WAIT_MS / 1000
"""Whatever is to be read has been read."""


class Sent:
    """In the place of a link's connection: what is sent over it."""

    link_name = LINK
    lost = False
    writable = True

    def __init__(self) -> None:
        self.appends: list[link.Append] = []

    def send(self, *parts: bytes | memoryview) -> None:
        frames = link.Splitter()
        frames.authenticated()
        self.appends += [link.decode_append(body) for _, body in frames.feed(b"".join(parts))]

    def gather(self) -> None:
        pass

    def write(self) -> None:
        pass

    def records(self, stream: LeaderStream) -> bytes:
        return b"".join(append.records for append in self.appends if append.stream == stream.stream_id)

    def headers(self, stream: LeaderStream) -> list[BatchHeader]:
        return [header for _, _, header in walk(self.records(stream))]

    def offsets(self, stream: LeaderStream) -> list[int]:
        return [header.base_offset for header in self.headers(stream)]


class Owner:
    """In the place of the leader end: what tails tell it."""

    def __init__(self) -> None:
        self.offsets_source = OffsetsSource(KeyringFile(None))
        self.passing: Callable[[BatchHeader, bool], bool] = lambda header, as_plain: True
        self.stopped: list[tuple[str, float]] = []
        self.gone: list[str] = []
        self.messages: list[str] = []
        self.blocked: list[Callable[[], None]] = []
        self.doubts: list[int] = []
        self.beyond: list[int] = []
        self.woken = 0

    def may_pass(self, stream: LeaderStream, header: BatchHeader, records: Frame, as_plain: bool) -> bool:
        if not self.passing(header, as_plain):
            stream.undecided = True
        return not stream.undecided

    def wake(self) -> None:
        self.woken += 1

    def on_confirmed(self, stream: LeaderStream) -> None:
        pass

    def on_gone(self, stream: LeaderStream) -> None:
        self.gone.append(stream.key.topic)

    def caught_up(self, stream: LeaderStream) -> None:
        pass

    def stop_stream(self, stream: LeaderStream, code: str, message: str, retry_s: float) -> None:
        self.stopped.append((code, retry_s))
        self.messages.append(message)
        stream.blocked = lambda: None

    def block(self, stream: LeaderStream, end: Callable[[], None]) -> None:
        self.blocked.append(end)
        stream.blocked = end

    def doubt(self, stream: LeaderStream, until: int) -> None:
        self.doubts.append(until)
        stream.doubting = True

    def out_of_range(self, stream: LeaderStream) -> None:
        self.beyond.append(stream.next_offset)


class Scene:
    """One tail of broker 1, with what it reads from and tells."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.cluster = FakeCluster(rng)
        self.context: Any = FakeContext(self.cluster, FakeControl("A", rng))
        self.owner = Owner()
        self.sent = Sent()
        self.flow = Flow()
        self.streams = 0
        self.tail = Tail(self.owner, self.context, 1, LINK)

    def stream(self, topic: str = "t", end: int = 0, **more: Any) -> LeaderStream:
        """A stream of a topic, made if it is not there, to a follower whose log ends at ``end``; not read yet."""
        found = self.cluster.found.get(topic) or self.cluster.add_topic(topic)
        sent: Any = self.sent
        key, epoch = LinkPartition(LINK, topic, 0), found.partitions[0].leader_epoch
        self.streams += 1
        clock, number = self.context.clock, self.streams
        stream = LeaderStream(key, found.topic_id, topic, 1, epoch, sent, number, self.flow, clock, **more)
        stream.opened(end)
        return stream

    def read(self, topic: str = "t", **more: Any) -> tuple[Partition, LeaderStream]:
        """A partition that is read from now on."""
        stream = self.stream(topic, **more)
        self.tail.add(stream)
        return self.cluster.partition(topic), stream


def on_tail(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await work(scene)
        finally:
            await scene.tail.stop()

    run_simulated(run())


def transactional(partition: Partition, producer_id: int, *values: bytes) -> None:
    """Records of a transaction that is open."""
    partition.write_values(
        *values, keys=values, producer_id=producer_id, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT
    )


def ends(partition: Partition, producer_id: int, committed: bool) -> None:
    partition.mark(TransactionMarkers("t", 0, producer_id, 0, committed, 0))


# ---- each once, in order ----


def test_every_record_leaves_once_and_in_order_although_the_broker_goes_away_again_and_again() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        for number in range(60):
            partition.write_values(b"%d" % number, b"more")
            if number % 20 == 7:
                scene.cluster.down.add(1)
            elif number % 20 == 17:
                scene.cluster.down.clear()
            await asyncio.sleep(scene.cluster.random.uniform(0, 0.2))
        await asyncio.sleep(READ_S + 2 * REOPEN_DELAY_S)
        assert scene.owner.woken, "somebody else may lead by now"
        assert scene.sent.records(stream) == b"".join(partition.log)
        expected = 0
        for append in scene.sent.appends:
            assert append.from_offset == expected, "a gap that is none"
            expected = max([header.next_offset for _, _, header in walk(append.records)], default=expected)
        assert (stream.next_offset, stream.read_from) == (120, 120)

    on_tail(work)


@pytest.mark.parametrize("read_before_s", [0.01, BUSY_WAIT_MS / 1000 + 0.01, BUSY_S / 2])
def test_partitions_of_a_new_topic_do_not_wait_for_the_read_of_others(read_before_s: float) -> None:
    """Of the same topic, or of one that came right before."""

    async def work(scene: Scene) -> None:
        scene.read("t")
        await asyncio.sleep(read_before_s)  # it is being read, and nothing comes
        partition, stream = scene.read("u")
        partition.write_values(b"1")
        await asyncio.sleep(1.5 * BUSY_WAIT_MS / 1000)
        assert scene.sent.offsets(stream) == [0]

    on_tail(work)


@pytest.mark.parametrize("before", ["nothing", "another"])
def test_what_comes_after_a_time_without_any_partition_is_idle_in_its_time(before: str) -> None:
    async def work(scene: Scene) -> None:
        if before == "another":
            _, stream = scene.read("before")
            await asyncio.sleep(2 * BUSY_S)
            scene.tail.remove(stream)
        await asyncio.sleep(2 * BUSY_S + READ_S)
        streams = [scene.read(f"t-{number}")[1] for number in range(3)]
        await asyncio.sleep(3 * BUSY_S)
        assert [stream.lane for stream in streams] == [Lane.IDLE] * 3

    on_tail(work)


def test_a_gap_in_the_log_is_told_as_one() -> None:
    """Offsets that the source's log does not have are not to be waited for at the follower."""

    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        partition.write_values(b"a")
        await asyncio.sleep(READ_S)
        partition.end = 10
        partition.start = 10
        partition.write_values(b"b")
        stream.seek(10)
        scene.tail.resume()
        await asyncio.sleep(READ_S)
        assert [(each.from_offset, bool(each.records)) for each in scene.sent.appends][-1] == (1, True)
        assert scene.sent.offsets(stream) == [0, 10]

    on_tail(work)


def test_the_follower_hears_where_the_log_starts_and_ends_though_no_record_comes() -> None:
    async def work(scene: Scene) -> None:
        partition, _ = scene.read()
        partition.write_values(b"a")
        partition.write_values(b"b")
        await asyncio.sleep(READ_S)
        count = len(scene.sent.appends)
        partition.delete_records(1)
        await asyncio.sleep(READ_S)
        (told,) = scene.sent.appends[count:]
        assert (told.source_start, told.source_end, bytes(told.records)) == (1, 2, b"")
        await asyncio.sleep(10)
        assert len(scene.sent.appends) == count + 1, "once"

    on_tail(work)


# ---- another log ----


def held_reads(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Reads that have something for their stream are answered when the event is set."""
    answered = asyncio.Event()
    fetch = FakeFetchConnection.fetch

    async def held(self: FakeFetchConnection, *args: Any, **more: Any) -> list[Fetched]:
        found = await fetch(self, *args, **more)
        if any(each.records for each in found):
            await answered.wait()
        return found

    monkeypatch.setattr(FakeFetchConnection, "fetch", held)
    return answered


@pytest.mark.parametrize("then", ["ended", "another stream", "went on elsewhere"])
def test_what_was_read_for_a_stream_that_is_not_there_any_more_is_not_sent(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(scene: Scene) -> None:
        answered = held_reads(monkeypatch)
        partition, stream = scene.read()
        for number in range(3):
            partition.write_values(b"%d" % number)
        await asyncio.sleep(READ_S)  # the answer is on its way
        after = scene.stream(end=1)
        if then == "went on elsewhere":
            stream.seek(2)
        else:
            scene.tail.remove(stream)
        if then == "another stream":
            scene.tail.add(after)
        answered.set()
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == ([2] if then == "went on elsewhere" else [])
        assert scene.sent.offsets(after) == ([1, 2] if then == "another stream" else [])

    on_tail(work)


def test_nothing_is_read_under_another_leader_epoch_than_the_streams() -> None:
    """The log may have been cut and have grown again: as far as before, with other records."""

    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        for _ in range(5):
            partition.write_values(b"x")
        await asyncio.sleep(READ_S)
        partition.cut(3)
        partition.move(1)
        for _ in range(9):
            partition.write_values(b"other")
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == [0, 1, 2, 3, 4]
        assert scene.owner.stopped == [(reasons.SOURCE_UNAVAILABLE, REOPEN_DELAY_S)]

    on_tail(work)


@pytest.mark.parametrize(
    ("error", "code", "retry_s"),
    [
        (6, reasons.SOURCE_UNAVAILABLE, REOPEN_DELAY_S),
        (74, reasons.SOURCE_UNAVAILABLE, REOPEN_DELAY_S),
        (75, reasons.SOURCE_UNAVAILABLE, REOPEN_DELAY_S),
        (3, ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, REOPEN_DELAY_S),
        (100, ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, REOPEN_DELAY_S),
        (29, reasons.SOURCE_UNAVAILABLE, STOPPED_RETRY_S),
    ],
    ids=["not leader", "fenced", "epoch unknown", "no topic", "no topic id", "not allowed"],
)
def test_an_error_of_one_partition_ends_its_stream_alone(
    error: int, code: str, retry_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(scene: Scene) -> None:
        fetched = FakeFetchConnection._fetched
        bad = scene.stream("bad")

        def answer(self: FakeFetchConnection, wanted: Any, *args: Any) -> Fetched:
            if wanted.topic_id == bad.topic_id:
                return Fetched(wanted.topic_id, wanted.partition, error, -1, -1, memoryview(b""))
            return fetched(self, wanted, *args)

        monkeypatch.setattr(FakeFetchConnection, "_fetched", answer)
        scene.tail.add(bad)
        good, stream = scene.read("good")
        for _ in range(3):
            good.write_values(b"x")
            await asyncio.sleep(READ_S)
        assert scene.owner.stopped == [(code, retry_s)]
        assert scene.owner.gone == (["bad"] if code == ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED else [])
        assert scene.sent.records(stream) == b"".join(good.log)

    on_tail(work)


def test_an_offset_that_the_log_does_not_have_is_looked_after_when_all_before_is_there() -> None:
    async def work(scene: Scene) -> None:
        partition = scene.cluster.add_topic("t").partitions[0]
        for _ in range(9):
            partition.write_values(b"x")
        partition.delete_records(6)
        scene.read(end=3)
        await asyncio.sleep(READ_S)
        (end,) = scene.owner.blocked
        assert scene.owner.beyond == []
        end()
        assert scene.owner.beyond == [3]
        assert not scene.sent.appends
        assert not scene.owner.stopped

    on_tail(work)


# ---- what cannot be sent ----


@pytest.mark.parametrize("compacted", [False, True])
def test_what_stands_before_a_damaged_batch_leaves_and_nothing_after(compacted: bool) -> None:
    async def work(scene: Scene) -> None:
        stream = scene.stream()
        stream.compacted = stream.read_committed = compacted
        partition = scene.cluster.partition("t")
        for number in range(4):
            partition.write_values(b"%d" % number)
        partition.log[2] = partition.log[2][:16] + b"\x01" + partition.log[2][17:]  # the format of before
        scene.tail.add(stream)
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == [0, 1]
        assert not scene.owner.stopped
        scene.owner.blocked[0]()  # the follower has these
        assert scene.owner.stopped == [(ReasonCode.UNSUPPORTED_MESSAGE_FORMAT, STOPPED_RETRY_S)]
        assert "format 1" in scene.owner.messages[0]

    on_tail(work)


def test_a_decision_that_is_not_known_holds_what_comes_after_it_and_only_that() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        other, beside = scene.read("other")
        scene.owner.passing = lambda header, as_plain: not header.is_control
        partition.write_values(b"plain")
        transactional(partition, 7, b"in it")
        ends(partition, 7, committed=True)
        partition.write_values(b"after")
        other.write_values(b"x")
        await asyncio.sleep(READ_S)
        assert scene.sent.records(stream) == partition.log[0] + partition.log[1]
        assert scene.sent.records(beside) == other.log[0]
        reads = scene.cluster.requests
        await asyncio.sleep(10)
        assert scene.cluster.requests - reads < 100, "it is asked for again and again"
        scene.owner.passing = lambda header, as_plain: True
        stream.undecided = False
        scene.tail.resume()
        await asyncio.sleep(READ_S)
        assert scene.sent.records(stream) == b"".join(partition.log)

    on_tail(work)


def test_what_follows_a_decision_that_is_known_soon_does_not_wait_for_the_read_of_another_partition() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        other, _ = scene.read("other")
        partition.write_values(b"plain")
        other.write_values(b"x")
        await asyncio.sleep(0.1)  # both are busy
        scene.owner.passing = lambda header, as_plain: not header.is_control
        transactional(partition, 7, b"in it")
        ends(partition, 7, committed=True)
        await asyncio.sleep(0.1)
        assert stream.undecided
        scene.owner.passing = lambda header, as_plain: True
        stream.undecided = False
        scene.tail.resume()
        await asyncio.sleep(0.1)
        assert scene.sent.records(stream) == b"".join(partition.log)

    on_tail(work)


def test_nor_does_it_where_the_decision_is_waited_for_just_as_both_become_busy() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        other, _ = scene.read("other")
        await asyncio.sleep(10)  # nothing is busy
        scene.owner.passing = lambda header, as_plain: not header.is_control
        transactional(partition, 7, b"in it")
        ends(partition, 7, committed=True)
        other.write_values(b"x")
        await asyncio.sleep(0.1)
        assert stream.undecided
        scene.owner.passing = lambda header, as_plain: True
        stream.undecided = False
        scene.tail.resume()
        await asyncio.sleep(0.1)
        assert scene.sent.records(stream) == b"".join(partition.log)

    on_tail(work)


# ---- compacted logs ----


def test_of_a_compacted_topic_committed_records_leave_as_plain_and_aborted_ones_as_they_are() -> None:
    async def work(scene: Scene) -> None:
        asked: list[tuple[int, bool]] = []

        def passing(header: BatchHeader, as_plain: bool) -> bool:
            asked.append((header.base_offset, as_plain))
            return True

        scene.owner.passing = passing
        stream = scene.stream()
        stream.compacted = stream.read_committed = True
        partition = scene.cluster.partition("t")
        transactional(partition, 7, b"kept")
        ends(partition, 7, committed=True)
        transactional(partition, 8, b"lost")
        ends(partition, 8, committed=False)
        transactional(partition, 9, b"open")
        scene.tail.add(stream)
        await asyncio.sleep(READ_S)
        headers = scene.sent.headers(stream)
        assert [(each.base_offset, each.is_transactional, each.is_control) for each in headers] == [
            (0, False, False),
            (1, True, True),
            (2, True, False),
            (3, True, True),
            (4, True, False),  # it is not cleaned yet, and ends with a marker
        ]
        assert (0, True) in asked
        assert (4, False) in asked
        assert (2, True) not in asked
        ends(partition, 9, committed=True)
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == [0, 1, 2, 3, 4, 5]

    on_tail(work)


def test_where_deletions_may_be_missing_nothing_leaves_before_that_is_known() -> None:
    async def work(scene: Scene) -> None:
        stream = scene.stream()
        stream.compacted = stream.read_committed = True
        stream.tombstone_window.learn({"delete.retention.ms": "1000"})
        partition = scene.cluster.partition("t")
        partition.write_values(b"a", keys=[b"a"])
        partition.write_values(None, keys=[b"b"])
        partition.write_values(b"c", keys=[b"c"])
        partition.clean({1})
        scene.tail.add(stream)
        await asyncio.sleep(READ_S)
        assert scene.owner.doubts == [3]
        assert not scene.sent.appends
        stream.doubted, stream.doubting = 3, False
        scene.tail.resume()
        await asyncio.sleep(READ_S)
        assert scene.owner.doubts == [3]
        assert scene.sent.offsets(stream) == [0, 2]

    on_tail(work)


def test_a_log_that_was_seen_not_to_grow_keeps_its_follower_in_time() -> None:
    """However long nothing happens: what comes then was written after the last read that had nothing."""

    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        stream.tombstone_window.learn({"delete.retention.ms": "60000"})
        partition.write_values(b"a")
        await asyncio.sleep(READ_S)
        stream.confirmed(1)
        await asyncio.sleep(200)
        scene.tail.remove(stream)
        now = scene.context.clock.monotonic()
        assert not stream.tombstone_window.late(now)
        assert stream.tombstone_window.late(now + 31), "the next stream does not know what happened meanwhile"

    on_tail(work)


# ---- limits ----


def test_no_more_is_on_its_way_than_the_follower_takes_and_others_are_read_meanwhile() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        for _ in range(8):
            partition.write_values(bytes(IN_FLIGHT_BYTES_MIN // 2 + 1))
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == [0, 1]
        other, beside = scene.read("other")
        other.write_values(b"x")
        await asyncio.sleep(TAIL_WAIT_MS / 1000 / 2)
        assert scene.sent.records(beside) == other.log[0]
        for end in range(1, 9):
            stream.confirmed(end)
            scene.tail.resume()
            await asyncio.sleep(READ_S)
            assert len(scene.sent.offsets(stream)) == min(end + 2, 8)
        assert scene.sent.records(stream) == b"".join(partition.log)

    on_tail(work)


def test_a_peer_that_takes_nothing_is_sent_nothing_until_it_does() -> None:
    async def work(scene: Scene) -> None:
        partition, stream = scene.read()
        scene.sent.writable = False
        partition.write_values(bytes(SHARE_BYTES))
        await asyncio.sleep(READ_S)
        scene.sent.appends.clear()
        partition.write_values(b"y")
        await asyncio.sleep(10)
        assert scene.sent.appends == []
        scene.sent.writable = True
        scene.tail.resume()
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream)[-1] == 1

    on_tail(work)


# ---- the offsets topic ----


def test_of_the_offsets_topic_nothing_leaves_that_is_undecided_or_that_cannot_be_encrypted() -> None:
    async def work(scene: Scene) -> None:
        partition = scene.cluster.add_topic("__consumer_offsets").partitions[0]
        transactional(partition, 7, b"open")
        _, whole = scene.read("__consumer_offsets", copy=OffsetsCopy(OffsetsForm.WHOLE))
        await asyncio.sleep(READ_S)
        assert scene.sent.records(whole) == b""
        ends(partition, 7, committed=True)
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(whole) == [0, 1]
        scene.tail.remove(whole)
        _, encrypted = scene.read("__consumer_offsets", copy=OffsetsCopy(OffsetsForm.ENCRYPTED))
        await asyncio.sleep(READ_S)
        assert scene.sent.records(encrypted) == b""
        assert scene.owner.stopped == [(ReasonCode.KEYRING_UNUSABLE, STOPPED_RETRY_S)]
        assert "no keyring is configured" in scene.owner.messages[0]

    on_tail(work)


def test_reads_of_a_busy_stream_do_not_go_over_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of these, and hundreds of reads in a second."""
    looked: Counter[str] = Counter()
    lane: Any = LeaderStream.lane

    def counted(stream: LeaderStream) -> Lane:
        looked[stream.key.topic] += 1
        found: Lane = lane.fget(stream)
        return found

    monkeypatch.setattr(LeaderStream, "lane", property(counted))

    async def work(scene: Scene) -> None:
        scene.read("idle")
        partition, stream = scene.read("busy")
        await asyncio.sleep(3 * BUSY_S)
        looked.clear()
        for _ in range(50):
            partition.write_values(b"x")
            await asyncio.sleep(0.02)
        await asyncio.sleep(READ_S)
        assert scene.sent.offsets(stream) == list(range(50))
        assert looked["busy"] > 50 > 5 * looked["idle"]

    on_tail(work)
