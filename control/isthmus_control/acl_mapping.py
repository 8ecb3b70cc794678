"""What becomes of access control bindings on the other side of a link.

A link that has principal namespaces attached carries the bindings of their principals, for the topics and groups of the
namespaces attached beside them. Nothing is ever widened: on the target a principal may do, with what the link maps, at
most what its counterpart may do on the source.

=========================================  =============================================================================
the source's binding                       becomes
=========================================  =============================================================================
names a topic or group that is mapped      the same, with principal and name mapped
a prefix inside of a mapped namespace      the same, with the prefix mapped
ALLOW for more than a namespace            nothing: its counterpart would reach what is not mapped
DENY for more than a namespace             DENY for each of the namespaces that it covers, or the target would let
                                           in whom the source keeps out
DENY for every principal                   the same for each principal that an ALLOW was mapped for
other resources, wildcard principals       nothing
=========================================  =============================================================================

What becomes nothing is reported, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from isthmus_control.acls import WILDCARD, AclBinding, AclResource, Pattern, Permission
from isthmus_control.model import INTERNAL_PREFIX, KAFKA_INTERNAL_TOPICS, NamespaceMapping, ResourceType

EVERY_USER: Final = f"User:{WILDCARD}"
"""The one principal that stands for all (of type User) in bindings."""
_KINDS: Final[Mapping[int, ResourceType]] = MappingProxyType(
    {AclResource.TOPIC: ResourceType.TOPIC, AclResource.GROUP: ResourceType.CONSUMER_GROUP}
)


class NotMapped(NamedTuple):
    """A binding of the source that has no counterpart, and why."""

    binding: AclBinding
    reason: str


class Mapped(NamedTuple):
    """What the target is to have of the source's bindings."""

    bindings: frozenset[AclBinding]
    not_mapped: tuple[NotMapped, ...]


class _Unmappable(Exception):
    """Says why."""


def counterparts(bindings: Iterable[AclBinding], mappings: Sequence[NamespaceMapping]) -> Mapped:
    """The target's bindings for the source's, by the link's ``mappings``, of which this cluster leads."""
    principals = [mapping for mapping in mappings if mapping.type is ResourceType.PRINCIPAL]
    found: set[AclBinding] = set()
    not_mapped: list[NotMapped] = []
    denied_to_all: list[AclBinding] = []
    for binding in sorted(bindings):
        deny = binding.permission == Permission.DENY
        if deny and binding.principal == EVERY_USER:
            denied_to_all.append(binding)
            continue
        mapping = next((each for each in principals if each.holds(binding.principal)), None)
        if mapping is None:
            continue
        try:
            principal = _principal(binding.principal, mapping)
            found.update(
                binding._replace(principal=principal, **place._asdict()) for place in _places(binding, mappings)
            )
        except _Unmappable as error:
            not_mapped.append(NotMapped(binding, str(error)))
    allowed = {each.principal for each in found if each.permission == Permission.ALLOW}
    for binding in denied_to_all:
        try:
            places = _places(binding, mappings)
        except _Unmappable:
            continue  # it is about nothing that is mapped
        found.update(binding._replace(principal=each, **place._asdict()) for each in allowed for place in places)
    return Mapped(frozenset(found), tuple(not_mapped))


def held(binding: AclBinding, mappings: Sequence[NamespaceMapping]) -> bool:
    """Whether a binding of the target is about principals and resources of the link's namespaces alone.

    ``mappings``: those of the link in which this cluster follows. A DENY may be for a whole namespace whatever its
    prefix is: it lets in nobody.
    """
    kind = _KINDS.get(binding.resource_type)
    if kind is None or binding.principal == EVERY_USER:
        return False
    if not any(mapping.type is ResourceType.PRINCIPAL and mapping.holds(binding.principal) for mapping in mappings):
        return False
    own = [mapping for mapping in mappings if mapping.type is kind]
    name, deny = binding.resource_name, binding.permission == Permission.DENY
    if binding.pattern_type == Pattern.LITERAL:
        if name == WILDCARD:
            return deny and any(not mapping.local_prefix for mapping in own)
        return any(mapping.holds(name) for mapping in own)
    if deny:
        return any(name.startswith(mapping.local_prefix) for mapping in own)
    return bool(name) and not _covers_internal(kind, name) and any(mapping.holds(name) for mapping in own)


class _Place(NamedTuple):
    """Fields of a binding that say what it is about."""

    pattern_type: int
    resource_name: str


def _principal(principal: str, mapping: NamespaceMapping) -> str:
    if principal == EVERY_USER:
        raise _Unmappable("it is for every principal, of the target too")
    counterpart = mapping.remote_name(principal)
    if counterpart is None or counterpart == EVERY_USER:
        raise _Unmappable(f"{principal} has no counterpart in the namespace {mapping.remote_prefix!r}")
    return counterpart


def _places(binding: AclBinding, mappings: Sequence[NamespaceMapping]) -> list[_Place]:
    """What a binding is about, on the target. Raises _Unmappable."""
    kind = _KINDS.get(binding.resource_type)
    if kind is None:
        raise _Unmappable("bindings for topics and consumer groups are mapped, and no others")
    own = [mapping for mapping in mappings if mapping.type is kind]
    name, deny = binding.resource_name, binding.permission == Permission.DENY
    if binding.pattern_type == Pattern.LITERAL and name != WILDCARD:
        counterpart = next((found for each in own if (found := each.remote_name(name)) is not None), None)
        if counterpart is None:
            raise _Unmappable(f"no mapping of the link holds the {_noun(kind)} {name!r}")
        if counterpart == WILDCARD:
            raise _Unmappable(f"the {_noun(kind)} {name!r} would become every one of the target")
        return [_Place(Pattern.LITERAL, counterpart)]
    if binding.pattern_type not in (Pattern.LITERAL, Pattern.PREFIXED):
        raise _Unmappable(f"pattern type {binding.pattern_type} is not known to this version")
    prefix = "" if binding.pattern_type == Pattern.LITERAL else name
    if binding.pattern_type == Pattern.PREFIXED:
        inside = next((each for each in own if each.local_prefix and prefix.startswith(each.local_prefix)), None)
        inside = inside or next((each for each in own if not each.local_prefix and each.holds(prefix)), None)
        if inside is not None:
            return [_prefixed(kind, prefix, inside, deny)]
    covered = [each for each in own if each.local_prefix.startswith(prefix)]
    if not covered:
        raise _Unmappable(f"no mapping of the link holds {_noun(kind)}s with the prefix {prefix!r}")
    if not deny:
        raise _Unmappable(
            f"it reaches beyond the {_noun(kind)} namespace {covered[0].local_prefix!r}: grant it for that prefix, "
            "and it is mapped"
        )
    return [_whole(each) for each in covered]


def _prefixed(kind: ResourceType, prefix: str, mapping: NamespaceMapping, deny: bool) -> _Place:
    """The counterpart of a prefix inside of a namespace."""
    counterpart = mapping.remote_prefix + prefix[len(mapping.local_prefix) :]
    if deny:
        return _Place(Pattern.PREFIXED, counterpart) if counterpart else _whole(mapping)
    if not counterpart:
        raise _Unmappable(f"the prefix {prefix!r} would become every {_noun(kind)} of the target")
    if mapping.remote_name(prefix) is None or any(_covers_internal(kind, each) for each in (prefix, counterpart)):
        raise _Unmappable(f"the prefix {prefix!r} would become {counterpart!r}, which reaches beyond the namespace")
    return _Place(Pattern.PREFIXED, counterpart)


def _whole(mapping: NamespaceMapping) -> _Place:
    """All of the remote namespace, and where its prefix is empty, all there is."""
    if not mapping.remote_prefix:
        return _Place(Pattern.LITERAL, WILDCARD)
    return _Place(Pattern.PREFIXED, mapping.remote_prefix)


def _covers_internal(kind: ResourceType | None, prefix: str) -> bool:
    """Whether a prefix of topics holds internal ones, which are in no namespace."""
    return kind is ResourceType.TOPIC and any(
        name.startswith(prefix) or prefix.startswith(INTERNAL_PREFIX)
        for name in (INTERNAL_PREFIX, *KAFKA_INTERNAL_TOPICS)
    )


def _noun(kind: ResourceType) -> str:
    return "topic" if kind is ResourceType.TOPIC else "consumer group"
