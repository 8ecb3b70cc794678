"""What a link moves now, and in which direction. Whoever sends or takes what namespaces hold asks here, and only here.

Pairs of namespaces have roles, and today all that a link has attached moves by its roles. What makes a link stand still
while its roles stay (a pause by the operator, a reversal) is one condition in :func:`_moves`.
"""

from __future__ import annotations

from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role


def pushed(link: Link, *kinds: ResourceType) -> tuple[NamespaceMapping, ...]:
    """The pairs of namespaces that this side sends to the other one: of some types, or of all."""
    return tuple(each for each in link.mappings if _moves(each, Role.LEADER) and (not kinds or each.type in kinds))


def followed(link: Link, *kinds: ResourceType) -> tuple[NamespaceMapping, ...]:
    """The pairs of namespaces that this side takes from the other one: of some types, or of all."""
    return tuple(each for each in link.mappings if _moves(each, Role.FOLLOWER) and (not kinds or each.type in kinds))


def pushed_topics(link: Link) -> tuple[NamespaceMapping, ...]:
    """As :func:`pushed` of topics, with the offsets topic where its copy is on the other side."""
    offsets = (each for each in link.offsets_topics if _moves(each, Role.LEADER))
    return (*pushed(link, ResourceType.TOPIC), *offsets)


def _moves(mapping: NamespaceMapping, role: Role) -> bool:
    return mapping.role is role
