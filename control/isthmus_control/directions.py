"""What a link moves now, and in which direction. Whoever sends or takes what namespaces hold asks here, and only here.

Pairs of namespaces have roles (:meth:`~isthmus_control.model.Link.pairs`), and today all that a link has attached moves
by its roles. What makes a link stand still while its roles stay (a pause by the operator, a reversal) is one condition
in :func:`_moving`. What acks, leases and reservations promise goes by the roles, whatever moves.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role


def pushed(link: Link, *kinds: ResourceType) -> tuple[NamespaceMapping, ...]:
    """The pairs of namespaces that this side sends to the other one: of some types, or of all."""
    return _moving(link.pairs(Role.LEADER, *kinds))


def followed(link: Link, *kinds: ResourceType) -> tuple[NamespaceMapping, ...]:
    """The pairs of namespaces that this side takes from the other one: of some types, or of all."""
    return _moving(link.pairs(Role.FOLLOWER, *kinds))


def pushed_topics(link: Link) -> tuple[NamespaceMapping, ...]:
    """As :func:`pushed` of topics, with the offsets topic where its copy is on the other side."""
    offsets = link.offsets_topic(Role.LEADER)
    return (*pushed(link, ResourceType.TOPIC), *_moving(() if offsets is None else (offsets,)))


def _moving(pairs: Iterable[NamespaceMapping]) -> tuple[NamespaceMapping, ...]:
    return tuple(pairs)
