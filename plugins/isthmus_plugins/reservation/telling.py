"""Who is told why a request is refused: those alone whom the broker lets describe what it is about.

The prefix of a namespace, its link and the reason of an operator are nobody else's business, and neither is whether
there is such a topic. So before a refusal is told, the broker is asked on the client's own connection, with the
client's rights (``describing``). Who may not describe something is refused as a broker refuses it, without a word, and
the log has the words.

What is forwarded costs nothing by it, and a refusal one round trip to the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from isthmus_control.lookup import Reservation
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Ask, Request, Verdict
from isthmus_plugins.aside import on_loop
from isthmus_plugins.clock import monotonic
from isthmus_plugins.describing import described as described_of
from isthmus_plugins.describing import question
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.reservation.verdicts import message
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
)
from isthmus_protocol.messages import RequestHead, RequestPayload
from isthmus_protocol.refusals import Part, Refusal, refuse
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.reservation")

NOT_DESCRIBED: Final = {
    ResourceType.TOPIC: TOPIC_AUTHORIZATION_FAILED,
    ResourceType.CONSUMER_GROUP: GROUP_AUTHORIZATION_FAILED,
    ResourceType.PRINCIPAL: CLUSTER_AUTHORIZATION_FAILED,
}
"""What a broker answers who may not describe a resource."""


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

        def answered(told: Collection[str]) -> Verdict:
            if monotonic() > self._context.lease_deadline:
                return self._without_lease(request)
            return self.verdict(request, head, payload, decide, cause, {**described, kind: told})

        return Ask(question(kind, names, head.client_id), answered, partial(described_of, kind, names))

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
        on_loop(self._untold.one, host, fields)


def _say_untold(count: int, last: Mapping[str, Any]) -> None:
    log.info("refused without saying why, to who may not describe it", extra={**last, "times": count})


def _code(part: Part, kind: ResourceType) -> int:
    if part.api_key == ApiKey.CREATE_DELEGATION_TOKEN:
        return DELEGATION_TOKEN_AUTHORIZATION_FAILED
    return NOT_DESCRIBED[kind]
