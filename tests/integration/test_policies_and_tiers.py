"""What brokers load of their owner's: policies that refuse topics and settings, and tiered storage (KIP-405)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.java_steps import compiled, java_compiles
from support.kafka import Clusters
from support.links import Linked, linked, until
from support.raw_log import log_start
from support.source_topics import alter_topic
from support.wire import Wire

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="what brokers load")]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the compiled classes of brokers."""
    if not java_compiles(DEFAULT_VERSION):
        pytest.skip("classes of brokers need a JDK")
    return compiled(DEFAULT_VERSION, tmp_path_factory.mktemp("classes"), "HouseRules", "FileTier")


@pytest.fixture
def with_rules(shared_kafka: Clusters, classes: Path) -> Iterator[Linked]:
    """A target whose owner has rules for topics."""
    rules = {
        "create.topic.policy.class.name": "HouseRules$OfCreation",
        "alter.config.policy.class.name": "HouseRules$OfChanges",
    }
    with KafkaCluster(name="rules", settings=rules, classes=(classes,)) as b, linked(shared_kafka(), b) as link:
        yield link


def test_what_a_policy_refuses_is_one_topics_reason(with_rules: Linked) -> None:
    link = with_rules
    plain, rolls, finite = ("plain", "rolls", "finite")
    for name in (plain, rolls, finite):
        settings = {"segment.ms": "60000"} if name == rolls else {}
        link.a.create_topic(link.local + name, config=settings, direct=True)
        link.a.produce(link.local + name, [b"first"], direct=True)
    planned = {each["topic"]: each for each in link.attach(None, None, "--dry-run")["topics"]}
    assert "house rule: segment.ms is an hour at least" in planned[link.remote + rolls]["settings_refused"]
    link.attach()
    for name in (plain, rolls):
        link.wait_end(link.remote + name, 1)
    until("it shows", lambda: link.b.reason(link.name, link.remote + rolls)[0] == "TARGET_REFUSES_SETTINGS")
    assert "house rule: segment.ms is an hour at least" in link.b.reason(link.name, link.remote + rolls)[1]
    until("it shows", lambda: link.b.reason(link.name, link.remote + finite, -1)[0] == "TARGET_TOPIC_NOT_CREATED")
    refused = f"house rule: {link.remote}finite has a retention.ms"
    assert refused in link.b.reason(link.name, link.remote + finite, -1)[1]
    assert refused in (link.a.partition(link.name, link.local + finite) or {})["message"]
    assert refused in link.b.proxy.get(f"/v1/topics/{link.remote}finite")["message"]
    assert [link.b.link(link.name)["state"], link.a.link(link.name)["state"]] == ["Catching Up"] * 2
    (planned_over,) = link.b.proxy.cli("link", "failover", link.name, "--dry-run")["namespaces"]
    left_out = {"type": "topic", "name": link.local + finite, "reason": f"{link.remote}finite was not made here"}
    assert left_out in planned_over["left_out"]
    assert link.remote + finite not in link.b.topics()
    assert link.b.reason(link.name, link.remote + plain) == (None, "")
    alter_topic(link.a, link.local + rolls, {"segment.ms": "7200000"})
    until("it shows no more", lambda: link.b.reason(link.name, link.remote + rolls)[0] is None, 20)
    assert link.b.topic_config(link.remote + rolls)["segment.ms"] == "7200000"
    link.a.delete_topic(link.local + finite, direct=True)

    alter_topic(link.a, link.local + rolls, {"segment.ms": "60000"})
    until("refused again", lambda: link.b.reason(link.name, link.remote + rolls)[0] == "TARGET_REFUSES_SETTINGS", 20)
    until("promoted", lambda: link.b.proxy.cli("link", "promote", link.name, "--local", link.remote), 20)
    for name in (plain, rolls):
        assert link.b.produce(link.remote + name, [b"second"]) == [1], "writable, both"
    assert link.b.topic_config(link.remote + rolls)["segment.ms"] == "7200000"


def test_a_tiered_topic_is_followed_from_its_first_record_by_a_cluster_without_tiers(
    shared_kafka: Clusters, classes: Path, tmp_path: Path
) -> None:
    tiered = {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.manager.class.name": "FileTier",
        "rsm.config.directory": str(tmp_path / "tier"),
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
        "rlmm.config.remote.log.metadata.topic.num.partitions": "1",
        "remote.log.manager.task.interval.ms": "500",
        "log.retention.check.interval.ms": "500",
    }
    with KafkaCluster(name="tiered", settings=tiered, classes=(classes,)) as a, linked(a, shared_kafka()) as link:
        source, target = link.names("long")
        settings = {"remote.storage.enable": "true", "segment.bytes": "1048576", "local.retention.ms": "1000"}
        link.a.create_topic(source, config=settings, direct=True)
        values = [b"%06d" % number + b"x" * 10_000 for number in range(400)]
        link.a.produce(source, values, direct=True)
        with Wire(a.bootstrap_servers) as wire:
            until("segments are in the tier alone", lambda: log_start(wire, source, local=True) > 100, 90)
            assert log_start(wire, source) == 0
        (planned,) = link.attach(None, None, "--dry-run")["topics"]
        assert planned["action"] == "create"
        assert "remote.storage.enable" in planned["settings_refused"]
        link.attach()
        link.wait_end(target, 400)
        assert [each.value for each in link.b.read(target, direct=True)] == values
        until("it shows", lambda: link.b.reason(link.name, target)[0] == "TARGET_REFUSES_SETTINGS")
        assert "remote.storage.enable" in link.b.reason(link.name, target)[1]
        assert link.verify()["equal"]
        until("promoted", lambda: link.b.proxy.cli("link", "promote", link.name, "--local", link.remote), 20)
        assert link.b.produce(target, [b"here"]) == [400]
