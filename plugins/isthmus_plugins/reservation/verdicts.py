"""From what was refused of a request to the verdict on it, and from topic ids to names: for any kind of reservation."""

from __future__ import annotations

from functools import partial
from typing import Final

from isthmus_control.lookup import Reservation
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Close, PluginContext, Replace, Request, Verdict
from isthmus_protocol.messages import (
    RequestHead,
    RequestPayload,
    ResponsePayload,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.refusals import Part, Refused, parts_of

CAUSE: Final = "reserved_namespace"
CAUSE_NO_LEASE: Final = "no_lease"
NO_LEASE_MESSAGE: Final = "this proxy has lost touch with the other proxies of its cluster and takes no writes now"

_NOUNS: Final = {
    ResourceType.TOPIC: "topic",
    ResourceType.CONSUMER_GROUP: "consumer group",
    ResourceType.PRINCIPAL: "principal",
}


def message(name: str, reservation: Reservation) -> str:
    """What a client is told, in versions that carry a message."""
    if reservation.link is not None:
        why = (
            f"it follows over link {reservation.link}; write to the namespace that leads, or detach it and clear the "
            "reserved flag"
        )
    else:
        why = reservation.reason
    return f"{_NOUNS[reservation.type]} {name} is in the reserved namespace {reservation.prefix!r}: {why}"


def verdict_of(request: Request, head: RequestHead, refused: Refused | None, cause: str) -> Verdict:
    """What becomes of a request of which ``refused`` says what was refused."""
    if refused is None:
        return None
    if refused.answer is not None:
        return Answer(refused.answer, cause)
    frame = b""
    if refused.remaining is not None:
        frame = encode_request(refused.remaining, request.correlation_id, head.client_id)
    if refused.close:
        return Close("a write that asks for no answer (acks=0) and is refused", frame)
    return Replace(frame, partial(_merged, head.api_key, head.version, refused), cause)


def _merged(api_key: int, version: int, refused: Refused, frame: bytes) -> bytes:
    correlation_id, response = decode_response(api_key, version, frame)
    merged: ResponsePayload = refused.merge(response)
    return encode_response(merged, correlation_id)


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
