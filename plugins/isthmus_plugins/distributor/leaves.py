"""Connections of a cluster to the others of its tree, made as they are needed."""

from __future__ import annotations

from collections.abc import Callable

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, OtherCluster, Transactions
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distributor.reasons import TARGET_IS_ANOTHER_CLUSTER, TARGET_UNREACHABLE, Waits
from isthmus_plugins.distributor.renamed import LeafApi, RenamedLeaf, RenamedTransactions, Renaming
from isthmus_plugins.process import PluginContext


class Leaves:
    """By name, of one version of the tree. ``own``: what the cluster that asks is called in it."""

    def __init__(self, context: PluginContext, document: TreeDocument, own: str) -> None:
        self._context = context
        self._clusters = document.clusters
        self._names = document.names
        self._own = own
        self._open: dict[str, OtherCluster] = {}
        self._renamings: dict[str, Renaming] = {}

    async def reached(self, name: str) -> LeafApi:
        """A cluster, by the names that topics have at the one that asks.

        Raises Waits where it is not reached, or another cluster is.
        """
        itself, renaming = await self.itself(name), self._renaming(name)
        return itself if renaming is None else RenamedLeaf(itself, renaming)

    async def transactions(self, name: str, made: Callable[[ClusterApi], Transactions]) -> Transactions:
        """What ``made`` makes of a cluster, by the names of the one that asks. Raises Waits."""
        itself, renaming = made(await self.itself(name)), self._renaming(name)
        return itself if renaming is None else RenamedTransactions(itself, renaming)

    def name_there(self, name: str, topic: str) -> str | None:
        """What a cluster calls a topic of the one that asks; None: nothing, as it would be too long there."""
        renaming = self._renaming(name)
        return topic if renaming is None else renaming.there(topic)

    def _renaming(self, name: str) -> Renaming | None:
        if self._names is None:
            return None
        if name not in self._renamings:
            self._renamings[name] = Renaming(self._names, self._own, name)
        return self._renamings[name]

    async def itself(self, name: str) -> OtherCluster:
        """A cluster, by the names that topics have there. Raises Waits where it is not reached, or another one is."""
        known = self._open.get(name)
        if known is not None:
            return known
        cluster = self._clusters[name]
        try:
            found = await self._context.other_cluster(name, cluster.servers)
        except BrokerUnavailable as error:
            raise Waits(TARGET_UNREACHABLE, f"cluster {name} is not reached: {error}") from error
        if found.cluster_id != cluster.cluster_id:
            await found.close()
            raise Waits(
                TARGET_IS_ANOTHER_CLUSTER,
                f"{cluster.bootstrap_servers} is cluster {found.cluster_id}, and the tree has {cluster.cluster_id} as "
                f"{name}",
            )
        self._open[name] = found
        return found

    async def close(self) -> None:
        """Close all connections."""
        for each in self._open.values():
            await each.close()
        self._open.clear()
