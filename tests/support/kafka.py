"""Real Kafka clusters for tests.

Most clusters are shared by the modules that a worker runs one after the other: use topics and groups of your own
(``unique``) and leave brokers alone. A test that kills, pauses or configures brokers takes ``kafka_cluster``, whose
clusters are its own. From async tests call blocking methods through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import pytest

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster, Security

Clusters = Callable[..., KafkaCluster]
"""Takes the fields of ClusterSpec (version, brokers, settings, listeners, security ...), returns a running cluster."""

SECURITY: Final = Security(
    users={"admin": "admin-secret", "alice": "alice-secret", "bob": "bob-secret"},
    authorize=True,
    super_users=("admin",),
    client_certificates="required",
)
"""Of ``secured_kafka``: admin is a super user, alice and bob may do what ACLs allow, which is nothing at first."""

AUTHORIZED: Final = Security(
    users={"app-1": "app-1-secret", "app-2": "app-2-secret"}, authorize=True, super_users=("ANONYMOUS",)
)
"""Of ``authorized_pair``: whoever does not log in may do anything, and app-1 and app-2 what ACLs allow."""

_SMALL: Final = ("-Xms32m",)
"""Of shared clusters: their heaps grow as they are used, a third less memory for each broker."""
_BROKERS_KEPT: Final = 4
"""So many brokers may idle for modules to come: each takes a fiftieth of a core, and to start it 2.5 s of one."""

NOW_MS: Final = int(time.time() * 1000)
"""A timestamp for records of tests: brokers delete what is a week old, some minutes after it was written."""

VERSIONS: Final = [
    pytest.param(version, marks=pytest.mark.one_in_ci("clients", of="broker version", case=version))
    for version in ("3.9.2", "4.1.1", DEFAULT_VERSION)
]
"""Of brokers, that must work; CI tries one of them with each commit."""

SHARED: Final = frozenset(
    {
        "authorized_pair",
        "kafka",
        "kafka_of_each_version",
        "kafka_pair",
        "kafka_three",
        "proxied",
        "proxied_of_each_version",
        "proxied_three",
        "secured_kafka",
    }
)
"""The fixtures of shared clusters."""

_numbers: Final = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test uses, and with which no other one begins: clusters are shared, and what a test has left
    reserved there holds all that begins so."""
    return f"{prefix}{os.getpid()}-{next(_numbers):05}"


class SharedClusters:
    """The clusters of a worker. Those that were not used for longest are stopped where too many would idle."""

    def __init__(self) -> None:
        self._stacks: dict[str, ExitStack] = {}
        """By what the cluster is: what ends with it. The one that was used last comes last."""
        self._clusters: dict[str, KafkaCluster] = {}
        self._users: dict[str, str] = {}
        """The module that used it last: another module's clusters may go."""

    def cluster(self, module: str, role: str, chosen: Mapping[str, Any]) -> KafkaCluster:
        """The running cluster with these fields of ClusterSpec, started if need be."""
        key = repr((role, sorted(chosen.items())))
        if key not in self._stacks:
            self._make_room(module)
            stack = ExitStack()
            self._clusters[key] = stack.enter_context(KafkaCluster(name=role, jvm_flags=_SMALL, **chosen))
        else:
            stack = self._stacks.pop(key)
        self._stacks[key], self._users[key] = stack, module
        return self._clusters[key]

    def end_with(self, cluster: KafkaCluster, context: AbstractContextManager[Any]) -> None:
        """Enter a context that is left before the cluster stops."""
        (key,) = (key for key, each in self._clusters.items() if each is cluster)
        self._stacks[key].enter_context(context)

    def _make_room(self, module: str) -> None:
        others = [key for key in self._stacks if self._users[key] != module]
        while others and sum(len(self._clusters[key].broker_ids) for key in others) > _BROKERS_KEPT:
            self._stop(others.pop(0))

    def _stop(self, key: str) -> None:
        del self._clusters[key], self._users[key]
        self._stacks.pop(key).close()

    def close(self) -> None:
        """Stop them all."""
        while self._stacks:
            self._stop(next(iter(self._stacks)))


shared: Final = SharedClusters()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and waits much, tests with brokers, comes first: at the end all workers have short files left.

    Modules that share clusters follow each other, so that these need not be started again. Spark's, which one worker
    runs one after the other, come first of all.
    """
    used: dict[str, set[str]] = defaultdict(set)
    for item in items:
        used[item.nodeid.partition("::")[0]] |= SHARED.intersection(getattr(item, "fixturenames", ()))
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith("tests/spark/"),
            item.get_closest_marker("brokers") is None,
            sorted(used[item.nodeid.partition("::")[0]]),
        )
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests without brokers come last: what takes time of the machine without being used goes before."""
    if item.get_closest_marker("brokers") is None:
        shared.close()


@pytest.fixture(scope="session", autouse=True)
def _no_cluster_is_left() -> Iterator[None]:
    yield
    shared.close()


@pytest.fixture(scope="module")
def shared_kafka(request: pytest.FixtureRequest) -> Clusters:
    """Clusters shared by modules: the same arguments give the same cluster, started where it does not run.

    ``role`` tells apart several with equal arguments: ``shared_kafka(role="target")``.
    """

    def cluster(role: str = "source", **chosen: Any) -> KafkaCluster:
        return shared.cluster(request.node.nodeid, role, chosen)

    return cluster


@pytest.fixture(scope="module")
def kafka(shared_kafka: Clusters) -> KafkaCluster:
    """One broker of the newest version, plain text."""
    return shared_kafka()


@pytest.fixture(scope="module")
def kafka_pair(shared_kafka: Clusters) -> tuple[KafkaCluster, KafkaCluster]:
    """Two clusters of one broker: ``kafka`` and another."""
    return shared_kafka(), shared_kafka(role="target")


@pytest.fixture(scope="module")
def kafka_three(shared_kafka: Clusters) -> KafkaCluster:
    """Three brokers of the newest version, plain text."""
    return shared_kafka(brokers=3)


@pytest.fixture(scope="module", params=VERSIONS)
def kafka_of_each_version(request: pytest.FixtureRequest, shared_kafka: Clusters) -> KafkaCluster:
    """One broker, of each version that must work in turn."""
    version: str = request.param
    return shared_kafka() if version == DEFAULT_VERSION else shared_kafka(version=version)


@pytest.fixture(scope="module")
def secured_kafka(shared_kafka: Clusters) -> KafkaCluster:
    """One broker with an authorizer; listens with SASL_SSL (main), SASL_PLAINTEXT, SSL with client certificates."""
    return shared_kafka(listeners=("SASL_SSL", "SASL_PLAINTEXT", "SSL"), security=SECURITY)


@pytest.fixture(scope="module")
def authorized_pair(shared_kafka: Clusters) -> tuple[KafkaCluster, KafkaCluster]:
    """Two clusters of one broker with an authorizer; they listen with PLAINTEXT (main) and SASL_PLAINTEXT."""
    listeners = ("PLAINTEXT", "SASL_PLAINTEXT")
    source, target = (
        shared_kafka(role=role, listeners=listeners, security=AUTHORIZED)
        for role in ("authorized-source", "authorized-target")
    )
    return source, target


@pytest.fixture
def kafka_cluster() -> Iterator[Clusters]:
    """Starts clusters that are the test's own and end with it."""
    with ExitStack() as stack:
        yield lambda **chosen: stack.enter_context(KafkaCluster(**chosen))
