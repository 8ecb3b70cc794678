"""What each side of a link lets the other cluster have done without asking: rights in namespaces (``docs/adr/0020``).

| right | written | the other cluster may |
|---|---|---|
| FOLLOW | ``follow:orders-`` | follow what begins with ``orders-`` here |
| LEAD | ``lead:orders-`` | have it reserved here, following what is there |
| REPLACE | ``replace:orders-`` | have what these topics hold cut for that, or deleted as their source is |
| BROKER_SETTINGS | ``broker-settings`` | have settings of the brokers here changed for that |

Groups and principals have the word of their type before the prefix (``lead:consumer-group:app-``,
``lead:principal:User:app-``); a name of a topic has no colon. A copy of the other cluster's offsets topic takes
``lead:__consumer_offsets``.

Grants come with a token, from an operator, or with a pair: what this side attaches itself, or had attached when grants
began, the other one may detach and attach again (a promotion that is abandoned does), until this side detaches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from isthmus_control.model import (
    AttachRequest,
    Grant,
    Link,
    NamespaceMapping,
    OnSourceDelete,
    OnSourceLoss,
    ResourceType,
    Right,
    Role,
)
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

BROKER_SETTINGS: Final = Grant(Right.BROKER_SETTINGS)
OFFSETS_COPY: Final = Grant(Right.LEAD, ResourceType.TOPIC, OFFSETS_TOPIC)
"""A copy of the other cluster's offsets topic may be made here."""
_PAIRS: Final = (Right.FOLLOW, Right.LEAD)
EVERYTHING: Final = (
    *(Grant(right, ResourceType.TOPIC, prefix) for right in (*_PAIRS, Right.REPLACE) for prefix in ("", "_")),
    *(Grant(right, ResourceType.CONSUMER_GROUP, prefix) for right in _PAIRS for prefix in ("", "_")),
    *(Grant(right, ResourceType.PRINCIPAL) for right in _PAIRS),
    BROKER_SETTINGS,
)
"""Of links within one machine (``link.allow_local_links``). The empty prefix holds nothing that begins with ``_``."""

_SEPARATOR: Final = re.compile(r",(?=(?:follow|lead|replace):|broker-settings(?:,|\Z))")
"""Names of groups and principals may have commas."""


def parse_grants(text: str) -> tuple[Grant, ...]:
    """The grants of a text, separated by commas. Raises ValueError, which says what is wrong."""
    return tuple(dict.fromkeys(map(parse_grant, _SEPARATOR.split(text))))


def parse_grant(text: str) -> Grant:
    """One of them."""
    if text == Right.BROKER_SETTINGS:
        return BROKER_SETTINGS
    right, colon, prefix = text.partition(":")
    if not colon or right not in (Right.FOLLOW, Right.LEAD, Right.REPLACE):
        raise ValueError(
            f"{text!r} is no grant: follow:PREFIX, lead:PREFIX or replace:PREFIX of topics, follow:TYPE:PREFIX or "
            f"lead:TYPE:PREFIX with the type {ResourceType.CONSUMER_GROUP} or {ResourceType.PRINCIPAL}, or "
            f"{Right.BROKER_SETTINGS}"
        )
    for kind in (ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL):
        if prefix.startswith(f"{kind}:"):
            return Grant(Right(right), kind, prefix.removeprefix(f"{kind}:"))
    return Grant(Right(right), ResourceType.TOPIC, prefix)


def covers(grant: Grant, wanted: Grant) -> bool:
    """Whether one right includes another one."""
    if grant.right is not wanted.right:
        return False
    if grant.right is Right.BROKER_SETTINGS:
        return True
    # The namespace with the empty prefix does not hold what begins with an underscore.
    within = wanted.prefix.startswith(grant.prefix) and (bool(grant.prefix) or not wanted.prefix.startswith("_"))
    return grant.type is wanted.type and within


def missing(link: Link, wanted: Iterable[Grant]) -> tuple[Grant, ...]:
    """What the other cluster of the link wants to have done here, and may not."""
    # What the operator here has asked for, and waits for the one there: asked for there as well, both agree.
    asked = (request for request in link.waiting if request.asked_here)
    given = (*link.grants, *(each for request in asked for each in _agreed(request)))
    return tuple(each for each in wanted if not any(covers(grant, each) for grant in given))


def needed(
    kind: ResourceType,
    prefix: str,
    role: Role,
    *,
    replaces: bool = False,
    disable_transaction_verification: bool = False,
    on_source_loss: OnSourceLoss | None = None,
    on_source_delete: OnSourceDelete | None = None,
) -> tuple[Grant, ...]:
    """What attaching a pair takes at the side that is asked; names and role are its own."""
    found = [_of_role(kind, prefix, role)]
    cuts = replaces or on_source_loss is OnSourceLoss.CUT or on_source_delete is OnSourceDelete.DELETE
    if cuts and kind is ResourceType.TOPIC:
        found.append(Grant(Right.REPLACE, kind, prefix))
    if disable_transaction_verification:
        found.append(BROKER_SETTINGS)
    return tuple(found)


def lacks(link: Link, request: AttachRequest) -> tuple[Grant, ...]:
    """What the other cluster may not have attached here; what is attached takes no grant again, but to cut more."""
    attached = link.mapping(request.type, request.local_prefix)
    known = () if attached is None else needed_by(attached)
    cut = Right.REPLACE if request.truncate_target else None
    return missing(link, (each for each in needed_for(request) if each not in known or each.right is cut))


def needed_by(attached: NamespaceMapping) -> tuple[Grant, ...]:
    """The same of what is attached here."""
    return needed(
        attached.type,
        attached.local_prefix,
        attached.role,
        disable_transaction_verification=attached.disable_transaction_verification,
        on_source_loss=attached.on_source_loss,
        on_source_delete=attached.on_source_delete,
    )


def needed_for(request: AttachRequest) -> tuple[Grant, ...]:
    """The same of what is asked for here."""
    return needed(
        request.type,
        request.local_prefix,
        request.role,
        replaces=request.truncate_target,
        disable_transaction_verification=request.disable_transaction_verification,
        on_source_loss=request.on_source_loss,
        on_source_delete=request.on_source_delete,
    )


def _agreed(request: AttachRequest) -> tuple[Grant, ...]:
    if request.role is Role.FOLLOWER:
        return needed_for(request)
    return needed(request.type, request.local_prefix, request.role)  # the rest is about the other side


def of_pair(mapping: NamespaceMapping) -> Grant:
    """The grant that comes with a pair."""
    if mapping.offsets is not None:
        return Grant(Right.LEAD, ResourceType.TOPIC, OFFSETS_TOPIC, attached=True)
    return with_pair(mapping.type, mapping.local_prefix, mapping.role)


def with_pair(kind: ResourceType, prefix: str, role: Role) -> Grant:
    """The same, by the local namespace and its role."""
    return replace(_of_role(kind, prefix, role), attached=True)


def _of_role(kind: ResourceType, prefix: str, role: Role) -> Grant:
    return Grant(Right.FOLLOW if role is Role.LEADER else Right.LEAD, kind, prefix)


def not_granted(link_name: str, lacking: Iterable[Grant]) -> str:
    """What the other cluster was not granted, for people at either side."""
    lacking = tuple(lacking)
    namespaces = ",".join(str(each) for each in lacking if each != BROKER_SETTINGS)
    options = f" --may '{namespaces}'" if namespaces else ""
    options += " --broker-settings" if BROKER_SETTINGS in lacking else ""
    return f"it was not granted: at the cluster that is asked, isthmus link grant {link_name}{options} does that"
