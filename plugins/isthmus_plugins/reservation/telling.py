"""Who is told why a request is refused: those alone whom the broker lets describe what it is about.

The prefix of a namespace, its link and the reason of an operator are nobody else's business, and neither is whether
there is such a topic. So before a refusal is told, the broker is asked on the client's own connection, with the
client's rights: it answers an authorization error where the client may not describe something. Such a client is refused
as a broker refuses it, without a word, and the log has the words.

===============  =============================  =====================================================================
about            the broker is asked            who may not describe it is answered
===============  =============================  =====================================================================
topics           Metadata, which makes nothing  TOPIC_AUTHORIZATION_FAILED
consumer groups  DescribeGroups                 GROUP_AUTHORIZATION_FAILED
principals       DescribeAcls, of nobody        CLUSTER_AUTHORIZATION_FAILED; DELEGATION_TOKEN_AUTHORIZATION_FAILED
===============  =============================  =====================================================================

What is forwarded costs nothing by it, and a refusal one round trip to the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

from isthmus_control.lookup import Reservation
from isthmus_control.model import ResourceType
from isthmus_plugins.api import ASKED_ID, Ask, Request, Verdict
from isthmus_plugins.clock import monotonic
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.reservation.verdicts import message
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE,
    DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    GROUP_ID_NOT_FOUND,
    INVALID_TOPIC_EXCEPTION,
    LEADER_NOT_AVAILABLE,
    NOT_COORDINATOR,
    SECURITY_DISABLED,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import RequestHead, RequestPayload, build_request, decode_response, encode_request
from isthmus_protocol.refusals import Part, Refusal, refuse
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.reservation")

_APIS: Final = {
    ResourceType.TOPIC: ApiKey.METADATA,
    ResourceType.CONSUMER_GROUP: ApiKey.DESCRIBE_GROUPS,
    ResourceType.PRINCIPAL: ApiKey.DESCRIBE_ACLS,
}
VERSIONS: Final = {ApiKey.METADATA: 12, ApiKey.DESCRIBE_GROUPS: 5, ApiKey.DESCRIBE_ACLS: 3}
"""In which the broker is asked: all brokers from 3.9 on have these."""
NOT_DESCRIBED: Final = {
    ResourceType.TOPIC: TOPIC_AUTHORIZATION_FAILED,
    ResourceType.CONSUMER_GROUP: GROUP_AUTHORIZATION_FAILED,
    ResourceType.PRINCIPAL: CLUSTER_AUTHORIZATION_FAILED,
}
"""What a broker answers who may not describe a resource."""
MAY_DESCRIBE: Final = {
    ResourceType.TOPIC: (0, UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, INVALID_TOPIC_EXCEPTION),
    ResourceType.CONSUMER_GROUP: (
        0,
        COORDINATOR_LOAD_IN_PROGRESS,
        COORDINATOR_NOT_AVAILABLE,
        NOT_COORDINATOR,
        GROUP_ID_NOT_FOUND,
    ),
    ResourceType.PRINCIPAL: (0, SECURITY_DISABLED),
}
"""Codes that a broker answers to who may, whether there is such a thing or not. Any other one is no leave."""
_ANY: Final = 1
"""Of resource types, pattern types, operations and permissions in a filter of ACLs."""


@dataclass(frozen=True, slots=True)
class Telling:
    """A refusal that tells of something: in ``words``, where an answer has room for them, and by its ``code``."""

    type: ResourceType
    name: str
    """Of the topic, group or principal, as the client knows it."""
    code: int
    words: str

    @staticmethod
    def of(name: str, reservation: Reservation, code: int) -> Telling:
        return Telling(reservation.type, name, code, message(name, reservation))


Decide = Callable[[Part], Refusal | Telling | None]
Described = Mapping[ResourceType, Collection[str]]
"""Of the types that the broker was asked about: what the client may describe."""


class Refusals:
    """Refuses parts of requests, and tells who may know why."""

    def __init__(self, context: PluginContext, without_lease: Callable[[Request], Verdict]) -> None:
        """``without_lease``: what becomes of a request if the lease ends while the broker is asked."""
        self._context = context
        self._without_lease = without_lease
        self._untold = RarelyEach(_say_untold)

    def verdict(
        self,
        request: Request,
        head: RequestHead,
        payload: RequestPayload,
        decide: Decide,
        cause: str,
        described: Described = MappingProxyType({}),
    ) -> Verdict:
        """What becomes of a request of which ``decide`` says what is refused. It is asked again after the broker."""
        asked: dict[ResourceType, set[str]] = {}

        def told(part: Part) -> Refusal | None:
            found = decide(part)
            if not isinstance(found, Telling):
                return found
            if found.type not in described:
                asked.setdefault(found.type, set()).add(found.name)
            elif found.name not in described[found.type]:
                self._keep_back(request, found)
                return Refusal(_code(part, found.type))
            return Refusal(found.code, found.words)

        refused = refuse(head, payload, told)
        if refused is None or refused.close or not asked:
            return verdict_of(request, head, refused, cause)
        kind, names = next(iter(asked.items()))

        def answered(frame: bytes) -> Verdict:
            if monotonic() > self._context.lease_deadline:
                return self._without_lease(request)
            known = {**described, kind: _described(kind, names, frame)}
            return self.verdict(request, head, payload, decide, cause, known)

        return Ask(_question(kind, names, head.client_id), answered)

    def whole(self, request: Request, head: RequestHead, payload: RequestPayload, why: Telling, cause: str) -> Verdict:
        """Refuse all of a request for one reason."""
        return self.verdict(request, head, payload, lambda part: why, cause)

    def _keep_back(self, request: Request, why: Telling) -> None:
        host = request.client.address.rpartition(":")[0]
        fields = {
            "client": request.client.address,
            "principal": request.client.principal,
            "api": ApiKey(request.api_key).name.lower(),
            "reason": why.words,
        }
        self._untold.one(host, fields)


def _say_untold(count: int, last: Mapping[str, Any]) -> None:
    log.info("refused without saying why, to who may not describe it", extra={**last, "times": count})


def _code(part: Part, kind: ResourceType) -> int:
    if part.api_key == ApiKey.CREATE_DELEGATION_TOKEN:
        return DELEGATION_TOKEN_AUTHORIZATION_FAILED
    return NOT_DESCRIBED[kind]


# ---- what the broker is asked ----


def _question(kind: ResourceType, names: Collection[str], client_id: str | None) -> bytes:
    """A request whose answer says which of these the client may describe. It counts as the client's in quotas."""
    api = _APIS[kind]
    values: dict[str, Any]
    if kind is ResourceType.TOPIC:
        values = {"topics": [{"name": name} for name in names], "allow_auto_topic_creation": False}
    elif kind is ResourceType.CONSUMER_GROUP:
        values = {"groups": tuple(names)}
    else:
        values = {
            "resource_type_filter": _ANY,
            "resource_name_filter": None,
            "pattern_type_filter": _ANY,
            "principal_filter": f"User:{uuid4()}",
            "host_filter": None,
            "operation": _ANY,
            "permission_type": _ANY,
        }
    return encode_request(build_request(api, VERSIONS[api], values), ASKED_ID, client_id)


def _described(kind: ResourceType, names: Collection[str], frame: bytes) -> Collection[str]:
    """Which of ``names`` the client may describe, by the broker's answer."""
    api = _APIS[kind]
    answer: Any = decode_response(api, VERSIONS[api], frame)[1]
    leave = MAY_DESCRIBE[kind]
    if kind is ResourceType.TOPIC:
        return {topic.name for topic in answer.topics if int(topic.error_code) in leave}
    if kind is ResourceType.CONSUMER_GROUP:
        return {group.group_id for group in answer.groups if int(group.error_code) in leave}
    return names if int(answer.error_code) in leave else ()
