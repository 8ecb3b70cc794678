"""The state of each pair of namespaces of a link: as good as the worst of what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from isthmus_control.model import Link, LinkMode, NamespaceKey, NamespaceMapping, ResourceType
from isthmus_control.states import WAITING, LinkState, PartitionState, ReasonCode, combine
from isthmus_plugins.links import AclStatus, GroupStatus, MappingStatus, PartitionStatus, SyncStatus


class _Part(NamedTuple):
    """Something that a namespace holds."""

    state: PartitionState
    reason: str | None
    message: str | None

    @classmethod
    def of(cls, status: PartitionStatus | GroupStatus | AclStatus | SyncStatus) -> _Part:
        return cls(PartitionState(status.state), status.reason, status.message)


def mapping_statuses(
    link: Link,
    connected: bool,
    partitions: Sequence[PartitionStatus],
    groups: Sequence[GroupStatus],
    acls: Sequence[AclStatus],
    all_else_is_in_sync: Callable[[NamespaceMapping, bool], bool] = lambda mapping, has_some: has_some,
    commits: Callable[[NamespaceMapping], Iterable[SyncStatus]] = lambda mapping: (),
    rings: Mapping[NamespaceKey, str] = MappingProxyType({}),
) -> list[MappingStatus]:
    """Of all pairs of namespaces, from what is known of the partitions, groups and bindings of the link.

    ``all_else_is_in_sync``: whether what this proxy does not have of a pair of topics is In-Sync; it is told whether
    the proxy has some. ``commits``: what acks of commits mean, wherever those of a pair of groups may come: also of
    groups that have not committed yet. ``rings``: what is wrong with namespaces that follow themselves.
    """
    found = []
    for mapping in link.mappings:
        if mapping.type is ResourceType.TOPIC:
            mode, parts = link.mode, list(_topics(mapping, partitions))
        elif mapping.type is ResourceType.CONSUMER_GROUP:
            mode, parts = _groups(mapping, groups, commits)
        else:
            mode, parts = LinkMode.ASYNCHRONOUS, list(_principals(mapping, acls))
        if (ring := rings.get(mapping.local)) is not None:
            parts.insert(0, _Part(PartitionState.STOPPED, ReasonCode.FOLLOWS_ITSELF, ring))
        topics = mapping.type is ResourceType.TOPIC
        all_else = all_else_is_in_sync(mapping, bool(parts)) if topics else bool(parts)
        state = combine(mode, connected, (part.state for part in parts), all_else)
        why = _why(state, parts)
        reason, message = (None, None) if why is None else (why.reason, why.message)
        found.append(MappingStatus.of(mapping, state, reason, message))
    return found


def _topics(mapping: NamespaceMapping, partitions: Iterable[PartitionStatus]) -> Iterator[_Part]:
    for each in partitions:
        if each.role == mapping.role.value and mapping.holds(each.topic):
            yield _Part.of(each)


def _groups(
    mapping: NamespaceMapping,
    groups: Iterable[GroupStatus],
    commits: Callable[[NamespaceMapping], Iterable[SyncStatus]],
) -> tuple[LinkMode, list[_Part]]:
    """Where acks of commits mean something, that counts; else whether committed offsets are where they should be."""
    held = [each for each in groups if each.role == mapping.role.value and mapping.holds(each.group)]
    acked = [each.sync for each in held if each.sync is not None]
    if held and len(acked) == len(held):
        return LinkMode.SYNCHRONOUS, list(map(_Part.of, (*acked, *commits(mapping))))
    return LinkMode.ASYNCHRONOUS, list(map(_Part.of, held))


def _principals(mapping: NamespaceMapping, acls: Iterable[AclStatus]) -> Iterator[_Part]:
    for each in acls:
        if each.role == mapping.role.value:
            yield _Part.of(each)


def _why(state: LinkState, parts: Iterable[_Part]) -> _Part | None:
    """What says the most of why a state is no better: something that waits for somebody, else what has the state."""
    reported = [part for part in parts if part.reason is not None or part.message is not None]
    waiting = (part for part in reported if part.state in WAITING)
    return next(waiting, None) or next((part for part in reported if part.state.value == state.value), None)
