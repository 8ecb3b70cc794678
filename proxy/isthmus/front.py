"""The front: which brokers this proxy serves clients for, and where.

Whole-cluster mode has one port to bootstrap from and one for each broker; brokers come and go, and so do their ports.
Sidecar mode has one port for one broker. Clients are given :class:`Addresses`: this proxy's own ports, and the
addresses at which other proxies of the cluster serve the other brokers, as their leases in the control log say. A
broker that no proxy serves is not shown at all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from isthmus.config import ProxyConfig
from isthmus.errors import ConfigurationError, PeerFault
from isthmus.kafka.client import ClusterClient
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Listener
from isthmus_control.control_state import ControlState
from isthmus_control.model import BrokerClaim
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.front")

BOOTSTRAP: Final = -1
BROKERS_INTERVAL_S: Final = 2.0
"""How often brokers that came or went are looked for."""


class Addresses:
    """What clients are given in place of brokers' own addresses. An ``AddressMap``."""

    def __init__(self, advertised_host: str) -> None:
        self._host = advertised_host.encode()
        self._elsewhere: Mapping[int, BrokerClaim] = {}
        self.ports: dict[int, int] = {}
        """This proxy's own ports, by broker."""

    def follow(self, state: ControlState) -> None:
        """Learn where other proxies serve brokers."""
        self._elsewhere = state.broker_addresses()

    def __call__(self, node_id: int, host: bytes, port: int) -> tuple[bytes, int] | None:
        """None: no proxy serves that broker, and clients are not shown it."""
        own = self.ports.get(node_id)
        if own is not None:
            return self._host, own
        claim = self._elsewhere.get(node_id)
        return (claim.host.encode(), claim.port) if claim is not None else None


class Front:
    """The client listeners of one process."""

    def __init__(
        self,
        config: ProxyConfig,
        client: ClusterClient,
        gateway: Gateway,
        addresses: Addresses,
        client_tls: ssl.SSLContext | None,
        supervision: Supervision,
    ) -> None:
        self._config = config
        self._client = client
        self._gateway = gateway
        self._client_tls = client_tls
        self._listeners: dict[int, Listener] = {}
        self._addresses = addresses
        self._tasks = Tasks("front", supervision)
        self.unserved: dict[int, str] = {}
        """Brokers that have no port here, and why."""
        self._accepting = False
        self._advertised = config.client_listener.advertised
        self.on_change: Callable[[], None] = lambda: None
        """Called when a broker of this proxy came or went."""

    # ---- where ----

    @property
    def brokers(self) -> frozenset[int] | None:
        """The brokers that this proxy fronts; None: all of them."""
        broker_id = self._config.cluster.broker_id
        return None if broker_id is None else frozenset((broker_id,))

    def fronts(self, broker_id: int) -> bool:
        """Also of one whose port cannot be had: no other proxy can, and links look after its partitions."""
        return self.brokers is None or broker_id in self._listeners

    def claims(self) -> tuple[BrokerClaim, ...]:
        """The brokers that this proxy serves now, and the addresses that clients are given."""
        return tuple(
            BrokerClaim(broker_id, self._advertised, listener.bind.port)
            for broker_id, listener in sorted(self._listeners.items())
            if broker_id != BOOTSTRAP
        )

    @property
    def targets(self) -> Sequence[Endpoint]:
        """The brokers' listeners that clients' connections are forwarded to."""
        broker_id = self._config.cluster.broker_id
        return self._targets(BOOTSTRAP if broker_id is None else broker_id)

    @property
    def bootstrap(self) -> Endpoint:
        """Where clients begin. Known after :meth:`bind`."""
        broker_id = self._config.cluster.broker_id
        return Endpoint(self._advertised, self._listeners[BOOTSTRAP if broker_id is None else broker_id].bind.port)

    # ---- life ----

    async def bind(self) -> None:
        """Bind every port; clients that connect wait until :meth:`serve`.

        Raises ConfigurationError where the port to bootstrap from cannot be bound, or that of a sidecar; one broker's
        of a whole cluster leaves that :attr:`unserved`, and is tried again.
        """
        broker_id = self._config.cluster.broker_id
        bind = self._config.client_listener.bind
        if broker_id is not None:
            if broker_id not in self._client.brokers:
                known = ", ".join(map(str, sorted(self._client.brokers)))
                raise ConfigurationError(
                    "cluster.broker_id",
                    f"the cluster has no broker {broker_id}",
                    f"It has {known}: name one of them, or see that this one is up.",
                )
            await self._listen(broker_id, Endpoint(bind.host, bind.port))
            return
        await self._listen(BOOTSTRAP, Endpoint(bind.host, bind.port))
        await self._follow_brokers()

    async def serve(self) -> None:
        """Let clients in."""
        self._accepting = True
        for broker_id, listener in list(self._listeners.items()):
            try:
                await listener.accept()
            except OSError as error:
                await self._leave(broker_id, listener, error)
        if self.brokers is None:
            self._tasks.keep("brokers", self._watch_brokers)

    async def _leave(self, broker_id: int, listener: Listener, error: OSError) -> None:
        """Do without a broker of a whole cluster whose port another process listens on. Raises ConfigurationError."""
        refused = _refused(listener.bind, error)
        if self.brokers is not None or broker_id == BOOTSTRAP:
            raise refused from error
        await listener.stop()
        del self._listeners[broker_id], self._addresses.ports[broker_id]
        self.unserved[broker_id] = str(refused)
        log.error("broker not served", extra={"broker": broker_id, "detail": str(refused)})
        self.on_change()

    async def stop(self) -> None:
        """Listen no more. Sessions go on."""
        await self._tasks.close()
        for listener in self._listeners.values():
            await listener.stop()

    def use_tls(self, client_tls: ssl.SSLContext | None) -> None:
        """Have clients that come from now on served with this."""
        self._client_tls = client_tls
        for listener in self._listeners.values():
            listener.use_tls(client_tls)

    async def _listen(self, broker_id: int, bind: Endpoint) -> None:
        listener = Listener(self._gateway, broker_id, bind, lambda: self._targets(broker_id), self._client_tls)
        try:
            if taken := {each.bind.port for each in self._listeners.values() if bind.port} & {bind.port}:
                raise OSError(errno.EADDRINUSE, f"another broker's, or to bootstrap from: {taken.pop()}")
            await listener.start()
            if self._accepting:
                await listener.accept()
        except OSError as error:
            await listener.stop()
            raise _refused(bind, error) from error
        self._listeners[broker_id] = listener
        if broker_id != BOOTSTRAP:
            self._addresses.ports[broker_id] = listener.bind.port
        log.info("client listener bound", extra={"broker": broker_id, "address": str(listener.bind)})

    def _targets(self, broker_id: int) -> Sequence[Endpoint]:
        brokers = self._client.brokers
        if broker_id != BOOTSTRAP:
            broker = brokers.get(broker_id)
            return () if broker is None else (Endpoint(broker.host, broker.port),)
        return [Endpoint(broker.host, broker.port) for _, broker in sorted(brokers.items())]

    async def _follow_brokers(self) -> None:
        """Listen for brokers that are new. Those that are gone keep their port: they may be restarting."""
        brokers = sorted(self._client.brokers)
        unserved = {}
        for broker_id in (broker_id for broker_id in brokers if broker_id not in self._listeners):
            try:
                bind = self._config.client_listener.broker_bind(broker_id)
                await self._listen(broker_id, Endpoint(bind.host, bind.port))
                self.on_change()
            except ConfigurationError as error:  # no reason to serve the others less
                unserved[broker_id] = str(error)
                if self.unserved.get(broker_id) != str(error):
                    log.error("broker not served", extra={"broker": broker_id, "detail": str(error)})
        self.unserved = unserved

    async def _watch_brokers(self) -> None:
        while True:
            await asyncio.sleep(BROKERS_INTERVAL_S)
            try:
                await self._client.refresh(())
                await self._follow_brokers()
            except PeerFault as error:
                log.warning("brokers not followed", extra={"detail": str(error)})


def _refused(bind: Endpoint, error: OSError) -> ConfigurationError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "It is tried again; raise the hard limit of file descriptors (LimitNOFILE= of systemd, ulimit -Hn)."
    else:
        fix = (
            "Another process has the port, or the host is not this machine's: choose another one (a broker's with "
            "broker_port_base or broker_ports)."
        )
    return ConfigurationError("client_listener.bind", f"{bind} cannot be bound: {error.strerror or error}", fix)
