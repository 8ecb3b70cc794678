"""Audit lines in the cluster's own topic: who changed what by way of any proxy, also while it takes no records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from support.kafka import unique
from support.links import until
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_control.model import AUDIT_TOPIC
from isthmus_protocol.error_codes import TOPIC_AUTHORIZATION_FAILED
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

TOKEN = "a" * 64


@pytest.mark.one_in_ci("stories", of="TLS of a proxy")
def test_every_proxy_tells_who_changed_what(tmp_path: Path) -> None:
    tokens, prefix = tmp_path / "tokens", f"{unique('audit')}-"
    tokens.write_text(f"alice {TOKEN}\n")
    admin = {"loopback_without_authentication": False, "operator_token_file": str(tokens)}
    token = {"authorization": f"Bearer {TOKEN}"}
    with (
        KafkaCluster(name="audit", brokers=2) as kafka,
        ProxyProcess(kafka.bootstrap_servers, name="one", broker_id=1, extra={"admin_listener": admin}) as one,
        ProxyProcess(kafka.bootstrap_servers, name="two", broker_id=2) as two,
    ):
        assert httpx.get(f"{one.url}/v1/status", trust_env=False).status_code == 401
        body = {"type": "topic", "prefix": prefix, "reserved": True}
        made = httpx.post(f"{one.url}/v1/namespaces", json=body, headers=token, timeout=60, trust_env=False)
        assert made.status_code == 201, made.text
        until("it cannot be read by its id, either", lambda: fetched_by_id(two) == TOPIC_AUTHORIZATION_FAILED)
        two.cli("namespace", "alter", prefix, "--consistency", "strict")

        def both() -> bool:
            return len(two.cli("audit")) >= 2

        until("both lines are in the topic", both)
        first, second = two.cli("audit")
        assert (first["who"], first["proxy"], first["outcome"]) == ("alice", "one", "done")
        assert first["after"]["reserved"] is True
        assert (second["who"], second["proxy"]) == ("loopback", "two")
        assert (second["before"], second["after"]) == ({"consistency": "available"}, {"consistency": "strict"})
        assert TOKEN not in kafka_text(kafka)
        assert TOKEN not in one.log
        environment = {**os.environ, "ISTHMUS_TOKEN_FILE": str(tokens)}
        command = [sys.executable, "-m", "isthmus", "audit", "--url", one.url]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        assert "consistency: available -> strict" in told

        # Clients see nothing of it.
        consumer = Consumer({"bootstrap.servers": one.bootstrap, "group.id": "g"})
        assert AUDIT_TOPIC not in consumer.list_topics(timeout=20).topics
        consumer.close()

        # The topic takes no records: changes are made, and their lines come later.
        configure(kafka, "100")
        two.cli("namespace", "alter", prefix, "--no-reserved")
        until("it is told", lambda: any("TOO_LARGE" in each for each in warnings(two)))
        two.cli("namespace", "delete", prefix)
        assert {each["prefix"] for each in two.get("/v1/namespaces")["items"]} == set()
        assert "isthmus_audit_lines_waiting 2.0" in metrics_of(two)
        assert len(two.cli("audit")) == 4, "with its own lines that wait"
        configure(kafka, "1000000")
        until("they are sent", lambda: "isthmus_audit_lines_waiting 0.0" in metrics_of(two), timeout_s=60)
        assert not warnings(two)
        last = two.cli("audit")
        assert [each["action"].partition(" ")[0] for each in last] == ["POST", "PATCH", "PATCH", "DELETE"]

        # Somebody deletes it: it is made again.
        admin_client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin_client.delete_topics([AUDIT_TOPIC])[AUDIT_TOPIC].result(30)
        two.cli("namespace", "create", prefix)
        until("it is there again", lambda: AUDIT_TOPIC in admin_client.list_topics(timeout=20).topics, timeout_s=60)
        until("its line, too", lambda: [each["action"] for each in two.cli("audit")] == ["POST /v1/namespaces"])


def fetched_by_id(proxy: ProxyProcess) -> int:
    """What a client is told of the topic that reads it by its id, by way of a proxy that has changed nothing."""
    with Wire(proxy.bootstrap) as wire:
        named = wire.request(
            ApiKey.METADATA, 12, {"topics": [{"name": AUDIT_TOPIC}], "allow_auto_topic_creation": False}
        )
        (topic,) = named.topics
        asked = {"topic_id": topic.topic_id, "partitions": [{"partition": 0, "fetch_offset": 0}]}
        answer = wire.request(ApiKey.FETCH, 13, {"max_wait": 100, "max_bytes": 1000, "topics": [asked]})
        return int(answer.responses[0].partitions[0].error_code) if answer.responses else 0


def warnings(proxy: ProxyProcess) -> list[str]:
    return [each for each in proxy.get("/v1/status")["process"]["warnings"] if "audit" in each]


def metrics_of(proxy: ProxyProcess) -> str:
    return httpx.get(f"{proxy.url}/metrics", trust_env=False).text


def configure(kafka: KafkaCluster, size: str) -> None:
    """Set how large a batch of the topic may be."""
    entry = ConfigEntry("max.message.bytes", size, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, AUDIT_TOPIC, incremental_configs=[entry])
    client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    client.incremental_alter_configs([resource])[resource].result(30)


def kafka_text(kafka: KafkaCluster) -> str:
    """All that the topic has."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "all", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(AUDIT_TOPIC, 0, 0)])
        _, end = consumer.get_watermark_offsets(TopicPartition(AUDIT_TOPIC, 0), timeout=20)
        assert end >= 2
        values = [record.value() or b"" for record in consumer.consume(end, timeout=20)]
        assert len(values) == end
        return b"\n".join(values).decode()
    finally:
        consumer.close()
