"""Records of newer proxies in the control log of a real cluster: what this version leaves alone, and what goes on."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from support.kafka import unique
from support.links import linked, until

from isthmus.control_topic import TOPIC
from isthmus_bench.kafka import KafkaCluster
from isthmus_control.levels import KNOWN_LEVEL

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(120)]

GIVES_UP_MS = 1_500


def newer(envelope: dict[str, Any]) -> bytes:
    raw = {"v": 1, "id": str(uuid.uuid4()), "kind": "freeze", "at_ms": 1, "by": "new", "seen": -1, "body": {}}
    return json.dumps({**raw, **envelope}).encode()


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_what_a_newer_record_concerns_is_left_alone_and_all_else_goes_on(kafka: KafkaCluster) -> None:
    with KafkaCluster(name="newer-records") as own, linked(own, kafka) as pair:
        pair.attach()
        (led, followed), free = pair.names("led"), unique("free-")
        for topic in (led, free):
            pair.a.create_topic(topic)
        pair.a.produce(led, [b"before"])
        pair.wait_state(followed, "Following")
        assert pair.a.proxy.cli("control", "upgrade")["after"] == KNOWN_LEVEL

        pair.a.produce(TOPIC, [newer({"ignorable": True})], direct=True)
        pair.a.produce(led, [b"still"])
        pair.wait_end(followed, 2)

        concerned = {"namespaces": [["topic", pair.local]], "links": []}
        pair.a.produce(TOPIC, [newer({"concerns": concerned})], direct=True)
        for restarted in (False, True):
            if restarted:
                pair.a.proxy.stop()
                pair.a.proxy.start()
            until("A says why the link stands", lambda: pair.a.link(pair.name)["reason"] == "CONTROL_RECORD_UNKNOWN")
            assert "upgrade this proxy" in pair.a.link(pair.name)["message"]
            until("B knows it, too", lambda: pair.b.link(pair.name)["state"] == "Disconnected")
            with pytest.raises(KafkaException) as refused:
                pair.a.produce(led, [b"x"], message_timeout_ms=GIVES_UP_MS)
            assert refused.value.args[0].code() == KafkaError._MSG_TIMED_OUT  # it is tried again until then
            pair.a.produce(free, [b"x"])
            (said,) = pair.a.proxy.cli("control", "describe")["not_understood"]
            assert "a command 'freeze', which this version does not know" in said
            assert said in pair.a.proxy.get("/v1/status")["process"]["warnings"]
        assert pair.a.end(led) == 2
        assert pair.a.end(free) == 2

        pair.a.produce(TOPIC, [newer({})], direct=True)  # it does not say what it concerns
        until("the proxy ends", lambda: not pair.a.proxy.running)
        assert "freeze" in pair.a.proxy.log[-3_000:]
