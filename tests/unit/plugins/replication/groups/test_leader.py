"""When the leader end takes a partition of the offsets topic for read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.group_replicas import PLACE, committed_at, in_replicas, log, until_at
from support.offsets import commit, marker_batch, offsets_batch
from support.replicas import LINK, Replicas

from isthmus_control.commands import AlterLink
from isthmus_control.model import LinkMode
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.partitions import LinkPartition, OrderedPlace
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Marker
from isthmus_protocol.records import BatchHeader, Frame


def replaced(replicas: Replicas) -> bool:
    """Whether the committed offsets are read anew, in the partition's leader epoch."""
    partition = replicas.a.partition(OFFSETS_TOPIC)
    sources = replicas.ends["A"].group_leader._sources
    return 0 in sources and sources[0].leader_epoch == partition.leader_epoch


def loaded(replicas: Replicas) -> bool:
    return replaced(replicas) and replicas.ends["A"].group_leader._sources[0].loaded


def test_a_new_leader_whose_high_watermark_lags_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        partition = replicas.a.partition(OFFSETS_TOPIC)
        before = partition.end
        log(replicas, commit("app-1", "local-t", 8))
        log(replicas, commit("app-1", "local-u", 0))
        await until_at(replicas, {PLACE: committed_at(8)})
        requests: list[int] = []
        replicas.b.on_commit = lambda group, place, committed: requests.append(committed.offset)
        partition.move(partition.leader)
        partition.lag = partition.end - before
        await replicas.until("it is read anew", lambda: replaced(replicas), 5)
        asked = replicas.a.requests
        await asyncio.sleep(3)
        assert not loaded(replicas)
        assert replicas.a.requests - asked < 200, "it waits, and does not ask without pause"
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(8)}
        partition.lag = 0
        await replicas.until("it is read", lambda: loaded(replicas), 5)
        log(replicas, commit("app-1", "local-t", 9))
        await until_at(replicas, {PLACE: committed_at(9)})
        assert requests == [9]

    in_replicas(monkeypatch, test)


def test_a_log_whose_last_records_are_cleaned_away_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        partition = replicas.a.partition(OFFSETS_TOPIC)
        partition.end += 3
        partition.move(partition.leader)
        await replicas.until("it is read", lambda: loaded(replicas), 5)

    in_replicas(monkeypatch, test)


def test_a_log_end_that_cannot_be_read_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        ends, failures = replicas.a.log_ends, [BrokerUnavailable("down"), None]

        async def failing(places: Any) -> Any:
            if failures:
                error = failures.pop(0)
                if error is not None:
                    raise error
                return {}
            return await ends(places)

        monkeypatch.setattr(replicas.a, "log_ends", failing)
        partition = replicas.a.partition(OFFSETS_TOPIC)
        partition.move(partition.leader)
        await replicas.until("it is read", lambda: loaded(replicas), 10)
        assert not failures

    in_replicas(monkeypatch, test)


def test_what_a_marker_commits_waits_for_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        leader = replicas.ends["A"].group_leader
        replicas.controls["A"].apply(AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        key = LinkPartition(LINK, OFFSETS_TOPIC, 0)
        await replicas.until("it confirms", lambda: leader.place(key) is not None)
        asked: list[bool] = []

        def may_pass(place: OrderedPlace, header: BatchHeader, batch: Frame) -> bool:
            asked.append(header.is_control)
            return not header.is_control

        leader.may_pass = may_pass
        partition = replicas.a.partition(OFFSETS_TOPIC)
        partition.write(offsets_batch(partition.end, [commit("app-1", "local-t", 6)], 7))
        partition.write(marker_batch(partition.end, 7, Marker.COMMIT))
        log(replicas, commit("app-1", "local-t", 7))
        await replicas.until("the marker was seen", lambda: True in asked)
        await asyncio.sleep(1)
        assert asked.count(True) == 1, "it is asked again when there is reason to"
        await until_at(replicas, {PLACE: committed_at(5)})
        place = leader.place(key)
        assert place is not None
        assert place.acked < partition.end - 1
        leader.may_pass = lambda *batch: True
        leader.resume(0)
        await until_at(replicas, {PLACE: committed_at(7)})
        await replicas.until("all is confirmed", lambda: place.acked == partition.end)

    in_replicas(monkeypatch, test)
