"""The connections to the proxies of other clusters: who dials, who is known, who is alive.

For every link in the control state, the side that dials keeps one connection to each proxy of the other cluster, found
through any of the link's remote addresses; the other side accepts them. After the handshake there is no difference.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from isthmus_control.anchors import Anchor, MalformedAnchor
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, LinkMode
from isthmus_control.sealing import SealingError
from isthmus_control.states import ReasonCode
from isthmus_plugins import descriptors
from isthmus_plugins.accepting import Acceptor, oldest_of_most
from isthmus_plugins.link_policy import is_loopback, remote_address
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach, rare_lines
from isthmus_plugins.replication.link import calls, features, reasons
from isthmus_plugins.replication.link.attempts import TokenAttempts, place_of
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import (
    MALFORMED_CALL,
    SECRET,
    Credential,
    LinkConnection,
    LinkLost,
    LinkRejected,
    PeerSilent,
    Receiver,
    TokenCredential,
)
from isthmus_plugins.replication.link.features import Protection
from isthmus_plugins.replication.link.part import NotJoined, Part, not_joined
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

PURPOSE_CREATE: Final = "create-link"
PURPOSE_LINK: Final = "link"
HEARD: Final = "control_anchor"
"""In a HELLO: how far the control log of the other cluster had been."""
PROOF: Final = "control_anchor_proof"
"""In a HELLO: that the other cluster said so itself."""
REDIAL_DELAY_MIN_S: Final = 0.2
REDIAL_DELAY_MAX_S: Final = 2.0
DELETED_LINK_GRACE_S: Final = 1.0
LEASE_POLL_S: Final = 0.1
"""A proxy that has no lease yet, because it starts or is refused, speaks to nobody."""
HANDSHAKES_MAX: Final = 256
"""Connections that have not proved anything yet. For one more, the oldest of the host that has most such goes."""
ADDRESSES_MAX: Final = 1_000
"""That are dialled of one link: peers tell of more and more, and what one of them told is tried for ever."""
NO_TOKEN: Final = (
    "the token is none of this cluster's that can be used: it was used already, has expired, or was made elsewhere; "
    "isthmus link token create makes one"
)
ALREADY_CONNECTED: Final = "ALREADY_CONNECTED"
ALREADY_CONNECTED_WAIT_S: Final = 30.0
_REASONS: Final = {
    "UNSUPPORTED_VERSION": ReasonCode.PEER_VERSION_UNSUPPORTED,
    "LINK_NOT_FOUND": ReasonCode.PEER_HAS_NO_SUCH_LINK,
    "OTHER_SECRET": ReasonCode.AUTHENTICATION_ERROR,
}
"""What a peer's rejection is called in status."""
OTHER_SECRET: Final = "OTHER_SECRET"
BEHIND_S: Final = 10.0
"""A peer that does not know what a link needs, and was not heard of for so long, is gone; it dials more often."""
TOPOLOGY_INTERVAL_S: Final = 2.0
"""How often a peer is asked for its cluster's proxies: one that is new is dialled within this time."""


@dataclass(slots=True)
class PeerState:
    """What is known of the other cluster of one link."""

    last_heard: float | None = None
    reason: str | None = ReasonCode.NOT_CONNECTED_YET
    message: str | None = "the link has not connected yet"
    connections: dict[str, LinkConnection] = field(default_factory=dict)
    """By the peer proxy's name."""
    dialling: set[str] = field(default_factory=set)
    """Addresses for which a task is dialling or keeps a connection."""
    unreached: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By such an address: the code, and why nobody was reached there last."""
    behind: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By name, the peer proxies that do not know what the link needs: what that is, and when they were asked last."""


class LinkPeers(Part):
    """All link connections of this proxy.

    What connections carry is for others: see :meth:`serve`, which comes before anything else.
    """

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._answers: Mapping[str, Answering] | None = None
        self._create_answers: Mapping[str, Answering] = {}
        self._receiver = Receiver()
        self._on_change: Callable[[], None] = not_joined
        self._tasks = Tasks("link-peers", context.supervision)
        self._states: dict[str, PeerState] = {}
        self._accepted: dict[LinkConnection, None] = {}
        """Connections that were accepted and are in the handshake, or create a link."""
        self._leaving: set[LinkConnection] = set()
        """Connections of links that were deleted just now."""
        self._arriving: set[LinkConnection] = set()
        """Connections that were accepted and not made yet: in their TLS handshake."""
        self._acceptor: Acceptor[LinkConnection] | None = None
        self._rejected = RarelyEach(_log_rejected)
        self._odd_calls = RarelyEach(_log_odd_calls)
        self._unreached = RarelyEach(_log_unreached)
        self._connected = rare_lines(log, "link peer connected", logging.INFO)
        self._lost = rare_lines(log, "link peer lost", logging.INFO)
        self._attempts = TokenAttempts(context.clock)

    # ---- life ----

    def serve(
        self,
        answers: Mapping[str, Answering],
        create_answers: Mapping[str, Answering],
        receiver: Receiver,
        on_change: Callable[[], None],
    ) -> None:
        """Have connections answer these calls, by method, and give the rest to ``receiver``.

        To be called once, before any comes. ``create_answers``: of connections that are made to create a link.
        ``on_change`` is called when one came or went.
        """
        self._answers, self._create_answers = answers, create_answers
        self._receiver, self._on_change = receiver, on_change

    def answers(self) -> Sequence[Answering]:
        return (calls.Topology.by(self._topology),)

    async def listen(self) -> None:
        """Listen for peers, if a link listener is configured. Raises OSError."""
        spec = self._context.link_listener
        if spec is None:
            return
        self._acceptor = spec.acceptor(
            spec.host,
            spec.port,
            self._accept,
            self._context.supervision,
            arriving=self._arriving,
            admits=self._admits,
            failed=lambda peer, error: self._turned_away(peer, "TLS_HANDSHAKE_FAILED", str(error)),
            tls=spec.server_tls,
        )
        await self._acceptor.bind()
        self._acceptor.listen(HANDSHAKES_MAX)
        self._context.link_listening(self._acceptor)

    async def stop(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._tasks.close()
        for connection in [*self._accepted, *self._leaving, *self.all_connections()]:
            await connection.stopped()

    def all_connections(self) -> list[LinkConnection]:
        return [connection for state in self._states.values() for connection in state.connections.values()]

    def control_changed(self, state: ControlState) -> None:
        """Keep connections for the links that there are and for no others."""
        wanted = state.links
        for name in [name for name in self._states if name not in wanted]:
            for connection in self._states.pop(name).connections.values():
                # The peer may be waiting for the answer to the very call that deleted the link.
                asyncio.get_running_loop().call_later(DELETED_LINK_GRACE_S, connection.close, "the link was deleted")
                self._leaving = {other for other in self._leaving if not other.lost} | {connection}
        for link in wanted.values():
            peer = self._states.setdefault(link.name, PeerState())
            for connection in list(peer.connections.values()):
                connection.keep_steady(link.mode is LinkMode.SYNCHRONOUS)
                try:
                    self._check_features(link, connection.peer, connection.protection)
                except LinkRejected as error:
                    connection.close(error.message)
            if link.dials:
                for address in link.remote_addresses:
                    self._keep_dialling(link.name, peer, address)

    def state(self, link_name: str) -> PeerState:
        """What is known of the link's peer."""
        state = self._states.get(link_name) or PeerState()
        for connection in state.connections.values():
            if state.last_heard is None or connection.last_heard > state.last_heard:
                state.last_heard = connection.last_heard
        return state

    def behind(self, link_name: str) -> str | None:
        """What the link needs that a proxy of the peer does not know, in words."""
        state, since = self._states.get(link_name), self._clock.monotonic() - BEHIND_S
        found = [] if state is None else [message for message, at in state.behind.values() if at > since]
        return "; ".join(sorted(found)) or None

    def connections(self, link_name: str) -> list[LinkConnection]:
        """The live connections of a link, in the order of their peers' names: the same first one until it goes."""
        state = self._states.get(link_name)
        return [state.connections[name] for name in sorted(state.connections)] if state is not None else []

    def fronting(self, link_name: str, broker_id: int) -> LinkConnection | None:
        """The connection to the proxy that fronts this broker of the other cluster."""
        for connection in self.connections(link_name):
            brokers = connection.peer.get("brokers")
            if brokers == "all" or (isinstance(brokers, list) and broker_id in brokers):
                return connection
        return None

    # ---- dialling ----

    def _keep_dialling(self, link_name: str, state: PeerState, address: str) -> None:
        if address not in state.dialling and len(state.dialling) < ADDRESSES_MAX:
            state.dialling.add(address)
            self._tasks.keep(f"dial-{link_name}-{address}", partial(self._dial_for_ever, link_name, state, address))

    def _current(self, link_name: str, state: PeerState) -> Link | None:
        """The link as it is now; None if it is gone or another one took its name."""
        if self._states.get(link_name) is not state:
            return None
        return self._context.control.state.links.get(link_name)

    async def _dial_for_ever(self, link_name: str, state: PeerState, address: str) -> None:
        delay = REDIAL_DELAY_MIN_S
        while (link := self._current(link_name, state)) is not None:
            if self._clock.monotonic() > self._context.lease_deadline:
                await asyncio.sleep(LEASE_POLL_S)
                continue
            try:
                connection = await self._dial(link_name, link, state, address)
            except _AlreadyConnected as already:
                # Another address of the same proxy: dial this one only when that connection is gone.
                state.unreached.pop(address, None)
                await already.connection.lost_within(ALREADY_CONNECTED_WAIT_S)
                continue
            except (OSError, TimeoutError, LinkRejected, LinkLost, SealingError, ValueError) as error:
                self._dial_failed(link_name, state, address, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, REDIAL_DELAY_MAX_S)
                continue
            delay = REDIAL_DELAY_MIN_S
            state.unreached.pop(address, None)
            await self._stay(link_name, state, connection)
        state.dialling.discard(address)

    async def _dial(self, link_name: str, link: Link, state: PeerState, address: str) -> LinkConnection:
        """Connect to one address of a link's peer and take the connection into use.

        While the link's secret is rotated either side may be the first to have the new one alone.
        """
        *others, last = link.secrets
        for secret_id in others:
            try:
                return await self._dial_with(secret_id, link_name, link, state, address)
            except LinkRejected as error:
                if error.code != OTHER_SECRET:
                    raise
        return await self._dial_with(last, link_name, link, state, address)

    async def _dial_with(
        self, secret_id: str, link_name: str, link: Link, state: PeerState, address: str
    ) -> LinkConnection:
        self._check_may_go_on(link)
        where = remote_address(address)
        if where is None:
            raise ValueError("it is no host:port")
        already: list[LinkConnection] = []

        def approve(peer: dict[str, Any], protection: Protection) -> None:
            self._check_cluster(link, peer)
            self._check_features(link, peer, protection)
            known = state.connections.get(str(peer.get("proxy")))
            if known is not None and not known.lost and known.peer.get("incarnation") == peer.get("incarnation"):
                already.append(known)
                raise LinkRejected(ALREADY_CONNECTED, "this proxy is connected already")

        try:
            return await LinkConnection.dial(
                *where,
                clock=self._clock,
                supervision=self._context.supervision,
                hello={**self._hello(link), SECRET: secret_id},
                secret=self._context.unseal(link.secrets[secret_id], link.link_id),
                identity=self._identity(),
                tls=self._context.link_client_tls,
                approve=approve,
                on_refused=self._refused_peer,
                on_ready=lambda connection: self._take(link_name, link, state, connection),
            )
        except LinkRejected as error:
            if already:
                raise _AlreadyConnected(already[0]) from error
            raise

    def _dial_failed(self, link_name: str, state: PeerState, address: str, error: Exception) -> None:
        code = _reason_of(error)
        message = f"{address}: {str(error) or type(error).__name__}"
        if state.unreached.get(address) != (code, message):
            state.unreached[address] = code, message
            self._unreached.one(f"{link_name} {address}", (address, str(code), message))
        if not state.connections:  # else the link is up, over another address
            state.reason, state.message = code, message

    async def _stay(self, link_name: str, state: PeerState, connection: LinkConnection) -> None:
        """Until the connection is lost: learn of the peer cluster's other proxies and dial them."""
        while not connection.lost:
            try:
                proxies = (await connection.call(calls.Topology())).proxies
            except (LinkRejected, TimeoutError):
                proxies = ()
            except LinkLost:
                break
            for proxy in proxies:
                if proxy.link_address and remote_address(proxy.link_address) and proxy.proxy not in state.connections:
                    self._keep_dialling(link_name, state, proxy.link_address)
            await connection.lost_within(TOPOLOGY_INTERVAL_S)

    # ---- accepting ----

    def _admits(self, descriptor: int, peer: str) -> bool:
        """Whether one more connection may come in. What it is shows in the handshake; until then there are so many."""
        self._accepted = {other: None for other in self._accepted if not other.lost}
        if len(self._accepted) + len(self._arriving) >= HANDSHAKES_MAX and not self._made_room():
            self._turned_away(peer, "TOO_MANY", "there are too many connections that have not proved anything")
        elif descriptors.is_kept(descriptor):
            self._turned_away(peer, "TOO_MANY", "file descriptors run short")
        else:
            return True
        return False

    def _turned_away(self, peer: str, code: str, why: str) -> None:
        """A connection from ``host:port`` ends before it says anything."""
        self._say_rejected(peer.rpartition(":")[0], code, why)

    def _say_rejected(self, address: str, code: str, why: str) -> None:
        self._rejected.one(f"{place_of(address)} {code}", (address, code, why))

    def _made_room(self) -> bool:
        """End the connection that has proved nothing for longest, of the host that has most such. False: all have."""
        unproven = {each: each.peer_address for each in self._accepted if not each.ready.done()}
        if self._acceptor is not None and len(self._arriving) >= len(unproven):
            return self._acceptor.end_oldest()
        if not unproven:
            return False
        oldest = oldest_of_most(unproven)
        oldest.close("it has proved nothing, and others wait")
        self._accepted.pop(oldest, None)
        return True

    def _accept(self) -> LinkConnection:
        return LinkConnection(
            clock=self._clock,
            supervision=self._context.supervision,
            accept=self._look_up,
            approve=self._approve,
            on_refused=self._refused_peer,
            identity=self._identity(),
            on_ready=self._accepted_ready,
            on_made=self._made,
        )

    def _made(self, connection: LinkConnection) -> None:
        self._arriving.discard(connection)
        self._accepted[connection] = None

    def _look_up(self, hello: dict[str, Any], connection: LinkConnection) -> Credential | TokenCredential:
        """What a dialler must hold. Raises LinkRejected."""
        if self._clock.monotonic() > self._context.lease_deadline:
            raise LinkRejected(reasons.NO_LEASE, "this proxy has no lease (yet)")
        purpose = hello.get("purpose")
        if purpose == PURPOSE_CREATE:
            token_id = hello.get("token")
            return self._without_token(connection) if token_id is None else self._token(str(token_id), connection)
        if purpose == PURPOSE_LINK:
            for link in self._context.control.state.links.values():
                if link.link_id == hello.get("link_id"):
                    self._check_cluster(link, hello)
                    return self._credential(link, hello.get(SECRET, ""))
            self._claimed(hello, connection)
            raise LinkRejected("LINK_NOT_FOUND", "there is no such link on this cluster: it was deleted, or never made")
        raise LinkRejected("INVALID_REQUEST", f"unknown purpose {purpose!r}")

    def _credential(self, link: Link, secret_id: object) -> Credential:
        """Raises LinkRejected, which tells a stranger nothing of keys."""
        sealed = link.secrets.get(secret_id) if isinstance(secret_id, str) else None
        if sealed is None:
            raise LinkRejected(OTHER_SECRET, "this cluster does not have that secret of the link (yet, or any more)")
        try:
            return Credential(self._context.unseal(sealed, link.link_id))
        except SealingError as error:
            log.warning("link secret not opened", extra={"link": link.name, "detail": str(error)})
            raise LinkRejected(
                "AUTHENTICATION_ERROR", "this proxy cannot open the link's secret: see its log"
            ) from error

    def _without_token(self, connection: LinkConnection) -> Credential:
        if self._context.link_policy.allow_local_links and is_loopback(connection.peer_address):
            return Credential(b"")
        raise LinkRejected(
            "AUTHENTICATION_ERROR",
            "this cluster takes a link from who shows one of its tokens: isthmus link token create makes one there, "
            "isthmus link create --token-file shows it (link.allow_local_links does without, on one machine)",
        )

    def _token(self, token_id: str, connection: LinkConnection) -> TokenCredential:
        pause_s = self._attempts.pause_s(connection.peer_address)
        if pause_s:
            message = f"tokens that came from your address were none: try again in {pause_s:.0f} s"
            raise LinkRejected("TOO_MANY_ATTEMPTS", message)
        token = self._context.control.state.link_tokens.get(token_id)
        if token is None or self._clock.time() * 1000 >= token.expires_ms:
            raise LinkRejected("AUTHENTICATION_ERROR", NO_TOKEN)
        try:
            return TokenCredential(token.public_key, self._context.unseal(token.acceptor_key, token_id))
        except SealingError as error:
            log.warning("link token not opened", extra={"token_id": token_id, "detail": str(error)})
            raise LinkRejected("AUTHENTICATION_ERROR", "this proxy cannot open its own token: see its log") from error

    def _refused_peer(self, connection: LinkConnection, code: str, why: str) -> None:
        """A connection ends because of what its peer sent, or a call of it is not understood."""
        if code == MALFORMED_CALL:
            self._odd_calls.one(place_of(connection.peer_address), (connection.peer_address, why))
            return
        if code == "AUTHENTICATION_ERROR" and connection.shows_token and not connection.dialled:
            self._attempts.failed(connection.peer_address)
        self._say_rejected(connection.peer_address, code, why)

    def _approve(self, hello: dict[str, Any], protection: Protection) -> None:
        """A dialler whose proof holds may come in. Raises LinkRejected."""
        if hello.get("purpose") == PURPOSE_CREATE:
            self.check_protection(hello, protection)
        for link in self._context.control.state.links.values():
            if hello.get("purpose") == PURPOSE_LINK and link.link_id == hello.get("link_id"):
                self._check_features(link, hello, protection)

    def _accepted_ready(self, connection: LinkConnection) -> None:
        if connection.purpose == PURPOSE_CREATE:
            self._attempts.succeeded(connection.peer_address)
            connection.handlers = self._create_answers
            return
        self._accepted.pop(connection, None)
        for link in self._context.control.state.links.values():
            if link.link_id == connection.peer.get("link_id"):
                self._take(link.name, link, self._states.setdefault(link.name, PeerState()), connection)
                return
        connection.close("the link was deleted meanwhile")

    # ---- both ----

    def _identity(self) -> dict[str, Any]:
        brokers = self._context.fronted_brokers
        return {
            "cluster_id": self._context.cluster_id,
            "proxy": self._context.proxy_name,
            "incarnation": self._context.incarnation,
            "brokers": "all" if brokers is None else sorted(brokers),
            "features": list(features.FEATURES),
        }

    def _hello(self, link: Link) -> dict[str, Any]:
        """What a dialler says. A cluster that lost its control log has no link to say the rest to."""
        anchors = self._context.control.anchors
        hello = {"purpose": PURPOSE_LINK, "link_id": link.link_id}
        proven = anchors.proven_of(link.remote_cluster_id)
        if proven is not None:
            return {**hello, HEARD: proven[0].encode(), PROOF: proven[1]}
        heard = anchors.heard_of(link.remote_cluster_id)
        return hello if heard is None else {**hello, HEARD: heard.encode()}

    def _claimed(self, hello: Mapping[str, Any], connection: LinkConnection) -> None:
        try:
            anchor = Anchor.decode(str(hello[HEARD]))
        except (KeyError, MalformedAnchor):
            return
        by = f"proxy {hello.get('proxy')!r} at {connection.peer_address}, of a link that this cluster does not know"
        proof = hello.get(PROOF)
        self._context.control.anchors.claimed(anchor, proof if isinstance(proof, str) else None, by)

    def _check_cluster(self, link: Link, peer: Mapping[str, Any]) -> None:
        if peer.get("cluster_id") != link.remote_cluster_id:
            raise LinkRejected(
                ReasonCode.PEER_IS_ANOTHER_CLUSTER,
                f"the peer is of cluster {peer.get('cluster_id')}, the link goes to {link.remote_cluster_id}",
            )

    def check_protection(self, peer: Mapping[str, Any], protection: Protection) -> None:
        """Nothing need be said in the clear over this connection, where that is configured. Raises LinkRejected."""
        if (missing := self._unprotected(peer, protection)) is not None:
            raise LinkRejected("UNSUPPORTED_VERSION", missing)

    def _unprotected(self, peer: Mapping[str, Any], protection: Protection) -> str | None:
        if protection is not Protection.NONE or not self._context.link_policy.require_encryption:
            return None
        return features.in_the_clear(peer.get("proxy"), refused=True)

    def _check_may_go_on(self, link: Link) -> None:
        """This proxy knows all that its control log says of the link. Raises LinkRejected."""
        stopped = self._context.control.state.lookup.stopped.get(link.name)
        if stopped is not None:
            raise LinkRejected(ReasonCode.CONTROL_RECORD_UNKNOWN, stopped)

    def _check_features(self, link: Link, peer: Mapping[str, Any], protection: Protection) -> None:
        """The link may go on here, and the peer knows what it needs. Raises LinkRejected."""
        self._check_may_go_on(link)
        missing = features.missing(link, peer) or self._unprotected(peer, protection)
        behind = self._states.setdefault(link.name, PeerState()).behind
        if missing is None:
            behind.pop(str(peer.get("proxy")), None)
            return
        behind[str(peer.get("proxy"))] = missing, self._clock.monotonic()
        raise LinkRejected("UNSUPPORTED_VERSION", missing)

    def _take(self, link_name: str, link: Link, state: PeerState, connection: LinkConnection) -> None:
        """Take a connection into use; the same proxy's one from before is dead by now."""
        name = str(connection.peer.get("proxy"))
        old = state.connections.get(name)
        if old is not None:
            old.close("the peer connected again")
        state.connections[name] = connection
        state.last_heard = self._clock.monotonic()
        state.reason = state.message = None
        connection.link_name = link_name
        connection.keep_steady(link.mode is LinkMode.SYNCHRONOUS)
        if self._answers is None:
            raise NotJoined("connections come before anybody serves them")
        connection.handlers = self._answers
        connection.receiver = Watched(self._receiver, lambda: self._gone(link_name, state, name, connection))
        said = {"link": link_name, "peer": name, "dialled": connection.dialled}
        self._connected.one(_of_host(link_name, connection), said)
        self._on_change()

    def _gone(self, link_name: str, state: PeerState, name: str, connection: LinkConnection) -> None:
        if state.connections.get(name) is connection:
            state.last_heard = connection.last_heard
            del state.connections[name]
            said = {"link": link_name, "peer": name, "detail": connection.lost_reason}
            self._lost.one(_of_host(link_name, connection), said)
            if not state.connections:
                silent = isinstance(connection.lost_error, PeerSilent)
                state.reason = ReasonCode.PEER_SILENT if silent else ReasonCode.CONNECTION_LOST
                state.message = connection.lost_reason
        self._on_change()

    async def _topology(self, connection: LinkConnection, question: calls.Topology) -> calls.TopologyAnswer:
        """This cluster's proxies, for a peer that dials."""
        leases = self._context.control.state.proxies.values()
        return calls.TopologyAnswer(
            tuple(
                calls.Proxy(
                    lease.name, lease.link_address, "all" if lease.all_brokers else tuple(sorted(lease.broker_ids))
                )
                for lease in leases
            )
        )


class Watched(Receiver):
    """A receiver that also calls ``gone`` when a connection is lost."""

    def __init__(self, inner: Receiver, gone: Callable[[], None]) -> None:
        self.on_append = inner.on_append  # type: ignore[method-assign]
        self.on_appended = inner.on_appended  # type: ignore[method-assign]
        self.on_call = inner.on_call  # type: ignore[method-assign]
        self.on_stopped = inner.on_stopped  # type: ignore[method-assign]
        self.on_writable = inner.on_writable  # type: ignore[method-assign]
        self._inner = inner
        self._gone = gone

    def on_lost(self, connection: LinkConnection) -> None:
        self._inner.on_lost(connection)
        self._gone()


class _AlreadyConnected(Exception):
    """The dialled proxy has a connection already."""

    def __init__(self, connection: LinkConnection) -> None:
        super().__init__("connected already")
        self.connection = connection


def _reason_of(error: Exception) -> str:
    if isinstance(error, LinkRejected):
        return _REASONS.get(error.code, error.code)
    if isinstance(error, SealingError):
        return ReasonCode.AUTHENTICATION_ERROR
    if isinstance(error, socket.gaierror):
        return ReasonCode.UNRESOLVABLE_BOOTSTRAP_ERROR
    if isinstance(error, TimeoutError):
        return ReasonCode.TIMEOUT_ERROR
    return ReasonCode.BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR


def _of_host(link_name: str, connection: LinkConnection) -> str:
    """Under which lines about a link's connections are counted: what a peer calls itself it may change."""
    return f"{link_name} {place_of(connection.peer_address)}"


def _log_rejected(connections: int, last: tuple[str, str, str]) -> None:
    peer, code, why = last
    extra = {"connections": connections, "peer": peer, "code": code, "detail": why}
    log.warning("link connections rejected", extra=extra)


def _log_unreached(times: int, last: tuple[str, str, str]) -> None:
    address, code, why = last
    extra = {"address": address, "code": code, "detail": why, "times": times}
    log.warning("link peer not reached", extra=extra)


def _log_odd_calls(odd: int, last: tuple[str, str]) -> None:
    peer, why = last
    log.warning("link calls not understood", extra={"calls": odd, "peer": peer, "detail": why})
