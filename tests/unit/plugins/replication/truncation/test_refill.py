"""Refilling a topic from the spool of a truncation, against a model cluster on a simulated clock."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable

import pytest
from support.fake_cluster import run_simulated
from support.partition_log import Partition, batch
from support.replicas import LINK, Replicas

from isthmus_control.model import Reason
from isthmus_control.truncations import PartitionCut, PartitionView, Truncation, TruncationPhase
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.follower.log import FILLER_KEY
from isthmus_plugins.replication.truncation.refill import refill
from isthmus_plugins.replication.truncation.spool import Spool
from isthmus_protocol.records import TRANSACTIONAL_BIT

OLD, NEW = "old", "new"
TIMEOUT_S = 300.0


def refilled(
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Partition], None],
    cut: PartitionCut,
    harm: Callable[[Partition], None] = lambda partition: None,
) -> Partition:
    """What a log becomes that is spooled up to a cut and put back into another topic."""

    async def run() -> Partition:
        replicas = Replicas(random.Random(5), 1)
        replicas.start("B")
        end, cluster = replicas.ends["B"], replicas.b
        write(cluster.add_topic(OLD).partitions[0])
        old = (await cluster.topics())[OLD]
        truncation = Truncation(
            LINK,
            OLD,
            str(uuid.UUID(bytes=old.topic_id)),
            Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote"),
            (PartitionView(1, 0),),
            None,
            "p",
            "o",
            0,
            TruncationPhase.SPOOLING,
            0,
        )
        spool = Spool(end.context, truncation, "1")
        await spool.create(1)
        await spool.check(cut, await spool.fill(old, cut))
        new = cluster.add_topic(NEW)
        harm(new.partitions[0])
        async with asyncio.timeout(TIMEOUT_S):
            topic_id = str(uuid.UUID(bytes=new.topic_id))
            await refill(end.follower, spool, LINK, NEW, topic_id, cut, False, asyncio.Semaphore(1))
        await replicas.stop("B")
        return new.partitions[0]

    return run_simulated(run())


def test_a_gap_right_before_the_cut_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was compacted before it followed: its last batch before the cut ends earlier."""

    def write(old: Partition) -> None:
        old.write(batch(0, [b"a", b"b"]))
        old.write(batch(20_015, [b"rogue"]))

    new = refilled(monkeypatch, write, PartitionCut(0, 0, 20_015, 20_016))
    assert (new.start, new.end) == (0, 20_015)
    assert [record.value for record in new.records().values() if record.key != FILLER_KEY] == [b"a", b"b"]


def test_a_log_of_which_nothing_is_left_keeps_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(old: Partition) -> None:
        old.write(batch(0, [b"deleted"] * 5))
        old.start = 5
        old.write(batch(9, [b"rogue"]))

    new = refilled(monkeypatch, write, PartitionCut(0, 5, 9, 10))
    assert (new.start, new.end) == (5, 9)
    assert not new.records()


def test_a_gap_inside_a_transaction_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is in the log that was spooled: what becomes of it is the source's to say, when the topic follows again."""

    def write(old: Partition) -> None:
        more = {"producer_id": 7, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT}
        old.write(batch(0, [b"a"], base_sequence=0, **more))
        old.write(batch(5, [b"b"], base_sequence=1, **more))
        old.write(batch(6, [b"rogue"]))

    new = refilled(monkeypatch, write, PartitionCut(0, 0, 6, 7))
    assert (new.start, new.end, new.last_stable_offset) == (0, 6, 0)


def test_a_refill_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(new: Partition) -> None:
        monkeypatch.setattr(
            "isthmus_plugins.replication.follower.follower_end.FollowerEnd.proceed", lambda end, stream: None
        )

    with pytest.raises(BrokerUnavailable, match="new-0 stays at 0 for 60 s"):
        refilled(monkeypatch, lambda old: old.write(batch(0, [b"a"])), PartitionCut(0, 0, 1, 1), silent)
