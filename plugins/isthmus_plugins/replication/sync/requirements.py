"""Which links must have something before it is acked, and which before a marker goes (``docs/adr/0008``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.new_partitions import UNRECORDED
from isthmus_plugins.replication.sync.progress import Phase, Progress
from isthmus_plugins.replication.sync.quorums import GroupScope, Quorum, Quorums
from isthmus_protocol.offsets_log import OFFSETS_TOPIC


class Requirements:
    """What acks, decisions and markers need, as links, records and leases are now."""

    def __init__(
        self,
        quorums: Quorums,
        links: SynchronousLinks,
        progress: Mapping[LinkPartition, Progress],
        leader_epoch: Callable[[TopicPartition], int],
        scope_of: Callable[[str], GroupScope],
        clock: Clock,
    ) -> None:
        """``progress``: of what this proxy pushes. ``scope_of``: with which other groups one is held alike."""
        self._clock = clock
        self._quorums = quorums
        self._links = links
        self._expiring = links.expiring
        self._progress = progress
        self._leader_epoch = leader_epoch
        self._scope_of = scope_of
        self._recorded: dict[tuple[TopicPartition, bool, GroupScope | None], tuple[Quorum, ...]] = {}
        """What is needed of partitions where that follows from the control log alone."""

    def changed(self) -> None:
        """The control log says something else, or which links count is known better."""
        self._recorded.clear()

    # ---- acks ----

    def needed(self, place: TopicPartition, transactional: bool, scope: GroupScope | None = None) -> Iterable[Quorum]:
        """What must be confirmed of a partition's records before they are acked; ``scope``: to these groups."""
        if self._expiring.unsure or self._expiring:
            return self._needed_now(place, transactional, scope)
        found = self._recorded.get((place, transactional, scope))
        if found is None:
            found = tuple(self._needed_now(place, transactional, scope))
            if not self._quorums.confirm(place[0], scope) and not self._links.has_young(place):
                self._recorded[place, transactional, scope] = found
        return found

    def _needed_now(self, place: TopicPartition, transactional: bool, scope: GroupScope | None) -> Iterator[Quorum]:
        now, records = self._clock.monotonic(), self._records_of(place, scope)
        yield from self._quorums.of_acks(place, records, transactional, self._stays, now, scope)
        for key in self._leased(place, now):
            if scope is None or key.link in scope.links:
                yield Quorum(1, (key,))
        if self._links.waits_for_record(place) or (transactional and self._commits_may_go(place, records, scope)):
            yield Quorum(1, (UNRECORDED,))
        if self._quorums.confirm(place[0], scope):
            epoch = self._leader_epoch(place)
            for key in _in_sync(place, records):
                progress = self._progress.get(key)
                known = progress is not None and progress.epoch == epoch
                if progress is None or not known or now < progress.seen_at + LEASE_S + LEASE_MARGIN_S:
                    yield Quorum(1, (key,))  # what the process before this one promised may depend on it

    def _commits_may_go(
        self, place: TopicPartition, records: Mapping[str, SyncRecord], scope: GroupScope | None
    ) -> bool:
        """Whether another proxy may answer EndTxn and not know yet that decisions for a partition wait, as it is new.

        All know what they have to of a partition that has reached In-Sync.
        """
        new = [link for link, record in records.items() if record.from_first]
        if not new:
            return False
        confirm = self._quorums.confirm(place[0], scope)
        known = sum(link in confirm.links for link in records.keys() - set(new))
        return known < confirm.count or any(link not in confirm.links for link in new)

    def commit_needed(self, place: TopicPartition, groups: Collection[str] | None = None) -> Iterator[Quorum]:
        """Who must have a decision to commit that lists a partition before it is acked, whichever proxy pushes that.

        A partition of the offsets topic is many groups', of several links. ``groups``: those in which the transaction
        has committed offsets there. Where they are not known (None), each link that is In-Sync needs it: one that is
        not may be down because of others."""
        if place[0] == OFFSETS_TOPIC and groups is None:
            yield from self.needed(place, False)
            return
        for scope in self._scopes(place, groups):
            yield from self._commit_quorums(place, scope)
        if self._links.waits_for_record(place):
            yield Quorum(1, (UNRECORDED,))

    def _commit_quorums(self, place: TopicPartition, scope: GroupScope | None) -> Iterator[Quorum]:
        yield from self._quorums.of_decisions(place, self._records_of(place, scope), scope)
        for key in self._leased(place, self._clock.monotonic()):
            if scope is None or key.link in scope.links:
                yield Quorum(1, (key,))

    def _scopes(self, place: TopicPartition, groups: Collection[str] | None) -> Collection[GroupScope | None]:
        """For which groups a decision is asked about; of topics there are none."""
        return {self._scope_of(group) for group in groups or ()} if place[0] == OFFSETS_TOPIC else (None,)

    # ---- decisions and markers ----

    def ordered(self, place: TopicPartition) -> Iterator[LinkPartition]:
        """Over which links no commit marker comes before the decision that it carries out, acked or not.

        All with a record, but those without which transactions have gone on, until they join again.
        """
        records = self._links.records(place)
        for link, record in records.items():
            key = LinkPartition(link, *place)
            progress = self._progress.get(key)
            suspended = progress is not None and progress.suspended and record.state is not SyncState.IN_SYNC
            if not suspended and not self._quorums.goes_without(key, records):
                yield key
        yield from self._unrecorded(place, self._clock.monotonic())

    def sent_to(self, place: TopicPartition, groups: Collection[str] | None = None) -> set[LinkPartition]:
        """Over which links a decision goes that lists a partition: where markers wait for it, or its ack.

        Not over those that transactions go without: what is acked is on enough others, and this one may be away for
        hours. ``groups``: see :meth:`commit_needed`.
        """
        if place[0] == OFFSETS_TOPIC and groups is None:
            return {key for quorum in self.commit_needed(place) for key in quorum.keys}
        found: set[LinkPartition] = set()
        for scope in self._scopes(place, groups):
            records = self._records_of(place, scope)
            acks = {key for quorum in self._commit_quorums(place, scope) for key in quorum.keys}
            without = {key for key in acks if key.link in records and self._quorums.goes_without(key, records, scope)}
            found |= acks - without
        return found if place[0] == OFFSETS_TOPIC else found.union(self.ordered(place))

    # ---- what is recorded ----

    def _records_of(self, place: TopicPartition, scope: GroupScope | None) -> dict[str, SyncRecord]:
        """Of the links that lead these groups; all without a scope."""
        records = self._links.records(place)
        return {link: each for link, each in records.items() if scope is None or link in scope.links}

    def _stays(self, key: LinkPartition) -> bool:
        progress = self._progress.get(key)
        return progress is not None and progress.phase is Phase.IN_SYNC and not progress.late

    def _leased(self, place: TopicPartition, now: float) -> Iterator[LinkPartition]:
        """Links that nothing is recorded In-Sync of, whose leases of before may still run."""
        for link in self._links.leading(place[0]) if self._expiring.unsure else ():
            record = self._links.record(link, place)
            if record is None or record.state is not SyncState.IN_SYNC:
                yield LinkPartition(link, *place)
        yield from self._expiring.running(place, now)

    def _unrecorded(self, place: TopicPartition, now: float) -> Iterator[LinkPartition]:
        """Of these, those with no record that says whether transactions go without them: what was led, or synchronous,
        and is no more."""
        for link in self._links.leading(place[0]) if self._expiring.unsure else ():
            if self._links.record(link, place) is None and not self._links.is_synchronous(link):
                yield LinkPartition(link, *place)
        for key in self._expiring.running(place, now):
            if self._links.record(key.link, place) is None:
                yield key


def _in_sync(place: TopicPartition, records: Mapping[str, SyncRecord]) -> list[LinkPartition]:
    return [LinkPartition(link, *place) for link, record in records.items() if record.state is SyncState.IN_SYNC]
