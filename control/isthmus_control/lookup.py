"""What the hot path asks of the control state, compiled when namespaces or links change.

Longest prefix wins. Prefixes are grouped by length, so a question costs one slice and one dictionary access for each
distinct length, and not a comparison for each namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isthmus_control.concerns import Beyond
from isthmus_control.demands import NONE as NO_DEMANDS
from isthmus_control.demands import Demands, combined
from isthmus_control.model import (
    INTERNAL_PREFIX,
    Link,
    Namespace,
    NamespaceKey,
    NamespaceMapping,
    ResourceType,
    Reversal,
    Role,
    contains,
)
from isthmus_protocol.offsets_copy import COPY_PREFIX


@dataclass(frozen=True, slots=True)
class Reservation:
    """Why a resource may not be written: the namespace, the link that it follows (if any), the reason for people.

    ``beyond``: whether it may be written is not known here (:mod:`isthmus_control.concerns`).
    """

    type: ResourceType
    prefix: str
    link: str | None
    reason: str
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A resource's name on the other side of a link."""

    link: Link
    mapping: NamespaceMapping
    local_name: str
    remote_name: str


INTERNAL = Reservation(ResourceType.TOPIC, INTERNAL_PREFIX, None, "an internal topic of Isthmus")
OFFSETS_COPY = Reservation(ResourceType.TOPIC, COPY_PREFIX, None, "a copy of another cluster's offsets topic")


class Lookup:
    """Questions about single resource names. Built by :class:`~isthmus_control.model.ControlState`."""

    __slots__ = (
        "_beyond",
        "_demanding",
        "_following",
        "_fresh",
        "_leading",
        "_lengths",
        "_plugged",
        "_reserved",
        "_reversing",
        "stopped",
    )

    def __init__(
        self,
        namespaces: Mapping[NamespaceKey, Namespace],
        links: Mapping[str, Link],
        beyond: Iterable[Beyond] = (),
        reversals: Iterable[Reversal] = (),
    ) -> None:
        self._beyond: dict[ResourceType, list[Reservation]] = {kind: [] for kind in ResourceType}
        self.stopped: dict[str, str] = {}
        """By name, the links that may not go on here, and why."""
        for record in beyond:
            for kind, prefix in record.concerns.reserved(links):
                self._beyond[kind].append(Reservation(kind, prefix, None, record.message, beyond=True))
            for name in record.concerns.stopped(links):
                self.stopped.setdefault(name, record.message)
        self._following: list[tuple[Link, NamespaceMapping]] = []
        self._leading: list[tuple[Link, NamespaceMapping]] = []
        for _, link in sorted(links.items()):
            for mapping in (*link.mappings, *link.offsets_topics):
                (self._following if mapping.role is Role.FOLLOWER else self._leading).append((link, mapping))
        self._reserved: dict[ResourceType, dict[str, Reservation]] = {kind: {} for kind in ResourceType}
        for namespace in namespaces.values():
            if namespace.reserved:
                self._reserved[namespace.type][namespace.prefix] = self._reservation(namespace)
        self._reversing = [(key, each) for each in reversals if each.at_leader for key in each.keys]
        self._demanding = {
            kind: [each for each in namespaces.values() if each.type is kind]
            for kind in {each.type for each in namespaces.values() if each.demands != NO_DEMANDS}
        }
        """Also those that ask for nothing: what they hold gets no less."""
        self._fresh = [each for each in namespaces.values() if not each.stale_reads]
        self._lengths = {kind: _descending(table) for kind, table in self._reserved.items()}
        self._plugged: dict[ResourceType, dict[str, Namespace]] = {}
        for each in sorted(namespaces.values(), key=lambda each: len(each.prefix)):
            if each.plugins:
                self._plugged.setdefault(each.type, {})[each.prefix] = each

    def _reservation(self, namespace: Namespace) -> Reservation:
        link = next(
            (
                link.name
                for link, mapping in self._following
                if mapping.type is namespace.type and mapping.local_prefix == namespace.prefix
            ),
            None,
        )
        return Reservation(namespace.type, namespace.prefix, link, namespace.reserved_reason or "reserved")

    def reservation(self, kind: ResourceType, name: str) -> Reservation | None:
        """The most specific reservation that holds ``name``, None where clients may write it."""
        unknown = self.beyond(kind, name)
        if unknown is not None:
            return unknown
        table = self._reserved[kind]
        for length in self._lengths[kind]:
            found = table.get(name[:length])
            # A longer prefix may exclude the name by a rule of its own (internal topics, the empty prefix).
            if found is not None and contains(kind, found.prefix, name):
                return found
        return None

    def beyond(self, kind: ResourceType, name: str) -> Reservation | None:
        """Why it is not known here whether clients may write ``name``; None: it is."""
        return next((each for each in self._beyond[kind] if contains(kind, each.prefix, name)), None)

    def reversing(self, kind: ResourceType, name: str) -> Reversal | None:
        """The reversal by which a resource that this cluster leads still is to be led by another one."""
        return next((each for key, each in self._reversing if key.type is kind and contains(*key, name)), None)

    def reserves(self, kind: ResourceType) -> bool:
        """Whether any namespace of this type is reserved, or about to be."""
        return bool(self._lengths[kind] or self._beyond[kind] or self._reversing)

    def topic_reservation(self, topic: str) -> Reservation | None:
        """As :meth:`reservation` for topics; the proxies' own topics, and copies of offsets, always are."""
        if topic.startswith(INTERNAL_PREFIX):
            return INTERNAL
        if topic.startswith(COPY_PREFIX):
            return OFFSETS_COPY
        return self.reservation(ResourceType.TOPIC, topic)

    def following(self, kind: ResourceType, local_name: str) -> Counterpart | None:
        """Where a local resource is followed from. At most one mapping can hold it."""
        for link, mapping in self._following:
            if mapping.type is kind and (remote := mapping.remote_name(local_name)) is not None:
                return Counterpart(link, mapping, local_name, remote)
        return None

    def leading(self, kind: ResourceType, local_name: str) -> tuple[Counterpart, ...]:
        """Where a local resource is replicated to, by link name: at most one counterpart for each link."""
        return tuple(
            Counterpart(link, mapping, local_name, remote)
            for link, mapping in self._leading
            if mapping.type is kind and (remote := mapping.remote_name(local_name)) is not None
        )

    def demands(self, kind: ResourceType, name: str) -> Demands:
        """What is asked for a topic or group of the synchronous links that lead it."""
        return combined(each.demands for each in self._demanding.get(kind, ()) if name in each)

    def reads_stale(self, topic: str) -> bool:
        """Whether consumers read a topic that follows also while it is not known to be In-Sync."""
        return not any(topic in each for each in self._fresh)

    def demanding(self, kind: ResourceType, name: str) -> str:
        """The longest prefix of the namespaces that hold a topic or group; empty where none of them asks for anything.

        What such a prefix holds, and no longer one, is asked for alike.
        """
        return max((each.prefix for each in self._demanding.get(kind, ()) if name in each), key=len, default="")

    def plugged(self, kind: ResourceType, name: str) -> tuple[Namespace, ...]:
        """The namespaces with plugins that hold a resource, the widest one first."""
        return tuple(each for each in self._plugged.get(kind, {}).values() if name in each)

    def led_groups(self, link_name: str) -> tuple[str, ...]:
        """Prefixes as of :meth:`demanding` of all groups that a link leads."""
        led = [each.local_prefix for link, each in self._leading if link.name == link_name and each.leads_groups]
        known = [each.prefix for each in self._demanding.get(ResourceType.CONSUMER_GROUP, ())]
        found = {each for each in known if any(each.startswith(prefix) for prefix in led)}
        return tuple(sorted(found)) or (("",) if led else ())

    def local(self, link: str, kind: ResourceType, role: Role, remote_name: str) -> Counterpart | None:
        """The local counterpart of a remote resource on a link, where the local namespace has this role."""
        for candidate, mapping in self._following if role is Role.FOLLOWER else self._leading:
            if candidate.name == link and mapping.type is kind:
                local = mapping.local_name(remote_name)
                if local is not None:
                    return Counterpart(candidate, mapping, local, remote_name)
        return None


def _descending(prefixes: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({len(prefix) for prefix in prefixes}, reverse=True))
