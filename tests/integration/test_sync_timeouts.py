"""What producers are told when an ack stays out for longer than they wait, and what is stored then.

"Not acked" is not "not written". All clients write to a strict namespace whose other cluster cannot be reached, give up
at once or go on, each in its own way (the table in docs/synchronous-mode.md), and the link comes back.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError as LibrdkafkaError
from kafka import KafkaProducer
from kafka.errors import KafkaError
from support.kafka import unique
from support.links import Linked, relayed, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

REQUEST_MS: Final = 2000
"""The time-out of one Produce request."""
DELIVERY_MS: Final = 6000
"""How long a client tries in all."""
JAVA: Final = f"delivery.timeout.ms={DELIVERY_MS}\nrequest.timeout.ms={REQUEST_MS}\nlinger.ms=0\nretries=2147483647\n"


@dataclass
class Scene:
    """A strict namespace that B follows, In-Sync and then cut off, with a topic for each client."""

    link: Linked
    directory: Path
    prefix: str = field(default_factory=lambda: unique("strict-") + "-")
    told: dict[str, str] = field(default_factory=dict)
    """By client: what it was told when it gave up."""
    mended: threading.Event = field(default_factory=threading.Event)

    def topic(self, client: str) -> str:
        return self.prefix + client

    def states(self) -> dict[str, str]:
        return {
            each["topic"].removeprefix(self.prefix): each["state"] for each in self.link.a.partitions(self.link.name)
        }


# ---- clients ----


def java(scene: Scene, client: str, *settings: str) -> None:
    path = scene.directory / f"{client}.properties"
    path.write_text(JAVA + "".join(f"{each}\n" for each in settings))
    done = scene.link.a.kafka.tool(
        "kafka-verifiable-producer",
        *("--bootstrap-server", scene.link.a.bootstrap, "--topic", scene.topic(client)),
        *("--max-messages", "1", "--acks", "-1", "--command-config", str(path)),
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (told,) = [each for each in events if each["name"].startswith("producer_send")]
    scene.told[client] = f"{told['name']} {told.get('exception')}"


def java_transactional(scene: Scene, client: str) -> None:
    settings = [*JAVA.splitlines(), f"bootstrap.servers={scene.link.a.bootstrap}", "transaction.timeout.ms=10000"]
    done = scene.link.a.kafka.tool(
        "kafka-producer-perf-test",
        *("--topic", scene.topic(client), "--num-records", "1", "--record-size", "10", "--throughput", "-1"),
        *("--transactional-id", unique("txn-"), "--producer-props", *settings),
        check=False,
    )
    scene.told[client] = done.stdout + done.stderr


def librdkafka(scene: Scene, client: str, **settings: Any) -> None:
    errors: list[LibrdkafkaError | None] = []
    producer = scene.link.a.producer(
        acks="all", linger_ms=0, message_timeout_ms=DELIVERY_MS, request_timeout_ms=REQUEST_MS, **settings
    )
    transactional = "transactional_id" in settings
    if transactional:
        producer.init_transactions(30)
        producer.begin_transaction()
    producer.produce(scene.topic(client), b"x", partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    (error,) = errors
    scene.told[client] = "acked" if error is None else error.name()
    if transactional:
        producer.abort_transaction(60)


def aiokafka(scene: Scene, client: str, **settings: Any) -> None:
    async def run() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=scene.link.a.bootstrap, acks="all", **settings)
        await producer.start()
        try:
            if "transactional_id" in settings:
                await producer.begin_transaction()
            sent = await producer.send(scene.topic(client), b"x", partition=0)
            try:
                await asyncio.wait_for(asyncio.shield(sent), DELIVERY_MS / 1000)
            except Exception as error:
                scene.told[client] = type(error).__name__
            else:
                scene.told[client] = "acked"
            await asyncio.to_thread(scene.mended.wait)
            if sent.done():
                return
            await asyncio.wait_for(sent, 60)  # it went on by itself, whatever the application had given up
            if "transactional_id" in settings:
                await producer.commit_transaction()
        finally:
            await producer.stop()

    asyncio.run(run())


def kafka_python(scene: Scene, client: str, **settings: Any) -> None:
    producer = KafkaProducer(
        bootstrap_servers=scene.link.a.bootstrap,
        acks="all",
        request_timeout_ms=REQUEST_MS,
        delivery_timeout_ms=DELIVERY_MS,
        **settings,
    )
    try:
        if "transactional_id" in settings:
            producer.init_transactions()
            producer.begin_transaction()
        try:
            producer.send(scene.topic(client), b"x", partition=0).get(60)
        except KafkaError as error:
            scene.told[client] = type(error).__name__
        else:
            scene.told[client] = "acked"
        if "transactional_id" in settings:
            scene.mended.wait()
            producer.abort_transaction()
    finally:
        producer.close(30)


class Client:
    """``copies``: how often the record may be stored; ``committed``: how often it is read as committed."""

    def __init__(self, run: Callable[[Scene, str], None], told: str, once: bool = True, aborted: bool = False) -> None:
        self.run = run
        self.told = told
        self.once = once
        self.aborted = aborted


def _librdkafka(**settings: Any) -> Callable[[Scene, str], None]:
    return lambda scene, client: librdkafka(scene, client, **settings)


def _aiokafka(**settings: Any) -> Callable[[Scene, str], None]:
    return lambda scene, client: aiokafka(scene, client, request_timeout_ms=REQUEST_MS, **settings)


def _kafka_python(**settings: Any) -> Callable[[Scene, str], None]:
    return lambda scene, client: kafka_python(scene, client, **settings)


TIMEOUT_EXCEPTION: Final = "org.apache.kafka.common.errors.TimeoutException"
CLIENTS: Final = {
    "java": Client(java, f"producer_send_error class {TIMEOUT_EXCEPTION}"),
    "java-plain": Client(
        lambda scene, client: java(scene, client, "enable.idempotence=false"),
        f"producer_send_error class {TIMEOUT_EXCEPTION}",
        once=False,
    ),
    "java-transactional": Client(java_transactional, TIMEOUT_EXCEPTION, aborted=True),
    "librdkafka": Client(_librdkafka(enable_idempotence=True), "_MSG_TIMED_OUT"),
    "librdkafka-plain": Client(_librdkafka(), "_MSG_TIMED_OUT", once=False),
    "librdkafka-transactional": Client(_librdkafka(transactional_id=unique("txn-")), "_MSG_TIMED_OUT", aborted=True),
    "aiokafka": Client(_aiokafka(enable_idempotence=True), "TimeoutError"),
    "aiokafka-plain": Client(_aiokafka(), "RequestTimedOutError"),
    "kafka-python": Client(_kafka_python(), "KafkaTimeoutError"),
    "kafka-python-plain": Client(_kafka_python(enable_idempotence=False), "KafkaTimeoutError", once=False),
    "kafka-python-transactional": Client(
        _kafka_python(transactional_id=unique("txn-")), "KafkaTimeoutError", aborted=True
    ),
    "aiokafka-transactional": Client(_aiokafka(transactional_id=unique("txn-")), "TimeoutError"),
}


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Everything has happened: who gave up, gave up, and the link is In-Sync again."""
    with relayed(*kafka_pair) as (link, relay):
        scene = Scene(link, tmp_path_factory.mktemp("clients"))
        link.a.proxy.cli("namespace", "create", scene.prefix, "--type", "topic", "--consistency", "strict")
        link.attach(scene.prefix, scene.prefix, "--disable-transaction-verification")
        for client in CLIENTS:
            link.a.create_topic(scene.topic(client))
        for client in CLIENTS:
            link.wait_end(scene.topic(client), 0)
        command = "link", "set-mode", link.name, "synchronous", "--confirm-timeout-ms", "2000"
        until("accepted", lambda: link.a.proxy.cli(*command))
        in_sync = dict.fromkeys(CLIENTS, "In-Sync")
        until("In-Sync", lambda: scene.states() == in_sync)
        relay.cut(refuse=True)
        with ThreadPoolExecutor(len(CLIENTS)) as pool:
            running = [pool.submit(each.run, scene, client) for client, each in CLIENTS.items()]
            try:
                until("all of them were told", lambda: len(scene.told) == len(CLIENTS) or failed(running))
                assert not [client for client in CLIENTS if link.b.end(scene.topic(client))], "the link was not cut"
            finally:
                relay.mend()
                scene.mended.set()
            for each in running:
                each.result(60)
        until("In-Sync again", lambda: scene.states() == in_sync)
        yield scene


def failed(running: list[Any]) -> bool:
    for each in running:
        if each.done():
            each.result()
    return False


@pytest.mark.parametrize("client", CLIENTS)
def test_a_record_that_was_not_acked_is_stored_once(scene: Scene, client: str) -> None:
    """At both sides; by a producer without idempotence as often as it was sent."""
    assert CLIENTS[client].told in scene.told[client]
    topic = scene.topic(client)
    at_a, at_b = (side.read(topic, direct=True) for side in (scene.link.a, scene.link.b))
    assert [each.offset for each in at_a] == [each.offset for each in at_b]
    assert len(at_a) == 1 or (len(at_a) > 1 and not CLIENTS[client].once)
    until(
        "its transaction has ended",
        lambda: (
            len(scene.link.b.read(topic, direct=True, isolation="read_committed"))
            == (0 if CLIENTS[client].aborted else len(at_a))
        ),
    )
