"""What clients are answered about a reservation, and from topic ids to names: for any kind of reservation."""

from __future__ import annotations

from typing import Final

from isthmus_control.lookup import Reservation
from isthmus_control.model import ResourceType
from isthmus_plugins.process import PluginContext
from isthmus_protocol.messages import (
    RequestHead,
    RequestPayload,
)
from isthmus_protocol.refusals import Part, parts_of

CAUSE: Final = "reserved_namespace"
CAUSE_NO_LEASE: Final = "no_lease"
NO_LEASE_MESSAGE: Final = "this proxy has lost touch with the other proxies of its cluster and takes no writes now"

_NOUNS: Final = {
    ResourceType.TOPIC: "topic",
    ResourceType.CONSUMER_GROUP: "consumer group",
    ResourceType.PRINCIPAL: "principal",
}


def message(name: str, reservation: Reservation) -> str:
    """What a client is answered, in versions that carry a message."""
    if reservation.beyond:
        return f"{_NOUNS[reservation.type]} {name} takes no writes at this proxy now: {reservation.reason}"
    if reservation.link is not None:
        why = (
            f"it follows over link {reservation.link}; write to the namespace that leads, or detach it and clear the "
            "reserved flag"
        )
    else:
        why = reservation.reason
    return f"{_NOUNS[reservation.type]} {name} is in the reserved namespace {reservation.prefix!r}: {why}"


def unknown_ids(context: PluginContext, head: RequestHead, payload: RequestPayload) -> set[bytes]:
    """The topic ids in a request whose names are not known yet."""
    return {
        part.topic_id.bytes
        for part in parts_of(head, payload)
        if not part.topic and part.topic_id and context.known_topic_name(part.topic_id.bytes) is None
    }


def topic_of(context: PluginContext, part: Part) -> str | None:
    """The name of the topic that a part of a request is about; None if it is about none, or about an unknown id."""
    if not part.topic and part.topic_id is not None:
        return context.known_topic_name(part.topic_id.bytes)
    return part.topic or None
