"""Drills: what a failover now would lose, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, ResourceType, Role
from isthmus_plugins.drill_report import DrillFailover, DrillReport, LostByFailover
from isthmus_plugins.links import LinkStatus, NamespaceRef, OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.operations import losses
from isthmus_plugins.replication.operations.unconfirmed import Unconfirmed

Progress = Callable[[int, int], None]


class Drills:
    """``status``: what this proxy shows of a link."""

    def __init__(self, context: PluginContext, unconfirmed: Unconfirmed, status: Callable[[Link], LinkStatus]) -> None:
        self._context = context
        self._unconfirmed = unconfirmed
        self._status = status

    async def fail_over(self, link: Link, request: DrillFailover, progress: Progress) -> DrillReport:
        """Say what failing over what follows over a link would come to. Raises OperationError."""
        pairs, role = _wanted(link, request.namespaces)
        return DrillReport(
            link_name=link.name,
            asked="follower" if role is Role.FOLLOWER else "leader",
            namespaces=[NamespaceRef(type=each.type.value, local=each.local_prefix) for each in pairs],
            lost=await self._lost(link, pairs, role),
        )

    async def _lost(self, link: Link, pairs: Sequence[NamespaceMapping], role: Role) -> LostByFailover:
        if role is Role.LEADER:
            return losses.lost([await self._unconfirmed.of(link)], *_held(pairs))
        status = self._status(link)
        try:
            answers = await self._unconfirmed.asked(link)
        except OperationError as error:
            return losses.not_said(error.message)
        if answers:
            return losses.lost(answers, *_names(pairs))
        topic, _ = _held(pairs)
        followed = [each for each in status.partitions if topic(each.topic) is not None]
        why = status.message or "no proxy of the source answers"
        return losses.last_known(followed, status.last_heard_seconds, f"the source is not connected: {why}")


def _wanted(link: Link, namespaces: Sequence[NamespaceRef]) -> tuple[list[NamespaceMapping], Role]:
    """The pairs that were asked for, of the one role that this cluster has in them; all that follow where nothing is
    named, or else all that are led."""
    if not namespaces:
        for role in (Role.FOLLOWER, Role.LEADER):
            if pairs := list(link.pairs(role)):
                return pairs, role
        raise OperationError("NOT_FOUND", f"nothing is attached to {link.name!r}", 404)
    found = []
    for each in namespaces:
        key = NamespaceKey(ResourceType(each.type), each.local)
        mapping = link.mapping(*key)
        if mapping is None:
            raise OperationError("NOT_FOUND", f"the {key} is not attached to {link.name!r}", 404)
        found.append(mapping)
    roles = {each.role for each in found}
    if len(roles) > 1:
        raise OperationError(
            "INVALID", "some of these follow, and this cluster leads the others: a failover is of what follows", 422
        )
    return found, roles.pop()


def _names(pairs: Sequence[NamespaceMapping]) -> tuple[losses.Name, losses.Name]:
    """What the source's topics and groups are called here."""
    return tuple(_first(pairs, kind, NamespaceMapping.local_name) for kind in _KINDS)  # type: ignore[return-value]


def _held(pairs: Sequence[NamespaceMapping]) -> tuple[losses.Name, losses.Name]:
    """This cluster's own topics and groups, of those that the pairs hold."""
    return tuple(  # type: ignore[return-value]
        _first(pairs, kind, lambda mapping, name: name if mapping.holds(name) else None) for kind in _KINDS
    )


_KINDS: Final = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP)


def _first(
    pairs: Sequence[NamespaceMapping], kind: ResourceType, called: Callable[[NamespaceMapping, str], str | None]
) -> losses.Name:
    some = [each for each in pairs if each.type is kind]
    return lambda name: next((found for each in some if (found := called(each, name)) is not None), None)
