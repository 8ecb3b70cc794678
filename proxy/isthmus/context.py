"""The process as its plugins see it: :class:`isthmus_plugins.process.PluginContext`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.client_properties import read_security
from isthmus.cluster_access import ClusterAccess, OtherCluster, other_cluster
from isthmus.config import Address, LinkListenerSection
from isthmus.control_log import ControlLog
from isthmus.errors import ConfigurationError, PeerFault
from isthmus.front import Front
from isthmus.kafka.security import SecuritySpec
from isthmus.session.listener import Gateway
from isthmus.topic_names import TopicNames
from isthmus_control.commands import Body
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import Outcome
from isthmus_control.sealing import Sealed, Sealer, Secret
from isthmus_plugins import clock
from isthmus_plugins.accepting import Acceptor
from isthmus_plugins.api import Tap
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.link_policy import LinkPolicy
from isthmus_plugins.observers import LinkObservers
from isthmus_plugins.process import AnchorsApi, CaptureAllowed, Clock, LinkListenerSpec
from isthmus_plugins.tasks import Supervision


class Control:
    """The control log as plugins use it, with its errors as they know them."""

    def __init__(self, control_log: ControlLog) -> None:
        self._log = control_log

    @property
    def state(self) -> ControlState:
        return self._log.state

    @property
    def anchors(self) -> AnchorsApi:
        return self._log.anchors

    async def append(self, body: Body) -> Outcome:
        """Append a command and return what came of it. Raises BrokerUnavailable: it may count or not."""
        try:
            return await self._log.append(body)
        except PeerFault as error:
            raise BrokerUnavailable(str(error)) from error

    async def append_all(self, bodies: Sequence[Body]) -> Sequence[Outcome]:
        """Append commands in this order, and return what came of them. Raises BrokerUnavailable: any may count."""
        # Each of these stands in line to be written before the next one begins.
        return await asyncio.gather(*map(self.append, bodies))

    async def enforced(self, offset: int) -> None:
        """Return when every proxy with an unexpired lease enforces the log up to ``offset``."""
        try:
            await self._log.enforced(offset)
        except PeerFault as error:
            raise BrokerUnavailable(str(error)) from error

    async def caught_up(self) -> None:
        """Return when all is applied that stood in the log at the call. Raises BrokerUnavailable."""
        try:
            await self._log.caught_up()
        except PeerFault as error:
            raise BrokerUnavailable(str(error)) from error

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        """Call ``changed`` after each applied command that changed the state."""
        self._log.subscribe(changed)


class Context:
    """One per process, made before the plugins start."""

    def __init__(
        self,
        proxy_name: str,
        cluster_id: str,
        cluster: ClusterAccess,
        control_log: ControlLog,
        front: Front,
        gateway: Gateway,
        sealer: Sealer,
        link_section: LinkListenerSection | None,
        link_server_tls: ssl.SSLContext | None,
        link_client_tls: ssl.SSLContext | None,
        link_policy: LinkPolicy,
        data_directory: Path | None,
        offsets_keyring_file: Path | None,
        capture_allowed: CaptureAllowed,
        clients_directory: Path | None,
        partition_metrics: bool,
        supervision: Supervision,
    ) -> None:
        self.proxy_name = proxy_name
        self.incarnation = control_log.incarnation
        self.cluster_id = cluster_id
        self.clock: Clock = clock
        self.cluster = cluster
        self.control = Control(control_log)
        self.link_client_tls = link_client_tls
        self.link_policy = link_policy
        self.data_directory = data_directory
        self.offsets_keyring_file = offsets_keyring_file
        self.capture_allowed = capture_allowed
        self.partition_metrics = partition_metrics
        self.supervision = supervision
        self.link_listener: LinkListenerSpec | None = None
        self.link_observers = LinkObservers()
        self.fronted_brokers = front.brokers
        self._clients_directory = clients_directory
        self._internal_topic_ids: list[bytes] = []
        self._topic_names = TopicNames(cluster)
        self._control_log = control_log
        self._front = front
        self._gateway = gateway
        self._sealer = sealer
        self._link_section = link_section
        self._link_acceptor: Acceptor[Any] | None = None
        if link_section is not None:
            self.link_listener = LinkListenerSpec(link_section.bind.host, link_section.bind.port, link_server_tls)

    @property
    def internal_topic_ids(self) -> Collection[bytes]:
        """The ids of the proxies' own topics. More may come: it is always the same object."""
        if not self._internal_topic_ids:
            self._internal_topic_ids.append(self._control_log.topic_id.bytes)
        return self._internal_topic_ids

    def hide_topic(self, topic_id: bytes) -> None:
        """Count a topic among the proxies' own."""
        if topic_id not in self.internal_topic_ids:
            self._internal_topic_ids.append(topic_id)

    def fronts(self, broker_id: int) -> bool:
        """Whether this proxy fronts the broker."""
        return self._front.fronts(broker_id)

    def link_listening(self, acceptor: Acceptor[Any]) -> None:
        """The link listener is bound: to a port of this, which gets other certificates when they are renewed."""
        self._link_acceptor = acceptor

    def use_link_tls(self, server_tls: ssl.SSLContext | None) -> None:
        """Have peers that come from now on served with this."""
        if self.link_listener is not None:
            self.link_listener = replace(self.link_listener, server_tls=server_tls)
        if self._link_acceptor is not None:
            self._link_acceptor.tls = server_tls

    def use_link_dial_tls(self, client_tls: ssl.SSLContext | None) -> None:
        """Have peers dialled with this from now on."""
        self.link_client_tls = client_tls

    @property
    def link_address(self) -> str | None:
        """Where peers reach this proxy's link listener."""
        if self._link_section is None or self._link_acceptor is None:
            return None
        address: Address = self._link_section.advertised_at(self._link_acceptor.port)
        return str(address)

    def seal(self, secret: bytes, purpose: str) -> Sealed:
        """A secret as it may stand in the control log. ``purpose``: the id of the link or token."""
        return self._sealer.seal(Secret(secret), purpose)

    def unseal(self, sealed: Sealed, purpose: str) -> bytes:
        """The secret again. Raises SealingError where this proxy's control keys do not open it."""
        return self._sealer.open(sealed, purpose).reveal()

    async def other_cluster(self, name: str, bootstrap: Sequence[str]) -> OtherCluster:
        """Connect to the brokers of another cluster of a tree, as the client's file of its name says."""
        security = SecuritySpec()
        try:
            if self._clients_directory is not None:
                file = self._clients_directory / f"{name}.properties"
                security = await asyncio.to_thread(read_security, file)
            return await other_cluster(bootstrap, security)
        except (ConfigurationError, ValueError) as error:
            raise BrokerUnavailable(f"cluster {name} cannot be connected to: {error}") from error

    async def topic_names(self, topic_ids: Collection[bytes]) -> Mapping[bytes, str]:
        """The names of topics by their ids, of those that the cluster has; read where one is not known."""
        return await self._topic_names.of(topic_ids)

    def known_topic_name(self, topic_id: bytes) -> str | None:
        """The name of a topic, if it is known already. An id never changes its topic."""
        return self._topic_names.known(topic_id)

    async def fence(self) -> None:
        """Return when no client's write that was forwarded before the call can still land."""
        await self._gateway.fence()

    def observe(self, tap: Tap | None) -> None:
        """Have this note all traffic from now on; None: nobody."""
        self._gateway.observe(tap)

    @property
    def lease_deadline(self) -> float:
        """Until when (monotonic seconds) this proxy may vouch for what it forwards."""
        return self._control_log.lease_deadline
