"""Digests of ranges of logs: equal for what is equal, for nothing else, and never of less than was asked for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeFetchConnection, run_simulated
from support.partition_log import Partition, batch
from support.peers import CalledAtOnce
from support.replicas import INDEX, LINK, Replicas

from isthmus_control.commands import CompactFollowerTopic
from isthmus_control.model import OffsetsCopy, OffsetsForm
from isthmus_plugins.cluster import BrokerUnavailable, Fetched, KafkaRefused, TransactionMarkers
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.comparison import digests
from isthmus_plugins.replication.comparison.digests import (
    BATCHES,
    CHECKED,
    CONTENTS,
    LATEST,
    MARKED,
    RECORDS,
    Digest,
    Verification,
)
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.logs import reading
from isthmus_plugins.replication.logs.reading import Reads
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.producer_ids import carry
from isthmus_protocol.records import TRANSACTIONAL_BIT, Compression, CorruptBatch

TOPIC, SOURCES_ID = "local-t", 7
LEVELS = [BATCHES, CHECKED, RECORDS, CONTENTS, MARKED]


class Scene:
    """One log on each of two clusters, neither of which follows the other."""

    def __init__(self) -> None:
        self.replicas = Replicas(random.Random(1), 1)
        self.replicas.a.on_new_partition = self.replicas.b.on_new_partition = lambda *made: None
        self.replicas.start()
        self.ours, self.theirs = (cluster.add_topic(TOPIC).partitions[0] for cluster in self.clusters)
        self.verifications = {name: end.parts.digests for name, end in self.replicas.ends.items()}

    @property
    def clusters(self) -> tuple[FakeCluster, FakeCluster]:
        return self.replicas.a, self.replicas.b

    @property
    def verification(self) -> Verification:
        return self.verifications["A"]

    async def digest(
        self,
        level: str,
        offset: int = 0,
        to: int | None = None,
        of: str = "A",
        reads: Reads | None = None,
        once: bool = False,
    ) -> Digest:
        cluster = self.replicas.a if of == "A" else self.replicas.b
        topic = (await cluster.topics())[TOPIC]
        to = cluster.partition(TOPIC).end if to is None else to
        return await self.verifications[of].digest(topic, 0, offset, to, level, reads, once)

    async def latest(self, until: int, offset: int = 0, to: int | None = None, of: str = "A") -> Digest:
        cluster = self.replicas.a if of == "A" else self.replicas.b
        topic = (await cluster.topics())[TOPIC]
        return await self.verifications[of].latest(topic, 0, until, offset, until if to is None else to)

    async def equal(self, level: str, offset: int = 0, to: int | None = None) -> bool:
        ours, theirs = await self.digest(level, offset, to), await self.digest(level, offset, to, "B")
        return ours.digest == theirs.digest

    def peer(self) -> CalledAtOnce:
        """A's end of the link, as the other cluster asks it."""
        return CalledAtOnce(LINK, self.verification.answers())


def on_logs(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await work(scene)
        await scene.replicas.stop()

    run_simulated(run())


def transaction(log: Partition, producer_id: int, committed: bool | None, *values: bytes) -> None:
    """Records of a transaction, and its end if it has one."""
    log.write_values(
        *values, keys=values, producer_id=producer_id, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT
    )
    if committed is not None:
        assert log.mark(TransactionMarkers("", 0, producer_id, 0, committed, 0)) == 0


# ---- what is equal ----


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_is_equal_and_one_byte_a_record_more_or_a_record_less_is_not(level: str) -> None:
    async def work(scene: Scene) -> None:
        for number in range(6):
            scene.ours.write_values(b"%d" % number, b"more", keys=[b"k", None])
            scene.theirs.write_values(b"%d" % number, b"more", keys=[b"k", None])
        assert await scene.equal(level)
        assert (await scene.digest(level)).records == 12
        whole = list(scene.theirs.log)
        for change in (
            batch(6, [b"3", b"mora"], keys=[b"k", None]),
            batch(6, [b"3", b"more"], keys=[b"k", b""]),
            batch(6, [b"3", b"more"], keys=[b"k", None], timestamp=1_700_000_000_001),
        ):
            scene.theirs.log[3] = change
            assert not await scene.equal(level)
            assert await scene.equal(level, 0, 6)
            assert await scene.equal(level, 8, 12), "the difference is before that"
        scene.theirs.log[:] = whole
        scene.theirs.clean({7})
        assert not await scene.equal(level)
        scene.ours.clean({7})
        assert await scene.equal(level)

    on_logs(work)


def test_what_each_cluster_has_of_its_own_makes_no_difference() -> None:
    async def work(scene: Scene) -> None:
        more: dict[str, Any] = {"producer_epoch": 3, "base_sequence": 9}
        scene.ours.write(batch(0, [b"x"], producer_id=SOURCES_ID, leader_epoch=4, **more))
        carried = carry(SOURCES_ID, INDEX["A"], INDEX["B"])
        scene.theirs.write(batch(0, [b"x"], producer_id=carried, leader_epoch=9, **more))
        for level in (BATCHES, RECORDS, CONTENTS):
            assert await scene.equal(level), level
        scene.theirs.cut(0)
        scene.theirs.write(batch(0, [b"x"], producer_id=carried + 1, leader_epoch=9, **more))
        assert not await scene.equal(BATCHES), "another producer's"

    on_logs(work)


def test_batches_that_are_cut_in_other_places_hold_equal_records() -> None:
    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"a", b"b", b"c")
        scene.ours.write_values(b"d", attributes=Compression.GZIP)
        scene.theirs.write_values(b"a")
        scene.theirs.write_values(b"b", b"c", b"d")
        assert not await scene.equal(BATCHES)
        for level in (RECORDS, CONTENTS, MARKED):
            assert await scene.equal(level), level
            for offset in range(4):
                for to in range(offset + 1, 5):
                    assert await scene.equal(level, offset, to), (level, offset, to)
                    assert (await scene.digest(level, offset, to)).records == to - offset

    on_logs(work)


def test_a_range_that_begins_or_ends_within_a_batch_is_of_these_records_alone() -> None:
    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"a", b"b", b"c", b"d")
        scene.theirs.write_values(b"A", b"b", b"c", b"D")
        for level in LEVELS:
            assert await scene.equal(level, 1, 3), level
            assert not await scene.equal(level, 0, 3), level
            assert not await scene.equal(level, 1, 4), level
            assert [(await scene.digest(level, *each)).records for each in ((1, 3), (0, 3), (1, 4))] == [2, 3, 3]

    on_logs(work)


@pytest.mark.parametrize("level", LEVELS)
def test_what_became_of_a_transaction_counts_where_the_level_says_so(level: str) -> None:
    async def work(scene: Scene) -> None:
        transaction(scene.ours, SOURCES_ID, True, b"x", b"y")
        transaction(scene.theirs, carry(SOURCES_ID, INDEX["A"], INDEX["B"]), False, b"x", b"y")
        assert await scene.equal(level) == (level == CONTENTS)
        assert (await scene.digest(level)).records == 2, "a marker is no record"

    on_logs(work)


def test_beyond_the_last_stable_offset_records_are_compared_as_they_are() -> None:
    """One side may know of an end of which the other does not, yet; a record that differs differs all the same."""

    async def work(scene: Scene) -> None:
        carried = carry(SOURCES_ID, INDEX["A"], INDEX["B"])
        for log, producer_id in ((scene.ours, SOURCES_ID), (scene.theirs, carried)):
            log.write_values(b"before")
            transaction(log, producer_id, None, b"open")
            log.write_values(b"after")
        assert scene.ours.last_stable_offset == 1
        assert await scene.equal(RECORDS)
        assert (await scene.digest(RECORDS)).records == 3
        scene.theirs.log[2] = batch(2, [b"AFTER"])
        assert not await scene.equal(RECORDS)

    on_logs(work)


def test_a_digest_that_was_ended_early_says_where_and_the_rest_goes_on_there() -> None:
    async def work(scene: Scene) -> None:
        for number in range(9):
            for log in (scene.ours, scene.theirs):
                log.write_values(b"%d" % number, bytes(100))
        offset, ends, records = 0, [], 0
        while offset < 18:
            found = await scene.digest(BATCHES, offset, 18, reads=Reads(550), once=True)
            assert found.to > offset
            assert found.digest == (await scene.digest(BATCHES, offset, found.to, "B")).digest
            ends.append(offset := found.to)
            records += found.records
        assert ends == [6, 12, 18]
        assert records == 18

    on_logs(work)


# ---- compacted topics ----


def test_of_compacted_logs_the_latest_of_each_key_are_equal_whatever_was_cleaned() -> None:
    async def work(scene: Scene) -> None:
        for log in (scene.ours, scene.theirs):
            for key, value in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", b"3"), (b"d", b"4")):
                log.write_values(value, keys=[key])
        scene.ours.compact(6, drop_tombstones=True)
        assert scene.ours.records().keys() == {2, 4, 5}
        ours, theirs = await scene.latest(6), await scene.latest(6, of="B")
        assert ours == theirs
        assert ours.records == 3
        assert (await scene.latest(6, 3, 5)).records == 1
        assert (await scene.latest(6, 3, 5)) == (await scene.latest(6, 3, 5, of="B"))
        scene.theirs.log[4] = batch(4, [b"other"], keys=[b"c"])
        assert (await scene.latest(6)).digest != (await scene.latest(6, of="B")).digest
        assert (await scene.latest(4, of="A")) == (await scene.latest(4, of="B")), "before it they are equal"

    on_logs(work)


def test_an_aborted_record_is_nobodys_latest() -> None:
    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"1", keys=[b"k"])
        before = await scene.latest(1)
        transaction(scene.ours, SOURCES_ID, False, b"k")
        assert (await scene.latest(3)).digest == before.digest
        transaction(scene.ours, SOURCES_ID + 1, True, b"k")
        assert (await scene.latest(5)).digest != before.digest

    on_logs(work)


def test_digests_of_many_offsets_are_those_of_each() -> None:
    async def work(scene: Scene) -> None:
        log = scene.ours
        log.write_values(b"1", b"2", b"3", keys=[b"a", b"b", b"a"])
        transaction(log, SOURCES_ID, False, b"b", b"c")
        log.write_values(b"4", b"5", keys=[b"c", b"b"])
        topic = (await scene.replicas.a.topics())[TOPIC]
        offsets = list(range(log.end + 1))
        found = await scene.verification.latest_at(topic, 0, 0, offsets)
        assert [offset for offset, _ in found] == offsets
        for offset, digest in found:
            assert digest == (await scene.latest(offset)).digest, offset
        whole = await scene.verification.latest_at(topic, 0, 0, offsets, whole_batches=True)
        assert [offset for offset, _ in whole] == [0, 0, 0, 3, 3, 5, 6, 6, 8]
        assert whole == [(offset, dict(found)[offset]) for offset, _ in whole]

    on_logs(work)


def test_only_what_a_cleaner_takes_may_be_gone() -> None:
    async def work(scene: Scene) -> None:
        log = scene.ours
        log.write_values(b"kept", None, b"without a key", keys=[b"k", b"k", None])
        transaction(log, SOURCES_ID, False, b"aborted")
        transaction(log, SOURCES_ID + 1, True, b"committed")
        transaction(log, SOURCES_ID + 2, None, b"open")
        log.write_values(None, keys=[b"tombstone that may be read by nobody yet"])
        gone = [await scene.verification.may_be_gone(TOPIC, 0, offset) for offset in range(log.end)]
        assert gone == [False, True, True, True, True, False, True, False, False]
        with pytest.raises(BrokerUnavailable, match="does not exist"):
            await scene.verification.may_be_gone("no-topic", 0, 0)

    on_logs(work)


@pytest.mark.parametrize(
    ("policy", "expected"), [("delete", False), ("compact", True), ("compact,delete", True), ("compactor", False)]
)
def test_a_topic_is_compacted_as_its_policy_says(policy: str, expected: bool) -> None:
    async def work(scene: Scene) -> None:
        topic = scene.replicas.a.add_topic("u", configs={"cleanup.policy": policy})
        assert await scene.verification.compacts("u", topic.topic_id) == expected

        async def refuse(name: str, settings: Collection[str]) -> Any:
            raise KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", "no")

        scene.replicas.a.topic_configs = refuse  # type: ignore[method-assign]
        with pytest.raises(BrokerUnavailable, match="AUTHORIZATION"):
            await scene.verification.compacts("u", topic.topic_id)

    on_logs(work)


def test_a_follower_that_was_compacted_once_may_lack_records_for_ever_and_another_topic_of_its_name_not() -> None:
    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        replicas.start()
        await replicas.connect()
        replicas.a.add_topic(TOPIC, configs={"cleanup.policy": "compact"})
        await replicas.until("made", lambda: "remote-t" in replicas.b.found)
        follower = replicas.b.found["remote-t"]
        verification, control = replicas.ends["B"].parts.digests, replicas.controls["B"]
        await replicas.until("compacts", lambda: control.state.follower_topics["remote-t"].compacts)
        record = control.state.follower_topics["remote-t"]
        await replicas.stop("B")
        await asyncio.sleep(1.0)  # whatever it has asked brokers for is done
        assert record.topic_id is not None
        control.apply(CompactFollowerTopic("remote-t", record.topic_id, False, record.compacts_since_offset))
        follower.configs["cleanup.policy"] = "delete"
        assert await verification.compacts("remote-t", follower.topic_id)
        assert not await verification.compacts("remote-t", bytes(16))
        await replicas.stop("A")

    run_simulated(run())


# ---- trouble while reading ----


def test_brokers_that_go_away_in_between_change_no_digest() -> None:
    async def work(scene: Scene) -> None:
        for number in range(50):
            scene.ours.write_values(b"%d" % number)
        expected = [await scene.digest(level) for level in LEVELS]
        scene.replicas.a.trouble = 0.5
        for _ in range(5):
            for level, digest in zip(LEVELS, expected, strict=True):
                topic = None
                while topic is None:
                    try:
                        topic = (await scene.replicas.a.topics())[TOPIC]
                    except BrokerUnavailable:
                        continue
                assert await scene.verification.digest(topic, 0, 0, 50, level) == digest

    on_logs(work)


@pytest.mark.parametrize("level", [BATCHES, CONTENTS, MARKED])
def test_what_a_new_leader_does_not_show_yet_is_waited_for_and_not_left_out(level: str) -> None:
    async def work(scene: Scene) -> None:
        log = scene.ours
        for number in range(4):
            log.write_values(b"%d" % number)
        expected = await scene.digest(level)
        scene.replicas.a._high_watermark = lambda partition: partition.high_watermark  # type: ignore[method-assign]
        log.lag = 2  # its high watermark is behind for a moment
        asyncio.get_running_loop().call_later(1.0, setattr, log, "lag", 0)
        assert await scene.digest(level) == expected
        log.lag = 2
        with pytest.raises(OperationError, match="up to 2 so far, not to 4"):
            await scene.digest(level)

    on_logs(work)


def test_a_log_that_cannot_be_read_is_an_error_for_everybody_who_asks() -> None:
    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"x")
        topic = (await scene.replicas.a.topics())[TOPIC]
        scene.replicas.a.down.add(1)
        for level in LEVELS:
            with pytest.raises(OperationError, match="reading failed") as raised:
                await scene.verification.digest(topic, 0, 0, 1, level)
            assert raised.value.http_status == 503
        with pytest.raises(BrokerUnavailable):
            await scene.verification.digest_of(TOPIC, 0, 0, 1)
        with pytest.raises(BrokerUnavailable):
            await scene.verification.may_be_gone(TOPIC, 0, 0)
        peer = scene.peer()
        for question in (
            calls.Digest(TOPIC, 0, 0, 1, RECORDS, None),
            calls.Digest(TOPIC, 0, 0, 1, LATEST, 1),
            calls.DigestsAt(TOPIC, 0, 0, 1, LATEST, (1,)),
            calls.TopicLimits(TOPIC),
            calls.CountOffsets(TOPIC, 0, 1),
        ):
            with pytest.raises(LinkRejected) as refused:
                await peer.call(question)
            assert refused.value.code == "READ_FAILED", question

    on_logs(work)


def test_a_damaged_batch_is_an_error_and_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"x")
        damaged = bytearray(scene.ours.log[0])
        damaged[16] = 1  # the format of before
        scene.ours.log[0] = bytes(damaged)
        with pytest.raises(BrokerUnavailable):
            await scene.verification.digest_of(TOPIC, 0, 0, 1)
        for level in LEVELS:
            with pytest.raises(LinkRejected) as refused:
                await scene.peer().call(calls.Digest(TOPIC, 0, 0, 1, level))
            assert refused.value.code == "BATCH_UNREADABLE"

    on_logs(work)


def test_a_batch_that_does_not_match_its_crc_is_no_consumers() -> None:
    async def work(scene: Scene) -> None:
        for log in (scene.ours, scene.theirs):
            log.write_values(b"x", b"y")
        damaged = bytearray(scene.ours.log[0])
        damaged[17] ^= 1  # the CRC itself: all else is equal
        scene.ours.log[0] = bytes(damaged)
        assert await scene.equal(BATCHES)
        with pytest.raises(CorruptBatch, match="offset 0"):
            await scene.digest(CHECKED)
        with pytest.raises(LinkRejected) as refused:
            await scene.peer().call(calls.Digest(TOPIC, 0, 0, 2, CHECKED))
        assert refused.value.code == "BATCH_UNREADABLE"
        scene.theirs.write_values(b"z")
        damaged = bytearray(scene.theirs.log[1])
        damaged[-1] ^= 1
        scene.theirs.log[1] = bytes(damaged)
        ended = await scene.digest(CHECKED, 0, 3, "B")
        assert (ended.to, ended.records) == (2, 2), "before it"
        assert ended.digest == (await scene.digest(CHECKED, 0, 2, "B")).digest

    on_logs(work)


def test_of_a_range_no_more_is_read_than_it_was_said_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        monkeypatch.setattr(digests, "READ_BYTES_MIN", 1)
        for _ in range(20):
            scene.ours.write_values(bytes(100))
        reads = Reads(1000)
        found = await scene.digest(CHECKED, 0, 20, reads=reads, once=True)
        assert 1000 >= reads.bytes > 700
        asked: list[int] = []
        fetch = FakeFetchConnection.fetch

        async def counted(self: Any, *args: Any, **more: Any) -> list[Fetched]:
            asked.append(args[2])
            return await fetch(self, *args, **more)

        monkeypatch.setattr(FakeFetchConnection, "fetch", counted)
        question = calls.Digest(TOPIC, 0, 0, found.to, CHECKED, bytes=reads.bytes)
        assert (await scene.peer().call(question)).digest == found.digest
        assert asked == [reads.bytes]

    on_logs(work)


@pytest.mark.parametrize("level", [*LEVELS, LATEST])
def test_others_have_their_turn_every_few_batches_of_one_read(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of one record a read of some megabytes has thousands, and acks of clients wait meanwhile."""

    async def work(scene: Scene) -> None:
        for _ in range(300):
            scene.ours.write_values(b"v", keys=[b"k"])
        fetch, others, turns = FakeFetchConnection.fetch, Tasks("others", Supervision()), 0

        async def other() -> None:
            nonlocal turns
            for _ in range(100):
                turns += 1
                await asyncio.sleep(0)

        async def read(self: Any, *args: Any, **more: Any) -> list[Fetched]:
            found = await fetch(self, *args, **more)
            others.start("other", other())
            return found

        monkeypatch.setattr(FakeFetchConnection, "fetch", read)
        assert (await (scene.latest(300) if level == LATEST else scene.digest(level))).to == 300
        assert turns >= 300 / 20
        await others.close()

    on_logs(work)


def test_a_log_that_is_read_from_one_leader_is_not_read_on_from_the_next() -> None:
    """Each replica is cleaned by itself: what the two show is not one log."""

    async def work(scene: Scene) -> None:
        scene.ours.write_values(b"x")
        topic = (await scene.replicas.a.topics())[TOPIC]._replace(pinned=True)
        assert (await scene.verification.digest(topic, 0, 0, 1, CONTENTS)).records == 1
        scene.ours.move(1)
        with pytest.raises(OperationError, match="another leader since"):
            await scene.verification.digest(topic, 0, 0, 1, CONTENTS)
        again = (await scene.replicas.a.topics())[TOPIC]._replace(pinned=True)
        assert (await scene.verification.digest(again, 0, 0, 1, CONTENTS)).records == 1

    on_logs(work)


def test_a_long_log_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        for number in range(20):
            scene.ours.write_values(b"%d" % number, bytes(100))
        expected = [await scene.digest(level) for level in LEVELS]
        reads = 0
        fetch = FakeFetchConnection.fetch

        async def counted(self: FakeFetchConnection, *args: Any, **more: Any) -> list[Fetched]:
            nonlocal reads
            reads += 1
            return await fetch(self, *args, **more)

        monkeypatch.setattr(reading, "CHUNK_BYTES", 500)
        monkeypatch.setattr(FakeFetchConnection, "fetch", counted)
        assert [await scene.digest(level) for level in LEVELS] == expected
        assert reads >= 5 * len(LEVELS)

    on_logs(work)


# ---- what a peer may ask ----


def test_a_peer_is_told_limits_and_digests_of_what_its_link_has() -> None:
    async def work(scene: Scene) -> None:
        for number in range(5):
            scene.ours.write_values(b"%d" % number, keys=[b"k"])
        transaction(scene.ours, SOURCES_ID, None, b"open")
        scene.ours.delete_records(2)
        peer = scene.peer()
        limits = await peer.call(calls.TopicLimits(TOPIC))
        assert limits == calls.TopicLimitsAnswer((calls.Ends(2, 6, 5),), False)
        for level in LEVELS:
            answer = await peer.call(calls.Digest(TOPIC, 0, 2, 5, level))
            assert Digest(answer.digest, answer.records, answer.to) == await scene.digest(level, 2, 5)
        answer = await peer.call(calls.Digest(TOPIC, 0, 2, 5, LATEST, 5))
        assert Digest(answer.digest, answer.records, answer.to) == await scene.latest(5, 2)
        with pytest.raises(LinkRejected, match=r"until is missing"):
            await peer.call(calls.Digest(TOPIC, 0, 2, 5, LATEST, None))
        digests = await peer.call(calls.DigestsAt(TOPIC, 0, 2, 5, LATEST, (3, 5)))
        assert digests.digests[1] == (await scene.latest(5)).digest

    on_logs(work)


def test_a_peer_is_told_nothing_of_what_its_link_does_not_have() -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.a.add_topic("private")
        other_link = CalledAtOnce("another", scene.verification.answers())
        for peer, topic in ((scene.peer(), "private"), (scene.peer(), "local-none"), (other_link, TOPIC)):
            for question in (
                calls.Digest(topic, 0, 0, 1, RECORDS, None),
                calls.DigestsAt(topic, 0, 0, 1, LATEST, (1,)),
                calls.TopicLimits(topic),
                calls.CountOffsets(topic, 0, 1),
            ):
                with pytest.raises(LinkRejected) as refused:
                    await peer.call(question)
                assert refused.value.code == "UNKNOWN_TOPIC"

    on_logs(work)


@pytest.mark.parametrize("form", OffsetsForm)
def test_of_copies_that_are_not_whole_no_digest_lets_a_peer_try_out_what_it_is_not_to_know(form: OffsetsForm) -> None:
    async def work(scene: Scene) -> None:
        state = scene.replicas.controls["A"].state
        link = state.links[LINK]
        mappings = tuple(replace(each, local_prefix=TOPIC, offsets=OffsetsCopy(form)) for each in link.mappings)
        scene.replicas.controls["A"].state = state.evolve(links={LINK: replace(link, mappings=mappings)})
        scene.ours.write_values(b"x")
        for question in (calls.Digest(TOPIC, 0, 0, 1, RECORDS, None), calls.DigestsAt(TOPIC, 0, 0, 1, LATEST, (1,))):
            if form is OffsetsForm.WHOLE:
                await scene.peer().call(question)
                continue
            with pytest.raises(LinkRejected) as refused:
                await scene.peer().call(question)
            assert refused.value.code == "NOT_COMPARED"

    on_logs(work)
