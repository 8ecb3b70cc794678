"""Fixtures for all tests: running Kafka clusters, and proxies in front of some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kafka import (
    authorized_pair,
    kafka,
    kafka_cluster,
    kafka_of_each_version,
    kafka_pair,
    kafka_three,
    secured_kafka,
    shared_kafka,
)
from support.proxies import proxied, proxied_of_each_version, proxied_three, shared_proxied
from support.wan import wan

pytest_plugins = ("support.suites",)

__all__ = (
    "authorized_pair",
    "kafka",
    "kafka_cluster",
    "kafka_of_each_version",
    "kafka_pair",
    "kafka_three",
    "proxied",
    "proxied_of_each_version",
    "proxied_three",
    "secured_kafka",
    "shared_kafka",
    "shared_proxied",
    "wan",
)

BUGS = frozenset({"write failed", "batch not prepared"})
"""What a follower end says of an exception that it does not know. It goes on as well as it can: nobody would notice."""


@pytest.fixture(autouse=True)
def no_bug_is_got_over(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [record for record in caplog.get_records("call") if record.getMessage() in BUGS]
    assert not found, found[0].exc_text or found[0].exc_info


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and waits much, tests with brokers, comes first: at the end all workers have short files left."""
    items.sort(key=lambda item: item.get_closest_marker("brokers") is None)
