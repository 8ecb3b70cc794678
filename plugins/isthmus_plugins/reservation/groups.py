"""Reserved namespaces of consumer groups.

Two things may be the case with a group in one, and they differ in what its clients may do:

==================  ============================================  ================================================
                    the group follows over a link                 the namespace is reserved, and follows nothing
==================  ============================================  ================================================
join, heartbeat     goes on                                       refused if there is no such group yet
commit offsets      refused for partitions of topics that follow  refused if there is no such group yet
                    over the same link: their committed offsets come
                    from the source. Others go through
delete offsets      as commits                                    refused
delete the group,   refused                                       refused
change its settings
==================  ============================================  ================================================

Whether there is a group is asked of its coordinator, and only for requests that would make one: a join of a new member,
a commit from outside of the group. Everything else costs a look at the group's name, and in clusters that have no
reserved namespace of groups not even that. Where clients are told to move, commits are answered otherwise now and then
(``coordinators``). The proxies' own groups are nobody else's: whatever would change them is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from isthmus_control.lookup import Counterpart, Lookup, Reservation
from isthmus_control.model import INTERNAL_PREFIX, ResourceType
from isthmus_plugins.api import Close, Hold, Request, RequestHook, Verdict
from isthmus_plugins.aside import as_asked
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.coordinators import MESSAGE as ELSEWHERE
from isthmus_plugins.reservation.coordinators import Coordinators
from isthmus_plugins.reservation.reversing import MESSAGE as REVERSING
from isthmus_plugins.reservation.reversing import Reversing
from isthmus_plugins.reservation.telling import Refusals, Telling
from isthmus_plugins.reservation.verdicts import (
    CAUSE,
    CAUSE_NO_LEASE,
    NO_LEASE_MESSAGE,
    topic_of,
    unknown_ids,
)
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    GROUP_AUTHORIZATION_FAILED,
    NOT_COORDINATOR,
    POLICY_VIOLATION,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
)
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import Part, Refusal, refuse_all
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.reservation")

CAUSE_REPLICATED: Final = "replicated_group"
CAUSE_INTERNAL: Final = "internal_group"
INTERNAL_MESSAGE: Final = f"{INTERNAL_PREFIX}* are the proxies' own groups"
LOGGED_MAX: Final = 10_000
"""Groups whose refusal was logged: a consumer with automatic commits is refused every few seconds."""

COMMITS: Final = (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT)
MAKES_GROUP: Final = (
    ApiKey.JOIN_GROUP,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ApiKey.STREAMS_GROUP_HEARTBEAT,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS,
)
"""A broker makes the group that such a request names, or the transaction that it opens does."""
DELETIONS: Final = (ApiKey.OFFSET_DELETE, ApiKey.DELETE_GROUPS, ApiKey.DELETE_SHARE_GROUP_OFFSETS)
_GROUP: Final = ResourceType.CONSUMER_GROUP
_PREFIX: Final = INTERNAL_PREFIX.encode()
_FIRST_HEARTBEAT: Final = 0
"""Member epoch of a heartbeat that joins (KIP-848)."""


class GroupReservations:
    """Decides about requests of consumers and administrators to groups in reserved namespaces."""

    def __init__(self, context: PluginContext, reversing: Reversing, moves: MoveTimes) -> None:
        """``moves``: of the present control state."""
        self._context = context
        self._reversing = reversing
        self._coordinators = Coordinators(context, moves)
        self._lookup: Lookup = context.control.state.lookup
        self._logged: set[tuple[int, str]] = set()
        self._refusals = Refusals(context, self._without_lease)

    def hooks(self) -> Sequence[RequestHook]:
        return [
            *(RequestHook(api, self.on_commit, whole=True, pure=True) for api in COMMITS),
            *(RequestHook(api, self.on_join, whole=True, pure=True) for api in MAKES_GROUP),
            *(RequestHook(api, self.on_delete, whole=True, pure=True) for api in DELETIONS),
        ]

    def reservations_changed(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._logged.clear()

    # ---- commits ----

    def on_commit(self, request: Request) -> Verdict:
        """Decide about OffsetCommit and TxnOffsetCommit."""
        if _is_internal(request):
            return _refused_internal(request)
        if request.now > self._context.lease_deadline:
            return self._without_lease(request)
        if request.api_key == ApiKey.OFFSET_COMMIT and (elsewhere := self._coordinators.elsewhere(request)):
            telling = Telling(_GROUP, _group_of(request), NOT_COORDINATOR, ELSEWHERE)
            return elsewhere if isinstance(elsewhere, Close) else self._told(request, telling)
        if not self._lookup.reserves(_GROUP):
            return None
        group = _group_of(request)
        unknown_here = self._lookup.beyond(_GROUP, group)
        if unknown_here is not None:
            return self._told(request, Telling.of(group, unknown_here, COORDINATOR_LOAD_IN_PROGRESS))
        if self._reversing.holds(_GROUP, group):
            return self._reversing.answered_later(group, _reversed(request))
        following = self._lookup.following(_GROUP, group)
        if following is None:
            reserved = self._lookup.reservation(_GROUP, group) is not None
            return Hold(self._if_it_exists(request, group)) if reserved and _from_outside(request) else None
        head, payload = decode_request(request.frame)
        unknown = unknown_ids(self._context, head, payload)
        return Hold(self._resolved(request, group, unknown)) if unknown else self._replicated(request, following)

    async def _resolved(self, request: Request, group: str, unknown: set[bytes]) -> Verdict:
        """Decide after the names of topic ids have been read from the cluster."""
        try:
            await self._context.topic_names(unknown)
        except BrokerUnavailable as error:
            return await as_asked(request, _refused_whole, request, COORDINATOR_LOAD_IN_PROGRESS, str(error), CAUSE)
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        following = self._lookup.following(_GROUP, group)
        return None if following is None else await as_asked(request, self._replicated, request, following)

    def _replicated(self, request: Request, group: Counterpart) -> Verdict:
        """Refuse what a request changes of the committed offsets that the link keeps.

        Commits with what a broker answers who may not describe the topic, so that nothing is told by it.
        """
        head, payload = decode_request(request.frame)

        def decide(part: Part) -> Refusal | Telling | None:
            topic = topic_of(self._context, part)
            if topic is None:
                return Refusal(UNKNOWN_TOPIC_ID)
            source = self._lookup.following(ResourceType.TOPIC, topic)
            if source is None or source.link.name != group.link.name:
                return None
            if request.api_key not in DELETIONS:
                return Refusal(TOPIC_AUTHORIZATION_FAILED)
            return Telling(ResourceType.TOPIC, topic, POLICY_VIOLATION, f"it follows over link {group.link.name}")

        verdict = self._refusals.verdict(request, head, payload, decide, CAUSE_REPLICATED)
        if verdict is not None:
            self._log_once(request, group.local_name, group.mapping.local_prefix, group.link.name)
        return verdict

    # ---- joins, and whatever else makes a group ----

    def on_join(self, request: Request) -> Verdict:
        """Decide about a request that makes the group which it names, should there be none.

        Without a lease every namespace could be reserved: then no group is made, and those that exist go on.
        """
        if _is_internal(request):
            return _refused_internal(request)
        vouches = request.now <= self._context.lease_deadline
        if vouches and not self._lookup.reserves(_GROUP):
            return None
        group = _group_of(request)
        if request.api_key == ApiKey.ADD_OFFSETS_TO_TXN and self._lookup.reversing(_GROUP, group) is not None:
            return _reversed(request)
        if vouches and self._reserved_here(group) is None:
            return None
        return Hold(self._if_it_exists(request, group)) if _joins(request) else None

    async def _if_it_exists(self, request: Request, group: str) -> Verdict:
        """Forward a request to a group that exists; refuse to make it."""
        try:
            exists = await self._context.cluster.group_exists(group)
        except BrokerUnavailable as error:
            return await as_asked(request, _refused_whole, request, COORDINATOR_LOAD_IN_PROGRESS, str(error), CAUSE)
        except KafkaRefused as error:
            why = f"the proxy may not see whether group {group} exists: {error}"
            log.warning("group not described", extra={"group": group, "error": str(error)})
            return await as_asked(request, _refused_whole, request, GROUP_AUTHORIZATION_FAILED, why, CAUSE)
        if exists:
            return None
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        reservation = self._reserved_here(group)
        if reservation is None:
            return None
        if self._reversing.holds(_GROUP, group):
            return await as_asked(request, _reversed, request)
        self._log_once(request, group, reservation.prefix, None)
        telling = Telling.of(group, reservation, GROUP_AUTHORIZATION_FAILED)
        return await as_asked(request, self._told, request, telling)

    def _reserved_here(self, group: str) -> Reservation | None:
        """The reservation of a group that follows nothing."""
        reservation = self._lookup.reservation(_GROUP, group)
        if reservation is None or self._lookup.following(_GROUP, group) is not None:
            return None
        return reservation

    # ---- deletions ----

    def on_delete(self, request: Request) -> Verdict:
        """Decide about the deletion of groups, or of some of their committed offsets."""
        if request.now > self._context.lease_deadline:
            return self._without_lease(request)
        internal = _PREFIX in request.frame
        if not internal and not self._lookup.reserves(_GROUP):
            return None
        if request.api_key == ApiKey.DELETE_GROUPS:
            head, payload = decode_request(request.frame)
            return self._refusals.verdict(request, head, payload, partial(self._undeletable, request), CAUSE)
        if internal and _is_internal(request):
            return _refused_internal(request)
        group = _group_of(request)
        following = self._lookup.following(_GROUP, group)
        if following is not None:
            # What a share group has read is not replicated.
            return self._replicated(request, following) if request.api_key == ApiKey.OFFSET_DELETE else None
        reservation = self._lookup.reservation(_GROUP, group)
        if reservation is None:
            return None
        self._log_once(request, group, reservation.prefix, None)
        return self._told(request, Telling.of(group, reservation, POLICY_VIOLATION))

    def _undeletable(self, request: Request, part: Part) -> Refusal | Telling | None:
        group = str(part.item)
        if group.startswith(INTERNAL_PREFIX):
            return Refusal(POLICY_VIOLATION, INTERNAL_MESSAGE)
        reservation = self._lookup.reservation(_GROUP, group)
        if reservation is None:
            return None
        self._log_once(request, group, reservation.prefix, reservation.link)
        return Telling.of(group, reservation, POLICY_VIOLATION)

    def unalterable(self, group: str) -> Refusal | Telling | None:
        """Why the group's configuration may not be changed, None if it may."""
        if group.startswith(INTERNAL_PREFIX):
            return Refusal(POLICY_VIOLATION, INTERNAL_MESSAGE)
        reservation = self._lookup.reservation(_GROUP, group)
        return None if reservation is None else Telling.of(group, reservation, POLICY_VIOLATION)

    # ---- all of them ----

    def _told(self, request: Request, why: Telling) -> Verdict:
        head, payload = decode_request(request.frame)
        return self._refusals.whole(request, head, payload, why, CAUSE)

    def _without_lease(self, request: Request) -> Verdict:
        return _refused_whole(request, COORDINATOR_LOAD_IN_PROGRESS, NO_LEASE_MESSAGE, CAUSE_NO_LEASE)

    def _log_once(self, request: Request, group: str, prefix: str, link: str | None) -> None:
        """Log why a group's clients are refused, once for each kind of request."""
        if (request.api_key, group) in self._logged:
            return
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged.add((request.api_key, group))
        log.info(
            "group request refused",
            extra={"api": ApiKey(request.api_key).name.lower(), "group": group, "namespace": prefix, "link": link},
        )


def _group_of(request: Request) -> str:
    return str(peeks.group_id(request.api_key, request.version, request.frame), "utf-8", "replace")


def _is_internal(request: Request) -> bool:
    """Whether the group that a request names is the proxies' own. A search of the bytes is enough for nearly all."""
    return _PREFIX in request.frame and _group_of(request).startswith(INTERNAL_PREFIX)


def _reversed(request: Request) -> Verdict:
    """Another cluster is about to lead the group: clients ask again."""
    return _refused_whole(request, COORDINATOR_LOAD_IN_PROGRESS, REVERSING, CAUSE)


def _refused_internal(request: Request) -> Verdict:
    code = POLICY_VIOLATION if request.api_key in DELETIONS else GROUP_AUTHORIZATION_FAILED
    return _refused_whole(request, code, INTERNAL_MESSAGE, CAUSE_INTERNAL)


def _from_outside(request: Request) -> bool:
    """Whether a commit comes from no member of the group. Those of members are answered by a group that exists."""
    commit: Any = decode_request(request.frame)[1]
    generation = getattr(commit, "generation_id_or_member_epoch", getattr(commit, "generation_id", -1))
    return int(generation) < 0


def _joins(request: Request) -> bool:
    """Whether a request can be the first that a group hears of its sender."""
    asked: Any = decode_request(request.frame)[1]
    if hasattr(asked, "member_epoch"):
        return int(asked.member_epoch) == _FIRST_HEARTBEAT
    return not getattr(asked, "member_id", "")


def _refused_whole(request: Request, code: int, why: str, cause: str) -> Verdict:
    head, payload = decode_request(request.frame)
    return verdict_of(request, head, refuse_all(head, payload, Refusal(code, why)), cause)
