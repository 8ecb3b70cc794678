"""Failover: follower namespaces become what clients write, without their source, which is dead or out of reach.

It says what the source's acks meant until when (the *claim*), waits until what was leased has run out, so that every
proxy of this cluster has recorded that, and has the promotion carried out without the source (``promotion``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, ResourceType, Role, TopicState, contains
from isthmus_control.rules.promotions import followed_over
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.failover_report import FailedOverNamespace, Failover, FailoverReport, GroupClaim, PartitionClaim
from isthmus_plugins.links import LeftOutName, NamespaceRef, OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link.peers import PeerState
from isthmus_plugins.replication.operations.promotion import Promotions, doubted
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.replication.sync.leases import SyncLeases
from isthmus_plugins.replication.sync.status import claimed, claimed_of_group, sayable, some_of
from isthmus_protocol.offsets_log import partition_of

SOURCE_REACHABLE: Final = "SOURCE_REACHABLE"
CLAIMS_RECORDED_S: Final = 4.0
"""So long after the source was heard last its leases have run out, and every proxy here has recorded them."""
POLL_S: Final = 0.1
NOT_FOLLOWED: Final = {TopicState.CREATING: "was not made here", TopicState.REFUSED: "does not follow"}

Progress = Callable[[int, int], None]


class Failovers:
    """``peer``: what is known of the other cluster of a link."""

    def __init__(
        self,
        context: PluginContext,
        promotions: Promotions,
        sync_leases: SyncLeases,
        peer: Callable[[str], PeerState],
        left_out: LeftOutNames,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._promotions = promotions
        self._sync_leases = sync_leases
        self._peer = peer
        self._left_out = left_out

    async def fail_over(self, link: Link, request: Failover, progress: Progress) -> FailoverReport:
        """Promote what follows over a link, or (``dry_run``) say what that would come to. Raises OperationError."""
        keys = self._wanted(link, request.namespaces)
        reachable = bool(self._peer(link.name).connections)
        if reachable and not (request.dry_run or request.although_reachable):
            raise OperationError(
                SOURCE_REACHABLE,
                f"the other cluster of link {link.name!r} is connected: `isthmus link promote` moves its writers here "
                "and loses nothing. To go on without it all the same (its proxies answer and its brokers do not), say "
                "--yes",
            )
        if not request.dry_run and not reachable:
            await self._leases_over(link.name)
        reports = {key: await self._look(link, key) for key in keys}
        if request.dry_run:
            for each in reports.values():
                await self._promotions.try_settings(link.name, each, {}, without_source=True)
        peer = self._peer(link.name)
        report = FailoverReport(
            link_name=link.name,
            dry_run=request.dry_run,
            mode=link.mode.value,
            reachable=reachable,
            last_heard_seconds=None if peer.last_heard is None else round(self._clock.monotonic() - peer.last_heard, 3),
            namespaces=list(reports.values()),
        )
        if not request.dry_run:
            progress(0, len(keys))
            move_ms = round(request.move_clients_seconds * 1000)
            await self._promotions.without_source(link.name, keys, reports, move_ms)
            progress(len(keys), len(keys))
        return report

    async def release(self, key: NamespaceKey) -> None:
        """End what links left open in a namespace that follows no more; if any did, its reservation is cleared then.

        Raises OperationError.
        """
        state = self._context.control.state
        if not state.namespaces[key].reserved:
            return
        records = [each for topic, each in state.follower_topics.items() if contains(*key, topic)]
        links = [record.link for record in records if followed_over(state, key, record.link)]
        if links:
            await self._promotions.without_source(max(links, key=links.count), [key], {})

    def _wanted(self, link: Link, namespaces: Sequence[NamespaceRef]) -> list[NamespaceKey]:
        """What was asked for: all that follows where nothing is named, and what goes together with what was begun."""
        promotions = self._context.control.state.promotions
        named = [NamespaceKey(ResourceType(each.type), each.local) for each in namespaces]
        if not named:
            named = [mapping.local for mapping in link.mappings if mapping.role is Role.FOLLOWER]
            named += [key for key, promotion in promotions.items() if promotion.link == link.name]
        if not named:
            raise OperationError("NOT_FOUND", f"this cluster follows nothing over {link.name!r}", 404)
        for key in named:
            mapping = link.mapping(*key)
            if key not in promotions and (mapping is None or mapping.role is not Role.FOLLOWER):
                raise OperationError("NOT_FOUND", f"the {key} does not follow over {link.name!r}", 404)
        together = [other for key in named if key in promotions for other in promotions[key].keys]
        return list(dict.fromkeys((*together, *named)))

    async def _leases_over(self, link_name: str) -> None:
        """Wait until no proxy here may hold that something is In-Sync."""
        while not (peer := self._peer(link_name)).connections and peer.last_heard is not None:
            if self._clock.monotonic() - peer.last_heard > CLAIMS_RECORDED_S:
                return
            await asyncio.sleep(POLL_S)

    async def _look(self, link: Link, key: NamespaceKey) -> FailedOverNamespace:
        """What a namespace has, and what becomes of it."""
        begun, mapping = self._context.control.state.promotions.get(key), link.mapping(*key)
        remote = mapping.remote_prefix if mapping is not None else begun.remote_prefix if begun is not None else ""
        report = FailedOverNamespace(type=key.type.value, local=key.prefix, remote=remote, begun=begun is not None)
        if key.type is ResourceType.PRINCIPAL:
            return report
        report.left_out = self._left_out.of_follower(link.name, key.type, remote)
        try:
            if key.type is ResourceType.CONSUMER_GROUP:
                await self._look_at_groups(link, key, report)
                return report
            topics = await self._context.cluster.topics()
            report.topics = sorted(name for name, topic in topics.items() if self._holds(key, mapping, topic))
            report.left_out += self._not_followed(link, key)
            await self._promotions.look_at_replicas(report)
            await self._promotions.look_at_transactions(link.name, topics, report)
            report.claims = await self._claims(topics, report.topics)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        records = self._context.control.state.follower_topics
        report.missing = [why for name in report.topics if name in records for why in doubted(records[name])]
        report.logs_differ = self._promotions.logs_differ(report.topics)
        report.settings_kept = [name for name in report.topics if name in records and not records[name].settings]
        return report

    def _not_followed(self, link: Link, key: NamespaceKey) -> list[LeftOutName]:
        """Topics that were to follow, and do not."""
        found = []
        for topic, record in sorted(self._context.control.state.follower_topics.items()):
            if record.link == link.name and record.state in NOT_FOLLOWED and contains(*key, topic):
                why = "" if record.reason is None else f": {record.reason.message}"
                reason = f"{topic} {NOT_FOLLOWED[record.state]}{why}"
                found.append(LeftOutName(type="topic", name=record.source_topic, reason=reason))
        return found

    @staticmethod
    def _holds(key: NamespaceKey, mapping: NamespaceMapping | None, topic: TopicInfo) -> bool:
        return contains(*key, topic.name) if mapping is None else mapping.remote_name(topic.name) is not None

    async def _claims(self, topics: Mapping[str, TopicInfo], names: Sequence[str]) -> list[PartitionClaim]:
        """What the source's acks meant, by partition."""
        places = [(name, partition) for name in names for partition in range(len(topics[name].partitions))]
        ends = await self._context.cluster.log_ends(places) if places else {}
        claims = []
        for topic, partition in places:
            record = self._context.control.state.follower_topics.get(topic)
            known = self._sync_leases.claim(topic, record.topic_id if record is not None else None, partition)
            end = ends.get((topic, partition))
            claim = PartitionClaim(
                topic=topic, partition=partition, end=end, message=claimed(known, self._clock.time())
            )
            lost = known is not None and end is not None and end < known.end
            if known is not None and lost:
                claim.message = (
                    f"the log ends at {end}, and ended at {known.end} once: what an ack meant is lost with it"
                )
            elif known is not None:
                claim.degrade_after_ms = known.terms.degrade_after_ms or None
                claim.any_of = some_of(known, known.terms, self._clock.time())
            if known is not None and claim.any_of is None and not lost:
                claim.in_sync_until_ms = sayable(known, self._clock.time())
                claim.in_sync_until_seconds_ago = _seconds_ago(claim.in_sync_until_ms, self._clock.time())
            claims.append(claim)
        return claims

    async def _look_at_groups(self, link: Link, key: NamespaceKey, report: FailedOverNamespace) -> None:
        """What the source's acks meant for committed offsets."""
        claims = self._sync_leases.groups.claims(link)
        partitions = max((each.partitions for each in claims.values()), default=0)
        here = {*await self._context.cluster.groups(), *self._sync_leases.committed_groups(link.name)}
        groups = sorted(group for group in here if contains(*key, group))
        offsets = await self._context.cluster.committed_offsets(groups) if groups else {}
        lost = False
        for group in groups:
            at = partition_of(report.remote + group.removeprefix(key.prefix), partitions) if partitions else None
            known = None if at is None else claims.get(at)
            claim = GroupClaim(group=group, partition=at, message=claimed_of_group(known, group, self._clock.time()))
            if (why := self._lost(link, group, offsets.get(group))) is not None:
                lost, claim.message = True, why
                report.group_claims.append(claim)
                continue
            if known is not None:
                terms = known.terms_of(group)
                claim.degrade_after_ms = terms.degrade_after_ms or None
                claim.any_of = some_of(known, terms, self._clock.time())
            if claim.any_of is None:
                claim.in_sync_until_ms = sayable(known, self._clock.time())
                claim.in_sync_until_seconds_ago = _seconds_ago(claim.in_sync_until_ms, self._clock.time())
            report.group_claims.append(claim)
        every = [
            None
            if claim is None or any(each.links for each in claim.terms.values())
            else sayable(claim, self._clock.time())
            for claim in map(claims.get, range(partitions))
        ]
        if None not in every and not lost:
            report.all_groups_until_ms = min((each for each in every if each is not None), default=None)

    def _lost(self, link: Link, group: str, has: Mapping[TopicPartition, CommittedOffset] | None) -> str | None:
        """Why nothing is claimed of a group that was In-Sync."""
        if has is None:
            return "its coordinator does not answer now: what it has is not known"
        if self._sync_leases.lost_offsets(link.name, group, has):
            return "its coordinator has lost commits that it had: what an ack meant is lost with them"
        return None


def _seconds_ago(until_ms: int | None, now_s: float) -> float | None:
    return None if until_ms is None else round(max(0.0, now_s - until_ms / 1000), 1)
