"""Proxies in front of real clusters, for tests.

They are shared, like the clusters behind them (see ``support.kafka``): use topics and groups of your own. A proxy
claims its brokers in the control topic of their cluster, so these clusters are not those of ``support.kafka``'s other
fixtures, where tests start proxies of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary

import pytest

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support.kafka import VERSIONS, Clusters, shared, unique
from support.links import Linked, linked, until

HEARTBEATS: Final = {
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "300",
}
"""Of KIP-848 groups, whose rebalances take several of them; 5 s each by default."""


def pytest_configure() -> None:
    ProxyProcess.forked = True


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


LINKED: Final = "linked"
"""In place of a version: the newest one, with a synchronous link over all topics and groups."""


@pytest.fixture(
    scope="module",
    params=[*VERSIONS, pytest.param(LINKED, marks=pytest.mark.one_in_ci("clients", of="broker version", case=LINKED))],
)
def proxied_of_each_version(request: pytest.FixtureRequest, shared_proxied: SharedProxies) -> Proxied:
    """One broker and its proxy, of each version that must work in turn; and the source of a synchronous link."""
    version: str = request.param
    if version == LINKED:
        return cast(Proxied, request.getfixturevalue("proxied_linked"))
    return shared_proxied() if version == DEFAULT_VERSION else shared_proxied(version=version)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=pytest.mark.one_in_ci("clients", of="three brokers of clients", case=case))
        for case in ("alone", LINKED)
    ],
)
def proxied_of_clients(request: pytest.FixtureRequest, shared_proxied: SharedProxies) -> Proxied:
    """Three brokers and their proxy; and the source of a synchronous link."""
    if request.param == LINKED:
        return cast(Proxied, request.getfixturevalue("proxied_linked"))
    return shared_proxied(brokers=3)


def _equal(pair: Linked) -> dict[str, Any]:
    """The report, once both sides are equal."""
    reports: list[dict[str, Any]] = []

    def equal() -> bool:
        reports.append(pair.verify(check=False))
        return bool(reports[-1]["equal"])

    try:
        until("both clusters are equal", equal)
    except AssertionError as error:
        compared = reports[-1]["partitions"] + reports[-1]["groups"]
        different = [each for each in compared if not each["equal"]]
        raise AssertionError(f"{error}: {different}; {pair.a.link(pair.name)}") from error
    return reports[-1]


@pytest.fixture(scope="module")
def proxied_linked() -> Iterator[Proxied]:
    """The source of a synchronous link over all topics and groups; both clusters are equal when the tests are over."""
    with (
        KafkaCluster(name="clients-a", brokers=3, settings=HEARTBEATS) as a,
        KafkaCluster(name="clients-b", brokers=1) as b,
        linked(a, b) as pair,
    ):
        pair.raise_levels()
        for kind in ("topic", "consumer-group"):
            until("connected", lambda: pair.a.link(pair.name)["state"] != "Disconnected")
            names = "--local", "", "--remote", "", "--type", kind
            consent = "--role", "leader", "--disable-transaction-verification"
            gone = ("--on-source-delete", "delete") if kind == "topic" else ()
            pair.a.proxy.cli("link", "attach", pair.name, *names, *consent, *gone)
        until("it follows", lambda: pair.a.link(pair.name)["state"] == "Following")
        until("accepted", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"))
        until("In-Sync", lambda: pair.a.link(pair.name)["state"] == "In-Sync")
        pair.a.create_topic(stays := unique("stays-"))  # tests that delete all that they made leave this to compare
        pair.a.produce(stays, [b"before the tests"])
        yield Proxied(a, pair.a.proxy)
        report = _equal(pair)
        assert report["partitions"]
        assert not report["left_out"], report["left_out"]
        assert pair.a.link(pair.name)["state"] == "In-Sync"
