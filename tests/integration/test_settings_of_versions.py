"""Settings that brokers of one version have and those of another one refuse, or go by although others are set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from support.kafka import Clusters
from support.links import Linked, Side, linked, until
from support.source_topics import alter_topic

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="settings that are refused")]
OLD: Final = "3.9.2"
DIFFERENCE: Final = "message.timestamp.difference.max.ms"


def test_a_topic_is_made_without_what_newer_brokers_refuse(shared_kafka: Clusters) -> None:
    with linked(shared_kafka(version=OLD), shared_kafka()) as link:
        source, target = link.names("small")
        link.a.create_topic(source, 2, {"segment.bytes": "100000", "max.message.bytes": "2000000"}, direct=True)
        link.a.produce(source, [b"x" * 100] * 300, direct=True)
        (planned,) = link.attach(None, None, "--dry-run")["topics"]
        assert planned["action"] == "create"
        assert "segment.bytes" in planned["settings_refused"]
        assert "INVALID_CONFIG" in planned["settings_refused"]
        link.attach()
        link.wait_end(target, 300)

        def reason() -> str | None:
            return (link.b.partition(link.name, target) or {}).get("reason")

        until("it shows", lambda: reason() == "TARGET_REFUSES_SETTINGS")
        time.sleep(4)  # longer than the source takes to ask again
        status = link.b.partition(link.name, target) or {}
        assert "segment.bytes" in status["message"]
        told = link.b.proxy.get(f"/v1/topics/{target}")
        assert (told["state"], told["reason"], told["message"]) == ("following", status["reason"], status["message"])
        assert link.b.topic_config(target)["max.message.bytes"] == "2000000"
        link.a.produce(source, [b"more"], direct=True)
        link.wait_end(target, 301)
        assert link.verify()["equal"]
        alter_topic(link.a, source, {"segment.bytes": "2000000"})
        until("it shows no more", lambda: not reason(), 20)
        assert link.b.topic_config(target)["segment.bytes"] == "2000000"


@contextmanager
def of_brokers(side: Side, name: str, value: str) -> Iterator[None]:
    side.alter_brokers({name: value})
    try:
        yield
    finally:
        side.alter_brokers({name: None})


@pytest.mark.parametrize("level", ["topic", "brokers"])
def test_old_records_are_copied_whatever_the_deprecated_limit(shared_kafka: Clusters, level: str) -> None:
    with linked(shared_kafka(version=OLD), shared_kafka(role="third", version=OLD)) as link:
        source, target = link.names("old")
        link.a.create_topic(source, direct=True)
        producer = link.a.producer(direct=True)
        producer.produce(source, b"an hour old", timestamp=int((time.time() - 3600) * 1000))
        assert producer.flush(30) == 0
        if level == "topic":
            alter_topic(link.a, source, {DIFFERENCE: "60000"})
            copy_and_promote(link, target)
        else:
            with of_brokers(link.a, f"log.{DIFFERENCE}", "60000"), of_brokers(link.b, f"log.{DIFFERENCE}", "60000"):
                copy_and_promote(link, target)


def copy_and_promote(link: Linked, target: str) -> None:
    link.attach()
    link.wait_end(target, 1)
    assert link.b.topic_config(target)[DIFFERENCE] == str(2**63 - 1)
    assert link.verify()["equal"]
    until("promoted", lambda: link.b.proxy.cli("link", "promote", link.name, "--local", link.remote), 20)
    assert link.b.topic_config(target)[DIFFERENCE] == "60000"
