"""What operators are told of replicated consumer groups: status and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import monotonic
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.model import Link, ResourceType
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins.api import PluginContext
from isthmus_plugins.links import GroupStatus
from isthmus_plugins.replication.followed_group import POSITION_NOT_KNOWN, TARGET_REFUSES_OFFSETS, FollowedGroup
from isthmus_plugins.replication.group_follower import GroupFollower
from isthmus_plugins.replication.group_leader import GroupLeader, LedGroup

_STOPPED: Final = frozenset({POSITION_NOT_KNOWN, TARGET_REFUSES_OFFSETS, ReasonCode.TRANSACTION_VERIFICATION_ENABLED})
"""Reasons that somebody must remove."""


class GroupStatuses:
    """The groups of this proxy's links."""

    def __init__(self, context: PluginContext, group_leader: GroupLeader, group_follower: GroupFollower) -> None:
        self._context = context
        self._group_leader = group_leader
        self._group_follower = group_follower

    def of(self, link: Link, connected: bool) -> list[GroupStatus]:
        """Every group of a link that this proxy tells of, or is told of."""
        led = [self._led(group, connected) for group in self._group_leader.groups(link)]
        lookup = self._context.control.state.lookup
        followed = []
        for group in self._group_follower.groups(link.name):
            counterpart = lookup.following(ResourceType.CONSUMER_GROUP, group.group)
            if counterpart is not None:
                followed.append(self._followed(group, counterpart.remote_name))
        return sorted(led, key=lambda status: status.group) + followed

    def _led(self, group: LedGroup, connected: bool) -> GroupStatus:
        state = PartitionState.FOLLOWING if group.told else PartitionState.CATCHING_UP
        if group.problem is not None:
            state = PartitionState.STOPPED
        elif not connected:
            state = PartitionState.DISCONNECTED
        return GroupStatus(
            group=group.group,
            remote_group=group.remote_group,
            role="leader",
            state=state,
            reason=POSITION_NOT_KNOWN if group.problem is not None else None,
            message=group.problem,
            positions=group.positions,
            unmapped_topics=list(group.unmapped_topics),
        )

    def _followed(self, group: FollowedGroup, remote: str) -> GroupStatus:
        now = monotonic()
        status = GroupStatus(
            group=group.group,
            remote_group=remote,
            role="follower",
            state=PartitionState.FOLLOWING if group.settled else PartitionState.CATCHING_UP,
            positions=len(group.wanted),
            pending=len(group.differences | group.unknown) if group.has is not None else len(group.wanted),
        )
        if status.pending and group.since:
            status.pending_seconds = round(now - min(group.since.values()), 3)
        reasons = sorted(group.pending.values(), key=lambda pending: pending.code not in _STOPPED)
        if reasons:
            status.reason, status.message = reasons[0]
            if status.reason in _STOPPED:
                status.state = PartitionState.STOPPED
        return status

    def metrics(self) -> Iterable[Metric]:
        """Groups by state and reason, pending positions, the age of the oldest."""
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
        unknown = GaugeMetricFamily(
            "isthmus_group_offsets_unknown_records",
            "Kinds of records in the offsets topic that this version does not know",
        )
        commits = CounterMetricFamily("isthmus_link_group_offsets_committed", "Positions committed for leaders")
        for name, link in sorted(self._context.control.state.links.items()):
            statuses = self.of(link, True)
            counts = Counter((each.role, str(each.state), each.reason or "") for each in statuses)
            for labels, count in sorted(counts.items()):
                groups.add_metric((name, *labels), count)
            if any(mapping.type is ResourceType.CONSUMER_GROUP for mapping in link.mappings):
                pending.add_metric((name,), sum(each.pending for each in statuses))
                seconds.add_metric((name,), max((each.pending_seconds or 0.0 for each in statuses), default=0.0))
        unknown.add_metric((), len(self._group_leader.unknown_records()))
        commits.add_metric((), self._group_follower.commits)
        return (groups, pending, seconds, unknown, commits)
