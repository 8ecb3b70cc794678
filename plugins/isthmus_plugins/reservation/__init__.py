"""Reservation: refuses what clients may not do to what reserved namespaces hold, and to the proxies' own topics.

Topics are decided here, ``groups`` and ``principals`` in files of their own, ``internal`` and ``untold``
hold the proxies' topics, ``reversing`` says what waits for a reversal.

The fast path is one scan of a Produce request for its topics, and one set lookup for each. What the set does not hold
is decided slowly: by name, with the topic's id resolved where a request has only that, and answered as a broker would,
with a code that clients act on and, for those who may know (``telling``), a message that names the namespace and the
reason. Requests that are refused in part go on without that part.

A proxy vouches for what it forwards only while its lease runs (ARCHITECTURE.md): without one it may have missed a
reservation, and refuses every write until it has caught up, with a code that makes producers try again. The same goes
for what a command concerns that a newer proxy wrote and this one does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import INTERNAL, Lookup
from isthmus_control.model import TOPIC_NAME_CHARS_MAX, ResourceType
from isthmus_plugins import clock
from isthmus_plugins.api import NEED_MORE, WITHOUT_RECORDS, Close, Hold, Leave, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import as_asked, decided_aside, for_the_thread, on_loop
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.groups import GroupReservations
from isthmus_plugins.reservation.internal import InternalTopics
from isthmus_plugins.reservation.principals import PrincipalReservations
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
from isthmus_protocol.elements import carried
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    INVALID_REQUEST,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER_OR_FOLLOWER,
    POLICY_VIOLATION,
    TOPIC_ALREADY_EXISTS,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import RequestHead, RequestPayload, decode_request, encode_request
from isthmus_protocol.refusals import Part, Refusal, parts_of, refuse_all
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

LEAVE_S: Final = 1.0
"""How long the lease is not asked for again."""
REFUSED_BYTES_AT_ONCE: Final = 512
"""Of a Produce that is refused, or looked at closer, on the loop: some fifty partitions."""
ALLOWED_MAX: Final = 100_000
"""Topics remembered as writable. When there are more, they are looked up anew."""

CODES: Final = {
    ApiKey.PRODUCE: INVALID_REQUEST,
    ApiKey.ADD_PARTITIONS_TO_TXN: INVALID_REQUEST,
    ApiKey.CREATE_TOPICS: POLICY_VIOLATION,
    ApiKey.DELETE_TOPICS: POLICY_VIOLATION,
    ApiKey.CREATE_PARTITIONS: POLICY_VIOLATION,
    ApiKey.DELETE_RECORDS: POLICY_VIOLATION,
    ApiKey.ALTER_CONFIGS: POLICY_VIOLATION,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: POLICY_VIOLATION,
    ApiKey.WRITE_TXN_MARKERS: POLICY_VIOLATION,
}
"""What a refused part of a request is answered with."""
NOT_KNOWN: Final = {
    ApiKey.PRODUCE: NOT_ENOUGH_REPLICAS,
    ApiKey.ADD_PARTITIONS_TO_TXN: COORDINATOR_LOAD_IN_PROGRESS,
}
"""And where it is not known whether it may be written: producers try again, and another proxy may take it."""
HELD: Final = {
    ApiKey.PRODUCE: NOT_LEADER_OR_FOLLOWER,
    ApiKey.ADD_PARTITIONS_TO_TXN: COORDINATOR_LOAD_IN_PROGRESS,
}
"""And where another cluster is about to lead it (``reversing``), or leads it and clients are told to look for that,
which they are where they ask for Metadata."""
_CONFIG_APIS: Final = (ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS)
RESOURCE_TYPE_GROUP: Final = 32
"""ConfigResource.Type of a group."""


class ReservationPlugin:
    """Enforces the reservations in the control state."""

    def __init__(self) -> None:
        self._allowed: set[bytes] = set()
        """Names and ids of topics that clients may write."""
        self._leave = Leave(float("-inf"))
        """Stands while the lease runs and the reservations are the same."""

    @hookimpl
    def isthmus_start(self, context: PluginContext) -> None:
        self._context = context
        self._internal = InternalTopics(context)
        self._reversing = Reversing(lambda: self._lookup)
        self._moves = MoveTimes(clock)
        self._groups = GroupReservations(context, self._reversing, self._moves)
        self._principals = PrincipalReservations(context)
        self._refusals = Refusals(context, self._without_lease)
        self._lookup: Lookup = context.control.state.lookup
        self._moves.control_changed(context.control.state)
        context.control.subscribe(self._control_changed)

    @hookimpl
    async def isthmus_stop(self) -> None:
        await self._internal.stop()

    def _control_changed(self, state: ControlState) -> None:
        self._moves.control_changed(state)
        if state.lookup is not self._lookup:
            self._lookup = state.lookup
            self._allowed.clear()
            self._leave.until = float("-inf")
            self._leave = Leave(float("-inf"))
            self._groups.reservations_changed(self._lookup)
            self._reversing.changed()
            self._principals.reservations_changed(self._lookup)

    @hookimpl
    def isthmus_request_hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.PRODUCE, self.on_produce, pure=True),
            RequestHook(ApiKey.METADATA, self.on_metadata, whole=True, pure=True),
            *(RequestHook(api, self.on_change, whole=True, pure=True) for api in CODES if api is not ApiKey.PRODUCE),
            RequestHook(ApiKey.STREAMS_GROUP_HEARTBEAT, self.on_streams_heartbeat, whole=True, pure=True),
            *self._internal.hooks(),
            *self._groups.hooks(),
            *self._principals.hooks(),
        ]

    # ---- fast path ----

    def on_produce(self, request: Request) -> Verdict:
        """Forward a Produce request whose topics are all known to be writable; look closer at any other."""
        leave = self._leave
        if request.aside:
            if request.now > self._context.lease_deadline:
                return self._without_lease(request)
        elif request.now > leave.until:
            # A lease may end before it runs out: the wall clock says that this machine stood still.
            leave.until = min(self._context.lease_deadline, request.now + LEAVE_S)
            if request.now > leave.until:
                return _by_size(request, self._without_lease)
        try:
            _, _, topics = peeks.produce_topics(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        for topic in topics:
            if topic not in self._allowed:
                return self._look_closer(request, topics)
        if len(topics) == 1:
            request.leave = leave
        return None

    def _look_closer(self, request: Request, topics: Collection[bytes]) -> Verdict:
        by_id = peeks.topics_are_ids(ApiKey.PRODUCE, request.version)
        lookup = self._lookup
        for topic in topics:
            name = self._context.known_topic_name(topic) if by_id else peeks.topic_text(topic)
            if name is None or lookup.topic_reservation(name) is not None:
                if request.whole:
                    return _by_size(request, self.on_change)
                if name is not None and self._reversing.holds(ResourceType.TOPIC, name):
                    return NEED_MORE
                return WITHOUT_RECORDS if name is not None and len(topics) == 1 else NEED_MORE
        on_loop(self._allow, lookup, {topic for topic in topics if len(topic) <= TOPIC_NAME_CHARS_MAX})
        return None

    def _allow(self, lookup: Lookup, topics: set[bytes]) -> None:
        """Remember what clients may write as far as this lookup says, if it counts still."""
        if lookup is not self._lookup:
            return
        if len(self._allowed) > ALLOWED_MAX:
            self._allowed.clear()
        self._allowed |= topics

    def _without_lease(self, request: Request) -> Verdict:
        if not request.whole:  # not worth to be kept until it is whole
            return Close("this proxy has no lease and takes no writes now")
        # Java gives up a transaction for any code here that it does not know as a passing one.
        transactional = request.api_key == ApiKey.ADD_PARTITIONS_TO_TXN
        refusal = Refusal(
            COORDINATOR_LOAD_IN_PROGRESS if transactional else NOT_ENOUGH_REPLICAS,
            NO_LEASE_MESSAGE,
        )
        head, payload = decode_request(request.frame)
        return verdict_of(request, head, refuse_all(head, payload, refusal), CAUSE_NO_LEASE)

    # ---- everything else ----

    def on_change(self, request: Request) -> Verdict:
        """Decide about each topic that a request would change."""
        if request.now > self._context.lease_deadline:
            return self._without_lease(request)
        head, payload = decode_request(request.frame)
        unknown = unknown_ids(self._context, head, payload)
        if unknown:
            return Hold(self._resolved(request, head, payload, unknown))
        if request.api_key == ApiKey.CREATE_TOPICS:
            named = {part.topic for part in parts_of(head, payload) if part.topic is not None}
            reserved = {name for name in named if self._lookup.topic_reservation(name) not in (None, INTERNAL)}
            if reserved:
                return Hold(self._created(request, head, payload, reserved))
        return self._decided(request, head, payload)

    async def _resolved(
        self, request: Request, head: RequestHead, payload: RequestPayload, unknown: set[bytes]
    ) -> Verdict:
        """Decide after the names of topic ids have been read from the cluster."""
        try:
            await self._context.topic_names(unknown)
        except BrokerUnavailable as error:
            return Close(f"topic ids cannot be resolved: {error}")
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        return await as_asked(request, self._decided, request, head, payload)

    async def _created(
        self, request: Request, head: RequestHead, payload: RequestPayload, reserved: set[str]
    ) -> Verdict:
        """Say of reserved topics that there are that there are, as brokers do: applications that make what they need
        go on then. One that is truncated is there to clients, whether it is to brokers or not.

        Never forwarded to have a broker say it: the topic may be deleted meanwhile, and would be made.
        """
        try:
            existing = {*await self._context.cluster.topics_named(reserved)}
        except BrokerUnavailable as error:
            return Close(f"topics cannot be read: {error}")
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        existing |= {name for name, each in self._context.control.state.truncations.items() if each.withheld}

        def decide(part: Part) -> Refusal | Telling | None:
            refusal = self._decide(part)
            if refusal is None or part.topic not in existing:
                return refusal
            words = f"Topic '{part.topic}' already exists."
            return Telling(ResourceType.TOPIC, part.topic, TOPIC_ALREADY_EXISTS, words)

        return await as_asked(request, self._refusals.verdict, request, head, payload, decide, CAUSE)

    def _decided(self, request: Request, head: RequestHead, payload: RequestPayload) -> Verdict:
        if request.api_key == ApiKey.PRODUCE:
            named = {name for part in parts_of(head, payload) if (name := topic_of(self._context, part)) is not None}
            held_s = self._reversing.held_s(named)
            if held_s is not None:
                return Hold(self._held(request, head, payload, named, request.now + held_s))
        return self._told(request, head, payload)

    async def _held(
        self, request: Request, head: RequestHead, payload: RequestPayload, named: Collection[str], until: float
    ) -> Verdict:
        """Decide about a Produce once it is known which cluster leads, or its time is over."""
        await self._reversing.until_decided(named, until)
        if monotonic() > self._context.lease_deadline:
            return await as_asked(request, self._without_lease, request)
        return await as_asked(request, self._told, request, head, payload)

    def _told(self, request: Request, head: RequestHead, payload: RequestPayload) -> Verdict:
        return self._refusals.verdict(request, head, payload, self._decide, CAUSE)

    def _decide(self, part: Part) -> Refusal | Telling | None:
        name = topic_of(self._context, part)
        if name is None:
            if part.api_key in _CONFIG_APIS and part.item.resource_type == RESOURCE_TYPE_GROUP:
                return self._groups.unalterable(part.item.resource_name)
            if part.topic_id is not None:  # deleted, or newer than what the cluster reported just now
                return Refusal(UNKNOWN_TOPIC_ID, "no topic of this cluster has that id")
            return None
        reservation, api = self._lookup.topic_reservation(name), ApiKey(part.api_key)
        if api in HELD and self._lookup.reversing(ResourceType.TOPIC, name) is not None:
            if reservation is None and api is ApiKey.PRODUCE:
                return None  # it is only announced
            return Telling(ResourceType.TOPIC, name, HELD[api], REVERSING)
        if reservation is None:
            return None
        code = NOT_KNOWN.get(api, CODES[api]) if reservation.beyond else CODES[api]
        if api is ApiKey.PRODUCE and not reservation.beyond and self._moves.leaves(name, monotonic()):
            code = HELD[api]
        return Telling.of(name, reservation, code)

    # ---- topics made by being asked for ----

    def on_metadata(self, request: Request) -> Verdict:
        """Keep a Metadata request from creating a topic in a reserved namespace."""
        topics, may_create = peeks.metadata(request.version, request.frame)
        if topics is None:
            return self._internal.on_all_topics(request)
        if not topics or not may_create:
            return None
        names = [name.decode("utf-8", "replace") for name, _ in topics if name is not None]
        if request.now > self._context.lease_deadline:
            reserved = set(names)  # for all that this proxy knows
        else:
            reserved = {name for name in names if self._lookup.topic_reservation(name) is not None}
        if not reserved:
            return None
        head, payload = decode_request(request.frame)
        if len(reserved) == len(set(names)) and hasattr(payload, "allow_auto_topic_creation"):
            unchanged: Any = payload
            frame = encode_request(
                replace(unchanged, allow_auto_topic_creation=False), request.correlation_id, head.client_id
            )
            return Replace(frame)
        return Hold(self._without_missing(request, head, payload, reserved))

    async def _without_missing(
        self, request: Request, head: RequestHead, payload: RequestPayload, reserved: set[str]
    ) -> Verdict:
        """Take the reserved topics that do not exist out of a request that may create its other ones."""
        try:
            existing = await self._context.cluster.topics()
        except BrokerUnavailable as error:
            return Close(f"topics cannot be read: {error}")
        missing = reserved - existing.keys()

        def decide(part: Part) -> Telling | None:
            if part.topic not in missing:
                return None
            return Telling(ResourceType.TOPIC, part.topic, UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")

        return await as_asked(request, self._refusals.verdict, request, head, payload, decide, CAUSE)

    def on_streams_heartbeat(self, request: Request) -> Verdict:
        """Keep the coordinator of a streams group (KIP-1071) from making its topics in a reserved namespace."""
        head, payload = decode_request(request.frame)
        topology: Any = getattr(payload, "topology", None)
        made = (
            topic.name
            for part in (topology.subtopologies if topology is not None else ())
            for topic in (*part.state_changelog_topics, *part.repartition_source_topics)
        )
        for name in made:
            reservation = self._lookup.topic_reservation(name)
            if reservation is not None:
                why = Telling.of(name, reservation, POLICY_VIOLATION)
                return self._refusals.whole(request, head, payload, why, CAUSE)
        return None


plugin = ReservationPlugin()


def _by_size(request: Request, decide: Callable[[Request], Verdict]) -> Verdict:
    """Decide about a Produce that most likely is refused: of what it names each is answered."""
    if not request.whole or request.aside or len(request.frame) <= REFUSED_BYTES_AT_ONCE:
        return decide(request)
    return Hold(decided_aside(carried(partial(decide, for_the_thread(request)))))
