"""Fixtures for all tests: running Kafka clusters, and proxies in front of some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest_plugins = ("support.suites", "support.kafka", "support.proxies", "support.wan")

BUGS = frozenset({"write failed", "batch not prepared"})
"""What a follower end says of an exception that it does not know. It goes on as well as it can: nobody would notice."""


@pytest.fixture(autouse=True)
def no_bug_is_got_over(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [record for record in caplog.get_records("call") if record.getMessage() in BUGS]
    assert not found, found[0].exc_text or found[0].exc_info
