"""No client ever learns a broker's own address: a relay in front of the proxy records every answer.

Brokers, proxy and relay are on loopback addresses of their own, so that an address tells whose it is. The proxy
advertises the relay's address with its own ports; so clients never leave the relay.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import pytest
from confluent_kafka import Consumer, ElectionType, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from support.groups import COORDINATOR_MOVES
from support.kafka import unique
from support.links import until
from support.wire import Wire, batch_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol import api_versions, schema
from isthmus_protocol.messages import decode_response, parse_request_head
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

BROKERS: Final = "127.0.0.3"
RELAY: Final = "127.0.0.2"
PROXY: Final = "127.0.0.1"

NOT_LEADER_OR_FOLLOWER: Final = 6
NOT_COORDINATOR: Final = 16
ODD_ID: Final = "hidden brokers, all three/ü"
OFFSETS_PARTITIONS: Final = 4


class Recorded:
    """One connection through the relay."""

    def __init__(self) -> None:
        self.requests = bytearray()
        self.answers = bytearray()

    def exchanges(self) -> Iterator[tuple[int, int, bytes]]:
        """API key, version and answer's frame, for each request that was answered."""
        asked = {head.correlation_id: head for head in map(parse_request_head, _frames(self.requests))}
        for frame in _frames(self.answers):
            head = asked[int.from_bytes(frame[4:8], "big", signed=True)]
            yield head.api_key, head.version, frame


def _frames(data: bytes | bytearray) -> Iterator[bytes]:
    position = 0
    while position + 4 <= len(data):
        end = position + 4 + int.from_bytes(data[position : position + 4], "big")
        if end > len(data):
            return
        yield bytes(data[position:end])
        position = end


class Relay:
    """Listens on the relay's address at each of some ports, and records what it passes on to the proxy's address."""

    def __init__(self, ports: list[int]) -> None:
        self.connections: list[Recorded] = []
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), name="relay")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        servers = [await asyncio.start_server(self._client, RELAY, port) for port in self._ports]
        self._ready.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        recorded = Recorded()
        self.connections.append(recorded)
        upstream = None
        try:
            port = writer.get_extra_info("sockname")[1]
            upstream_reader, upstream = await asyncio.open_connection(PROXY, port)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, upstream, recorded.requests))
                group.create_task(_copy(upstream_reader, writer, recorded.answers))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            writer.close()
            if upstream is not None:
                upstream.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    while data := await reader.read(65536):
        record += data
        writer.write(data)
        await writer.drain()
    raise ConnectionError("end of the stream")


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    """Their cluster's id has another form than Kafka's own: clients and proxies take it."""
    with KafkaCluster(name="hidden", brokers=3, host=BROKERS, cluster_id=ODD_ID) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(brokers: KafkaCluster) -> Iterator[ProxyProcess]:
    extra = {"client_listener": {"advertised_host": RELAY}}
    with ProxyProcess(brokers.bootstrap_servers, name="hidden", extra=extra) as process:
        yield process


@pytest.fixture
def relay(brokers: KafkaCluster, proxy: ProxyProcess) -> Iterator[Relay]:
    """At its end every answer is searched."""
    bootstrap = int(proxy.bootstrap.rpartition(":")[2])
    ports = [int(each["address"].rpartition(":")[2]) for each in proxy.get("/v1/status")["process"]["brokers"]]
    with Relay([bootstrap, *ports]) as running:
        yield running
    assert search(running, brokers) == []


def search(relay: Relay, brokers: KafkaCluster) -> list[str]:
    """Where answers tell a broker's address."""
    own_ports = {port for ports in brokers.state.ports.values() for port in ports.values()}
    found = []
    for connection in relay.connections:
        for api_key, version, frame in connection.exchanges():
            where = f"{ApiKey(api_key).name} v{version}"
            if BROKERS.encode() in frame:
                found.append(where)
            if _ports(decode_response(api_key, version, frame)[1]) & own_ports:
                found.append(f"{where}: a port")
    return found


def _ports(value: Any) -> set[int]:
    """The ports anywhere in a message."""
    if isinstance(value, tuple):
        return {port for item in value for port in _ports(item)}
    if not dataclasses.is_dataclass(value):
        return set()
    found: set[int] = set()
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        found |= {int(inner)} if field.name == "port" and inner is not None else _ports(inner)
    return found


def answers(relay: Relay, api_key: int) -> list[Any]:
    """All recorded answers of an API."""
    return [
        decode_response(key, version, frame)[1]
        for connection in relay.connections
        for key, version, frame in connection.exchanges()
        if key == api_key
    ]


def at_relay(proxy: ProxyProcess) -> str:
    return f"{RELAY}:{proxy.bootstrap.rpartition(':')[2]}"


def broker_addresses(proxy: ProxyProcess) -> dict[int, str]:
    with Wire(at_relay(proxy)) as wire:
        metadata = wire.request(ApiKey.METADATA, 12, {"topics": ()})
    return {broker.node_id: f"{broker.host}:{broker.port}" for broker in metadata.brokers}


def create_topic(proxy: ProxyProcess, replicas: int = 3) -> str:
    """Three partitions, each led by another broker."""
    topic = unique("topic-")
    admin = AdminClient({"bootstrap.servers": at_relay(proxy)})
    admin.create_topics([NewTopic(topic, 3, replication_factor=replicas)])[topic].result(30)
    return topic


def describe_topic(proxy: ProxyProcess, topic: str) -> Any:
    """The topic, once every broker has heard of it."""
    for address in broker_addresses(proxy).values():
        with Wire(address) as wire:
            while True:
                [described] = wire.request(ApiKey.METADATA, 12, {"topics": [{"name": topic}]}).topics
                if described.error_code == 0 and all(p.error_code == 0 for p in described.partitions):
                    break
    return described


def move_leader(proxy: ProxyProcess, topic: str, partition: int) -> None:
    """Make the next replica the preferred leader, and elect it."""
    [found] = [p for p in describe_topic(proxy, topic).partitions if p.partition_index == partition]
    replicas = [*found.replica_nodes[1:], found.replica_nodes[0]]
    with Wire(at_relay(proxy)) as wire:
        moved = [{"name": topic, "partitions": [{"partition_index": partition, "replicas": replicas}]}]
        answer = wire.request(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, {"timeout": 10_000, "topics": moved})
        assert answer.error_code == 0
        assert [p.error_code for t in answer.responses for p in t.partitions] == [0]
    admin = AdminClient({"bootstrap.servers": at_relay(proxy)})
    elected = admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, partition)]).result(30)
    assert all(error is None for error in elected.values()), elected


def test_clients_while_leaders_move(proxy: ProxyProcess, relay: Relay) -> None:
    topic, group = create_topic(proxy), unique("group-")
    settings = {"bootstrap.servers": at_relay(proxy)}
    producer = Producer(settings | {"enable.idempotence": True, "linger.ms": 0})
    consumer = Consumer(settings | {"group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    seen = 0
    try:
        for leg in range(3):
            for number in range(30):
                producer.produce(topic, b"x" * 100, partition=number % 3)
            assert producer.flush(30) == 0
            while seen < 30 * (leg + 1):
                message = consumer.poll(20)
                assert message is not None
                assert message.error() is None
                seen += 1
            for partition in range(3):
                move_leader(proxy, topic, partition)
    finally:
        consumer.close()
    admin = AdminClient(settings)
    with Wire(at_relay(proxy)) as wire:
        for version in range(schema.supported()[ApiKey.DESCRIBE_CLUSTER][1] + 1):
            assert len(wire.request(ApiKey.DESCRIBE_CLUSTER, version, {}).brokers) == 3
    admin.describe_consumer_groups([group])[group].result(30)
    assert answers(relay, ApiKey.FIND_COORDINATOR)
    assert any(answer.node_endpoints for answer in answers(relay, ApiKey.PRODUCE))


def told_coordinators(address: str, version: int, groups: list[str]) -> dict[str, tuple[int, str]]:
    """Of each group, its coordinator's id and address, as one broker tells them."""
    with Wire(address) as wire:
        if version >= 4:
            answers = wire.request(
                ApiKey.FIND_COORDINATOR, version, {"key_type": 0, "coordinator_keys": groups}
            ).coordinators
        else:
            answers = [wire.request(ApiKey.FIND_COORDINATOR, version, {"key": group}) for group in groups]
    assert [each.error_code for each in answers] == [0] * len(groups)
    return {group: (each.node_id, f"{each.host}:{each.port}") for group, each in zip(groups, answers, strict=True)}


def test_any_broker_tells_who_coordinates_a_group(proxy: ProxyProcess, relay: Relay) -> None:
    """In every version of FindCoordinator, by the address at which clients reach it; and nobody else coordinates."""
    groups = [unique("group-") for _ in range(2 * OFFSETS_PARTITIONS)]
    addresses = broker_addresses(proxy)
    with Wire(at_relay(proxy)) as wire:  # whoever asks first has the topic made
        wire.request(ApiKey.FIND_COORDINATOR, 0, {"key": groups[0]})
    leaders = {each.partition_index: each.leader_id for each in describe_topic(proxy, OFFSETS_TOPIC).partitions}
    assert len(set(leaders.values())) > 1
    expected = {group: leaders[partition_of(group, OFFSETS_PARTITIONS)] for group in groups}
    oldest, newest = schema.supported()[ApiKey.FIND_COORDINATOR]
    for address in addresses.values():
        for version in range(oldest, newest + 1):
            assert told_coordinators(address, version, groups) == {
                group: (node, addresses[node]) for group, node in expected.items()
            }
    for node, address in addresses.items():
        wanted = {group: 0 if node == each else NOT_COORDINATOR for group, each in expected.items()}
        until(f"broker {node} coordinates its own", lambda a=address, w=wanted: coordinating(a, groups) == w)


def coordinating(address: str, groups: list[str]) -> dict[str, int]:
    """What a broker answers to whoever asks it what each group has committed: an error code."""
    asked = [{"group_id": group, "topics": None} for group in groups]
    with Wire(address) as wire:
        answer = wire.request(ApiKey.OFFSET_FETCH, 8, {"groups": asked, "require_stable": False})
    return {each.group_id: each.error_code for each in answer.groups}


def test_a_consumer_finds_its_coordinator_wherever_it_moves(proxy: ProxyProcess, relay: Relay) -> None:
    """It commits on, and its group does not rebalance. All brokers know who it is, and no other serves the group."""
    topic, group = create_topic(proxy), unique("group-")
    partition, moves = partition_of(group, OFFSETS_PARTITIONS), 3
    settings = {"bootstrap.servers": at_relay(proxy)}
    producer = Producer(settings)
    consumer = Consumer(settings | {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False})
    assigned: list[int] = []
    consumer.subscribe([topic], on_assign=lambda _, partitions: assigned.append(len(partitions)))
    addresses = broker_addresses(proxy)

    def read_and_commit() -> None:
        producer.produce(topic, b"x", partition=0)
        assert producer.flush(30) == 0
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        commit(consumer)

    def coordinates(node: int) -> bool:
        told = {each: coordinating(address, [group])[group] for each, address in addresses.items()}
        return told == {each: 0 if each == node else NOT_COORDINATOR for each in addresses} and all(
            told_coordinators(address, 4, [group]) == {group: (node, addresses[node])} for address in addresses.values()
        )

    try:
        read_and_commit()
        for _ in range(moves):
            offsets_topic = describe_topic(proxy, OFFSETS_TOPIC).partitions
            [replicas] = [each.replica_nodes for each in offsets_topic if each.partition_index == partition]
            move_leader(proxy, OFFSETS_TOPIC, partition)
            until("the next replica coordinates", partial(coordinates, replicas[1]))
            read_and_commit()
        committed = consumer.committed([TopicPartition(topic, 0)], 30)
    finally:
        consumer.close()
    assert [each.offset for each in committed] == [moves + 1]
    assert assigned == [3], "the group rebalanced"


def commit(consumer: Consumer) -> None:
    """Commit what was read. While its coordinator moves a consumer is told so, and tries again."""
    while True:
        try:
            consumer.commit(asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() not in COORDINATOR_MOVES:
                raise
        else:
            return


def test_a_cluster_id_of_another_form_is_a_warning(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    assert brokers.cluster_id == ODD_ID
    status = proxy.get("/v1/status")
    assert status["cluster_id"] == ODD_ID
    assert status["ready"]
    (warning,) = [each for each in status["process"]["warnings"] if "the id of" in each]
    assert repr(ODD_ID) in warning


def test_java_share_consumer(brokers: KafkaCluster, proxy: ProxyProcess, relay: Relay) -> None:
    topic, group = create_topic(proxy), unique("share-")
    admin = AdminClient({"bootstrap.servers": at_relay(proxy)})
    with Wire(at_relay(proxy)) as wire:
        change = {"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}
        resource = {"resource_type": 32, "resource_name": group, "configs": [change]}
        answer = wire.request(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False})
        assert [each.error_code for each in answer.responses] == [0]
    producer = Producer({"bootstrap.servers": at_relay(proxy)})
    for number in range(30):
        producer.produce(topic, str(number))
    assert producer.flush(30) == 0
    consumed = brokers.tool(
        "kafka-console-share-consumer",
        *("--bootstrap-server", at_relay(proxy), "--topic", topic, "--group", group),
        *("--max-messages", "30", "--timeout-ms", "30000"),
    ).stdout
    assert len(consumed.splitlines()) == 30
    assert answers(relay, ApiKey.SHARE_FETCH)
    assert answers(relay, ApiKey.SHARE_ACKNOWLEDGE)
    admin.list_topics(timeout=20)


def test_answers_that_name_the_new_leader(proxy: ProxyProcess, relay: Relay) -> None:
    """KIP-951 in every version that has it, of each broker: it leads a part of what is asked."""
    topic = create_topic(proxy, replicas=1)  # followers would serve a Fetch, too
    described = describe_topic(proxy, topic)
    leaders = {partition.partition_index: partition.leader_id for partition in described.partitions}
    addresses = broker_addresses(proxy)
    producer = Producer({"bootstrap.servers": at_relay(proxy), "acks": "all"})
    for partition in leaders:
        for _ in range(40):
            producer.produce(topic, bytes(50_000), partition=partition)
    assert producer.flush(30) == 0
    by_id = {"topic_id": described.topic_id}

    for broker_id, address in addresses.items():
        led = {partition for partition, leader in leaders.items() if leader == broker_id}
        with Wire(address) as wire:
            for version in range(10, schema.supported()[ApiKey.PRODUCE][1] + 1):
                data = [{"index": p, "records": batch_of([b"x"])} for p in leaders]
                topic_data = [(by_id if version >= 13 else {"name": topic}) | {"partition_data": data}]
                values = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": topic_data}
                answer = wire.request(ApiKey.PRODUCE, version, values)
                refused = {p.index for p in answer.responses[0].partition_responses if p.error_code}
                assert refused == leaders.keys() - led
                assert {node.node_id for node in answer.node_endpoints} == {leaders[p] for p in refused}
                assert {f"{n.host}:{n.port}" for n in answer.node_endpoints} <= set(addresses.values())
            for version in range(16, schema.supported()[ApiKey.FETCH][1] + 1):
                asked = [
                    {"partition": p, "current_leader_epoch": -1, "fetch_offset": 0, "partition_max_bytes": 10_000_000}
                    for p in leaders
                ]
                values = {
                    "replica_id": -1,
                    "max_wait": 500,
                    "min_bytes": 1,
                    "max_bytes": 50_000_000,
                    "session_id": 0,
                    "session_epoch": -1,
                    "topics": [by_id | {"partitions": asked}],
                }
                answer = wire.request(ApiKey.FETCH, version, values)
                refused = {p.partition_index for p in answer.responses[0].partitions if p.error_code}
                assert refused == leaders.keys() - led
                read = sum(len(p.records or b"") for p in answer.responses[0].partitions)
                assert read >= 2_000_000 * len(led)
                # A large answer streams, and its end keeps its length: all endpoints or none.
                told = {f"{n.host}:{n.port}" for n in answer.node_endpoints}
                assert told <= {addresses[leaders[p]] for p in refused}
            group, member = unique("share-"), str(uuid.uuid4())
            share = {"group_id": group, "member_id": member, "share_session_epoch": 0}
            asked = [{"partition_index": p, "acknowledgement_batches": ()} for p in leaders]
            limits = {"max_wait": 100, "min_bytes": 0, "max_bytes": 1_000_000, "max_records": 10, "batch_size": 10}
            for version in range(1, schema.supported()[ApiKey.SHARE_FETCH][1] + 1):
                values = share | limits | {"topics": [by_id | {"partitions": asked}]}
                answer = wire.request(ApiKey.SHARE_FETCH, version, values)
                assert answer.error_code == 0, answer
                refused = {
                    p.partition_index
                    for t in answer.responses
                    for p in t.partitions
                    if p.error_code == NOT_LEADER_OR_FOLLOWER
                }
                assert refused == leaders.keys() - led
                assert {node.node_id for node in answer.node_endpoints} == {leaders[p] for p in refused}


def test_configuration_and_quorum(proxy: ProxyProcess, relay: Relay) -> None:
    admin = AdminClient({"bootstrap.servers": at_relay(proxy)})
    for broker in ("1", "2", "3"):
        resource = ConfigResource(ResourceType.BROKER, broker)
        configs = admin.describe_configs([resource])[resource].result(30)
        assert configs["node.id"].value == broker
        for name in ("listeners", "advertised.listeners", "controller.quorum.voters"):
            assert configs[name].value is None
            assert configs[name].is_sensitive
    with Wire(at_relay(proxy)) as wire:
        for version in range(2, schema.supported()[ApiKey.DESCRIBE_QUORUM][1] + 1):
            topic = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
            answer = wire.request(ApiKey.DESCRIBE_QUORUM, version, {"topics": [topic]})
            assert {node.node_id for node in answer.nodes} == {1, 2, 3}


def test_an_empty_request_of_every_api(proxy: ProxyProcess, relay: Relay) -> None:
    answered = 0
    for api_key, versions in api_versions.proxied().items():
        for version in versions:
            if api_key == ApiKey.ADD_PARTITIONS_TO_TXN and version >= 4:
                continue  # a broker does not answer one of no transactions
            with Wire(at_relay(proxy)) as wire:
                try:
                    wire.request(api_key, version, {"acks": -1} if api_key == ApiKey.PRODUCE else {})
                    answered += 1
                except (ConnectionError, TypeError):
                    pass
    assert answered > 100
