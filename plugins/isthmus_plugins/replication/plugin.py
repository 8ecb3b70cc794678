"""The replication plugin: its hooks, and the parts that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric

from isthmus_plugins.api import RequestHook
from isthmus_plugins.confirmation import Confirmer
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.link_operations import LinkOperations
from isthmus_plugins.observers import ConnectionObserver
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.assembly import Parts, assemble
from isthmus_plugins.replication.metrics import link_families, partition_families
from isthmus_plugins.replication.status.truncations import truncation_metrics


class ReplicationPlugin:
    """Both ends of this proxy's links."""

    _parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """Of the process that was started."""
        assert self._parts is not None
        return self._parts

    @hookimpl
    async def isthmus_start(self, context: PluginContext) -> None:
        self._parts = assemble(context)
        await self._parts.peers.listen()
        self._parts.start()

    @hookimpl
    async def isthmus_stop(self) -> None:
        await self.parts.stop()

    @hookimpl
    def isthmus_request_hooks(self) -> Sequence[RequestHook]:
        return [hook for part in self.parts.all for hook in part.hooks()]

    @hookimpl
    def isthmus_connection_observers(self) -> Sequence[ConnectionObserver]:
        return [self.parts.client_moves, self.parts.moved_members]

    @hookimpl
    def isthmus_confirmers(self) -> Sequence[Confirmer]:
        return [self.parts.sync]

    @hookimpl
    def isthmus_link_operations(self) -> LinkOperations | None:
        return self._parts.service if self._parts is not None else None

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        parts = self.parts
        cut = truncation_metrics(parts.context.control.state, parts.truncations.ended, parts.truncations.records_cut)
        own = [family for part in parts.all for family in part.metrics()]
        statuses = parts.service.statuses()
        families = link_families(statuses, parts.peers.connections, parts.traffic)
        if parts.context.partition_metrics:
            families = [*families, *partition_families(statuses, parts.traffic)]
        return [*families, *own, *cut]


plugin = ReplicationPlugin()
