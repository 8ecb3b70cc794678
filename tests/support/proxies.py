"""Proxies in front of real clusters, for tests.

They are shared, like the clusters behind them (see ``support.kafka``): use topics and groups of your own. A proxy
claims its brokers in the control topic of their cluster, so these clusters are not those of ``support.kafka``'s other
fixtures, where tests start proxies of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import pytest

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support.kafka import VERSIONS, Clusters, shared

HEARTBEATS: Final = {
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "300",
}
"""Of KIP-848 groups, whose rebalances take several of them; 5 s each by default."""


class Proxied(NamedTuple):
    """A cluster and the proxy in front of all of it."""

    kafka: KafkaCluster
    proxy: ProxyProcess

    @property
    def bootstrap(self) -> str:
        """What clients of the proxy are given."""
        return self.proxy.bootstrap

    @property
    def librdkafka(self) -> dict[str, str]:
        """Settings of a confluent-kafka client of the proxy."""
        return {"bootstrap.servers": self.bootstrap}

    def tool(self, name: str, *arguments: str, **more: Any) -> str:
        """Run one of Kafka's own tools against the proxy; returns what it printed."""
        return self.kafka.tool(name, "--bootstrap-server", self.bootstrap, *arguments, **more).stdout


SharedProxies = Callable[..., Proxied]
"""Takes the fields of ClusterSpec, returns a cluster with a proxy in front; the same for the same fields."""


_running: Final[WeakKeyDictionary[KafkaCluster, ProxyProcess]] = WeakKeyDictionary()
"""The proxy in front of each shared cluster that has one; it ends with its cluster."""


@pytest.fixture(scope="module")
def shared_proxied(shared_kafka: Clusters) -> SharedProxies:
    """Clusters with a proxy in front, shared by modules: the same arguments give the same ones."""

    def proxied(**chosen: Any) -> Proxied:
        cluster = shared_kafka(role="proxied", settings=HEARTBEATS, **chosen)
        if cluster not in _running:
            proxy = ProxyProcess(cluster.bootstrap_servers, name=f"proxy-{len(_running) + 1}")
            shared.end_with(cluster, proxy)
            _running[cluster] = proxy
        return Proxied(cluster, _running[cluster])

    return proxied


@pytest.fixture(scope="module")
def proxied(shared_proxied: SharedProxies) -> Proxied:
    """One broker of the newest version, and its proxy."""
    return shared_proxied()


@pytest.fixture(scope="module")
def proxied_three(shared_proxied: SharedProxies) -> Proxied:
    """Three brokers of the newest version, and one proxy in front of all."""
    return shared_proxied(brokers=3)


@pytest.fixture(scope="module", params=VERSIONS)
def proxied_of_each_version(request: pytest.FixtureRequest, shared_proxied: SharedProxies) -> Proxied:
    """One broker and its proxy, of each version that must work in turn."""
    version: str = request.param
    return shared_proxied() if version == DEFAULT_VERSION else shared_proxied(version=version)
