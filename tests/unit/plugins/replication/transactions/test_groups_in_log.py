"""Which groups earlier transactions have committed offsets in, read from the log."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.offsets import commit, marker_batch, offsets_batch
from support.partition_log import Partition

from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.transactions.groups_as_read import NOT_KNOWN, Producer
from isthmus_plugins.replication.transactions.groups_in_log import CLOCKS_APART_MS, PastTransaction, read_groups_in_log
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Marker

X, Y = 7, 8
START = 1_700_000_000_000
Read = Callable[..., Awaitable[dict[Producer, set[str | None]]]]


def on_log(monkeypatch: pytest.MonkeyPatch, test: Callable[[Partition, Read], Awaitable[None]]) -> None:
    async def run() -> None:
        rng = random.Random(1)
        cluster = FakeCluster(rng, range(1, 2))
        log = cluster.add_topic(OFFSETS_TOPIC).partitions[0]
        context = FakeContext(cluster, FakeControl("A", rng))

        async def read(*producers: Producer, started_ms: int = START, end: int = -1, partition: int = 0) -> dict:
            asked = [PastTransaction(each, started_ms, log.end if end < 0 else end) for each in producers]
            return await read_groups_in_log(context, partition, asked)  # type: ignore[arg-type]

        await test(log, read)

    run_simulated(run())


def put(log: Partition, producer_id: int, *groups: str, epoch: int = 0, at_ms: int = START) -> None:
    log.write(offsets_batch(log.end, [commit(group, "t", 1) for group in groups], producer_id, epoch, at_ms))


def test_groups_are_found_of_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, read: Read) -> None:
        put(log, -1, "of nobody's transaction")
        put(log, X, "a", "b")
        put(log, Y, "another producer's")
        put(log, X, "another transaction's", epoch=1)
        put(log, X, "c")
        log.write(marker_batch(log.end, X, Marker.COMMIT))
        assert await read((X, 0)) == {(X, 0): {"a", "b", "c"}}
        assert await read((X, 1), (Y, 0)) == {(X, 1): {"another transaction's"}, (Y, 0): {"another producer's"}}
        assert await read((X, 2)) == {(X, 2): set()}, "nothing is found of it"

    on_log(monkeypatch, test)


def test_the_log_is_read_from_when_the_transaction_began_up_to_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, read: Read) -> None:
        put(log, X, "long before", at_ms=START - CLOCKS_APART_MS - 1)
        put(log, X, "by another clock", at_ms=START - CLOCKS_APART_MS)
        end = log.end
        put(log, X, "later")
        assert await read((X, 0), end=end) == {(X, 0): {"by another clock"}}
        assert await read((X, 0), started_ms=-1, end=end) == {(X, 0): {"long before", "by another clock"}}
        assert await read((X, 0), started_ms=START + 2 * CLOCKS_APART_MS) == {(X, 0): set()}, "nothing came since"

    on_log(monkeypatch, test)


def test_what_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Partition, read: Read) -> None:
        put(log, X, "a")
        log.write(offsets_batch(log.end, [(b"\x00\x63?", b"?")], X, at_ms=START))
        assert await read((X, 0)) == {(X, 0): {"a", NOT_KNOWN}}
        with pytest.raises(BrokerUnavailable, match="__consumer_offsets-1"):
            await read((X, 0), partition=1)

    on_log(monkeypatch, test)
