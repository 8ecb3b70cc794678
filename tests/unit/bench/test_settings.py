"""What a cluster's description becomes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from isthmus_bench.kafka import ClusterSpec, EmbeddedKafkaError, KafkaCluster, Security
from isthmus_bench.kafka.settings import Reach, broker_properties, properties_text


def ports_of(spec: ClusterSpec) -> dict[int, dict[str, int]]:
    return {
        broker_id: {name: 1000 * broker_id + index for index, name in enumerate(spec.port_names(broker_id))}
        for broker_id in spec.ids
    }


def properties_of(broker_id: int, **chosen: Any) -> dict[str, str]:
    spec = ClusterSpec(**chosen)
    return broker_properties(spec, broker_id, ports_of(spec), Path("/c/broker"), Path("/c/tls"), "own-secret")


@pytest.mark.parametrize(("brokers", "voters"), [(1, 1), (2, 1), (3, 3), (5, 3)])
def test_the_quorum_survives_one_broker_where_it_can(brokers: int, voters: int) -> None:
    last = properties_of(brokers, brokers=brokers)
    assert len(last["controller.quorum.voters"].split(",")) == voters
    assert last["process.roles"] == ("broker,controller" if brokers <= voters else "broker")
    assert ("CONTROLLER://" in last["listeners"]) == (brokers <= voters)
    assert "CONTROLLER" not in last["advertised.listeners"]


@pytest.mark.parametrize(("brokers", "replicas", "in_sync"), [(1, "1", "1"), (2, "2", "2"), (4, "3", "2")])
def test_internal_topics_are_as_safe_as_the_brokers_allow(brokers: int, replicas: str, in_sync: str) -> None:
    properties = properties_of(1, brokers=brokers)
    assert properties["offsets.topic.replication.factor"] == replicas
    assert properties["transaction.state.log.replication.factor"] == replicas
    assert properties["transaction.state.log.min.isr"] == in_sync


def test_chosen_settings_win_and_those_of_a_broker_most() -> None:
    chosen = {"settings": {"num.io.threads": "8", "a": "all"}, "broker_settings": {2: {"a": "two"}}, "brokers": 2}
    assert properties_of(1, **chosen)["num.io.threads"] == "8"
    assert [properties_of(broker_id, **chosen)["a"] for broker_id in (1, 2)] == ["all", "two"]


def test_share_coordinator_settings_are_for_versions_that_know_them() -> None:
    assert not [key for key in properties_of(1, version="3.9.2") if key.startswith("share.")]
    assert properties_of(1, version="4.3.0")["share.coordinator.state.topic.replication.factor"] == "1"


def test_a_plain_cluster_has_one_listener() -> None:
    properties = properties_of(1)
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:1000"
    assert properties["inter.broker.listener.name"] == "PLAINTEXT"
    assert not [key for key in properties if "sasl" in key or "ssl" in key]


def test_a_secured_cluster_gives_nobody_rights_without_credentials() -> None:
    security = Security(users={"alice": "a"}, authorize=True, super_users=("alice",))
    properties = properties_of(1, listeners=("SASL_SSL",), security=security)
    protocols = dict(entry.split(":") for entry in properties["listener.security.protocol.map"].split(","))
    assert protocols == {"SASL_SSL": "SASL_SSL", "INTERNAL": "SASL_PLAINTEXT", "CONTROLLER": "SASL_PLAINTEXT"}
    assert properties["super.users"] == "User:broker;User:alice"
    # Clients cannot log in as the brokers' own user, nor the other way round.
    clients = properties["listener.name.sasl_ssl.plain.sasl.jaas.config"]
    assert re.findall(r"user_(\w+)", clients) == ["alice"]
    assert re.findall(r"user_(\w+)", properties["listener.name.internal.plain.sasl.jaas.config"]) == ["broker"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "a/b"}, "cannot be a cluster's name"),
        ({"name": ""}, "cannot be a cluster's name"),
        ({"brokers": 0}, "1 to 32 brokers"),
        ({"settings": {"listeners": "x"}}, "listeners cannot be set"),
        ({"broker_settings": {1: {"node.id": "5"}}}, "node.id cannot be set"),
        ({"broker_settings": {2: {"a": "b"}}}, "no broker 2"),
        ({"listeners": ("SASL_SSL",)}, "needs users"),
        ({"listeners": ("HTTP",)}, "listeners"),
        ({"version": "4.x"}, "not a Kafka version"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_impossible_clusters_are_refused_before_anything_starts(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(EmbeddedKafkaError, match=re.escape(message)):
        KafkaCluster(**chosen)


@pytest.mark.parametrize("password", ["", 'a"b', "a,b", "a=b", "a\\b"])
def test_passwords_that_kafkas_own_formats_cannot_carry_are_refused(password: str) -> None:
    with pytest.raises(ValueError, match="password of alice"):
        Security(users={"alice": password})


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("plain", "k=plain"),
        ("a=b #c", "k=a=b #c"),
        (" leading", "k=\\ leading"),
        ("back\\slash", "k=back\\\\slash"),
        ("two\nlines", "k=two\\nlines"),
        ("ü", "k=\\u00fc"),
        ("😀", "k=\\ud83d\\ude00"),
    ],
)
def test_values_are_escaped_as_java_reads_them(value: str, line: str) -> None:
    assert properties_text({"k": value}) == line + "\n"


def test_keys_are_escaped_too() -> None:
    assert properties_text({"a b:c=d": "e"}) == "a\\ b\\:c\\=d=e\n"


def test_brokers_may_meet_elsewhere_than_clients() -> None:
    spec = ClusterSpec(brokers=2, between_brokers=Reach(bind="198.18.0.1", advertised="198.18.0.2"))
    ports = ports_of(spec)
    properties = broker_properties(spec, 1, ports, Path("/c/broker"), Path("/c/tls"), "own-secret")
    client, internal, controller = (ports[1][name] for name in ("PLAINTEXT", "INTERNAL", "CONTROLLER"))
    assert properties["listeners"] == (
        f"PLAINTEXT://127.0.0.1:{client},INTERNAL://198.18.0.1:{internal},CONTROLLER://198.18.0.1:{controller}"
    )
    assert properties["advertised.listeners"] == (f"PLAINTEXT://127.0.0.1:{client},INTERNAL://198.18.0.2:{internal}")
    assert properties["controller.quorum.voters"] == f"1@198.18.0.2:{controller}"
    assert properties["inter.broker.listener.name"] == "INTERNAL"
    protocols = properties["listener.security.protocol.map"].split(",")
    assert sorted(protocols) == ["CONTROLLER:PLAINTEXT", "INTERNAL:PLAINTEXT", "PLAINTEXT:PLAINTEXT"]


def test_a_listener_may_be_reached_by_way_of_others() -> None:
    properties = properties_of(2, brokers=2, listeners=("PLAINTEXT", "SSL"), advertised_ports={"SSL": (7001, 7002)})
    assert "SSL://127.0.0.1:7002" in properties["advertised.listeners"].split(",")
    assert "7002" not in properties["listeners"]


@pytest.mark.parametrize("advertised", [{"SSL": (7001, 7002)}, {"PLAINTEXT": (7001,)}])
def test_of_such_a_listener_each_broker_has_a_port(advertised: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(EmbeddedKafkaError, match="one for each broker"):
        KafkaCluster(brokers=2, advertised_ports=advertised)
