"""Which leases the leader end of a synchronous link grants, and what they say that acks mean.

A lease of one link of a set (``confirm: ANY k``) says: so many of these have whatever is acked, until then. So a
partition of another link that was counted on leaves no earlier than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Protocol

from isthmus_control.demands import Confirm
from isthmus_control.model import PLAIN_TERMS, AckTerms, Link, ResourceType, remote_name
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition, SyncPlace
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.group_leases import led_namespaces
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.progress import Progress
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.quorums import NOT_KNOWN, Known, Quorum, Quorums
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 1.0


async def granted_no_more(context: PluginContext, offset: int) -> None:
    """Return when no proxy grants what it did before a change at an offset of the control log."""
    while True:
        try:
            await context.control.enforced(offset)
            return
        except BrokerUnavailable as error:
            log.warning("not known whether other proxies grant leases", extra={"detail": str(error)})
            await asyncio.sleep(RETRY_S)


class States(Protocol):
    """What is known of partitions that this proxy pushes over synchronous links."""

    @property
    def progress(self) -> Mapping[LinkPartition, Progress]: ...

    def in_sync(self, key: LinkPartition) -> bool: ...

    def is_late(self, key: LinkPartition, now: float) -> bool:
        """Whether a partition may not stay in sync for as long as a lease runs."""

    def sync_of(self, key: LinkPartition) -> SyncStatus: ...


class LeaseGrants:
    """Answers the follower end's calls for leases."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        pushed: PushedPartitions,
        quorums: Quorums,
        links: SynchronousLinks,
        states: States,
        known: Known,
    ) -> None:
        """``known``: what followers have confirmed."""
        self._context = context
        self._clock = context.clock
        self._leader_end = leader_end
        self._pushed = pushed
        self._quorums = quorums
        self._links = links
        self._states = states
        self._known = known

    async def on_sync_lease(self, connection: LinkConnection, question: calls.SyncLease) -> calls.SyncLeaseAnswer:
        """Grant the follower leases for those of its streams and groups that are in sync, and report how others are.

        Those of ``in_sync_any`` say what their ``terms`` say, in place of: this side has all that is acked. Of groups
        there are such terms by the prefix that they have at the follower.
        """
        now, link = self._clock.monotonic(), self._context.control.state.links.get(connection.link_name)
        streams = [self._leader_end.stream_of(connection, each) for each in question.streams]
        records = {each.stream_id: each for each in streams if each is not None and each.copy is None}
        granted = {each: terms[""] for each in records if (terms := self._grant(records[each], connection, now))}
        others = {each: stream.key for each, stream in records.items() if each not in granted}
        keys = [LinkPartition(connection.link_name, OFFSETS_TOPIC, each) for each in question.groups]
        places = {key.partition: self._pushed.get(key) for key in keys}
        groups = {each: terms for each in places if (terms := self._grant(places[each], connection, now)) is not None}
        return calls.SyncLeaseAnswer(
            tuple(each for each, terms in granted.items() if not terms.links),
            in_sync_any=tuple(each for each, terms in granted.items() if terms.links),
            terms={each: terms for each, terms in granted.items() if terms != PLAIN_TERMS},
            groups_in_sync=tuple(each for each, terms in groups.items() if not _is_some_chosen(terms)),
            groups_in_sync_any=tuple(each for each, terms in groups.items() if _is_some_chosen(terms)),
            group_terms={each: said for each, terms in groups.items() if (said := _said_of_groups(link, terms))},
            groups_of=led_namespaces(() if link is None else link.mappings),
            lease_ms=int(LEASE_S * 1000),
            states={
                each: reported
                for each, key in others.items()
                if self._links.leads(key) and (reported := self._report(key, now)) is not None
            },
        )

    def _report(self, key: LinkPartition, now: float) -> calls.SyncSaid | None:
        """What is said of a partition without a lease. That it is In-Sync from its first record is a promise, too."""
        status = self._states.sync_of(key)
        if status.from_first:
            progress = self._states.progress.get(key)
            if progress is None or now >= self._context.lease_deadline or self._states.is_late(key, now):
                return None
            progress.granted_at = now
            # Not In-Sync yet, so none of them can be counted on to stay: what acks wait for now is promised.
            confirm = self._quorums.confirm(key.topic)
            chosen = tuple(each for each in self._links.holding(key.place) if each.link in confirm.links)
            counted = Quorum(min(confirm.count, len(chosen)), chosen) if key in chosen else Quorum(1, (key,))
            self._quorums.promise(key.place, {"": counted}, now + LEASE_S + LEASE_MARGIN_S, now)
        return _said(status)

    def _grant(self, place: SyncPlace | None, connection: LinkConnection, now: float) -> Mapping[str, AckTerms] | None:
        """Grant a lease of a partition, if nothing speaks against it: of what it promises, as ``AckRules.asked``."""
        if place is None or place.connection is not connection or not self._able(place.key, now):
            return None
        promised = self._promises(place, now)
        if promised is None:
            return None
        for quorum in promised.values():
            for key in quorum.keys:
                self._states.progress[key].counted_at = now
        self._states.progress[place.key].granted_at = now
        self._quorums.promise(place.key.place, promised, now + LEASE_S + LEASE_MARGIN_S, now)
        asked = self._quorums.asked(place.key)
        return {each: self._terms(quorum, asked[each].degrade_after_ms) for each, quorum in promised.items()}

    def _able(self, key: LinkPartition, now: float) -> bool:
        return self._states.in_sync(key) and now < self._context.lease_deadline and not self._states.is_late(key, now)

    def _promises(self, place: SyncPlace, now: float) -> Mapping[str, Quorum] | None:
        """What acks mean as long as a lease runs; None: it is not so yet."""
        key = place.key
        if self._quorums.is_chosen(key) and place.leader_epoch != self._states.progress[key].level_epoch:
            return None  # whoever led meanwhile may have acked what this process knows nothing of
        found: dict[str, Quorum] = {}
        for prefix, demands in self._quorums.asked(key).items():
            quorum = found[prefix] = self._promise(key, prefix, demands.confirm, now)
            epoch, end = self._quorums.acked(key.place, place.topic_id, prefix)
            ends = (self._known.get(each, NOT_KNOWN) for each in quorum.keys)
            if end >= 0 and sum(at >= epoch and known >= end for at, known in ends) < quorum.count:
                return None
        return found

    def _promise(self, key: LinkPartition, prefix: str, confirm: Confirm, now: float) -> Quorum:
        """It counts on those that will stay, so that no ack has to wait for a promise when another one leaves."""
        alone = Quorum(1, (key,))
        if key.link not in confirm.links:
            return alone
        others = [each for each in self._links.holding(key.place) if each.link in confirm.links]
        able = [each for each in others if prefix in self._quorums.asked(each) and self._able(each, now)]
        quorum = Quorum(min(confirm.count, len(able)), tuple(able))
        return quorum if quorum.chooses else alone

    def _terms(self, quorum: Quorum, degrade_after_ms: int) -> AckTerms:
        """A promise in words that the other side can repeat."""
        links = self._context.control.state.links
        chosen = {each.link: links[each.link].remote_cluster_id for each in quorum.keys if each.link in links}
        count = quorum.count if quorum.chooses else 0
        return AckTerms(count, chosen if quorum.chooses else {}, degrade_after_ms)


def _is_some_chosen(terms: Mapping[str, AckTerms]) -> bool:
    return any(each.links for each in terms.values())


def _said_of_groups(link: Link | None, terms: Mapping[str, AckTerms]) -> dict[str, AckTerms]:
    """Terms that say something, by the prefix that the groups have at the other end."""
    mappings = () if link is None else link.mappings
    named = {remote_name(mappings, ResourceType.CONSUMER_GROUP, prefix): each for prefix, each in terms.items()}
    return {name: each for name, each in named.items() if name is not None and each != PLAIN_TERMS}


def _said(status: SyncStatus) -> calls.SyncSaid:
    any_of = None if status.any_of is None else calls.AnyOfLinks(**status.any_of.model_dump())
    said = status.model_dump(exclude={"any_of", "from_first"})
    return calls.SyncSaid(**said, any_of=any_of, from_first=status.from_first or None)
