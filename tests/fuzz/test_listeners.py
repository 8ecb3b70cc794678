"""Whatever comes to a listener of a running proxy: it goes on as before, and so do those who mean well.

ISTHMUS_FUZZ_S is for how many seconds, all listeners together: a minute, an hour in ``make test-fuzz``; of the minute
``make test`` has one listener's part. ISTHMUS_FUZZ_SEED is what is sent (``make test-fuzz`` takes the time). A failure
prints the seed.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support.fuzzing import MIB, SECONDS, SEED, Fuzzer, Watch, fuzz, say
from support.kafka import Clusters, unique
from support.links import linked, until, whole
from support.mutations import Mutations, frames_of, refit_request, requests_of
from support.raw_log import fetch
from support.relay import Relay
from support.wire import Wire, advertised, batch_of, log_in

from isthmus.kafka.sasl import PlainExchange
from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster, Security
from isthmus_bench.proxies import ProxyProcess
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Question
from isthmus_plugins.replication.link.connection import Credential, LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import FEATURES
from isthmus_plugins.replication.link.peers import PURPOSE_CREATE, PURPOSE_LINK
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import link, link_pieces
from isthmus_protocol.link import MessageType
from isthmus_protocol.schema import ApiKey

EACH_S: Final = SECONDS / 3

pytestmark = [
    pytest.mark.brokers,
    pytest.mark.timeout(2 * EACH_S + 300),
    pytest.mark.one_in_ci("fuzz", of="fuzzed listeners"),
]

PASSWORD: Final = "alice-secret"
TOKEN: Final = "a" * 64
QUEUED_BYTES: Final = 16 * MIB
ELSEWHERE: Final = "127.0.0.2"
"""This machine, too: where recording relays have the ports of the proxy."""


@pytest.fixture(scope="module")
def kafka(shared_kafka: Clusters) -> KafkaCluster:
    """One broker whose second listener has SASL. What it is made to wait for by half frames is bounded."""
    settings = {"auto.create.topics.enable": "false", "socket.request.max.bytes": str(MIB)}
    listeners = "PLAINTEXT", "SASL_PLAINTEXT"
    return shared_kafka(
        role="fuzzed", listeners=listeners, security=Security(users={"alice": PASSWORD}), settings=settings
    )


def make_topic(kafka: KafkaCluster) -> str:
    topic = unique("fuzzed-")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    return topic


def ack(wire: Wire, topic: str) -> int:
    """Write a record. Returns its offset, when it is acked."""
    partition = {"index": 0, "records": batch_of([b"x" * 100])}
    values = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": [partition]}]}
    (answered,) = wire.request(ApiKey.PRODUCE, 9, values).responses[0].partition_responses
    assert answered.error_code == 0
    return int(answered.base_offset)


# ---- clients ----


def test_the_client_listener(kafka: KafkaCluster, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    extra = {
        "cluster": {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_username": "alice",
            "sasl_password_file": str(password),
        },
        "client_listener": {
            "advertised_host": ELSEWHERE,
            "queued_bytes_max": QUEUED_BYTES,
            "authentication_timeout_s": 3.0,
            "frame_timeout_s": 3.0,
        },
    }
    topic = make_topic(kafka)
    with ProxyProcess(kafka.bootstrap("SASL_PLAINTEXT"), name=unique("fuzzed"), extra=extra) as proxy:
        (broker_id,) = kafka.broker_ids
        host, _, port = proxy.bootstrap.partition(":")
        at = host, int(port) + 1 + broker_id
        mutations = Mutations(SEED, record_clients((host, int(port)), at, topic))
        watch = Watch(proxy, QUEUED_BYTES)

        async def odd() -> None:
            await say(*at, mutations.odd(mutations.random.choice((logging_in, lambda frames: 0))))

        async def real() -> None:
            await say(*at, mutations.real())

        with Wire(f"{at[0]}:{at[1]}") as wire, Fuzzer(real) as fuzzer:
            log_in(wire, PlainExchange("alice", PASSWORD), "PLAIN")
            fuzz("clients", fuzzer, odd, real, partial(there_and_back, wire, topic), [watch], EACH_S)
        watch.check()
        no_task_fails(proxy)
        with Wire(proxy.bootstrap) as wire:
            log_in(wire, PlainExchange("alice", PASSWORD), "PLAIN")


def there_and_back(wire: Wire, topic: str) -> None:
    offset = ack(wire, topic)
    assert fetch(wire, topic, offset).records


def logging_in(frames: Sequence[bytes]) -> int:
    """How many of a client's frames come before it has authenticated."""
    keys = [int.from_bytes(frame[4:6], "big") for frame in frames]
    return max((at + 1 for at, key in enumerate(keys) if key == ApiKey.SASL_AUTHENTICATE), default=0)


def record_clients(bootstrap: tuple[str, int], broker: tuple[str, int], topic: str) -> list[list[bytes]]:
    """What clients of two kinds send to a proxy's two ports, by connection."""
    group = unique("fuzzed-")
    with ExitStack() as stack:
        relays = [
            stack.enter_context(Relay(target, target[1], host=ELSEWHERE, recording=True))
            for target in (bootstrap, broker)
        ]
        settings = {
            "bootstrap.servers": relays[0].address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": PASSWORD,
        }
        producer = Producer({**settings, "enable.idempotence": True, "compression.type": "gzip"})
        for number in range(20):
            producer.produce(topic, b"value", str(number), partition=0, headers={"a": b"b"})
            producer.poll(0)
        producer.flush(30)
        admin = AdminClient(settings)
        admin.list_topics(timeout=30)
        admin.list_consumer_groups().result(30)
        admin.create_topics([NewTopic(unique("never-"), 1, 1)], validate_only=True)
        consumer = Consumer({**settings, "group.id": group, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        until("it is read", lambda: consumer.poll(1.0))
        consumer.commit(asynchronous=False)
        consumer.get_watermark_offsets(TopicPartition(topic, 0))
        consumer.close()
        admin.describe_consumer_groups([group])[group].result(30)
        asyncio.run(aiokafka_clients(relays[0].address, topic))
        found = [frames_of(bytes(sent)) for relay in relays for sent in relay.sent]
    kept = [frames for frames in found if frames]
    assert {logging_in(frames) < len(frames) for frames in kept} == {True}
    keys = {int.from_bytes(frame[4:6], "big") for frames in kept for frame in frames}
    assert keys >= {ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.METADATA, ApiKey.JOIN_GROUP, ApiKey.OFFSET_COMMIT}
    return kept


async def aiokafka_clients(address: str, topic: str) -> None:
    settings: dict[str, Any] = {
        "bootstrap_servers": address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    async with AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait(topic, b"value", b"key")
    group = unique("fuzzed-")
    async with AIOKafkaConsumer(topic, group_id=group, auto_offset_reset="earliest", **settings) as consumer:
        await consumer.getone()
        await consumer.commit()


def no_task_fails(proxy: ProxyProcess) -> None:
    status, metrics = asked(proxy, "/metrics")
    assert status == 200
    assert b"isthmus_tasks_failing 0.0" in metrics


def asked(proxy: ProxyProcess, path: str) -> tuple[int, bytes]:
    """GET it, with a token, over a connection of its own."""
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# ---- peers of links ----


def test_the_link_listener(kafka: KafkaCluster, shared_kafka: Clusters) -> None:
    target = shared_kafka(role="fuzzed-target")
    a, b = (whole(each, proxy={"lease_s": 10.0}) for each in (kafka, target))
    host, _, port = b.link_address.partition(":")
    with (
        ExitStack() as stack,
        Relay((host, int(port)), recording=True) as relay,
        linked(kafka, target, a_proxies=[a], b_proxies=[b], remote=relay.address) as pair,
    ):
        source, copy = pair.names("fuzzed-")
        pair.raise_levels()
        pair.attach()
        pair.a.create_topic(source)
        pair.wait_following()
        until("accepted", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"))
        until("In-Sync", lambda: pair.a.link(pair.name)["state"] == "In-Sync")
        recorded = [frames for sent in relay.sent if (frames := frames_of(bytes(sent)))]
        relay.cut(refuse=True)  # it is dialled at its own address
        until("In-Sync again", lambda: pair.a.link(pair.name)["state"] == "In-Sync")
        neighbour = Neighbour(host, int(port), copy)
        asyncio.run(neighbour.make_link())
        mutations = Mutations(SEED, recorded)
        dialled = stack.enter_context(Dialled(Mutations(SEED, recorded)))
        pair.a.proxy.cli("link", "create", unique("dialled-"), "--remote", dialled.address)
        watches = [Watch(side.proxy) for side in (pair.a, pair.b)]

        async def odd() -> None:
            dialled.is_odd = True
            lot = mutations.random.random()
            if lot < 0.5:
                await say(host, int(port), mutations.odd())
            else:
                await neighbour.speak(lot < 0.8, neighbour.odd(mutations))

        async def real() -> None:
            dialled.is_odd = False
            await neighbour.speak(True, neighbour.real(mutations))

        with Wire(advertised(pair.a.bootstrap).popitem()[1]) as wire, Fuzzer(real) as fuzzer:
            fuzz("peers", fuzzer, odd, real, lambda: ack(wire, source), watches, EACH_S)
        for watch in watches:
            watch.check()
        for side in (pair.a, pair.b):
            no_task_fails(side.proxy)
        assert neighbour.welcomed > 10
        assert dialled.came > 3
        assert pair.a.link(pair.name)["state"] == "In-Sync"
        assert pair.verify()["equal"]


class Neighbour:
    """A proxy of a cluster that is not there, which has a link of its own with the one that is fuzzed."""

    LEFT_OUT: Final = frozenset({"create_link", "undo_create_link", "delete_link", "finish_secret_rotation"})
    """Methods that would end its link."""

    def __init__(self, host: str, port: int, topic: str) -> None:
        """``topic``: one that is there."""
        self._at = host, port
        self._link_id = str(uuid.uuid4())
        self._secret = b""
        self.welcomed = 0
        """How often it was let in."""
        methods = {each.METHOD for each in vars(calls).values() if isinstance(each, type) and _is_question(each)}
        asked = {
            "all": [topic],
            "bindings": [],
            "epoch": 0,
            "from": 0,
            "groups": ["g"],
            "level": "record",
            "local": "a-",
            "namespaces": [["topic", "a-"]],
            "offset": 0,
            "partition": 0,
            "partitions": [[topic, 0]],
            "prefix": "",
            "remote": "b-",
            "role": "leader",
            "secret_id": "a",
            "settings": {},
            "source_topic_id": str(uuid.uuid4()),
            "stream": 1,
            "to": 10,
            "topic": topic,
            "topic_ids": [str(uuid.uuid4())],
            "topics": [],
            "type": "topic",
            "until": 10,
        }
        self._asked: list[dict[str, Any]] = [
            {"id": number, "method": method, "params": asked}
            for number, method in enumerate(sorted(methods - self.LEFT_OUT), 1)
        ]
        self._calls = [link.encode_json(MessageType.CALL, each) for each in self._asked]
        batch = batch_of([b"x" * 100])
        self._others = [
            link.encode(MessageType.HEARTBEAT, b""),
            link.encode_append_head(1, 0, 0, 1, 0, len(batch)) + batch,
            link.encode_appended(1, 1),
            link.encode_json(MessageType.STOPPED, {"stream": 1, "code": "X", "message": "x", "end_offset": 1}),
            link.encode_json(MessageType.RESULT, {"id": 1, "result": {}}),
            link.encode_json(MessageType.RESULT, {"id": 1, "error": {"code": "X", "message": "x"}}),
            b"".join(link_pieces.encode_piece(1, 100_000, [bytes(50_000)])),
            link_pieces.encode_abandoned(1),
        ]

    async def make_link(self) -> None:
        """As a process of this machine may that has no token."""
        connection = await self._dial({"purpose": PURPOSE_CREATE})
        await connection.call(calls.CreateLink(unique("neighbour-"), self._link_id, producer_id_ranges={}))
        self._secret = connection.agreed_secret(self._link_id)
        await connection.stopped()

    def real(self, mutations: Mutations) -> list[bytes]:
        """Frames that end nothing."""
        return [self._others[0], *mutations.random.sample(self._calls, 3)]

    def odd(self, mutations: Mutations) -> list[bytes]:
        """Others: with something done to their bytes, or frames that are sound but for what they say."""
        if mutations.random.random() < 0.5:
            said = mutations.random.sample(self._asked, 3)
            return [link.encode(MessageType.CALL, mutations.inside(each)) for each in said]
        some = mutations.random.sample(self._calls, 3)
        return mutations.frames([*some, mutations.random.choice(self._others)])

    async def speak(self, linked: bool, frames: Sequence[bytes]) -> None:
        """Connect and send frames behind the handshake: as the proxy of a link, or as who creates one."""
        try:
            connection = await self._dial(
                {"purpose": PURPOSE_LINK, "link_id": self._link_id} if linked else {"purpose": PURPOSE_CREATE},
                self._secret if linked else b"",
            )
        except (LinkRejected, LinkLost):
            return
        self.welcomed += 1
        for frame in frames:
            connection.send(frame)
            await asyncio.sleep(0)
        await connection.lost_within(0.2)
        await connection.stopped()

    async def _dial(self, hello: dict[str, Any], secret: bytes = b"") -> LinkConnection:
        return await LinkConnection.dial(
            *self._at,
            clock=time,
            supervision=Supervision(),
            hello=hello,
            secret=secret,
            identity={
                "cluster_id": "of-a-neighbour",
                "proxy": f"neighbour-{uuid.uuid4()}",
                "incarnation": 1,
                "brokers": "all",
                "features": list(FEATURES),
            },
        )


class Dialled:
    """A cluster that is not there, to which the one that is fuzzed has made a link: its proxy is dialled, and answers
    calls, with what no proxy says while ``is_odd``."""

    SAYS: Final = (
        {"proxies": [{"proxy": "p", "link_address": "127.0.0.1:1", "brokers": "all"}]},
        {"topics": [], "groups": [], "left_out": []},
        {"granted": [], "states": {}, "groups_of": []},
    )

    def __init__(self, mutations: Mutations) -> None:
        self.is_odd = False
        self.came = 0
        """How often it was dialled."""
        self.address = ""
        self._mutations = mutations
        self._secret = b""
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="dialled", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(30)
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._made: list[LinkConnection] = []
        server = await self._loop.create_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listens.set()
        await self._over.wait()
        server.close()
        for connection in self._made:
            await connection.stopped()

    def _accept(self) -> LinkConnection:
        self._made = [each for each in self._made if not each.lost]
        connection = LinkConnection(
            clock=time,
            supervision=Supervision(),
            accept=lambda hello, _: Credential(self._secret if hello["purpose"] == PURPOSE_LINK else b""),
            identity={
                "cluster_id": "of-who-is-dialled",
                "proxy": "dialled",
                "incarnation": str(uuid.uuid4()),
                "brokers": "all",
                "features": list(FEATURES),
            },
            on_ready=self._ready,
        )
        self._made.append(connection)
        return connection

    def _ready(self, connection: LinkConnection) -> None:
        if connection.purpose == PURPOSE_CREATE:
            connection.handlers = {calls.CreateLink.METHOD: calls.CreateLink.by(self._create)}
            return
        self.came += 1
        connection._called = partial(self._answer, connection)  # type: ignore[method-assign]
        self._loop.call_later(0.5, self._say, connection)

    async def _create(self, connection: LinkConnection, question: calls.CreateLink) -> calls.CreateLinkAnswer:
        self._secret = connection.agreed_secret(question.link_id)
        return calls.CreateLinkAnswer((self.address,), producer_id_ranges={})

    def _answer(self, connection: LinkConnection, call: dict[str, Any]) -> None:
        if self.is_odd:
            said = {"id": call["id"], "result": self._mutations.random.choice(self.SAYS)}
            connection.send(link.encode(MessageType.RESULT, self._mutations.inside(said)))
        else:
            error = {"code": "UNKNOWN_METHOD", "message": call["method"]}
            connection.send(link.encode_json(MessageType.RESULT, {"id": call["id"], "error": error}))

    def _say(self, connection: LinkConnection) -> None:
        if self.is_odd and not connection.lost:
            kind = self._mutations.random.choice((MessageType.CALL, MessageType.RESULT, MessageType.STOPPED))
            connection.send(link.encode(kind, self._mutations.inside({"id": 1, "method": "topology", "params": {}})))


def _is_question(found: type) -> bool:
    return issubclass(found, Question) and found is not Question


# ---- operators ----


def test_the_admin_listener(kafka: KafkaCluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {TOKEN}\n")
    admin = {"loopback_without_authentication": False, "operator_token_file": str(tokens)}
    with ProxyProcess(kafka.bootstrap_servers, name=unique("fuzzed"), extra={"admin_listener": admin}) as proxy:
        host, _, port = proxy.url.removeprefix("http://").partition(":")
        mutations = Mutations(SEED, record_commands((host, int(port)), tokens), refit_request)
        watch = Watch(proxy)

        async def odd() -> None:
            await say(host, int(port), mutations.odd())

        async def real() -> None:
            await say(host, int(port), mutations.real())

        def status() -> None:  # again where there was no room: what that takes counts, too
            code, _ = until("it answers", lambda: asked(proxy, "/v1/status"), 30.0, 0.01)
            assert code == 200

        with Fuzzer(real) as fuzzer:
            fuzz("operators", fuzzer, odd, real, status, [watch], EACH_S)
        watch.check("change asked", "change")
        no_task_fails(proxy)


def record_commands(address: tuple[str, int], tokens: Path) -> list[list[bytes]]:
    """What ``isthmus`` sends, by connection: it reads, and changes what is not there."""
    commands = (
        ("status",),
        ("link", "list"),
        ("link", "describe", "nothing"),
        ("link", "delete", "nothing"),
        ("link", "set-mode", "nothing", "synchronous"),
        ("link", "attach", "nothing", "--local", "a-", "--remote", "b-", "--role", "leader"),
        ("namespace", "list"),
        ("namespace", "create", "fuzzed-"),
        ("namespace", "alter", "nothing-", "--consistency", "strict"),
        ("namespace", "delete", "nothing-"),
        ("link", "promote", "nothing", "--local", "a-"),
        ("control", "describe"),
        ("audit",),
        ("verify", "nothing"),
    )
    with Relay(address, recording=True) as relay:
        for command in commands:
            options = "--token-file", str(tokens), *command, "--url", f"http://{relay.address}", "-o", "json"
            assert ready_commands.run(options, 60).returncode != 2, command
        found = [requests_of(bytes(sent)) for sent in relay.sent]
    kept = [requests for requests in found if requests]
    assert len(kept) >= len(commands)
    return kept
