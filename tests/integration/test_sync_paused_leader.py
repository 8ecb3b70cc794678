"""A leader of the source that stood still while another one was elected, over a synchronous link."""

from __future__ import annotations

import asyncio

import pytest
from support.links import linked, until
from support.wire import Wire, advertised, batch_of

from isthmus.kafka.client import ClusterClient
from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.messages import decode_response
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240), pytest.mark.one_in_ci("stories", of="faults of records")]

VERSION = 9
REQUESTS = 30


def leader_of(kafka: KafkaCluster, topic: str) -> int:
    async def ask() -> int:
        async with ClusterClient(kafka.bootstrap_servers.split(",")) as client:
            return (await client.leader(topic, 0)).leader

    return asyncio.run(ask())


def test_what_it_acks_when_it_goes_on_is_on_both_sides(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    """It answers what it has got (acks=1) as if it led still, and throws that away when it hears of the other one."""
    settings = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
    with (
        KafkaCluster(name="paused", brokers=3, settings=settings) as source,
        linked(source, kafka_pair[1]) as link,
    ):
        link.attach()
        here, there = link.names("paused")
        link.a.create_topic(here, replicas=3)
        link.wait_end(there, 0)
        link.wait_following()
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"))
        until("In-Sync", lambda: link.a.link(link.name)["state"] == "In-Sync")
        leader = leader_of(source, here)

        with Wire(advertised(link.a.proxy.bootstrap)[leader]) as wire:

            def send(value: bytes) -> None:
                data = [{"name": here, "partition_data": [{"index": 0, "records": batch_of([value])}]}]
                wire.send(
                    ApiKey.PRODUCE,
                    VERSION,
                    {"transactional_id": None, "acks": 1, "timeout": 60_000, "topic_data": data},
                )

            def answered() -> int:
                frame = wire.receive_frame()
                assert frame is not None
                _, answer = decode_response(ApiKey.PRODUCE, VERSION, frame)
                return int(answer.responses[0].partition_responses[0].error_code)

            send(b"before")
            assert answered() == 0
            source.pause(leader)
            for number in range(REQUESTS):
                send(b"%d" % number)
            # While it stands still none of its own connections answers: another broker is asked who leads.
            link.a.produce(here, [b"others'"] * 2 * REQUESTS, acks="all")
            # That took a while: where nobody vouched meanwhile, acks=1 is what it is in Kafka.
            until("In-Sync again", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
            source.resume(leader)
            codes = [answered() for _ in range(REQUESTS)]

        acked = {b"%d" % number for number, code in enumerate(codes) if code == 0}
        until("all is there", lambda: link.b.end(there) == link.a.end(here))
        for side, topic in ((link.a, here), (link.b, there)):
            assert acked <= {each.value for each in side.read(topic)}, (side.kafka.cluster_id, codes)
