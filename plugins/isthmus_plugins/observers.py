"""What happens to connections and links, reported to plugins that want to know: the contract.

A plugin hands out observers with the hooks ``isthmus_connection_observers`` and ``isthmus_link_observers``. They are
notified at once, on the proxy's loop, so they must neither block nor await; what they got never changes afterwards.
One that raises is logged and counted by nobody else: what it was notified of has happened. Only a connection that is
opened can still be refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol

from isthmus_plugins.api import Client, Close

log = logging.getLogger("isthmus_plugins.observers")


class ConnectionObserver(Protocol):
    """Is notified of clients' connections."""

    def opened(self, client: Client) -> Close | None:
        """A client has connected; nothing it sends is read before this returns. :class:`~isthmus_plugins.api.Close`:
        it is sent away, and so it is where this raises."""

    def authenticated(self, client: Client) -> None:
        """``client.principal`` is known, or is another one: the broker has accepted its credentials, or the proxy's
        TLS listener its certificate. Called after :meth:`opened`; never, where a cluster takes anybody."""

    def closed(self, client: Client) -> None:
        """The connection is gone, or was refused."""


class LinkAppended(NamedTuple):
    """At the follower end: the in-sync replicas of a follower partition have more of its source."""

    link: str
    remote_cluster_id: str
    topic: str
    """The local name."""
    partition: int
    base_offset: int
    end_offset: int
    """Exclusive."""
    batches: int
    """Markers of transactions count as one each."""
    size_bytes: int
    took_s: float
    """From sending the request until its answer."""


class LinkConfirmed(NamedTuple):
    """At the leader end: the follower has said that it has more."""

    link: str
    remote_cluster_id: str
    topic: str
    partition: int
    base_offset: int
    """What was confirmed before."""
    end_offset: int
    took_s: float | None
    """Since the oldest batch that this confirms was sent; None: the follower had it, and nothing was sent."""


class LinkTold(NamedTuple):
    """The state of a partition of a link, or of the link as a whole, as this proxy knows it."""

    link: str
    remote_cluster_id: str
    role: Literal["leader", "follower"] | None
    """Of the partition here; None: of the whole link."""
    topic: str | None
    partition: int
    """-1: of the whole link, or of the topic."""
    state: str
    reason: str | None
    source_end: int | None
    follower_end: int | None
    lag: int | None
    """Offsets that the follower lacks."""
    lag_s: float | None
    """Age of the oldest record that it lacks."""


class LinkObserver(Protocol):
    """Is notified of what this proxy's ends of links do."""

    @property
    def observes_links(self) -> bool:
        """Whether it wants to be notified now. While nobody does, nothing is prepared."""

    def link_appended(self, event: LinkAppended) -> None: ...

    def link_confirmed(self, event: LinkConfirmed) -> None: ...

    def link_told(self, event: LinkTold) -> None:
        """A state has changed, or is reported again: everything when an observer begins to want it; then, once a
        second, each link as a whole, and partitions that lack something or are neither Following nor In-Sync, and once
        when they lack nothing any more. The state Gone: this proxy has it no more, and another one may."""


class LinkObservers:
    """Those that replication notifies. Empty until the plugins have started."""

    def __init__(self) -> None:
        self._all: tuple[LinkObserver, ...] = ()

    def add(self, observers: Iterable[LinkObserver]) -> None:
        self._all += tuple(observers)

    def __bool__(self) -> bool:
        """Whether somebody wants to be notified now."""
        return any(each.observes_links for each in self._all)

    def appended(self, event: LinkAppended) -> None:
        self._notify(event.link, lambda each: each.link_appended(event))

    def confirmed(self, event: LinkConfirmed) -> None:
        self._notify(event.link, lambda each: each.link_confirmed(event))

    def report(self, event: LinkTold) -> None:
        self._notify(event.link, lambda each: each.link_told(event))

    def _notify(self, link: str, notify: Callable[[LinkObserver], None]) -> None:
        for each in self._all:
            try:
                notify(each)
            except Exception:
                log.exception("link observer failed", extra={"link": link})
