"""What operators are shown of truncations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_control.truncations import Truncation
from isthmus_plugins.links import MovedGroupPosition, PartitionStatus, TruncatedPartition, TruncationStatus


def truncation_statuses(state: ControlState, link_name: str) -> list[TruncationStatus]:
    """The truncations of a link's topics: those under way, by topic, then those that are over, newest first."""
    under_way = [truncation for _, truncation in sorted(state.truncations.items())]
    return [_status(each) for each in (*under_way, *reversed(state.past_truncations)) if each.link == link_name]


def _status(truncation: Truncation) -> TruncationStatus:
    trouble = truncation.trouble
    return TruncationStatus(
        topic=truncation.topic,
        topic_id=truncation.topic_id,
        new_topic_id=truncation.new_topic_id,
        phase=truncation.phase.value,
        reason=truncation.reason.code,
        message=truncation.reason.message,
        trouble=None if trouble is None else trouble.code,
        trouble_message=None if trouble is None else trouble.message,
        proxy=truncation.proxy,
        began_ms=truncation.began_ms,
        phase_ms=truncation.phase_ms,
        messages_truncated=truncation.records,
        partitions=[
            TruncatedPartition(
                partition=cut.partition,
                offset_truncated_to=cut.offset,
                messages_truncated=cut.records,
                salvage_proxy=None if (file := truncation.salvage_file(cut.partition)) is None else file.proxy,
                salvage_file=None if file is None else file.path,
            )
            for cut in truncation.cuts
        ],
        positions_lost=truncation.positions_lost,
        groups_lost=truncation.layout.groups if truncation.positions_lost and truncation.layout is not None else 0,
        given_up=truncation.given_up,
        refills_failed=truncation.refills_failed,
        refill_failure=truncation.refill_failure,
        groups_moved=len({moved.group for moved in truncation.moved}),
        moved_positions=[
            MovedGroupPosition(
                group=moved.group,
                partition=moved.partition,
                offset=moved.offset,
                moved_to=moved.moved_to,
            )
            for moved in truncation.moved
        ],
    )


def note_truncations(state: ControlState, link_name: str, partitions: list[PartitionStatus]) -> None:
    """Put what is known of truncations into the statuses of a link's partitions; add those that have no stream now."""
    last = {each.topic: each for each in state.past_truncations if each.link == link_name and each.new_topic_id}
    reported = set()
    for status in partitions:
        if status.role != "follower":
            continue
        reported.add((status.topic, status.partition))
        truncation = state.truncations.get(status.topic) or last.get(status.topic)
        cut = None if truncation is None else truncation.cut(status.partition)
        if cut is not None and cut.records:
            status.offset_truncated_to, status.messages_truncated = cut.offset, cut.records
        if status.topic in state.truncations:
            _note(status, state.truncations[status.topic])
    for topic, truncation in sorted(state.truncations.items()):
        record = state.follower_topics.get(topic)
        for partition in range(len(truncation.partitions)) if truncation.link == link_name else ():
            if record is not None and (topic, partition) not in reported:
                status = PartitionStatus(
                    topic=topic,
                    remote_topic=record.source_topic,
                    partition=partition,
                    role="follower",
                    state=PartitionState.DIVERGED,
                )
                _note(status, truncation)
                partitions.append(status)


def _note(status: PartitionStatus, truncation: Truncation) -> None:
    status.state = PartitionState.DIVERGED
    trouble = truncation.trouble
    status.reason = ReasonCode.TRUNCATING if trouble is None else trouble.code
    status.message = truncation.describe()


def truncation_metrics(state: ControlState, ended: Mapping[str, int], records: Mapping[str, int]) -> Iterable[Metric]:
    """Truncations under way, by phase; by link, how many this proxy has carried out, and how much they cut."""
    active = GaugeMetricFamily(
        "isthmus_link_truncations_active",
        "Follower topics that are being truncated",
        labels=("link", "phase", "reason"),
    )
    for truncation in state.truncations.values():
        reason = "" if truncation.trouble is None else truncation.trouble.code
        active.add_metric((truncation.link, truncation.phase.value, reason), 1)
    over = CounterMetricFamily("isthmus_link_truncations", "Truncations that this proxy carried out", labels=("link",))
    cut = CounterMetricFamily("isthmus_link_truncated_records", "Offsets that they cut and salvaged", labels=("link",))
    failed = GaugeMetricFamily(
        "isthmus_link_truncation_refills_failed",
        "How often topics that are being truncated did not become what was spooled of them",
        labels=("link", "topic"),
    )
    for truncation in state.truncations.values():
        failed.add_metric((truncation.link, truncation.topic), truncation.refills_failed)
    for link, count in sorted(ended.items()):
        over.add_metric((link,), count)
        cut.add_metric((link,), records.get(link, 0))
    return (active, over, cut, failed)
