"""What operators are shown of replicated consumer groups: status and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role, leads_commits
from isthmus_control.states import PartitionState
from isthmus_plugins.links import GroupStatus, SyncStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.groups.feed import LedGroup
from isthmus_plugins.replication.groups.followed_group import POSITION_NOT_KNOWN, STOPPED, FollowedGroup
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC


class GroupStatuses(Part):
    """The groups of this proxy's links."""

    def __init__(
        self,
        context: PluginContext,
        group_leader: GroupLeader,
        group_follower: GroupFollower,
        sync_of: Callable[[LinkPartition, str], SyncStatus],
    ) -> None:
        """``sync_of``: what acks for a partition of the offsets topic mean to a group that a synchronous link leads."""
        self._context = context
        self._clock = context.clock
        self._group_leader = group_leader
        self._group_follower = group_follower
        self._sync_of = sync_of

    def of(self, link: Link, connected: bool) -> list[GroupStatus]:
        """Every group of a link that this proxy pushes, or that is pushed to it."""
        led = [self._led(link, group, connected) for group in self._group_leader.groups(link)]
        lookup = self._context.control.state.lookup
        followed = []
        for group in self._group_follower.groups(link.name):
            counterpart = lookup.following(ResourceType.CONSUMER_GROUP, group.group)
            if counterpart is not None:
                followed.append(self._followed(group, counterpart.remote_name))
        return sorted(led, key=lambda status: status.group) + followed

    def commits(self, link: Link, mapping: NamespaceMapping) -> list[SyncStatus]:
        """What acks of commits mean to the led groups of a pair, in each partition that this proxy pushes: the first
        commit of a group may come to any."""
        if mapping.role is not Role.LEADER:
            return []
        return [
            self._sync_of(key, mapping.local_prefix) for key in self._group_leader.places() if key.link == link.name
        ]

    def warnings(self, link: Link) -> list[str]:
        """What keeps this proxy from knowing all that the link's led groups have committed."""
        return self._group_leader.warnings() if link.leads_groups else []

    def _led(self, link: Link, group: LedGroup, connected: bool) -> GroupStatus:
        status = GroupStatus(
            group=group.group,
            remote_group=group.remote_group,
            role="leader",
            state=PartitionState.FOLLOWING if group.pushed else PartitionState.CATCHING_UP,
            positions=group.offsets,
            unmapped_topics=list(group.unmapped_topics),
            sync=self._sync(link, group),
        )
        if not connected:
            status.state = PartitionState.DISCONNECTED
        elif group.waiting is not None:
            _wait(status, group.waiting)
        if group.problem is not None:
            status.state, status.reason, status.message = PartitionState.STOPPED, POSITION_NOT_KNOWN, group.problem
        return status

    def _sync(self, link: Link, group: LedGroup) -> SyncStatus | None:
        if group.partition is None or not leads_commits(link):
            return None
        return self._sync_of(LinkPartition(link.name, OFFSETS_TOPIC, group.partition), group.group)

    def _followed(self, group: FollowedGroup, remote: str) -> GroupStatus:
        status = GroupStatus(
            group=group.group,
            remote_group=remote,
            role="follower",
            state=PartitionState.FOLLOWING,
            positions=len(group.wanted),
        )
        if not group.idle:
            _wait(status, group.waiting(self._clock.monotonic()))
        return status

    def metrics(self) -> Iterable[Metric]:
        """Groups by state and reason, pending committed offsets, the age of the oldest."""
        groups = GaugeMetricFamily(
            "isthmus_link_groups", "Consumer groups by state", labels=("link", "role", "state", "reason")
        )
        pending = GaugeMetricFamily(
            "isthmus_link_group_offsets_pending",
            "Positions and deletions that the follower's coordinators do not have yet",
            labels=("link",),
        )
        seconds = GaugeMetricFamily(
            "isthmus_link_group_offsets_pending_seconds", "Age of the oldest of them", labels=("link",)
        )
        warnings = GaugeMetricFamily(
            "isthmus_group_offsets_warnings", "What keeps this proxy from knowing all that groups have committed"
        )
        degraded = GaugeMetricFamily(
            "isthmus_link_groups_degraded",
            "Groups whose commits in transactions, or of strict namespaces, are acked without the other side",
            labels=("link",),
        )
        commits = CounterMetricFamily("isthmus_link_group_offsets_committed", "Positions committed for leaders")
        for name, link in sorted(self._context.control.state.links.items()):
            if link.drill is not None:
                continue
            statuses = self.of(link, True)
            counts = Counter((each.role, str(each.state), each.reason or "") for each in statuses)
            for labels, count in sorted(counts.items()):
                groups.add_metric((name, *labels), count)
            if any(mapping.type is ResourceType.CONSUMER_GROUP for mapping in link.mappings):
                pending.add_metric((name,), sum(each.pending for each in statuses))
                seconds.add_metric((name,), max((each.pending_seconds or 0.0 for each in statuses), default=0.0))
                degraded.add_metric(
                    (name,), sum(each.sync is not None and each.sync.degraded_since_ms is not None for each in statuses)
                )
        warnings.add_metric((), len(self._group_leader.warnings()))
        commits.add_metric((), self._group_follower.commits)
        return (groups, pending, seconds, degraded, warnings, commits)


def _wait(status: GroupStatus, waiting: calls.Waiting) -> None:
    """Say what waits, and why."""
    status.pending, status.reason, status.message = waiting.positions, waiting.code, waiting.message
    status.pending_seconds = waiting.age_ms / 1000
    status.state = PartitionState.STOPPED if waiting.code in STOPPED else PartitionState.CATCHING_UP
