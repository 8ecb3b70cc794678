"""What link observers are told of states: everything at first, then what changes, and what is not well again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from isthmus_plugins.links import LinkStatus, PartitionStatus
from isthmus_plugins.observers import LinkAppended, LinkConfirmed, LinkObservers, LinkTold
from isthmus_plugins.replication.status.observing import LinkObserving
from isthmus_plugins.tasks import Supervision


class Observer:
    def __init__(self) -> None:
        self.observes_links = True
        self.events: list[LinkTold] = []
        self.broken = False

    def link_appended(self, event: LinkAppended) -> None: ...

    def link_confirmed(self, event: LinkConfirmed) -> None: ...

    def link_told(self, event: LinkTold) -> None:
        if self.broken:
            raise ValueError
        self.events.append(event)

    def taken(self) -> list[tuple[str | None, int, str, int | None]]:
        events, self.events = self.events, []
        return [(event.topic, event.partition, event.state, event.lag) for event in events]


def partition(number: int, state: str = "Following", lag: int | None = 0, reason: str | None = None) -> PartitionStatus:
    return PartitionStatus(
        topic="t",
        remote_topic="t",
        partition=number,
        role="leader",
        state=state,
        reason=reason,
        source_end=10,
        follower_end=None if lag is None else 10 - lag,
        partition_mirror_lag=lag,
        lag_seconds=None if lag is None else lag / 10,
    )


def status(*partitions: PartitionStatus, state: str = "Following") -> LinkStatus:
    known: dict[str, Any] = {"link_name": "to-b", "link_id": "i", "local_cluster_id": "A", "remote_cluster_id": "B"}
    return LinkStatus(
        **known, remote=[], dials=True, mode="asynchronous", state=state, mappings=[], partitions=list(partitions)
    )


def test_changes_are_told_and_what_is_not_well_again() -> None:
    observer, observers = Observer(), LinkObservers()
    observers.add([observer])
    now = [status(partition(0), partition(1, "Catching Up", 3))]
    observing = LinkObserving(observers, lambda: now, time, Supervision())
    observing.report(again=True)
    assert observer.taken() == [
        (None, -1, "Following", None),
        ("t", 0, "Following", 0),
        ("t", 1, "Catching Up", 3),
    ]
    observing.report(again=False)
    assert observer.taken() == []
    observing.report(again=True)
    assert observer.taken() == [(None, -1, "Following", None), ("t", 1, "Catching Up", 3)], "they are told again"
    now = [status(partition(0, lag=2), partition(1, "Stopped", 3, "STOPPED_BY_OPERATOR"))]
    observing.report(again=False)
    assert observer.taken() == [("t", 0, "Following", 2), ("t", 1, "Stopped", 3)]
    observing.report(again=True)
    assert observer.taken() == [(None, -1, "Following", None), ("t", 0, "Following", 2), ("t", 1, "Stopped", 3)]
    now = [status(partition(1, "Stopped", 3, "SOURCE_TOPIC_MAY_BE_DELETED"))]
    observing.report(again=False)
    assert observer.taken() == [("t", 1, "Stopped", 3), ("t", 0, "Gone", None)], "another reason; one is no more"
    now = [status(partition(1, "Following", 1))]
    observing.report(again=False)
    now = [status(partition(1, "Following", 0))]
    observing.report(again=False)
    assert observer.taken() == [("t", 1, "Following", 1), ("t", 1, "Following", 0)], "it lacks nothing any more"
    now = []
    observing.report(again=True)
    assert sorted(observer.taken(), key=str) == [("t", 1, "Gone", None), (None, -1, "Gone", None)]


def test_what_is_told_of_a_partition() -> None:
    observer, observers = Observer(), LinkObservers()
    observers.add([observer])
    LinkObserving(observers, lambda: [status(partition(0, lag=None), partition(1, lag=5))], time, Supervision()).report(
        again=False
    )
    whole, unknown, behind = observer.events
    assert (whole.link, whole.remote_cluster_id, whole.role, whole.reason) == ("to-b", "B", None, None)
    assert (unknown.lag, unknown.lag_s, unknown.follower_end) == (None, None, None)
    assert (behind.role, behind.source_end, behind.follower_end, behind.lag, behind.lag_s) == ("leader", 10, 5, 5, 0.5)


def test_one_that_fails_disturbs_nobody_and_one_that_rests_costs_nothing() -> None:
    broken, other, observers = Observer(), Observer(), LinkObservers()
    broken.broken = True
    observers.add([broken, other])
    LinkObserving(observers, lambda: [status()], time, Supervision()).report(again=False)
    assert len(other.events) == 1
    assert observers
    broken.observes_links = other.observes_links = False
    assert not observers


def test_it_ends_whatever_changes_at_that_moment() -> None:
    """A cancellation that comes together with what is waited for must not get lost."""

    async def run() -> None:
        for turns in range(8):
            observing = LinkObserving(LinkObservers(), list, time, Supervision())
            observing.start()
            for _ in range(20):  # it waits for its second look, or a change
                await asyncio.sleep(0)
            observing.wake()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await observing.stop()

    asyncio.run(run())
