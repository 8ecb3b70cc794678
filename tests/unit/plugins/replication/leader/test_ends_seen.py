"""How fresh the lag is that a follower shows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_cluster import FakeFetchConnection
from support.replicas import LINK, Replicas, on_replicas

from isthmus_plugins.cluster import BrokerUnavailable, Fetched
from isthmus_plugins.links import PartitionStatus
from isthmus_plugins.replication.follower.stream import LAG_KNOWN_S
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import UNKNOWN_METHOD, LinkRejected


def at_b(replicas: Replicas) -> PartitionStatus:
    (status,) = replicas.ends["B"].parts.service.status(LINK).partitions
    return status


async def copied(replicas: Replicas) -> None:
    source = replicas.a.add_topic("local-t").partitions[0]
    source.write_values(b"a", b"b")
    await replicas.until("Following", lambda: replicas.equal() and at_b(replicas).state == "Following")
    await asyncio.sleep(3 * LAG_KNOWN_S)
    assert (at_b(replicas).partition_mirror_lag, at_b(replicas).lag_unknown_seconds) == (0, None)


def never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota on the source's proxy, as its broker answers Fetch: not at all for now."""

    async def fetch(*_: Any, **more: Any) -> list[Fetched]:
        await asyncio.sleep(1000)
        return []

    monkeypatch.setattr(FakeFetchConnection, "fetch", fetch)


def test_it_is_true_while_nothing_of_the_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        await copied(replicas)
        never_answers(monkeypatch)
        await asyncio.sleep(1)
        replicas.a.partition("local-t").write_values(b"c", b"d", b"e")
        await replicas.until("it is told", lambda: at_b(replicas).partition_mirror_lag == 3, 5)
        assert at_b(replicas).state == "Catching Up"
        assert (at_b(replicas).lag_seconds or 0) < 5
        await asyncio.sleep(10)
        assert (at_b(replicas).lag_seconds or 0) > 8, "of the oldest record that is missing"

    on_replicas(monkeypatch, work)


def test_it_is_unknown_while_the_sources_brokers_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        await copied(replicas)
        replicas.a.down.add(1)
        await asyncio.sleep(2 * LAG_KNOWN_S)
        status = at_b(replicas)
        assert (status.state, status.reason, status.partition_mirror_lag, status.lag_seconds) == (
            "Catching Up",
            "SOURCE_END_UNKNOWN",
            None,
            None,
        )
        assert LAG_KNOWN_S < (status.lag_unknown_seconds or 0) < 3 * LAG_KNOWN_S
        replicas.a.down.clear()
        await replicas.until("Following", lambda: at_b(replicas).state == "Following")
        assert at_b(replicas).lag_unknown_seconds is None

    on_replicas(monkeypatch, work)


def test_it_is_unknown_while_the_link_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        await copied(replicas)
        replicas.cut()
        replicas.a.partition("local-t").write_values(b"c")
        await asyncio.sleep(2 * LAG_KNOWN_S)
        status = at_b(replicas)
        assert (status.state, status.partition_mirror_lag, status.lag_seconds) == ("Disconnected", None, None)
        assert (status.lag_unknown_seconds or 0) > LAG_KNOWN_S
        await replicas.connect()
        await replicas.until("Following", lambda: at_b(replicas).state == "Following")
        assert (at_b(replicas).partition_mirror_lag, at_b(replicas).lag_unknown_seconds) == (0, None)

    on_replicas(monkeypatch, work)


def test_of_a_source_that_does_not_say_it_is_what_it_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a version before this. While it is connected it pushes what comes."""

    async def work(replicas: Replicas) -> None:
        async def unknown(connection: Any, question: calls.EndsSeen) -> calls.Done:
            raise LinkRejected(UNKNOWN_METHOD, "ends_seen")

        replicas.ends["B"].instead(calls.EndsSeen, unknown)
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"a")
        await replicas.until("Following", lambda: replicas.equal() and at_b(replicas).state == "Following")
        await asyncio.sleep(5 * LAG_KNOWN_S)
        assert (at_b(replicas).state, at_b(replicas).partition_mirror_lag) == ("Following", 0)
        replicas.cut()
        await asyncio.sleep(1)
        assert at_b(replicas).partition_mirror_lag is None

    on_replicas(monkeypatch, work)


def test_one_that_cannot_be_read_leaves_the_others_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        first, second = replicas.a.add_topic("local-t", 2).partitions
        first.move(1)
        second.move(2)
        for partition in (first, second):
            partition.write_values(b"a")
        await replicas.until("copied", replicas.equal)
        replicas.a.down.add(2)
        await asyncio.sleep(2 * LAG_KNOWN_S)
        known = {
            each.partition: each.lag_unknown_seconds is None
            for each in replicas.ends["B"].parts.service.status(LINK).partitions
        }
        assert known == {0: True, 1: False}
        replicas.a.down.clear()

    on_replicas(monkeypatch, work, brokers=2)


def test_a_reading_that_fails_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        await copied(replicas)
        never_answers(monkeypatch)

        async def refused(*_: Any) -> None:
            raise BrokerUnavailable("not now")

        monkeypatch.setattr(replicas.a, "high_watermarks", refused)
        await asyncio.sleep(3 * LAG_KNOWN_S)
        assert at_b(replicas).partition_mirror_lag is None

    on_replicas(monkeypatch, work)
