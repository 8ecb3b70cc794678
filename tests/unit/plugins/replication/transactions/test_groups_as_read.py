"""Which groups transactions have committed offsets in, as far as the offsets topic is read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated, simulated_now
from support.offsets import commit, marker_batch, offsets_batch
from support.partition_log import Partition

from isthmus_plugins.replication.transactions.groups_as_read import (
    KEPT_S,
    NOT_KNOWN,
    REST_S,
    SEEN_WITHIN_S,
    GroupsAsRead,
)
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Marker

X, Y = 7, 8


async def until(ready: Callable[[], bool]) -> None:
    deadline = simulated_now() + 30
    while not ready():
        assert simulated_now() < deadline
        await asyncio.sleep(0.01)


def on_offsets(monkeypatch: pytest.MonkeyPatch, test: Callable[[Partition, GroupsAsRead], Awaitable[None]]) -> None:
    async def run() -> None:
        rng = random.Random(1)
        cluster = FakeCluster(rng, range(1, 2))
        log = cluster.add_topic(OFFSETS_TOPIC).partitions[0]
        groups = GroupsAsRead(FakeContext(cluster, FakeControl("A", rng)), lambda: None)  # type: ignore[arg-type]
        groups.start()
        await test(log, groups)
        await groups.stop()

    run_simulated(run())


def put(log: Partition, producer_id: int, *groups: str, epoch: int = 0) -> None:
    log.write(offsets_batch(log.end, [commit(group, "t", 1) for group in groups], producer_id, epoch))


def end(log: Partition, producer_id: int, epoch: int = 0) -> None:
    log.write(marker_batch(log.end, producer_id, Marker.COMMIT, epoch))


def test_groups_are_known_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, groups: GroupsAsRead) -> None:
        put(log, X, "before")
        end(log, X)
        put(log, Y, "open")
        groups.follow(True)
        await until(lambda: groups.has_read(0, log.end))
        assert groups.groups_of(0, (X, 0)) == set(), "it had ended before"
        assert groups.groups_of(0, (Y, 0)) == {"open"}
        put(log, -1, "of nobody's transaction")
        put(log, X, "a", "b", epoch=1)
        assert not groups.has_read(0, log.end)
        await until(lambda: groups.has_read(0, log.end))
        assert groups.groups_of(0, (X, 1)) == {"a", "b"}
        assert groups.groups_of(0, (X, 0)) == set(), "another epoch is another transaction"
        end(log, X, epoch=2)
        put(log, X, "c", epoch=2)
        await until(lambda: groups.has_read(0, log.end))
        assert (groups.groups_of(0, (X, 1)), groups.groups_of(0, (X, 2))) == ({"a", "b"}, {"c"})
        log.write(offsets_batch(log.end, [(b"\x00\x63?", b"?")], Y))
        await until(lambda: groups.has_read(0, log.end))
        assert groups.groups_of(0, (Y, 0)) == {"open", NOT_KNOWN}, "some of it cannot be read"
        assert not groups.has_read(1, 0)

    on_offsets(monkeypatch, test)


def test_between_reads_it_rests_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, groups: GroupsAsRead) -> None:
        groups.follow(True)
        await until(lambda: groups.has_read(0, 0))
        for asks in (False, True, False):
            put(log, -1, "of nobody's transaction")
            await until(lambda: groups.has_read(0, log.end))
            rests_since = simulated_now()
            put(log, X, "a")
            await asyncio.sleep(REST_S / 4)
            assert not groups.has_read(0, log.end)
            if asks:
                groups.read_on()
            await until(lambda: groups.has_read(0, log.end))
            rested_s = simulated_now() - rests_since
            assert rested_s < (REST_S / 2 if asks else 2 * REST_S)

    on_offsets(monkeypatch, test)


def test_what_has_ended_is_forgotten_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, groups: GroupsAsRead) -> None:
        groups.follow(True)
        await until(lambda: groups.has_read(0, 0))
        put(log, X, "ends")
        put(log, Y, "goes on")
        end(log, X)
        end(log, Y)
        await until(lambda: groups.has_read(0, log.end))
        await asyncio.sleep(KEPT_S - 10)
        put(log, Y, "goes on")
        await asyncio.sleep(20)
        assert groups.groups_of(0, (X, 0)) == set()
        assert groups.groups_of(0, (Y, 0)) == {"goes on"}

    on_offsets(monkeypatch, test)


def test_what_was_decided_before_or_soon_after_it_began_may_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, groups: GroupsAsRead) -> None:
        assert groups.may_have_missed(0, simulated_now())
        groups.follow(True)
        await until(lambda: groups.has_read(0, 0))
        began_at = simulated_now()
        assert groups.may_have_missed(0, began_at)
        assert groups.may_have_missed(0, began_at + SEEN_WITHIN_S - 5)
        assert not groups.may_have_missed(0, began_at + SEEN_WITHIN_S)

    on_offsets(monkeypatch, test)
