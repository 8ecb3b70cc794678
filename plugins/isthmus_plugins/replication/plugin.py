"""The replication plugin: its hooks, and what of the process they reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import LinkMode
from isthmus_plugins.api import RequestHook
from isthmus_plugins.confirmation import Confirmer
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.link_operations import LinkOperations
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import AclEnds
from isthmus_plugins.replication.assembly import _Ends
from isthmus_plugins.replication.client_views.leader_epochs import LeaderEpochs
from isthmus_plugins.replication.client_views.syncing_topics import SyncingTopics
from isthmus_plugins.replication.client_views.time_offsets import TimeOffsets
from isthmus_plugins.replication.client_views.topic_id_aliases import FormerIds
from isthmus_plugins.replication.client_views.truncating_topics import WithheldTopics
from isthmus_plugins.replication.comparison.digests import Verification
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.in_doubt.sweep import TransactionSweep
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.link.shared_settings import LinkMirror
from isthmus_plugins.replication.operations.service import LinkService
from isthmus_plugins.replication.operations.verify import LinkVerification
from isthmus_plugins.replication.status.groups import GroupStatuses
from isthmus_plugins.replication.status.observing import LinkTelling
from isthmus_plugins.replication.status.truncations import truncation_metrics
from isthmus_plugins.replication.sync.confirmer import SyncLeader
from isthmus_plugins.replication.sync.leases import SyncLeases
from isthmus_plugins.replication.transactions.decisions import Decisions
from isthmus_plugins.replication.truncation.common_log import CommonLog
from isthmus_plugins.replication.truncation.missed_deletions import MissedDeletions
from isthmus_plugins.replication.truncation.steps import Truncations


class ReplicationPlugin:
    """Both ends of this proxy's links."""

    _service: LinkService | None = None

    @hookimpl
    async def isthmus_start(self, context: PluginContext) -> None:
        self._context = context
        self._former_ids = FormerIds()
        self._withheld = WithheldTopics()
        self._leader_epochs = LeaderEpochs()
        self._syncing = SyncingTopics(context)
        self._follower_end = FollowerEnd(context)
        self._store = TransactionStore(context, self._follower_end.decided)
        self._follower_end.awaits = self._store.awaits
        follower_topics = FollowerTopics(context)
        verification = Verification(context)
        link_verification = LinkVerification(context, verification)
        self._transaction_verification = TransactionVerification(context)
        self._group_follower = GroupFollower(context, self._store)
        self._follower_end.on_stored = self._group_follower.data_came
        self._sweep = TransactionSweep(context, self._store, self._group_follower.settled)
        common_log = CommonLog(context, verification)
        self._time_offsets = TimeOffsets(context, lambda: self._peers)
        self._peers = LinkPeers(
            context,
            handlers={
                "prepare_topics": follower_topics.prepare_topics,
                "open_stream": self._follower_end.open_stream,
                "close_stream": self._follower_end.close_stream,
                "doubt_deletions": self._follower_end.doubt_deletions,
                "ended_transactions": lambda connection, params: self._leader_end.ended_transactions(
                    connection, params
                ),
                "offsets_for_times": self._time_offsets.on_offsets_for_times,
                "digest": verification.on_digest,
                "ends": verification.on_ends,
                "limits": common_log.on_limits,
                "count_offsets": verification.on_count_offsets,
                "linked_topics": link_verification.on_linked_topics,
                "linked_groups": link_verification.groups.on_linked_groups,
                "committed": link_verification.groups.on_committed,
                "high_watermarks": link_verification.groups.on_high_watermarks,
                "group_offsets": self._group_follower.group_offsets,
                "group_applied": lambda connection, params: self._group_leader.on_applied(connection, params),
                "group_pending": self._group_follower.group_pending,
                "end_group_offsets": self._group_follower.end_group_offsets,
                "plan_attach": lambda connection, params: self._links.attaching.on_plan_attach(connection, params),
                "attach": lambda connection, params: self._links.attaching.on_attach(connection, params),
                "detach": lambda connection, params: self._links.attaching.on_detach(connection, params),
                "completing_transactions": lambda connection, params: self._links.on_completing_transactions(
                    connection, params
                ),
                "log_ends": lambda connection, params: self._links.on_log_ends(connection, params),
                "topic_settings": lambda connection, params: self._links.on_topic_settings(connection, params),
                "merge_settings": lambda connection, params: self._mirror.on_merge_settings(connection, params),
                "sync_lease": lambda connection, params: self._sync_leader.grants.on_sync_lease(connection, params),
                "decide": self._store.on_decide,
                "led_topics": lambda connection, params: self._links.attaching.on_led_topics(connection, params),
                "acls": lambda connection, params: self._acls.follower.on_acls(connection, params),
                "check_acls": lambda connection, params: self._links.attaching.on_check_acls(connection, params),
                "choose_offsets_topic": lambda connection, params: self._links.on_choose_offsets_topic(
                    connection, params
                ),
                "delete_link": lambda connection, params: self._links.creation.on_delete_link(connection, params),
            },
            create_handlers={
                "create_link": lambda connection, params: self._links.creation.on_create_link(connection, params),
                "undo_create_link": lambda connection, params: self._links.creation.on_undo_create_link(
                    connection, params
                ),
            },
            receiver=lambda link_name: _Ends(self._leader_end, self._follower_end, self._group_follower, self._store),
            on_change=lambda link_name: self._wake(),
        )
        self._acls = AclEnds(context, self._peers)
        self._leader_end = LeaderEnd(context, self._peers, verification)
        self._mirror = LinkMirror(context, self._peers.connections)
        self._group_leader = GroupLeader(context, self._peers)
        self._sync_leader = SyncLeader(context, self._leader_end, self._group_leader, self._mirror.agreed)
        self._decisions = Decisions(context, self._leader_end, self._group_leader, self._peers, self._sync_leader)
        self._sync_leases = SyncLeases(
            context, self._follower_end, self._group_follower, self._store, self._syncing.reached
        )
        self._group_status = GroupStatuses(context, self._group_leader, self._group_follower, self._sync_leader.sync_of)
        self._service = LinkService(
            context,
            self._peers,
            self._leader_end,
            self._follower_end,
            follower_topics,
            link_verification,
            self._transaction_verification,
            self._group_follower,
            self._group_status,
            self._acls,
            self._sync_leader,
            self._sync_leases,
            self._store,
            self._mirror,
        )
        self._telling = LinkTelling(context.link_observers, self._service.statuses)
        self._truncations = Truncations(
            context, self._peers, self._follower_end, verification, common_log, follower_topics
        )
        self._missed_deletions = MissedDeletions(
            context, self._peers, self._follower_end, common_log, self._truncations.begin
        )
        context.control.subscribe(self._control_changed)
        await self._peers.start()
        self._control_changed(context.control.state)
        self._store.start()
        self._sweep.start()
        self._follower_end.start()
        self._leader_end.start()
        self._mirror.start()
        self._sync_leader.start()
        self._decisions.start()
        self._sync_leases.start()
        self._transaction_verification.start()
        self._service.start()
        self._group_follower.start()
        self._group_leader.start()
        self._acls.leader.start()
        self._truncations.start()
        self._missed_deletions.start()
        self._telling.start()

    def _wake(self) -> None:
        self._telling.changed()
        self._leader_end.wake()
        self._group_leader.wake()
        self._acls.leader.wake()
        self._mirror.wake()

    @property
    def _links(self) -> LinkService:
        assert self._service is not None
        return self._service

    def _control_changed(self, state: ControlState) -> None:
        self._peers.follow(state.links.values())
        self._follower_end.control_changed(state)
        self._sync_leader.control_changed(state)
        self._sync_leases.control_changed(state)
        self._decisions.control_changed(state)
        self._transaction_verification.control_changed(state)
        self._group_follower.control_changed(state)
        self._former_ids.control_changed(state)
        self._withheld.control_changed(state)
        self._syncing.control_changed(state)
        self._leader_epochs.control_changed(state)
        self._wake()

    @hookimpl
    async def isthmus_stop(self) -> None:
        await self._telling.stop()
        await self._acls.leader.stop()
        await self._missed_deletions.stop()
        await self._truncations.stop()
        await self._group_leader.stop()
        await self._sync_leases.stop()
        await self._syncing.stop()
        await self._decisions.stop()
        await self._sync_leader.stop()
        await self._mirror.stop()
        await self._leader_end.stop()
        await self._transaction_verification.stop()
        await self._links.stop()
        await self._peers.stop()
        await self._group_follower.stop()
        await self._follower_end.stop()
        await self._sweep.stop()
        await self._store.stop()

    @hookimpl
    def isthmus_request_hooks(self) -> Sequence[RequestHook]:
        return [
            *self._sync_leader.hooks(),
            *self._decisions.hooks(),
            *self._former_ids.hooks(),
            *self._withheld.hooks(),
            *self._syncing.hooks(),
            *self._leader_epochs.hooks(),
            *self._time_offsets.hooks(),
        ]

    @hookimpl
    def isthmus_confirmers(self) -> Sequence[Confirmer]:
        return [self._sync_leader]

    @hookimpl
    def isthmus_link_operations(self) -> LinkOperations | None:
        return self._service

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        lag = GaugeMetricFamily(
            "isthmus_link_mirror_lag_offsets",
            "Offsets that the follower lacks",
            labels=("link", "topic", "partition", "role"),
        )
        seconds = GaugeMetricFamily(
            "isthmus_link_mirror_lag_seconds",
            "Age of the oldest record that the follower lacks",
            labels=("link", "topic", "partition", "role"),
        )
        connected = GaugeMetricFamily("isthmus_link_connections", "Live connections to peers", labels=("link",))
        heard = GaugeMetricFamily(
            "isthmus_link_heard_seconds", "Time since the peer cluster was last heard", labels=("link",)
        )
        since = GaugeMetricFamily(
            "isthmus_link_sync_since_timestamp_seconds",
            "Since when a partition of a synchronous link is In-Sync or Out-Of-Sync",
            labels=("link", "topic", "partition", "state"),
        )
        until = GaugeMetricFamily(
            "isthmus_link_sync_until_timestamp_seconds",
            "At the target: until when a partition of a synchronous link is known to be, or to have been, In-Sync",
            labels=("link", "topic", "partition"),
        )
        degraded = GaugeMetricFamily(
            "isthmus_link_sync_degraded_since_timestamp_seconds",
            "Since when transactional and strict producers are acked without a partition's other side",
            labels=("link", "topic", "partition"),
        )
        synchronous = GaugeMetricFamily("isthmus_link_synchronous", "1 of a synchronous link", labels=("link",))
        states = GaugeMetricFamily(
            "isthmus_link_partitions", "Partitions by state", labels=("link", "role", "state", "reason")
        )
        for status in self._links.statuses():
            synchronous.add_metric((status.link_name,), status.mode == LinkMode.SYNCHRONOUS)
            connected.add_metric((status.link_name,), len(self._peers.connections(status.link_name)))
            if status.last_heard_seconds is not None:
                heard.add_metric((status.link_name,), status.last_heard_seconds)
            counts = Counter((each.role, each.state, each.reason or "") for each in status.partitions)
            for labels_, count in sorted(counts.items()):
                states.add_metric((status.link_name, *labels_), count)
            for partition in status.partitions:
                labels = (status.link_name, partition.topic, str(partition.partition), partition.role)
                if partition.partition_mirror_lag is not None:
                    lag.add_metric(labels, partition.partition_mirror_lag)
                if partition.lag_seconds is not None:
                    seconds.add_metric(labels, partition.lag_seconds)
                if partition.sync is not None and partition.sync.since_ms is not None:
                    since.add_metric((*labels[:3], partition.sync.state), partition.sync.since_ms / 1000)
                if partition.sync is not None and partition.sync.degraded_since_ms is not None:
                    degraded.add_metric(labels[:3], partition.sync.degraded_since_ms / 1000)
                if partition.sync is not None and partition.sync.until_ms is not None:
                    until.add_metric(labels[:3], partition.sync.until_ms / 1000)
        batches = CounterMetricFamily("isthmus_link_appended_batches", "Batches appended to follower topics")
        batches.add_metric((), self._follower_end.batches_appended)
        size = CounterMetricFamily("isthmus_link_appended_bytes", "Bytes appended to follower topics")
        size.add_metric((), self._follower_end.bytes_appended)
        carried_out = self._truncations
        truncations = truncation_metrics(self._context.control.state, carried_out.ended, carried_out.records_cut)
        groups, acls = self._group_status.metrics(), self._acls.metrics()
        unsure = CounterMetricFamily(
            "isthmus_link_uncorrected_time_offsets", "Answers of ListOffsets by time that may be too early"
        )
        unsure.add_metric((), self._time_offsets.unsure)
        own = (lag, seconds, connected, heard, states, synchronous, since, until, degraded, batches, size, unsure)
        return (*own, *groups, *acls, *truncations)


plugin = ReplicationPlugin()
