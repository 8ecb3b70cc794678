"""The follower end's leases of groups: until when committed offsets that the source acks are here.

Each is of a partition of the source's offsets topic, and of the namespaces that followed when it was granted and that
the source led then: whatever it grants before it leads another one says nothing about that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from isthmus_control.commands import OffsetsClaim
from isthmus_control.control_state import ControlState
from isthmus_control.levels import SOURCE_LOSSES
from isthmus_control.model import AckTerms, GroupClaim, Link, NamespaceMapping, ResourceType, Role
from isthmus_control.rules.claims import supersedes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls

Namespaces = frozenset[tuple[str, str]]
"""Types and prefixes."""

_KINDS = frozenset({ResourceType.TOPIC, ResourceType.CONSUMER_GROUP})


def led_namespaces(mappings: Iterable[NamespaceMapping]) -> tuple[calls.NamespaceName, ...]:
    """The namespaces whose committed offsets a link pushes: types, and prefixes at the other end."""
    led = [each for each in mappings if each.type in _KINDS and each.role is Role.LEADER]
    return tuple(sorted(calls.NamespaceName(each.type.value, each.remote_prefix) for each in led))


def _followed(link: Link | None) -> Namespaces:
    mappings = () if link is None else link.mappings
    return frozenset(
        (each.type.value, each.local_prefix) for each in mappings if each.type in _KINDS and each.role is Role.FOLLOWER
    )


@dataclass(frozen=True, slots=True)
class GroupLease:
    """Of one partition of the source's offsets topic, which has so many ``partitions``."""

    until: float
    """Monotonic seconds."""
    until_ms: int
    """The same moment of this machine's wall clock."""
    partitions: int
    terms: Mapping[str, AckTerms]
    epoch: int = -1
    upto: int = -1
    """These as of :class:`~isthmus_control.model.GroupClaim`."""


class GroupLeases:
    """By link and partition of the source's offsets topic."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._leases: dict[tuple[str, int], tuple[str, GroupLease]] = {}
        """With the id of the link."""
        self._follows: dict[str, Namespaces] = {}
        self._links: object = None

    def control_changed(self, state: ControlState) -> None:
        if state.links is self._links:
            return
        self._links = state.links
        follows = {name: _followed(link) for name, link in state.links.items()}
        for key in list(self._leases):
            if follows.get(key[0], frozenset()) - self._follows.get(key[0], frozenset()):
                del self._leases[key]
        self._follows = follows

    def granted(self, link_name: str, granted: Mapping[int, GroupLease], said: Iterable[calls.NamespaceName]) -> None:
        """Take leases by partition of the source's offsets topic; ``said``: what the source leads."""
        link = self._context.control.state.links.get(link_name)
        if link is None or not _followed(link) <= {(each.type, each.prefix) for each in said}:
            return
        for partition, lease in granted.items():
            link_id, known = self._leases.get((link_name, partition), ("", lease))
            if link_id != link.link_id or lease.until > known.until:
                self._leases[link_name, partition] = link.link_id, lease

    def lease(self, link_name: str, partition: int) -> GroupLease | None:
        """Of the groups whose committed offsets are in that partition of the source's offsets topic, while it runs."""
        _, lease = self._leases.get((link_name, partition), ("", None))
        return lease if lease is not None and self._clock.monotonic() < lease.until else None

    def claims(self, link: Link) -> dict[int, GroupClaim]:
        """The latest that is known by this process, or recorded by any of the cluster, by partition."""
        state, now_ms = self._context.control.state, int(self._clock.time() * 1000)
        found = {
            partition: claim
            for name, partition in state.group_claims
            if name == link.name and (claim := state.group_claim(name, link.link_id, partition)) is not None
        }
        for (name, partition), (link_id, lease) in self._leases.items():
            known = found.get(partition)
            if (
                name == link.name
                and link_id == link.link_id
                and (known is None or supersedes(lease.until_ms, known.until_ms, now_ms))
            ):
                found[partition] = GroupClaim(
                    link_id, lease.until_ms, lease.partitions, lease.terms, lease.epoch, lease.upto
                )
        return found

    def due(self, over: float) -> dict[str, list[OffsetsClaim]]:
        """By link, the leases that ran out before and are not recorded."""
        state, now_ms = self._context.control.state, int(self._clock.time() * 1000)
        due: dict[str, list[OffsetsClaim]] = {}
        for (name, partition), (link_id, lease) in list(self._leases.items()):
            link = state.links.get(name)
            if link is None or link.link_id != link_id:
                del self._leases[name, partition]
            elif lease.until < over:
                known = state.group_claim(name, link_id, partition)
                if supersedes(lease.until_ms, None if known is None else known.until_ms, now_ms):
                    claim = OffsetsClaim(partition, lease.partitions, lease.until_ms, lease.terms)
                    if state.level >= SOURCE_LOSSES:
                        claim = replace(claim, epoch=lease.epoch, upto=lease.upto)
                    due.setdefault(name, []).append(claim)
        return due
