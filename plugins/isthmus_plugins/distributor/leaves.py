"""Connections of a distributor to other clusters of its tree, made as they are needed."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus_plugins.cluster import BrokerUnavailable, OtherCluster
from isthmus_plugins.distribution.document import Cluster
from isthmus_plugins.distributor.reasons import TARGET_IS_ANOTHER_CLUSTER, TARGET_UNREACHABLE, Waits
from isthmus_plugins.process import PluginContext


class Leaves:
    """By name, of one version of the tree."""

    def __init__(self, context: PluginContext, clusters: Mapping[str, Cluster]) -> None:
        self._context = context
        self._clusters = clusters
        self._open: dict[str, OtherCluster] = {}

    async def reached(self, name: str) -> OtherCluster:
        """Raises Waits where it is not reached, or another cluster is."""
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
