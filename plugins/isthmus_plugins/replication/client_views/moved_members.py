"""Has members of consumer groups that come from another cluster join their group at this one (KIP-848).

A member that finds its coordinator here goes on with heartbeats, in the epoch that it has at the cluster that it comes
from. What links copy of groups are committed offsets, so the group is none of that protocol here until a member has
joined it, and the broker answers the first ones GROUP_ID_NOT_FOUND. To clients that is final: Java raises it,
librdkafka has a fatal error. To UNKNOWN_MEMBER_ID, which the broker answers as soon as a member has joined, they give
up what they were assigned and join, and begin at what is committed here.

===============================  =====================================================================================
the group is here, as offsets    UNKNOWN_MEMBER_ID
nothing of it is here            as the broker has answered: nobody knows where the member would begin
that cannot be found out now     COORDINATOR_LOAD_IN_PROGRESS: the member asks again
===============================  =====================================================================================

So it is with groups of namespaces that are known here, whether they follow or not, at any time: that clients come
because they were told to (``client_moves``) is known at the other cluster, and those of one that is gone come without
that. At one cluster no member meets this: a group that has offsets and no member of this protocol has none whose epoch
goes on. Who joins (epoch 0) or leaves is left alone, and so is who may not read the group.

Until it has joined, a member's commits are answered UNKNOWN_MEMBER_ID, too. Java's go without an epoch then, and the
broker takes them of anybody while nobody is in the group: what it had read at the other cluster, of which this one may
not have all (a failover), would count as read here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, NamespaceKey, ResourceType
from isthmus_plugins.api import Client, Close, Gate, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_on_loop
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import Rarely
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import COORDINATOR_LOAD_IN_PROGRESS, GROUP_ID_NOT_FOUND, UNKNOWN_MEMBER_ID
from isthmus_protocol.messages import decode_request, decode_response, encode_response
from isthmus_protocol.refusals import Refusal, refuse_all
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

API: Final = ApiKey.CONSUMER_GROUP_HEARTBEAT
CAUSE: Final = "member_of_another_cluster"
MESSAGE: Final = "the member is of another cluster's group: it may join the group here"
MEMBERS_MAX: Final = 10_000
"""That are to join. Beyond it those that were told longest ago are forgotten."""
_JOINS: Final = 0
"""The member epoch of who joins; members have greater ones, and who leaves has lesser ones."""


class MovedMembers(Part):
    """Hooks that do nothing where no namespace of groups is known, and an observer of connections."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("moved-members", context.supervision)
        self._seen: Mapping[NamespaceKey, Namespace] = {}
        self._groups: tuple[Namespace, ...] = ()
        self._to_join: dict[int, tuple[bytes, bytes]] = {}
        """The group and the id of a member that has not joined yet, by the connection to its coordinator: it has one,
        of its own."""
        self._told = Rarely(_say_told)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        if state.namespaces is not self._seen:
            self._seen = state.namespaces
            self._groups = tuple(each for each in self._seen.values() if each.type is ResourceType.CONSUMER_GROUP)

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(API, self.on_heartbeat, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_COMMIT, self.on_commit, whole=True, pure=True),
        ]

    # ---- connections ----

    def opened(self, client: Client) -> Close | None:
        """A client has connected."""
        return None

    def authenticated(self, client: Client) -> None:
        """It is known who a client is: that makes no difference."""

    def closed(self, client: Client) -> None:
        """The connection is gone."""
        self._to_join.pop(client.session_id, None)

    # ---- requests ----

    def on_heartbeat(self, request: Request) -> Verdict:
        """Forward a heartbeat, and look at the answer."""
        if not self._groups:
            return None
        looks = partial(self._answered, request.client.session_id, request.version, request.frame)
        return Replace(request.frame, answered_on_loop(looks))

    def on_commit(self, request: Request) -> Verdict:
        """Refuse a commit of who is to join before."""
        member = self._to_join.get(request.client.session_id)
        if member is None:
            return None
        head, payload = decode_request(request.frame)
        commit: Any = payload
        if (commit.group_id.encode(), commit.member_id.encode()) != member:
            return None
        return verdict_of(request, head, refuse_all(head, payload, Refusal(UNKNOWN_MEMBER_ID, MESSAGE)), CAUSE)

    # ---- answers ----

    def _answered(self, session_id: int, version: int, asked: bytes, frame: bytes) -> bytes | Gate:
        code, _ = peeks.heartbeat_answer(version, frame)
        if not code:
            self._to_join.pop(session_id, None)
        if code != GROUP_ID_NOT_FOUND:
            return frame
        group, member_id, epoch, _ = peeks.group_member(version, asked)
        name = group.decode("utf-8", "replace")
        if epoch <= _JOINS or not any(name in each for each in self._groups):
            return frame
        self._to_join[session_id] = group, member_id
        if len(self._to_join) > MEMBERS_MAX:
            del self._to_join[next(iter(self._to_join))]
        gate = Gate()
        self._tasks.start("group", self._looked_for(gate, version, name, frame))
        return gate

    async def _looked_for(self, gate: Gate, version: int, group: str, frame: bytes) -> None:
        """Open the gate when it is known whether the group is here."""
        try:
            code = UNKNOWN_MEMBER_ID if await self._context.cluster.group_exists(group) else GROUP_ID_NOT_FOUND
        except BrokerUnavailable:
            code = COORDINATOR_LOAD_IN_PROGRESS
        except KafkaRefused as error:
            log.warning("group not described", extra={"group": group, "error": str(error)})
            code = GROUP_ID_NOT_FOUND
        if code == UNKNOWN_MEMBER_ID:
            self._told.one(group)
        gate.open(frame if code == GROUP_ID_NOT_FOUND else _refused(version, code, frame))


def _refused(version: int, code: int, frame: bytes) -> bytes:
    """The broker's answer with another error."""
    correlation_id, answered = decode_response(API, version, frame)
    told: Any = answered
    message = MESSAGE if code == UNKNOWN_MEMBER_ID else None
    return encode_response(replace(told, error_code=error_code(code), error_message=message), correlation_id)


def _say_told(count: int, group: str) -> None:
    log.info("members of another cluster's groups told to join", extra={"times": count, "of": group})
