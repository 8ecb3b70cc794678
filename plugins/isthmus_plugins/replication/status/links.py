"""What operators are shown of a link, and of each partition of it that this proxy knows of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

from isthmus_control.directions import pushed_topics
from isthmus_control.levels import FROM_FIRST
from isthmus_control.model import FollowerTopic, Link, LinkMode, NamespaceMapping, ResourceType, Role, TopicState
from isthmus_control.states import LinkState, PartitionState, ReasonCode
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.links import (
    ClientMoveStatus,
    DrillStatus,
    LinkStatus,
    PartitionStatus,
    ReversalStatus,
    WaitingMapping,
)
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import AclEnds
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.log import LogState, StopReason
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.source_deletions import SourceDeletions
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import features, reasons
from isthmus_plugins.replication.link.connection import least_protected
from isthmus_plugins.replication.link.features import Protection
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.link.shared_settings import SharedSettings
from isthmus_plugins.replication.proof.background import BackgroundVerification
from isthmus_plugins.replication.status.groups import GroupStatuses
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.replication.status.mappings import mapping_statuses
from isthmus_plugins.replication.status.offsets_topics import status_of
from isthmus_plugins.replication.status.proofs import differing, note_proofs, verified_every, verified_seconds
from isthmus_plugins.replication.status.source_losses import ToldSourceLosses, note_source_losses
from isthmus_plugins.replication.status.truncations import note_truncations
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.leases import SyncLeases
from isthmus_plugins.replication.sync.status import link_state, note_followed, note_led

ASKED_WITHIN_S: Final = 2.0
"""It is not known at once whether something was written to a new partition."""
MAKING_S: Final = 5.0
"""How long a topic may be about to be made without being shown."""
NOT_ON_LINKS: Final = frozenset({"admin", "capture", "front", "gateway", "namespace-plugins", "operations"})
"""Owners of background work that no link depends on."""


class Hindered(NamedTuple):
    """Why a proxy, or a link, does not do all of its work; None: it does."""

    code: str | None = None
    message: str | None = None


class LinkStatuses:
    """Puts together what all parts of this proxy's replication know of a link."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        leader_end: LeaderEnd,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        replicas: FollowerReplicas,
        source_deletions: SourceDeletions,
        transaction_verification: TransactionVerification,
        group_statuses: GroupStatuses,
        acls: AclEnds,
        sync_partitions: SyncPartitions,
        sync_leases: SyncLeases,
        shared_settings: SharedSettings,
        told_losses: ToldSourceLosses,
        left_out: LeftOutNames,
        background_verification: BackgroundVerification,
        trouble: Callable[[], str | None],
        settings_kept: Callable[[str], list[str]],
        waiting: Callable[[Link], list[WaitingMapping]],
        reversals: Callable[[str], list[ReversalStatus]],
        client_moves: Callable[[str], list[ClientMoveStatus]],
        ring: Callable[[str, NamespaceMapping], str | None],
        drill: Callable[[str], DrillStatus | None],
    ) -> None:
        """``trouble``: what keeps a promotion from going on. ``waiting``: pairs that are not granted yet.
        ``reversals``: those of a link that are under way. ``client_moves``: whose clients are told, of a link.
        ``ring``: what is wrong with a pair of a link that follows itself. ``drill``: the copy of what follows over a
        link."""
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._leader_end = leader_end
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._replicas = replicas
        self._source_deletions = source_deletions
        self._transaction_verification = transaction_verification
        self._group_statuses = group_statuses
        self._acls = acls
        self._sync_partitions = sync_partitions
        self._sync_leases = sync_leases
        self._shared_settings = shared_settings
        self._told_losses = told_losses
        self._left_out = left_out
        self._background_verification = background_verification
        self._trouble = trouble
        self._settings_kept = settings_kept
        self._waiting = waiting
        self._reversals = reversals
        self._client_moves = client_moves
        self._ring = ring
        self._drill = drill

    def of(self, link: Link) -> LinkStatus:
        """One link with its partitions."""
        peer = self._peers.state(link.name)
        connected = bool(peer.connections)
        partitions = self._leader_partitions(link, connected) + self._follower_partitions(link, connected)
        note_truncations(self._context.control.state, link.name, partitions)
        note_source_losses(self._context.control.state, link.name, partitions)
        note_led(link, self._sync_partitions.sync_of, partitions)
        state_here, leases = self._context.control.state, self._sync_leases
        note_followed(state_here, link, leases, self._clock, partitions, self._follower_topics.is_new)
        note_proofs(state_here, self._background_verification, partitions)
        groups, acls = self._group_statuses.of(link, connected), self._acls.statuses(link)
        # A namespace that is attached to a link that is In-Sync leaves it so: of that alone it is not In-Sync yet.
        of_pair = partial(self._all_else_is_in_sync, link, self._sync_partitions.unshown(link.name))
        of_link = partial(of_pair, self._sync_partitions.new.is_taken_up)
        of_mapping = partial(of_pair, self._sync_partitions.new.is_ready)
        commits = partial(self._group_statuses.commits, link)
        state, hindered = link_state(link, connected, partitions, of_link), self._hindered()
        behind, stopped = self._peers.behind(link.name), self._context.control.state.lookup.stopped.get(link.name)
        why = Hindered(ReasonCode.PEER_VERSION_UNSUPPORTED, behind) if behind else Hindered(peer.reason, peer.message)
        if stopped is not None:
            why = Hindered(ReasonCode.CONTROL_RECORD_UNKNOWN, stopped)
        rings = {each.local: ring for each in link.mappings if (ring := self._ring(link.name, each)) is not None}
        if rings and why == Hindered():
            why = Hindered(ReasonCode.FOLLOWS_ITSELF, next(iter(rings.values())))
        least, waiting = least_protected(self._peers.connections(link.name)), self._waiting(link)
        warned = self._warned(link.name, Hindered(why.code or hindered.code, why.message or hindered.message))
        if waiting and warned == Hindered():
            warned = Hindered(waiting[0].reason, f"{waiting[0].local!r} is not attached: {waiting[0].message}")
        if warned == Hindered() and least is not None and least.protection is Protection.NONE:
            warned = Hindered(ReasonCode.NOT_ENCRYPTED, features.in_the_clear(least.peer.get("proxy")))
        if warned == Hindered() and (found := differing(partitions)) is not None:
            warned = Hindered(*found)
        if (hindered.code is not None or rings) and state is LinkState.FOLLOWING:
            state = LinkState.CATCHING_UP  # nobody may be looking at what is new, or nobody leads it
        return LinkStatus(
            link_name=link.name,
            link_id=link.link_id,
            local_cluster_id=link.local_cluster_id,
            remote_cluster_id=link.remote_cluster_id,
            remote=list(link.remote_addresses),
            dials=link.dials,
            mode=link.mode.value,
            sync_confirm_timeout_ms=link.sync_confirm_timeout_ms,
            config=link.config,
            verify_every_seconds=verified_every(state_here, link),
            verified_seconds=verified_seconds(partitions),
            state=state,
            reason=warned.code,
            message=warned.message,
            encryption=None if least is None else least.protection.value,
            secret_rotating=link.next_secret is not None,
            last_heard_seconds=None if peer.last_heard is None else round(self._clock.monotonic() - peer.last_heard, 3),
            mappings=mapping_statuses(link, connected, partitions, groups, acls, of_mapping, commits, rings),
            waiting=waiting,
            transaction_verification=self._transaction_verification.status()
            if any(mapping.role is Role.FOLLOWER for mapping in link.mappings)
            else None,
            reversals=self._reversals(link.name),
            client_moves=self._client_moves(link.name),
            drill=self._drill(link.name),
            promoting=sorted(
                promotion.prefix
                for promotion in self._context.control.state.promotions.values()
                if promotion.link == link.name
            ),
            acls=acls,
            offsets_topics=[status_of(mapping) for mapping in link.offsets_topics],
            partitions=partitions,
            groups=groups,
            group_warnings=self._group_statuses.warnings(link),
            settings_kept=self._settings_kept(link.name),
            left_out=self._left_out.of(link.name),
            left_out_more=self._left_out.more(link.name),
            source_losses=self._told_losses.of(link),
            source_losses_left_off=self._told_losses.left_off(link.name),
        )

    def _all_else_is_in_sync(
        self,
        link: Link,
        unshown: Sequence[TopicPartition],
        holds_to_come: Callable[[str, str], bool],
        mapping: NamespaceMapping,
        has_some: bool,
    ) -> bool:
        """Whether a pair of a synchronous link is In-Sync but for the partitions of it that this proxy has.

        Where it is led, acks of topics to come have to wait for the other side (``holds_to_come``, by link and
        prefix); below the control log's level that knows of those, it goes by the topics that there are. What has no
        leader now, or has just got another one, may be no proxy's, and counts for all (``unshown``). Where it follows
        and this proxy has none, other proxies have all, and all was In-Sync: what became of that since, they show.
        Where there is no topic, the source says so of those to come.
        """
        if mapping.role is Role.LEADER:
            goes_by_topics = has_some and self._context.control.state.level < FROM_FIRST
            holds = goes_by_topics or holds_to_come(link.name, mapping.local_prefix)
            return holds and not any(mapping.holds(topic) for topic, _ in unshown)
        if has_some:
            return True
        topics = self._follower_topics
        followed = [
            record
            for record in self._followed(link)
            if record.state is TopicState.FOLLOWING and not topics.is_new(record.topic) and mapping.holds(record.topic)
        ]
        return all(map(self._was_in_sync_elsewhere, followed)) if followed else topics.holds_new(link.name)

    def _was_in_sync_elsewhere(self, record: FollowerTopic) -> bool:
        """Whether a topic that follows was In-Sync as a whole, and this proxy fronts no leader of it."""
        topic_id = record.topic_id or ""
        sync_record = partial(self._context.control.state.sync_record, record.link, record.topic, topic_id)
        partitions = self._replicas.elsewhere(topic_id)
        return partitions is not None and all(
            (known := sync_record(partition)) is not None and known.reached for partition in range(partitions)
        )

    def _hindered(self) -> Hindered:
        """What keeps this proxy from its work on links now, if anything."""
        for each in self._context.supervision.failing:
            if each.name.partition("/")[0] not in NOT_ON_LINKS:
                return Hindered(ReasonCode.INTERNAL_ERROR, each.describe(self._clock.monotonic()))
        throttled = self._context.cluster.throttled()
        return Hindered() if throttled is None else Hindered(ReasonCode.THROTTLED, throttled)

    def _warned(self, link_name: str, trouble: Hindered) -> Hindered:
        """``trouble``, or what else somebody should look at although all goes on."""
        told = trouble.message or self._shared_settings.refused.get(link_name) or self._trouble()
        lacking = self._replicas.of_own_topics()
        if told is None and trouble.code is None and lacking is not None:
            return Hindered(lacking.code, lacking.message)
        return Hindered(trouble.code, told)

    def _leader_partitions(self, link: Link, connected: bool) -> list[PartitionStatus]:
        found = []
        now = self._clock.monotonic()
        gone = self._leader_end.discovery.knows_gone(link)
        for key, prepared in sorted(self._leader_end.discovery.led.items()):
            if key.link != link.name or (gone and not any(each.holds(key.topic) for each in pushed_topics(link))):
                continue
            stream = self._leader_end.stream(key)
            stopped = self._leader_end.stopped.get(key)
            waiting = reasons.waiting_state(stopped.code) if stopped is not None else None
            empty, new_for_s = self._leader_end.discovery.is_empty(key), self._leader_end.discovery.new_for_s(key)
            told = stopped is not None or stream is not None or new_for_s is None or new_for_s > ASKED_WITHIN_S
            if empty is None and not told and link.mode is LinkMode.ASYNCHRONOUS:
                continue  # whether it lacks something is being asked
            status = PartitionStatus(
                topic=key.topic,
                remote_topic=prepared.remote_topic if prepared is not None else "",
                partition=key.partition,
                role="leader",
                state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
            )
            if stopped is not None:
                status.reason, status.message = stopped.code, stopped.message
            closed = stopped is None or stopped.code == reasons.CLOSED  # why, the other end says when it is asked again
            if closed and prepared is not None and (stopped is None or prepared.code is not None):
                status.reason, status.message = prepared.code, prepared.message
                waiting = reasons.waiting_state(prepared.code or "")
            if stream is not None:
                status.source_end, status.follower_end = stream.source_end, stream.acked
                status.partition_mirror_lag = stream.lag
                status.lag_seconds = stream.age_ms(now) / 1000
                caught_up = stream.lag == 0 and (stream.at_end or (empty and not stream.source_end))
                if caught_up and not stream.connection.lost:  # else it is about to be opened again, over another one
                    status.state = PartitionState.FOLLOWING
                if stream.late_marker is not None:
                    late = reasons.decision_not_stored(stream.late_marker)
                    status.reason, status.message = late.code, late.message
            elif (alone := self._leader_end.lag_without_stream.of(key)) is not None:
                status.source_end, status.follower_end = alone.source_end, alone.acked
                status.partition_mirror_lag, status.lag_seconds = alone.lag, alone.age_s(now)
            if stream is None and new_for_s is not None and empty and connected and not status.source_end:
                status.state = PartitionState.FOLLOWING
            if waiting is not None:
                status.state = waiting
            found.append(status)
        return found

    def _followed(self, link: Link) -> Iterator[FollowerTopic]:
        """Its topics here, without those that it is about to have no more."""
        for record in self._context.control.state.follower_topics.values():
            if record.link == link.name and not self._follower_end.is_leaving(link.name, record.topic):
                yield record

    def _follower_partitions(self, link: Link, connected: bool) -> list[PartitionStatus]:
        streams = {
            stream.place: stream
            for stream in self._follower_end.streams()
            if stream.link_name == link.name and not self._follower_end.is_leaving(link.name, stream.topic)
        }
        found = [self._follower_status(stream, connected) for _, stream in sorted(streams.items())]
        state = self._context.control.state
        for record in sorted(self._followed(link), key=attrgetter("topic")):
            if record.state is TopicState.REFUSED and record.reason is not None:
                found.append(
                    PartitionStatus(
                        topic=record.topic,
                        remote_topic=record.source_topic,
                        partition=-1,
                        role="follower",
                        state=PartitionState.REFUSED,
                        reason=record.reason.code,
                        message=record.reason.message,
                    )
                )
            elif record.state is TopicState.CREATING and not record.deleting:
                found += self._not_made(record, connected)
            elif record.state is TopicState.FOLLOWING and self._context.fronted_brokers is None:
                # No stream of it was opened since this process started.
                history = state.histories.get(record.topic)
                for partition in sorted(history.partitions) if history is not None else ():
                    if (record.topic, partition) not in streams:
                        found.append(self._without_stream(record, partition, connected))
        return found + self._not_recorded(link, connected)

    def _not_recorded(self, link: Link, connected: bool) -> list[PartitionStatus]:
        """Topics that wait before anything is recorded of them."""
        found = []
        for topic, why in sorted(self._follower_topics.refused.items()):
            following = self._context.control.state.lookup.following(ResourceType.TOPIC, topic)
            if why.code != ReasonCode.TRANSACTIONS_ENDING or following is None or following.link.name != link.name:
                continue
            if topic not in self._context.control.state.follower_topics:
                status = PartitionStatus(
                    topic=topic,
                    remote_topic=following.remote_name,
                    partition=-1,
                    role="follower",
                    state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
                    reason=why.code,
                    message=why.message,
                )
                found.append(status)
        return found

    def _not_made(self, record: FollowerTopic, connected: bool) -> list[PartitionStatus]:
        """A topic that was about to be made and is not: its brokers refuse it, or it takes its time."""
        refused = self._follower_topics.refused.get(record.topic)
        if refused is None and self._clock.time() - record.recorded_ms / 1000 < MAKING_S:
            return []
        status = PartitionStatus(
            topic=record.topic,
            remote_topic=record.source_topic,
            partition=-1,
            role="follower",
            state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
        )
        if refused is not None:
            status.state = reasons.waiting_state(refused.code) or status.state
            status.reason, status.message = refused.code, refused.message
        return [status]

    def _without_stream(self, record: FollowerTopic, partition: int, connected: bool) -> PartitionStatus:
        status = PartitionStatus(
            topic=record.topic,
            remote_topic=record.source_topic,
            partition=partition,
            role="follower",
            state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
        )
        refused = self._follower_topics.refused.get(record.topic)
        if self._follower_topics.source_is_gone(record):
            why = self._source_deletions.reason(record)
            status.state, status.reason = PartitionState.STOPPED, ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED
            status.message = why.message if why is not None else reasons.deleted(record.source_topic, record.topic)
        elif refused is not None:
            status.state = reasons.waiting_state(refused.code) or status.state
            status.reason, status.message = refused.code, refused.message
        elif not connected:
            status.reason = ReasonCode.NOT_CONNECTED_YET
        elif self._follower_topics.is_empty(record.topic, partition):
            status.state = PartitionState.FOLLOWING
        return status

    def _follower_status(self, stream: FollowerStream, connected: bool) -> PartitionStatus:
        follower_log, reason = stream.follower_log, stream.reason
        status = PartitionStatus(
            topic=stream.topic,
            remote_topic=stream.source_topic,
            partition=stream.partition,
            role="follower",
            state=PartitionState.CATCHING_UP,
            source_end=follower_log.source_end,
            follower_end=follower_log.end,
            partition_mirror_lag=stream.lag,
            lag_seconds=round(stream.lag_seconds, 3),
        )
        unknown_s = stream.lag_unknown_s(self._clock.monotonic())
        if unknown_s is not None:
            status.partition_mirror_lag = status.lag_seconds = None
            status.lag_unknown_seconds = round(unknown_s, 3)
        refused = self._follower_topics.refused.get(stream.topic)
        topic_settings = self._follower_topics.settings
        record = self._context.control.state.follower_topics.get(stream.topic)
        settings = topic_settings.reason(stream.topic) or reasons.doubted(record, stream.partition)
        settings = settings or self._replicas.reason(stream.topic)
        if refused is not None:
            reason = StopReason(refused.code, refused.message)
        kept = None if record is None else self._source_deletions.reason(record)
        if kept is not None and reason is not None and reason.code == kept.code:
            reason = StopReason(kept.code, kept.message)
        if reason is not None:
            status.reason, status.message = reason
        elif settings is not None:
            status.reason, status.message = settings.code, settings.message
        waiting = reasons.waiting_state(reason.code) if reason is not None else None
        knows_end = stream.knows_end or self._follower_topics.is_empty(stream.topic, stream.partition)
        if follower_log.state is LogState.DIVERGED:
            waiting = PartitionState.DIVERGED
        if waiting is not None:
            status.state = waiting
        elif not connected:
            status.state = PartitionState.DISCONNECTED
        elif not stream.closed and knows_end and not stream.lag and reason is None and unknown_s is None:
            status.state = PartitionState.FOLLOWING
        elif unknown_s is not None and status.reason is None:
            status.reason = ReasonCode.SOURCE_END_UNKNOWN
            status.message = f"the source has not said for {unknown_s:.0f} s where its log ends"
        return status
