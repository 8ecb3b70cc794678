"""Up to where two model clusters' logs are the same."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.partition_log import Partition, batch
from support.peers import CalledAtOnce
from support.replicas import INDEX, LINK, Replicas

from isthmus_control.model import FollowerTopic, SourceEpoch, TopicState
from isthmus_plugins.cluster import TransactionMarkers
from isthmus_plugins.replication.truncation.common_log import NO_EPOCH, CommonLog, epoch_bound
from isthmus_protocol import producer_ids
from isthmus_protocol.records import TRANSACTIONAL_BIT, Compression

SOURCE, TARGET, SOURCES_ID = "local-t", "remote-t", 7


def common_end(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Partition, Partition], None], policy: str = "delete"
) -> int:
    """What is found of logs that ``write`` fills: (the source's, the follower's)."""

    async def run() -> int:
        replicas = Replicas(random.Random(3), 1)
        replicas.b.on_new_partition = lambda topic, index, partition: None
        replicas.start()
        a, b = replicas.ends["A"], replicas.ends["B"]
        configs = {"cleanup.policy": policy}
        source = replicas.a.add_topic(SOURCE, configs=configs).partitions[0]
        target = replicas.b.add_topic(TARGET).partitions[0]
        write(source, target)
        peer: Any = CalledAtOnce(LINK, [*a.parts.common_log.answers(), *a.parts.digests.answers()])
        topic = (await replicas.b.topics())[TARGET]
        ids = (str(uuid.UUID(bytes=each.topic_id)) for each in (replicas.a.found[SOURCE], replicas.b.found[TARGET]))
        record = FollowerTopic(LINK, TARGET, SOURCE, next(ids), TopicState.FOLLOWING, 0, next(ids))
        end = await CommonLog(b.context, b.parts.digests).end(peer, topic, record, None, 0, target.start, target.end)
        await replicas.stop()
        return end

    return run_simulated(run())


def transaction(log: Partition, first: bytes, producer_id: int, compression: int = 0) -> None:
    """Its records, and no end."""
    values = [first, b"b"]
    more = {"producer_epoch": 0, "base_sequence": 0, "attributes": TRANSACTIONAL_BIT | compression}
    log.write(batch(log.end, values, producer_id=producer_id, **more))


def aborted(log: Partition, producer_id: int, committed: bool = False) -> None:
    assert log.mark(TransactionMarkers("", 0, producer_id, 0, committed, 0)) == 0


@pytest.mark.parametrize("value", [b"a", b"rogue"])
def test_a_transaction_that_was_aborted_since_is_no_difference(monkeypatch: pytest.MonkeyPatch, value: bytes) -> None:
    """Where batches were encoded again, which is why records are compared; the records themselves still count."""

    def write(source: Partition, target: Partition) -> None:
        carried = producer_ids.carry(SOURCES_ID, INDEX["A"], INDEX["B"])
        for log in (source, target):
            log.write_values(b"before")
        transaction(source, b"a", SOURCES_ID)
        aborted(source, SOURCES_ID)
        transaction(target, value, carried, Compression.GZIP)

    assert common_end(monkeypatch, write) == (3 if value == b"a" else 1)


def test_what_became_of_a_transaction_that_both_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(source: Partition, target: Partition) -> None:
        carried = producer_ids.carry(SOURCES_ID, INDEX["A"], INDEX["B"])
        for log in (source, target):
            log.write_values(b"before")
        transaction(source, b"a", SOURCES_ID)
        aborted(source, SOURCES_ID)
        transaction(target, b"a", carried, Compression.GZIP)
        aborted(target, carried, committed=True)

    assert common_end(monkeypatch, write) == 1


def tombstone(log: Partition) -> None:
    """Of a key that no log has."""
    nothing: Any = None
    log.write_values(nothing, keys=[b"nobody's"])


def marker(log: Partition) -> None:
    aborted(log, SOURCES_ID, committed=True)


def cleaned_tombstone(log: Partition) -> None:
    tombstone(log)
    log.clean({log.end - 1})


@pytest.mark.parametrize(
    ("of_source", "of_follower", "end"),
    [
        (marker, tombstone, 1),
        (tombstone, marker, 1),
        (tombstone, tombstone, 2),
        (cleaned_tombstone, tombstone, 2),
        (tombstone, cleaned_tombstone, 2),
        (marker, cleaned_tombstone, 2),
    ],
)
def test_a_tombstone_in_the_place_of_a_marker_is_another_record(
    monkeypatch: pytest.MonkeyPatch,
    of_source: Callable[[Partition], None],
    of_follower: Callable[[Partition], None],
    end: int,
) -> None:
    """Latest records tell nothing of it, and a stream that goes on there sees it: it would be truncated for ever."""

    def write(source: Partition, target: Partition) -> None:
        for log, last in ((source, of_source), (target, of_follower)):
            log.write_values(b"before", keys=[b"key"])
            last(log)

    assert common_end(monkeypatch, write, "compact") == end


def broker(*epochs: tuple[int, int], end: int) -> Callable[[int], Awaitable[tuple[int, int]]]:
    """What a broker answers whose log has these leader epochs, each with its first offset (LeaderEpochFileCache)."""

    async def epoch_end(asked: int) -> tuple[int, int]:
        if not epochs or asked > epochs[-1][0]:
            return NO_EPOCH, -1
        if asked == epochs[-1][0]:
            return asked, end
        higher = next(start for epoch, start in epochs if epoch > asked)
        return max((epoch for epoch, _ in epochs if epoch <= asked), default=asked), higher

    return epoch_end


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        (broker((0, 0), (5, 90), end=100), 95),
        (broker((0, 0), (5, 90), end=93), 93),
        (broker((0, 0), (6, 80), end=100), 80),  # epoch 5 is lost
        (broker((0, 0), end=85), 85),  # and nothing was written since
        (broker((0, 0), end=99), 90),  # what looks the same was written before
        (broker((7, 98), end=100), 95),  # all that it had expired
        (broker(end=100), 95),
    ],
)
def test_leader_epochs_bound_what_both_may_have(
    source: Callable[[int], Awaitable[tuple[int, int]]], bound: int
) -> None:
    known = (SourceEpoch(0, 0), SourceEpoch(5, 90))
    assert asyncio.run(epoch_bound(known, 95, source)) == bound
