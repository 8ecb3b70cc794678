"""The process that a plugin runs in, as the plugin sees it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isthmus_control.anchors import Anchor
from isthmus_control.commands import Body
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import Outcome
from isthmus_control.sealing import Sealed
from isthmus_plugins.accepting import Acceptor
from isthmus_plugins.api import Tap
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, OtherCluster
from isthmus_plugins.link_policy import LinkPolicy
from isthmus_plugins.observers import LinkObservers
from isthmus_plugins.tasks import Supervision


class AnchorsApi(Protocol):
    """How far control logs are, as it is known outside of them (:mod:`isthmus_control.anchors`)."""

    def own(self) -> Anchor | None:
        """How far this proxy has applied its cluster's log."""

    def proof(self, anchor: Anchor) -> str | None:
        """What proves to this cluster, when it has lost its log, that it told this anchor; None without control key."""

    def heard_of(self, cluster_id: str) -> Anchor | None:
        """How far a linked cluster's log was, as it said last."""

    def proven_of(self, cluster_id: str) -> tuple[Anchor, str] | None:
        """The same as it came with a proof, and that."""

    def hear(self, anchor: Anchor, proof: str | None = None) -> None:
        """A linked cluster says how far its log is."""

    def told(self, anchor: Anchor, by: str) -> None:
        """A linked cluster says how far this one's log had been: nothing is vouched for unless it has that."""

    def claimed(self, anchor: Anchor, proof: str | None, by: str) -> None:
        """The same of one whose link is not known here: it counts where it is proven that this cluster has told it."""


class ControlApi(Protocol):
    """The cluster's control state, and the way to change it."""

    @property
    def state(self) -> ControlState: ...

    @property
    def anchors(self) -> AnchorsApi: ...

    async def append(self, body: Body) -> Outcome:
        """Append a command and return what came of it. Retried until it is known."""

    async def append_all(self, bodies: Sequence[Body]) -> Sequence[Outcome]:
        """Append commands in this order, without waiting in between, and return what came of them."""

    async def enforced(self, offset: int) -> None:
        """Return when every proxy with an unexpired lease enforces the log up to ``offset``."""

    async def caught_up(self) -> None:
        """Return when all is applied that stood in the log at the call. Raises BrokerUnavailable."""

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        """Call ``changed`` after each applied command that changed the state."""


@dataclass(frozen=True, slots=True)
class LinkListenerSpec:
    """Where peers' connections come in."""

    host: str
    port: int
    server_tls: ssl.SSLContext | None
    acceptor: type[Acceptor[Any]] = Acceptor
    """How: on sockets, or on those of a simulation."""


class Clock(Protocol):
    """What time it is: the module :mod:`isthmus_plugins.clock`, or the clock of a simulation."""

    def monotonic(self) -> float:
        """Seconds that never go back, from a beginning that means nothing: for all that waits, or runs out."""

    def time(self) -> float:
        """Seconds since 1970 by the wall clock, which may be wrong or set back: for what people are shown."""


@dataclass(frozen=True, slots=True)
class CaptureAllowed:
    """What settings of captures may name (``[capture]``)."""

    files_directory: Path | None = None
    """Where files of clients are; None: nowhere."""
    servers: frozenset[str] = frozenset()
    """host:port of brokers."""


class PluginContext(Protocol):
    """The process, as a plugin sees it."""

    proxy_name: str
    incarnation: str
    cluster_id: str
    clock: Clock
    cluster: ClusterApi
    control: ControlApi
    link_listener: LinkListenerSpec | None
    link_client_tls: ssl.SSLContext | None
    link_policy: LinkPolicy
    """What the configuration allows of links."""

    fronted_brokers: frozenset[int] | None
    """None: every broker of the cluster."""

    data_directory: Path | None
    """Where plugins keep files (``[data] directory``); None: nowhere."""

    offsets_keyring_file: Path | None
    """Keys of groups' offsets (``[replication] offsets_keyring_file``); None: none."""

    capture_allowed: CaptureAllowed
    """``[capture]``."""

    partition_metrics: bool
    """Whether metrics have series for each partition (``[replication] partition_metrics``)."""

    supervision: Supervision
    """What of the background work fails."""

    link_observers: LinkObservers
    """Whom replication notifies."""

    @property
    def internal_topic_ids(self) -> Collection[bytes]:
        """The ids of the proxies' own topics, 16 bytes each. More may come: it is always the same object."""

    def hide_topic(self, topic_id: bytes) -> None:
        """Count a topic among the proxies' own."""

    def fronts(self, broker_id: int) -> bool:
        """Whether this proxy fronts the broker."""

    def link_listening(self, acceptor: Acceptor[Any]) -> None:
        """The link listener is bound: to a port of this, which gets other certificates when they are renewed."""

    @property
    def link_address(self) -> str | None:
        """Where peers reach this proxy's link listener."""

    def seal(self, secret: bytes, purpose: str) -> Sealed:
        """A secret as it may stand in the control log. ``purpose``: the id of the link or token."""

    def unseal(self, sealed: Sealed, purpose: str) -> bytes:
        """The secret again. Raises SealingError where this proxy's control keys do not open it."""

    async def other_cluster(self, name: str, bootstrap: Sequence[str]) -> OtherCluster:
        """Connect to the brokers of another cluster of a tree, as this proxy's configuration says of that ``name``.

        Raises BrokerUnavailable. Whoever asked closes it.
        """

    async def topic_names(self, topic_ids: Collection[bytes]) -> Mapping[bytes, str]:
        """The names of topics by their ids, of those that the cluster has.

        Where one is not known, all topics are read once, for all who ask, and not at once again: anybody can ask for
        ids that there are not. Raises BrokerUnavailable.
        """

    def known_topic_name(self, topic_id: bytes) -> str | None:
        """The name of a topic, if it is known already. An id never changes its topic."""

    async def fence(self) -> None:
        """Return when no client's write that was forwarded before the call can still land."""

    def observe(self, tap: Tap | None) -> None:
        """Have this note all traffic from now on; None: nobody. There is one at most."""

    @property
    def lease_deadline(self) -> float:
        """Until when (monotonic seconds) this proxy may vouch for what it forwards."""


def check_lease(context: PluginContext) -> None:
    """Raise BrokerUnavailable where another proxy may do by now what this one is about to."""
    if context.clock.monotonic() > context.lease_deadline:
        raise BrokerUnavailable("this proxy has no lease now")
