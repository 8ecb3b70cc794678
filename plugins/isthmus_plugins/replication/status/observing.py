"""Reports to link observers in which states links and their partitions are (``isthmus_plugins.observers``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

from isthmus_control.states import PartitionState
from isthmus_plugins.links import LinkStatus, PartitionStatus
from isthmus_plugins.observers import LinkObservers, LinkTold
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Supervision, Tasks

INTERVAL_S: Final = 1.0
CHANGED_S: Final = 0.1
"""After something changed, what comes of it is looked at together with what changes meanwhile."""
SHARE_MAX: Final = 0.05
"""Of the proxy's time that this may take: with very many partitions it looks less often."""
WELL: Final = frozenset({PartitionState.FOLLOWING.value, PartitionState.IN_SYNC.value})

GONE: Final = "Gone"
"""The state of what this proxy has no more: another one may have it now, or nobody has."""

Key = tuple[str, str, Literal["leader", "follower"] | None, str | None, int]
Known = tuple[str, str | None, bool]
"""State, reason, whether something is lacking."""


class LinkObserving(Part):
    """Looks at all states while somebody observes links."""

    def __init__(
        self,
        observers: LinkObservers,
        statuses: Callable[[], Iterable[LinkStatus]],
        clock: Clock,
        supervision: Supervision,
    ) -> None:
        self._clock = clock
        self._observers = observers
        self._statuses = statuses
        self._tasks = Tasks("link-observing", supervision)
        self._changed = asyncio.Event()
        self._reported: dict[Key, Known] = {}

    def start(self) -> None:
        self._tasks.keep("report", self._report_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def wake(self) -> None:
        """Some state may be another one now."""
        self._changed.set()

    async def _report_for_ever(self) -> None:
        due = self._clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(
                    max(0.0, due - self._clock.monotonic())
                ):  # wait_for may swallow that it is to end
                    await self._changed.wait()
                await asyncio.sleep(CHANGED_S)
            except TimeoutError:
                pass
            self._changed.clear()
            began = self._clock.monotonic()
            if self._observers:
                self.report(again=began >= due)
            else:
                self._reported = {}
            if began >= due:
                due = began + INTERVAL_S
            await asyncio.sleep((self._clock.monotonic() - began) / SHARE_MAX)

    def report(self, again: bool) -> None:
        """Report what is not as it was reported. ``again``: also what is reported once a second."""
        reported: dict[Key, Known] = {}
        for status in self._statuses():
            for event in events_of(status):
                key = event.link, event.remote_cluster_id, event.role, event.topic, event.partition
                reported[key] = event.state, event.reason, bool(event.lag)
                unwell = event.topic is None or event.state not in WELL or event.lag
                if self._reported.get(key) != reported[key] or (again and unwell):
                    self._observers.report(event)
        for link, remote, role, topic, partition in self._reported.keys() - reported.keys():
            self._observers.report(LinkTold(link, remote, role, topic, partition, GONE, None, None, None, None, None))
        self._reported = reported


def events_of(status: LinkStatus) -> Iterator[LinkTold]:
    """What is reported of a link: the whole first, then its partitions."""
    link, remote = status.link_name, status.remote_cluster_id
    yield LinkTold(link, remote, None, None, -1, status.state, status.reason, None, None, None, None)
    for each in status.partitions:
        yield LinkTold(
            link,
            remote,
            each.role,
            each.topic,
            each.partition,
            each.state,
            each.reason,
            each.source_end,
            each.follower_end,
            each.partition_mirror_lag,
            _age(each),
        )


def _age(status: PartitionStatus) -> float | None:
    return status.lag_seconds if status.partition_mirror_lag is not None else None
