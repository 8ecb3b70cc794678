"""Real Kafka clusters for tests.

Session-scoped clusters are shared: use topics and groups of your own (``unique``) and leave brokers alone. A test that
kills, pauses or configures brokers takes ``kafka_cluster``, whose clusters are its own. From async tests call blocking
methods through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
"""Of clusters that stay for the session: their heaps grow as they are used, a third less memory for each broker."""

NOW_MS: Final = int(time.time() * 1000)
"""A timestamp for records of tests: brokers delete what is a week old, some minutes after it was written."""

VERSIONS: Final = [
    pytest.param(version, marks=pytest.mark.one_in_ci("clients", of="broker version", case=version))
    for version in ("3.9.2", "4.1.1", DEFAULT_VERSION)
]
"""Of brokers, that must work; CI tries one of them with each commit."""

_numbers: Final = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="session")
def shared_kafka() -> Iterator[Clusters]:
    """Clusters shared by the session: the same arguments give the same cluster, started when first asked for.

    ``role`` tells apart several with equal arguments: ``shared_kafka(role="target")``.
    """
    running: dict[str, KafkaCluster] = {}
    with ExitStack() as stack:

        def cluster(role: str = "source", **chosen: Any) -> KafkaCluster:
            key = repr((role, sorted(chosen.items())))
            if key not in running:
                running[key] = stack.enter_context(KafkaCluster(name=role, jvm_flags=_SMALL, **chosen))
            return running[key]

        yield cluster


@pytest.fixture(scope="session")
def kafka(shared_kafka: Clusters) -> KafkaCluster:
    """One broker of the newest version, plain text."""
    return shared_kafka()


@pytest.fixture(scope="session")
def kafka_pair(shared_kafka: Clusters) -> tuple[KafkaCluster, KafkaCluster]:
    """Two clusters of one broker: ``kafka`` and another."""
    return shared_kafka(), shared_kafka(role="target")


@pytest.fixture(scope="session")
def kafka_three(shared_kafka: Clusters) -> KafkaCluster:
    """Three brokers of the newest version, plain text."""
    return shared_kafka(brokers=3)


@pytest.fixture(scope="session", params=VERSIONS)
def kafka_of_each_version(request: pytest.FixtureRequest, shared_kafka: Clusters) -> KafkaCluster:
    """One broker, of each version that must work in turn."""
    version: str = request.param
    return shared_kafka() if version == DEFAULT_VERSION else shared_kafka(version=version)


@pytest.fixture(scope="session")
def secured_kafka(shared_kafka: Clusters) -> KafkaCluster:
    """One broker with an authorizer; listens with SASL_SSL (main), SASL_PLAINTEXT, SSL with client certificates."""
    return shared_kafka(listeners=("SASL_SSL", "SASL_PLAINTEXT", "SSL"), security=SECURITY)


@pytest.fixture(scope="session")
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
