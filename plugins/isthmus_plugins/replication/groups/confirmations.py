"""Confirms to the leader ends of synchronous links how far this cluster's coordinators have what those pushed.

What the source's open transactions have committed counts as soon as it is stored here, for a failover.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.groups.applied_offsets import AppliedOffsets
from isthmus_plugins.replication.groups.followed_group import FollowedGroup
from isthmus_plugins.replication.groups.open_losses import OpenLosses, SourcePartition
from isthmus_plugins.replication.in_doubt.pending_offsets import (
    PendingName,
    PendingOffset,
    PendingOffsets,
    StillOpen,
)
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import CALL_TIMEOUT_S, LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")


class _Confirmed(NamedTuple):
    """To whom a partition is confirmed, and how far it is."""

    connection: LinkConnection
    epoch: int
    partitions: int
    applied: AppliedOffsets


class ReceivedSoFar(NamedTuple):
    """What had been received of a partition at some time."""

    key: SourcePartition
    applied: AppliedOffsets
    number: int


class Confirmations:
    """All partitions of sources' offsets topics whose leader ends want to know."""

    def __init__(self, context: PluginContext, store: TransactionStore, tasks: Tasks, losses: OpenLosses) -> None:
        self._losses = losses
        self._pending_offsets = PendingOffsets(context, store)
        self._tasks = tasks
        self._confirmed: dict[SourcePartition, _Confirmed] = {}
        self._untold = rare_lines(log, "commits not confirmed", logging.INFO)

    def __contains__(self, key: SourcePartition) -> bool:
        return key in self._confirmed

    def begin(self, key: SourcePartition, connection: LinkConnection, epoch: int, partitions: int) -> None:
        """Confirm a partition from now on; it is pushed from its start.

        ``epoch``: the source's leader epoch. ``partitions``: of the source's offsets topic.
        """
        self._confirmed[key] = _Confirmed(connection, epoch, partitions, AppliedOffsets())

    def end(self, key: SourcePartition) -> None:
        """Confirm a partition no more."""
        self._confirmed.pop(key, None)

    def received(
        self,
        key: SourcePartition,
        said: calls.Upto,
        pending: Sequence[PendingOffset],
        waited: Iterable[tuple[str, TopicPartition]],
    ) -> None:
        """Note what is to be there before a part is applied; have what is pending at the source stored.

        ``pending``: commits of open transactions. ``waited``: groups and places of the others.
        """
        connection, _, _, applied = self._confirmed[key]
        names = [(each.group, each.name) for each in pending]
        applied.received([*waited, *names], said.upto, said.settled, None if said.open is None else dict(said.open))
        if pending:
            so_far = ReceivedSoFar(key, applied, applied.number)
            self._tasks.keep("prepare", partial(self._store_pending, connection, so_far, pending))

    def received_so_far(self, key: SourcePartition) -> ReceivedSoFar | None:
        """What has been received of a partition by now; None: it is not confirmed."""
        confirmed = self._confirmed.get(key)
        return None if confirmed is None else ReceivedSoFar(key, confirmed.applied, confirmed.applied.number)

    def resolve(self, group: FollowedGroup) -> None:
        """Note what the coordinator has of a group as it is wanted."""
        confirmed = self._confirmed.get(group.source)
        if confirmed is not None:
            confirmed.applied.resolve(
                group.group, lambda what: not isinstance(what, PendingName) and group.has_as_wanted(what)
            )

    def has(self, so_far: ReceivedSoFar, group: FollowedGroup, places: Iterable[TopicPartition]) -> None:
        """What had been received of a group in these places is there."""
        for place in places:
            so_far.applied.has(group.group, place, so_far.number)
        self.report([so_far.key])

    def report(self, keys: Iterable[SourcePartition]) -> None:
        """Report to leader ends how far their commits are here. ``keys``: partitions that may have moved."""
        parts: dict[LinkConnection, list[calls.Applied]] = {}
        for key in keys:
            confirmed = self._confirmed.get(key)
            if confirmed is None or key in self._losses.said:
                continue  # what was lost of before is known by what was confirmed of before
            connection, epoch, _, applied = confirmed
            moved = applied.advance()
            if (known := applied.to_store()) is not None:
                self._tasks.keep("still-open", partial(self._store_open, key, confirmed, *known))
            if moved:
                self._losses.confirmed(key, epoch, applied.upto)
                parts.setdefault(connection, []).append(calls.Applied(key[1], epoch, applied.upto))
                entries = self._pending_offsets.void_before(connection, key[1], applied.stable_offset)
                if entries:
                    self._tasks.start("void", self._pending_offsets.forget(entries))
        for connection, found in parts.items():
            if not connection.lost:  # if it is, whoever pushes next pushes all
                answer = connection.begin_call(calls.GroupApplied(tuple(found)))
                self._tasks.start("applied", self._answered(connection, answer(CALL_TIMEOUT_S)))

    async def _store_pending(
        self, connection: LinkConnection, so_far: ReceivedSoFar, pending: Sequence[PendingOffset]
    ) -> None:
        await self._pending_offsets.store(connection, so_far.key[1], pending)
        for each in pending:
            so_far.applied.has(each.group, each.name, so_far.number)
        self.report([so_far.key])

    async def _store_open(self, key: SourcePartition, confirmed: _Confirmed, upto: int, still_open: StillOpen) -> None:
        await self._pending_offsets.still_open(confirmed.connection, key[1], upto, still_open)
        confirmed.applied.stored()
        self.report([key])

    def stable_offset(self, link_name: str, partition: int) -> int:
        """Before which offset of a source's offsets topic all transactions have ended, and what they committed is here;
        -1: not known."""
        confirmed = self._confirmed.get((link_name, partition))
        return -1 if confirmed is None else confirmed.applied.stable_offset

    def confirmed_over(self) -> Iterator[tuple[LinkConnection, int, int]]:
        """The partitions that are confirmed: to whom, which, and how many the source's offsets topic has."""
        return ((each.connection, key[1], each.partitions) for key, each in self._confirmed.items())

    async def _answered(self, connection: LinkConnection, answer: Awaitable[calls.Done]) -> None:
        try:
            await answer
        except (LinkRejected, LinkLost, TimeoutError) as error:
            link_name = connection.link_name
            self._untold.one(link_name, {"link": link_name, "detail": str(error)})
