"""What status says of a synchronous link at its source."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping

from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, LinkMode, ResourceType, Role, SyncState
from isthmus_control.states import LinkState, PartitionState, ReasonCode, combine
from isthmus_plugins.links import PartitionStatus, SyncStatus
from isthmus_plugins.replication.leader_stream import LedPartition

_WAITING = frozenset((PartitionState.DIVERGED, PartitionState.REFUSED, PartitionState.STOPPED))


def note_sync(
    state: ControlState,
    link: Link,
    topic_ids: Mapping[str, bytes],
    in_sync: Callable[[LedPartition], bool],
    why_not: Callable[[LedPartition], str | None],
    partitions: Iterable[PartitionStatus],
) -> None:
    """Add what is recorded of partitions that a synchronous link leads. Those that wait for somebody still do.

    ``in_sync``: whether the follower has been seen to have all that was acked before acks were held. ``why_not``: why
    that failed when it was tried last.
    """
    if link.mode is not LinkMode.SYNCHRONOUS:
        return
    leading = [each for each in link.mappings if each.type is ResourceType.TOPIC and each.role is Role.LEADER]
    for status in partitions:
        if status.role != "leader" or not any(mapping.holds(status.topic) for mapping in leading):
            continue
        status.sync = _sync(state, link.name, topic_ids.get(status.topic), in_sync, why_not, status)
        if PartitionState(status.state) not in _WAITING:
            status.state = PartitionState(status.sync.state)
            status.reason, status.message = status.sync.reason or status.reason, status.sync.message or status.message


def _sync(
    state: ControlState,
    link: str,
    topic_id: bytes | None,
    in_sync: Callable[[LedPartition], bool],
    why_not: Callable[[LedPartition], str | None],
    status: PartitionStatus,
) -> SyncStatus:
    record = None
    if topic_id is not None:
        record = state.sync_record(link, status.topic, str(uuid.UUID(bytes=topic_id)), status.partition)
    key = LedPartition(link, status.topic, status.partition)
    if record is None:
        return SyncStatus(state="Syncing", message=why_not(key))
    if record.state is SyncState.IN_SYNC and not in_sync(key):
        return SyncStatus(
            state="Out-Of-Sync" if record.reached else "Syncing",
            since_ms=record.since_ms,
            reason=ReasonCode.NOT_LEVEL_YET,
            message="acks are held until the follower is level",
        )
    why = record.reason
    return SyncStatus(
        state=record.state.value,
        since_offset=record.since_offset,
        since_ms=record.since_ms,
        reason=why.code if why is not None else None,
        message=why.message if why is not None else None,
    )


def link_state(link: Link, connected: bool, partitions: Iterable[PartitionStatus]) -> LinkState:
    """The state of a link. That of a synchronous one is what it promises, so copies of offsets topics have no part."""
    synchronous = link.mode is LinkMode.SYNCHRONOUS
    counted = [each for each in partitions if each.sync is not None or not synchronous]
    return combine(link.mode, connected, (PartitionState(each.state) for each in counted))
