"""Reserved namespaces of principals: nobody changes what principals in them may do, or how they authenticate.

==========================  ============================================================================================
CreateAcls                  bindings of such a principal are refused, one by one
DeleteAcls                  a filter that matches bindings of such a principal is refused. Where a filter leaves the
                            principal open, the broker is asked what it matches, under the proxy's own identity. So a
                            refusal is told to those alone whom the broker lets delete ACLs: in place of the filter it
                            gets one that matches nothing, and where it refuses that, its own answer stands
AlterUserScramCredentials   refused for such users
AlterClientQuotas           refused for entities with such a user
CreateDelegationToken       refused where such a principal is named as the owner. Who asks for a token of his own is not
                            known to the proxy: it may get one
==========================  ============================================================================================

A user named ``app-1`` is the principal ``User:app-1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final
from uuid import uuid4

from isthmus_control.acls import AclBinding, AclFilter
from isthmus_control.lookup import Lookup
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Hold, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_as_asked, as_asked
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.telling import Refusals, Telling
from isthmus_plugins.reservation.verdicts import CAUSE, CAUSE_NO_LEASE, NO_LEASE_MESSAGE, message
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import NOT_ENOUGH_REPLICAS, POLICY_VIOLATION, SECURITY_DISABLED
from isthmus_protocol.messages import (
    RequestHead,
    RequestPayload,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.refusals import Part, Refusal, parts_of, refuse_all
from isthmus_protocol.schema import ApiKey

CHANGES: Final = (
    ApiKey.CREATE_ACLS,
    ApiKey.DELETE_ACLS,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    ApiKey.ALTER_CLIENT_QUOTAS,
    ApiKey.CREATE_DELEGATION_TOKEN,
)
USER: Final = "User"
"""Principal type of what authenticates with a name."""
QUOTA_USER: Final = "user"
"""Entity type of a quota that is about a user."""
UNNAMED_MAX: Final = 100
"""Filters of one request that name no principal: the brokers are asked what each matches."""
NAMED_MAX: Final = 3
"""Bindings that a message names."""


class PrincipalReservations:
    """Decides about changes of principals in reserved namespaces."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._lookup: Lookup = context.control.state.lookup
        self._refusals = Refusals(context, self._without_lease)

    def hooks(self) -> Sequence[RequestHook]:
        return [RequestHook(api, self.on_change, whole=True, pure=True) for api in CHANGES]

    def reservations_changed(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def on_change(self, request: Request) -> Verdict:
        """Decide about each principal that a request would change."""
        if request.now > self._context.lease_deadline:
            return self._without_lease(request)
        if not self._lookup.reserves(ResourceType.PRINCIPAL):
            return None
        head, payload = decode_request(request.frame)
        if request.api_key == ApiKey.DELETE_ACLS:
            return Hold(self._deletion(request, head, payload))
        return self._refusals.verdict(request, head, payload, self._decide, CAUSE)

    def _decide(self, part: Part) -> Telling | None:
        for principal in _principals(part):
            reservation = self._lookup.reservation(ResourceType.PRINCIPAL, principal)
            if reservation is not None:
                return Telling.of(principal, reservation, POLICY_VIOLATION)
        return None

    def _reserved(self, principal: str) -> Refusal | None:
        reservation = self._lookup.reservation(ResourceType.PRINCIPAL, principal)
        return None if reservation is None else Refusal(POLICY_VIOLATION, message(principal, reservation))

    async def _deletion(self, request: Request, head: RequestHead, payload: RequestPayload) -> Verdict:
        """Decide about filters by what they match now."""
        refusals, unnamed = await as_asked(request, self._by_their_principals, head, payload)
        for index, matched in unnamed.items():
            try:
                refusals[index] = self._matching(await self._context.cluster.acls(matched))
            except BrokerUnavailable as error:
                refusals[index] = Refusal(NOT_ENOUGH_REPLICAS, f"what the filter matches cannot be read now: {error}")
            except KafkaRefused as error:
                # Without an authorizer there is nothing to delete, which the broker says itself.
                why = f"the proxy may not see whether the filter matches principals of reserved namespaces: {error}"
                refusals[index] = None if error.error_code == SECURITY_DISABLED else Refusal(POLICY_VIOLATION, why)
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        if not any(refusals):
            return None
        return await as_asked(request, _without, request, head, payload, refusals)

    def _by_their_principals(
        self, head: RequestHead, payload: RequestPayload
    ) -> tuple[list[Refusal | None], dict[int, AclFilter]]:
        """What filters are refused that name a principal, in their places, and those that name none."""
        refusals: list[Refusal | None] = []
        unnamed: dict[int, AclFilter] = {}
        for part in parts_of(head, payload):
            matched = _filter(part.item)
            if matched.principal is not None:
                refusals.append(self._reserved(matched.principal))
            elif len(unnamed) < UNNAMED_MAX:
                unnamed[len(refusals)] = matched
                refusals.append(None)
            else:
                why = f"more than {UNNAMED_MAX} filters without a principal: delete them in several requests"
                refusals.append(Refusal(POLICY_VIOLATION, why))
        return refusals, unnamed

    def _matching(self, bindings: frozenset[AclBinding]) -> Refusal | None:
        """Why bindings that a filter matches may not be deleted, all of them."""
        held = [(binding, refusal) for binding in sorted(bindings) if (refusal := self._reserved(binding.principal))]
        if not held:
            return None
        named = ", ".join(str(binding) for binding, _ in held[:NAMED_MAX])
        more = f" and {len(held) - NAMED_MAX} more" if len(held) > NAMED_MAX else ""
        return Refusal(POLICY_VIOLATION, f"the filter matches {named}{more}; {held[0][1].message}")

    def _without_lease(self, request: Request) -> Verdict:
        head, payload = decode_request(request.frame)
        refused = refuse_all(head, payload, Refusal(NOT_ENOUGH_REPLICAS, NO_LEASE_MESSAGE))
        return verdict_of(request, head, refused, CAUSE_NO_LEASE)


def _without(
    request: Request, head: RequestHead, payload: RequestPayload, refusals: Sequence[Refusal | None]
) -> Verdict:
    """What becomes of a deletion of which some filters are refused: in their place stand some that match nothing."""
    asked: Any = payload
    filters = tuple(
        each if refusal is None else replace(each, principal_filter=f"{USER}:{uuid4()}")
        for each, refusal in zip(asked.filters, refusals, strict=True)
    )
    frame = encode_request(replace(asked, filters=filters), request.correlation_id, head.client_id)
    refused = partial(_refused_filters, request.version, refusals)
    return Replace(frame, answered_as_asked(request, refused), CAUSE)


def _refused_filters(version: int, refusals: Sequence[Refusal | None], frame: bytes) -> bytes:
    """The broker's answer, with the refusals of those filters at whose place the broker deleted nothing."""
    correlation_id, payload = decode_response(ApiKey.DELETE_ACLS, version, frame)
    answered: Any = payload
    results = tuple(
        result
        if refusal is None or int(result.error_code)
        else replace(result, error_code=error_code(refusal.code), error_message=refusal.message)
        for result, refusal in zip(answered.filter_results, refusals, strict=True)
    )
    return encode_response(replace(answered, filter_results=results), correlation_id)


def _principals(part: Part) -> Sequence[str]:
    """The principals that a part of a request changes."""
    item: Any = part.item
    if part.api_key == ApiKey.CREATE_ACLS:
        return (item.principal,)
    if part.api_key == ApiKey.ALTER_USER_SCRAM_CREDENTIALS:
        return (f"{USER}:{item.name}",)
    if part.api_key == ApiKey.ALTER_CLIENT_QUOTAS:
        return [
            f"{USER}:{each.entity_name}"
            for each in item.entity
            if each.entity_type == QUOTA_USER and each.entity_name is not None
        ]
    owner = getattr(item, "owner_principal_name", None)
    return () if not owner else (f"{item.owner_principal_type}:{owner}",)


def _filter(item: Any) -> AclFilter:
    """A filter of DeleteAcls."""
    return AclFilter(
        item.resource_type_filter,
        item.resource_name_filter,
        item.pattern_type_filter,
        item.principal_filter,
        item.host_filter,
        item.operation,
        item.permission_type,
    )
