"""Which leases the leader end of a synchronous link grants, and what they say that acks mean.

A lease of one link of a set (``confirm: ANY k``) says: so many of these have whatever is acked, until then. So a
partition of another link that was counted on leaves no earlier than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, Protocol

from isthmus_control.codec import to_json
from isthmus_control.model import PLAIN_TERMS, AckTerms
from isthmus_plugins.api import BrokerUnavailable, PluginContext
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.replication.ack_rules import NOT_KNOWN, AckRules, Clause, Known
from isthmus_plugins.replication.connection import LinkConnection
from isthmus_plugins.replication.group_leases import led_namespaces
from isthmus_plugins.replication.leader import LeaderEnd
from isthmus_plugins.replication.leader_stream import LedPartition
from isthmus_plugins.replication.sync_places import GroupPlaces, SyncPlace
from isthmus_plugins.replication.sync_progress import Progress
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

LEASE_S: Final = 1.5
"""How long the follower may say that a partition is In-Sync, from when it asked. Less than the shortest time that acks
may wait."""
LEASE_MARGIN_S: Final = 0.25
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
    def progress(self) -> Mapping[LedPartition, Progress]: ...

    @property
    def known(self) -> Known: ...

    def in_sync(self, key: LedPartition) -> bool: ...

    def late_since(self, key: LedPartition) -> float | None:
        """Since when something waits for what a link has not confirmed, or did not wait."""

    def timeout_s(self, link_name: str) -> float: ...

    def leads(self, key: LedPartition) -> bool: ...

    def sync_of(self, key: LedPartition) -> SyncStatus: ...


class SyncGrants:
    """Answers the follower end's calls for leases."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        rules: AckRules,
        holding: Callable[[tuple[str, int]], Sequence[LedPartition]],
        states: States,
    ) -> None:
        """``holding``: over which links a partition is recorded In-Sync."""
        self._context = context
        self._leader_end = leader_end
        self._groups = groups
        self._rules = rules
        self._holding = holding
        self._states = states

    async def on_sync_lease(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Grant the follower leases for those of its streams and groups that are in sync, and tell how others are.

        Those of ``in_sync_any`` say what their ``terms`` say, in place of: this side has all that is acked.
        """
        now, link = monotonic(), self._context.control.state.links.get(connection.link_name)
        streams = [self._leader_end.stream_of(connection, int(each)) for each in params["streams"]]
        records = {each.stream_id: each for each in streams if each is not None and each.copy is None}
        granted = {each: clause for each in records if (clause := self._grant(records[each], connection, now))}
        terms = {each: self._terms(records[each].key, clause) for each, clause in granted.items()}
        others = {each: stream.key for each, stream in records.items() if each not in granted}
        keys = [LedPartition(connection.link_name, OFFSETS_TOPIC, int(each)) for each in params.get("groups", ())]
        return {
            "in_sync": [each for each, clause in granted.items() if not clause.chooses],
            "in_sync_any": [each for each, clause in granted.items() if clause.chooses],
            "terms": {str(each): to_json(said) for each, said in terms.items() if said != PLAIN_TERMS},
            "groups_in_sync": [key.partition for key in keys if self._grant(self._groups.place(key), connection, now)],
            "groups_of": led_namespaces(() if link is None else link.mappings),
            "lease_ms": int(LEASE_S * 1000),
            "states": {
                str(each): self._states.sync_of(key).model_dump(exclude_none=True)
                for each, key in others.items()
                if self._states.leads(key)
            },
        }

    def _grant(self, place: SyncPlace | None, connection: LinkConnection, now: float) -> Clause | None:
        """Grant a lease of a partition, if nothing speaks against it: of what it promises."""
        if place is None or place.connection is not connection or not self._able(place.key, now):
            return None
        clause, counted = self._promise(place, now)
        if clause is None:
            return None
        for key in counted:
            self._states.progress[key].counted_at = now
        self._states.progress[place.key].granted_at = now
        self._rules.promise(place.key.place, clause, now + LEASE_S + LEASE_MARGIN_S, now)
        return clause

    def is_late(self, key: LedPartition, now: float) -> bool:
        """Whether a partition may not stay in sync for as long as a lease runs."""
        since, timeout_s = self._states.late_since(key), self._states.timeout_s(key.link)
        return since is not None and now - since >= timeout_s - LEASE_S - LEASE_MARGIN_S

    def _able(self, key: LedPartition, now: float) -> bool:
        return self._states.in_sync(key) and now < self._context.lease_deadline and not self.is_late(key, now)

    def _promise(self, place: SyncPlace, now: float) -> tuple[Clause | None, Sequence[LedPartition]]:
        """What acks mean as long as a lease runs, and of which partitions that depends; None: it is not so yet.

        It counts on those that will stay, so that no ack has to wait for a promise when another one leaves.
        """
        key = place.key
        alone = Clause(1, (key,))
        confirm = self._rules.confirm(key.topic)
        clause, counted = alone, [key]
        if key.link in confirm.links:
            able = [each for each in self._holding(key.place) if each.link in confirm.links]
            able = [each for each in able if self._able(each, now)]
            clause, counted = Clause(min(confirm.count, len(able)), tuple(able)), able
            if not clause.chooses:
                clause, counted = alone, [key]
            if place.leader_epoch != self._states.progress[key].level_epoch:
                return None, ()  # whoever led meanwhile may have acked what this process knows nothing of
        epoch, end = self._rules.acked(key.place, place.topic_id)
        ends = (self._states.known.get(each, NOT_KNOWN) for each in clause.keys)
        has = sum(at >= epoch and known >= end for at, known in ends)
        return (clause, counted) if end < 0 or has >= clause.count else (None, ())

    def _terms(self, key: LedPartition, clause: Clause) -> AckTerms:
        """A promise in words that the other side can repeat."""
        links = self._context.control.state.links
        chosen = {each.link: links[each.link].remote_cluster_id for each in clause.keys if each.link in links}
        after_ms = self._rules.demands(key.topic).degrade_after_ms
        return AckTerms(clause.count, chosen, after_ms) if clause.chooses else AckTerms(degrade_after_ms=after_ms)
