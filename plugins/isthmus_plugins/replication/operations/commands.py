"""What operators' requests about links share: this cluster's control log, the other end, errors to be read."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from typing import Final, Protocol, TypeVar

from isthmus_control.apply import apply
from isthmus_control.commands import Body, Command
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link
from isthmus_control.outcome import Outcome, Rejected, Rejection
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link.call_codec import Question
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.peers import LinkPeers

A = TypeVar("A")
T = TypeVar("T")

_HTTP_STATUS: Final = {
    Rejection.NOT_FOUND: 404,
    Rejection.INVALID: 422,
    Rejection.NOT_SUPPORTED: 422,
    Rejection.LEASE_LOST: 503,
}


class Call(Protocol):
    """Asks the other end of a link. Raises OperationError."""

    async def __call__(self, link_name: str, question: Question[A]) -> A: ...


class LinkCommands:
    """Everything here raises OperationError, but for what answers a peer: that raises LinkRejected."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers

    def link(self, name: str) -> Link:
        """A link of that name."""
        links = self._context.control.state.links
        link = links.get(name)
        if link is None or link.drill is not None:  # a drill's leads nowhere, and is nobody's to change
            known = ", ".join(sorted(name for name, each in links.items() if each.drill is None)) or "none"
            raise OperationError("NOT_FOUND", f"there is no link {name!r} (links here: {known})", 404)
        return link

    def connection(self, link_name: str) -> LinkConnection:
        """Any connection of a link."""
        connections = self._peers.connections(link_name)
        if not connections:
            peer = self._peers.state(link_name)
            raise OperationError(
                "UNAVAILABLE",
                f"link {link_name!r} is not connected ({peer.message or 'the peer was never heard'}); --local-only "
                "deletes or detaches this end alone",
                503,
            )
        return connections[0]

    def knows(self, link_name: str, feature: str) -> None:
        """Raise OperationError unless every connected proxy of the other cluster knows something."""
        self.connection(link_name)
        older = [
            str(each.peer.get("proxy"))
            for each in self._peers.connections(link_name)
            if feature not in each.peer_features
        ]
        if older:
            raise OperationError(
                ReasonCode.PEER_VERSION_UNSUPPORTED,
                f"proxies of the other cluster are of a version that does not know this: upgrade {', '.join(older)}",
                409,
            )

    def all_know(self, link_name: str, feature: str) -> bool:
        """Whether every connected proxy of the other cluster knows something. Raises OperationError without any."""
        self.connection(link_name)
        return all(feature in each.peer_features for each in self._peers.connections(link_name))

    async def call(self, link_name: str, question: Question[A]) -> A:
        """Ask the other end of a link, for 60 s at most."""
        try:
            return await self.connection(link_name).call(question, timeout_s=60)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error

    async def append(self, body: Body) -> None:
        """Record a command here."""
        try:
            outcome = await self._context.control.append(body)
        except BrokerUnavailable as error:
            raise OperationError("CONTROL_LOG_UNAVAILABLE", str(error), 503) from error
        self._check(outcome)

    def would_append(self, body: Body) -> ControlState:
        """The state after a command, as things stand; raises what the control log would say. Changes nothing."""
        state = self._context.control.state
        command = Command(
            str(uuid.uuid4()), int(self._clock.time() * 1000), self._context.proxy_name, state.applied_offset, body
        )
        after, outcome = apply(state, state.applied_offset + 1, command)
        self._check(outcome)
        return after

    def _check(self, outcome: Outcome) -> None:
        if isinstance(outcome, Rejected):
            raise OperationError(outcome.code.told, outcome.message, _HTTP_STATUS.get(outcome.code, 409))

    async def append_for_peer(self, body: Body) -> None:
        """Record what a peer asks for."""
        await self.for_peer(self.append(body))

    async def for_peer(self, work: Awaitable[T]) -> T:
        """Await ``work``; an operator's error becomes the answer of a call."""
        try:
            return await work
        except OperationError as error:
            raise LinkRejected(error.code, error.message) from error

    async def enforced(self) -> None:
        """Return when every proxy of this cluster does what the control log says now."""
        await self._followed(self._context.control.enforced(self._context.control.state.applied_offset))

    async def caught_up(self) -> None:
        """Return when this proxy has applied all that stands in the control log now."""
        await self._followed(self._context.control.caught_up())

    async def _followed(self, work: Awaitable[None]) -> None:
        try:
            await work
        except BrokerUnavailable as error:
            raise OperationError("CONTROL_LOG_UNAVAILABLE", str(error), 503) from error

    async def asked(self, answer: Awaitable[T]) -> T:
        """What this cluster's brokers answer."""
        try:
            return await answer
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
