"""What settings a follower topic has, and how it comes to have them."""

from __future__ import annotations

import pytest

from isthmus_plugins.replication.logs.topic_settings import (
    NOT_COPIED,
    OVERRIDES,
    changes,
    copied,
    follows,
    given_back,
    wanted,
)

DEFAULTS = {
    "cleanup.policy": ("delete", "delete"),
    "compression.type": ("producer", "producer"),
    "max.message.bytes": ("1000000", "1000000"),
    "min.insync.replicas": ("1", "1"),
    "retention.ms": ("5", "604800000"),  # the control topic's own value, and the target's default
    "segment.bytes": ("100", "100"),
}


def test_what_the_source_tells() -> None:
    told = copied({"segment.bytes": "7", "odd": None, **dict.fromkeys(NOT_COPIED, "0:1")})
    assert told == {"segment.bytes": "7"}


def test_what_the_target_has_as_its_own_default_is_not_set() -> None:
    source = {"segment.bytes": "100", "max.message.bytes": "2000000", "retention.ms": "9", "newer.setting": "x"}
    assert wanted(source, DEFAULTS, 3) == {
        "max.message.bytes": "2000000",
        "retention.ms": "-1",
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "min.insync.replicas": "1",
    }


@pytest.mark.parametrize(("theirs", "replicas", "ours"), [("2", 3, "2"), ("2", 1, "1"), ("1", 3, "1")])
def test_no_more_replicas_in_sync_than_there_are(theirs: str, replicas: int, ours: str) -> None:
    assert wanted({"min.insync.replicas": theirs}, DEFAULTS, replicas)["min.insync.replicas"] == ours
    effective = {"min.insync.replicas": ours}
    assert follows(effective, {"min.insync.replicas": theirs}, replicas)
    assert not follows({"min.insync.replicas": "3"}, {"min.insync.replicas": theirs}, replicas)


def test_the_limit_of_older_brokers_is_overridden_and_given_back() -> None:
    """Kafka 3.9 goes by it where the newer ones have their defaults, which is what they are overridden with."""
    limit, forever = "message.timestamp.difference.max.ms", str(2**63 - 1)
    newer = {"message.timestamp.before.max.ms": forever}
    defaults = dict.fromkeys((limit, *newer), (forever, forever))
    assert wanted({**newer, limit: "60000"}, defaults, 1)[limit] == forever
    assert wanted({**newer, limit: "60000"}, {limit: ("60000", "60000")}, 1)[limit] == forever
    assert limit not in wanted({**newer, limit: "60000"}, {"retention.ms": ("1", "1")}, 1)
    own = {limit: (forever, "60000")}
    assert given_back({**newer, limit: "70000"}, own) == {limit: "70000"}
    assert given_back({**newer, limit: "60000"}, own) == {limit: None}
    assert given_back({}, own) == {limit: None}
    assert given_back(newer, own) == {}, "the source has no such limit"


def test_changes_set_and_remove() -> None:
    own = {
        "segment.bytes": ("30", "100"),
        "max.message.bytes": ("7", "1000000"),
        "retention.ms": ("-1", "604800000"),
        "follower.replication.throttled.replicas": ("0:1", ""),
    }
    chosen = {"max.message.bytes": "2000000", "retention.ms": "-1"}
    assert changes(own, chosen) == {"max.message.bytes": "2000000", "segment.bytes": None}


def test_whether_a_topic_has_its_sources_settings() -> None:
    source = {"segment.bytes": "7", "retention.ms": "9", "newer.setting": "x"}
    effective = {"segment.bytes": "7", "min.insync.replicas": "1", **OVERRIDES}
    assert follows(effective, source, 1)
    assert not follows({**effective, "retention.ms": "9"}, source, 1)
    assert not follows(effective, {**source, "segment.bytes": "8"}, 1)
