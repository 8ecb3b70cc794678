"""User story: an operator reserves a namespace of topics, and from then on no client changes anything in it.

Two sidecars front the two brokers of a cluster: both enforce what was told to one of them. Topics are made directly at
the brokers, where nothing is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioNewTopic
from aiokafka.errors import InvalidRequestError, PolicyViolationError
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from support.links import until
from support.wire import Wire, batch_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol import schema
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

UNKNOWN_TOPIC_OR_PARTITION = 3
NOT_LEADER = 6
TOPIC_AUTHORIZATION_FAILED = 29
TOPIC_ALREADY_EXISTS = 36
INVALID_REQUEST = 42
POLICY_VIOLATION = 44
OPERATION_NOT_ATTEMPTED = 55
UNKNOWN_TOPIC_ID = 100

CONTROL_TOPIC = "__isthmus_control"

_numbers = itertools.count(1)


class Setup(NamedTuple):
    kafka: KafkaCluster
    proxies: dict[int, ProxyProcess]
    """By the broker that each fronts."""
    direct: AdminClient
    """An administrator that bypasses the proxies."""

    @property
    def client(self) -> dict[str, str]:
        """Settings of a confluent-kafka client of the proxies."""
        return {"bootstrap.servers": self.proxies[1].bootstrap}

    def create_topic(self, name: str, partitions: int = 1) -> str:
        self.direct.create_topics([NewTopic(name, partitions, replication_factor=1)])[name].result(30)
        self.described(name)
        return name

    def delete_topic(self, name: str) -> None:
        self.direct.delete_topics([name])[name].result(30)

    def described(self, topic: str) -> Any:
        """The topic as both brokers know it, once they do."""
        while True:
            found = []
            for address in self.kafka.bootstrap_servers.split(","):
                with Wire(address) as wire:
                    [metadata] = wire.request(ApiKey.METADATA, 12, {"topics": [{"name": topic}]}).topics
                found.append(metadata)
            if all(metadata.error_code == 0 for metadata in found) and len({m.topic_id for m in found}) == 1:
                return found[0]

    def leader(self, topic: str, partition: int = 0) -> ProxyProcess:
        """The proxy of the partition's leader."""
        partitions = self.described(topic).partitions
        return self.proxies[next(p.leader_id for p in partitions if p.partition_index == partition)]

    def controller(self) -> ProxyProcess:
        """The proxy that an administrator's requests go to."""
        with Wire(self.proxies[1].bootstrap) as wire:
            return self.proxies[wire.request(ApiKey.METADATA, 12, {"topics": ()}).controller_id]

    def end(self, topic: str, partition: int = 0) -> int:
        """The log's end, asked of the brokers."""
        place = TopicPartition(topic, partition)
        while True:
            try:
                return int(self.direct.list_offsets({place: OffsetSpec.latest()})[place].result(30).offset)
            except KafkaException as error:  # of a topic that was made again: the client learns the leader by this
                if error.args[0].code() != NOT_LEADER:
                    raise

    def topics(self) -> set[str]:
        return set(self.direct.list_topics(timeout=20).topics)


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    with KafkaCluster(name="reserved", brokers=2) as cluster, ExitStack() as stack:
        proxies = {}
        for broker_id in cluster.broker_ids:
            proxy = ProxyProcess(cluster.bootstrap_servers, name=f"sidecar-{broker_id}", broker_id=broker_id)
            stack.callback(proxy.close)
            proxy.spawn()
            proxies[broker_id] = proxy
        for proxy in proxies.values():
            proxy.wait_ready()
        yield Setup(cluster, proxies, AdminClient({"bootstrap.servers": cluster.bootstrap_servers}))


def reserve(proxy: ProxyProcess, prefix: str) -> None:
    """Over REST: as the command, a second faster. Returns when every proxy enforces it."""
    body = {"type": "topic", "prefix": prefix, "reserved": True, "reason": "it moves to another cluster"}
    answer = httpx.post(f"{proxy.url}/v1/namespaces", json=body, params={"wait": True}, timeout=60, trust_env=False)
    assert answer.status_code == 201, answer.text


@contextmanager
def reserved(setup: Setup, *topics: str) -> Iterator[str]:
    """A reserved namespace with these topics in it (``t`` for ``{prefix}t``); yields its prefix."""
    prefix = f"reserved-{next(_numbers)}-"
    for topic in topics:
        setup.create_topic(prefix + topic)
    reserve(setup.proxies[1], prefix)
    yield prefix


def names_namespace(message: str | None, prefix: str) -> bool:
    return message is not None and f"namespace '{prefix}'" in message and "it moves to another cluster" in message


def produce_values(acks: int = -1, **batches: bytes) -> dict[str, Any]:
    """A Produce request for partition 0 of topics by name."""
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout": 30_000,
        "topic_data": [
            {"name": topic, "partition_data": [{"index": 0, "records": batch}]} for topic, batch in batches.items()
        ],
    }


def test_an_operator_reserves_a_namespace_and_clears_it(setup: Setup) -> None:
    first, second = setup.proxies.values()
    topic = setup.create_topic("orders-eu", partitions=2)
    producer = Producer(setup.client | {"enable.idempotence": True})
    errors: list[KafkaError | None] = []

    def produce() -> list[KafkaError | None]:
        errors.clear()
        for partition in range(2):
            producer.produce(topic, b"x", partition=partition, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(30) == 0
        return list(errors)

    assert produce() == [None, None]
    created = first.cli("namespace", "create", "orders-", "--type", "topic", "--reserved", "--reason", "migration")
    assert (created["prefix"], created["state"], created["reserved_reason"]) == ("orders-", "reserved", "migration")
    assert "orders-" in {listed["prefix"] for listed in second.cli("namespace", "list")}
    assert [error and error.code() for error in produce()] == [INVALID_REQUEST] * 2
    producer = Producer(setup.client)
    second.cli("namespace", "alter", "orders-", "--no-reserved")
    assert produce() == [None, None]
    first.cli("namespace", "alter", "orders-", "--reserved")
    assert [error and error.code() for error in produce()] == [INVALID_REQUEST] * 2
    first.cli("namespace", "delete", "orders-")
    assert produce() == [None, None]


def test_produce_is_refused_in_every_version_and_with_a_reason(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        topic = f"{prefix}t"
        topic_id = setup.described(topic).topic_id
        lowest, highest = schema.supported()[ApiKey.PRODUCE]
        with Wire(setup.leader(topic).bootstrap) as wire:
            for version in range(lowest, highest + 1):
                values = produce_values(**{topic: batch_of([b"x"])})
                if version >= 13:
                    values["topic_data"][0]["topic_id"] = topic_id
                [answered] = wire.request(ApiKey.PRODUCE, version, values).responses
                [partition] = answered.partition_responses
                assert (partition.error_code, partition.base_offset) == (INVALID_REQUEST, -1)
                if version >= 8:
                    assert names_namespace(partition.error_message, prefix), partition.error_message
        with Wire(setup.leader(topic).bootstrap) as wire:
            wire.send(ApiKey.PRODUCE, 9, produce_values(acks=0, **{topic: batch_of([b"x"])}))
            assert wire.receive_frame() is None, "without acks there is no answer, so the connection closes"
        assert setup.end(topic) == 0


def test_the_rest_of_a_mixed_request_goes_through(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        closed, free = f"{prefix}t", setup.create_topic(f"free-{next(_numbers)}")
        leader = setup.leader(free)
        if setup.leader(closed) is not leader:  # one connection has to do for both
            setup.delete_topic(free)
            free = next(
                name
                for name in (setup.create_topic(f"free-{next(_numbers)}") for _ in range(100))
                if setup.leader(name) is setup.leader(closed)
            )
        with Wire(setup.leader(closed).bootstrap) as wire:
            for order in ((closed, free), (free, closed)):
                values = produce_values(**{topic: batch_of([b"x"]) for topic in order})
                answers = wire.request(ApiKey.PRODUCE, 12, values).responses
                codes = {a.name: [int(p.error_code) for p in a.partition_responses] for a in answers}
                assert codes == {closed: [INVALID_REQUEST], free: [0]}
        assert (setup.end(closed), setup.end(free)) == (0, 2)
        for written in (3, 4):  # without acks there is no answer: a broker appends what it can, and closes
            with Wire(setup.leader(closed).bootstrap) as wire:
                values = produce_values(acks=0, **{topic: batch_of([b"x"]) for topic in (closed, free)})
                wire.send(ApiKey.PRODUCE, 12, values)
                assert wire.receive_frame() is None
            until("the free topic's record is there", lambda written=written: setup.end(free) == written)  # type: ignore[misc]
        assert setup.end(closed) == 0
        with Wire(setup.controller().bootstrap) as wire:
            new = f"free-{next(_numbers)}"
            asked = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in (f"{prefix}n", new)]
            created = wire.request(
                ApiKey.CREATE_TOPICS, 7, {"topics": asked, "timeout": 30_000, "validate_only": False}
            )
            assert {t.name: int(t.error_code) for t in created.topics} == {f"{prefix}n": POLICY_VIOLATION, new: 0}
            setup.described(new)
            records = [{"name": t, "partitions": [{"partition_index": 0, "offset": 1}]} for t in (closed, new)]
            deleted = wire.request(
                ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": closed}, {"name": new}], "timeout": 30_000}
            )
            assert {t.name: int(t.error_code) for t in deleted.responses} == {closed: POLICY_VIOLATION, new: 0}
        with Wire(setup.leader(free).bootstrap) as wire:
            records = [{"name": t, "partitions": [{"partition_index": 0, "offset": 1}]} for t in (closed, free)]
            trimmed = wire.request(ApiKey.DELETE_RECORDS, 2, {"topics": records, "timeout": 30_000})
            codes = {t.name: [int(p.error_code) for p in t.partitions] for t in trimmed.topics}
            assert codes == {closed: [POLICY_VIOLATION], free: [0]}


def test_administration_is_refused(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        topic = f"{prefix}t"
        change = {"name": "retention.ms", "config_operation": 0, "value": "1"}
        resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
        plain = {"resource_type": 2, "resource_name": topic, "configs": [{"name": "retention.ms", "value": "1"}]}
        marker = {
            "producer_id": 1,
            "producer_epoch": 0,
            "transaction_result": False,
            "topics": [{"name": topic, "partition_indexes": [0]}],
            "coordinator_epoch": 0,
        }
        new = {"name": f"{prefix}n", "num_partitions": 1, "replication_factor": 1}
        requests: list[tuple[ApiKey, int, dict[str, Any]]] = [
            (ApiKey.CREATE_TOPICS, 7, {"topics": [new], "timeout": 30_000, "validate_only": False}),
            (ApiKey.CREATE_PARTITIONS, 3, {"topics": [{"name": topic, "count": 5}], "timeout": 30_000}),
            (ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": topic}], "timeout": 30_000}),
            (ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": None, "topic_id": setup.described(topic).topic_id}]}),
            (ApiKey.DELETE_TOPICS, 5, {"topic_names": [topic], "timeout": 30_000}),
            (ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False}),
            (ApiKey.ALTER_CONFIGS, 2, {"resources": [plain], "validate_only": False}),
        ]
        with Wire(setup.controller().bootstrap) as wire:
            for api_key, version, values in requests:
                answer = wire.request(api_key, version, values)
                [entry] = next(
                    getattr(answer, name) for name in ("topics", "results", "responses") if hasattr(answer, name)
                )
                assert entry.error_code == POLICY_VIOLATION, (api_key.name, entry)
                assert names_namespace(entry.error_message, prefix), entry
        with Wire(setup.leader(topic).bootstrap) as wire:
            records = {"topics": [{"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}]}
            [deleted] = wire.request(ApiKey.DELETE_RECORDS, 2, records | {"timeout": 30_000}).topics
            assert [int(partition.error_code) for partition in deleted.partitions] == [POLICY_VIOLATION]
            [marked] = wire.request(ApiKey.WRITE_TXN_MARKERS, 1, {"markers": [marker]}).markers
            assert [int(p.error_code) for t in marked.topics for p in t.partitions] == [POLICY_VIOLATION]
        there = new | {"name": topic}
        with Wire(setup.controller().bootstrap) as wire:
            created = wire.request(ApiKey.CREATE_TOPICS, 7, {"topics": [there, new], "timeout": 30_000}).topics
            assert [each.error_code for each in created] == [TOPIC_ALREADY_EXISTS, POLICY_VIOLATION]
        assert f"{prefix}n" not in setup.topics()
        assert len(setup.described(topic).partitions) == 1
        assert setup.end(topic) == 0


def test_a_transaction_cannot_take_in_a_reserved_topic(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        closed, free = f"{prefix}t", setup.create_topic(f"free-{next(_numbers)}")
        transaction = f"txn-{next(_numbers)}"
        with Wire(setup.proxies[1].bootstrap) as wire:
            asked = {"key_type": 1, "coordinator_keys": [transaction]}
            while (found := wire.request(ApiKey.FIND_COORDINATOR, 4, asked).coordinators[0]).error_code:
                pass
        with Wire(f"{found.host}:{found.port}") as wire:
            values = {"transactional_id": transaction, "transaction_timeout": 60_000}
            while (producer := wire.request(ApiKey.INIT_PRODUCER_ID, 4, values)).error_code:
                pass
            topics = [{"name": name, "partitions": [0]} for name in (closed, free)]
            asked = {
                "v3_and_below_transactional_id": transaction,
                "v3_and_below_producer_id": producer.producer_id,
                "v3_and_below_producer_epoch": producer.producer_epoch,
                "v3_and_below_topics": topics,
            }
            answer = wire.request(ApiKey.ADD_PARTITIONS_TO_TXN, 3, asked)
            codes = {
                t.name: [int(p.partition_error_code) for p in t.results_by_partition]
                for t in answer.results_by_topic_v3_and_below
            }
            assert codes == {closed: [INVALID_REQUEST], free: [OPERATION_NOT_ATTEMPTED]}
        # As a client meets it: the transaction fails, is aborted, and the next one is fine without that topic.
        client = Producer(setup.client | {"transactional.id": f"txn-{next(_numbers)}"})
        client.init_transactions(30)
        client.begin_transaction()
        client.produce(free, "lost")
        client.flush(30)  # else both are asked for at once, none is added, and librdkafka fails to abort an empty one
        client.produce(closed, "refused")
        with pytest.raises(KafkaException) as refused:
            client.commit_transaction(30)
        assert refused.value.args[0].txn_requires_abort()
        client.abort_transaction(30)
        client.begin_transaction()
        client.produce(free, "kept")
        client.commit_transaction(30)
        assert setup.end(closed) == 0


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_no_topic_is_made_by_being_asked_for(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        free = f"free-{next(_numbers)}"
        lowest, highest = schema.supported()[ApiKey.METADATA]
        with Wire(setup.proxies[2].bootstrap) as wire:
            for version in range(lowest, highest + 1):
                for names in ([f"{prefix}n"], [f"{prefix}n", f"{prefix}t", f"{free}-{version}"]):
                    values = {"topics": [{"name": name} for name in names], "allow_auto_topic_creation": True}
                    answered = {
                        t.name: int(t.error_code) for t in wire.request(ApiKey.METADATA, version, values).topics
                    }
                    assert answered.keys() == set(names)
                    assert answered[f"{prefix}n"] == UNKNOWN_TOPIC_OR_PARTITION
                    assert answered.get(f"{prefix}t", 0) == 0
                setup.described(f"{free}-{version}")
        producer = Producer(setup.client | {"message.timeout.ms": 3000})
        errors: list[KafkaError] = []
        producer.produce(f"{prefix}n", "x", on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(20) == 0
        assert errors[0].code() in (
            KafkaError._UNKNOWN_TOPIC,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._MSG_TIMED_OUT,
        )
        assert f"{prefix}n" not in setup.topics()


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_both_proxies_enforce_it_when_the_command_returns(setup: Setup) -> None:
    """Writers at both proxies hammer the topic: nothing is stored after the reservation counts as made."""
    for number in range(4):
        prefix = f"reserved-{next(_numbers)}-"
        topics = [setup.create_topic(f"{prefix}{each}", partitions=2) for each in range(2)]
        stop = threading.Event()

        def write(topic: str, partition: int, address: str, stop: threading.Event = stop) -> None:
            values = produce_values(**{topic: batch_of([b"x"])})
            values["topic_data"][0]["partition_data"][0]["index"] = partition
            with Wire(address) as wire:
                while not stop.is_set():
                    wire.request(ApiKey.PRODUCE, 9, values)

        places = [(topic, partition) for topic in topics for partition in range(2)]
        writers = [
            threading.Thread(target=write, args=(*place, setup.leader(*place).bootstrap), daemon=True)
            for place in places
        ]
        for writer in writers:
            writer.start()
        while not all(setup.end(*place) > 20 for place in places):
            pass
        reserve(setup.proxies[1 + number % 2], prefix)
        ends = {place: setup.end(*place) for place in places}
        later = {place: setup.end(*place) for place in places for _ in range(5)}
        stop.set()
        for writer in writers:
            writer.join()
        assert later == ends
        assert {place: setup.end(*place) for place in places} == ends


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_ids_of_topics_that_were_made_again(setup: Setup) -> None:
    """Produce v13 and Fetch v13 name topics by id; an id is that of one life of a topic."""

    def produce(proxy: ProxyProcess, topic_id: UUID) -> int:
        data = [{"topic_id": topic_id, "partition_data": [{"index": 0, "records": batch_of([b"x"])}]}]
        values = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": data}
        code = NOT_LEADER
        with Wire(proxy.bootstrap) as wire:
            while code == NOT_LEADER:  # the broker is told of a topic before it begins to lead it
                [answered] = wire.request(ApiKey.PRODUCE, 13, values).responses
                assert answered.topic_id == topic_id
                code = int(answered.partition_responses[0].error_code)
        return code

    def fetch(proxy: ProxyProcess, topic_id: UUID) -> int:
        partition = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0, "partition_max_bytes": 1000}
        values = {
            "replica_id": -1,
            "max_wait": 100,
            "min_bytes": 1,
            "max_bytes": 1000,
            "session_id": 0,
            "session_epoch": -1,
            "topics": [{"topic_id": topic_id, "partitions": [partition]}],
        }
        with Wire(proxy.bootstrap) as wire:
            return int(wire.request(ApiKey.FETCH, 13, values).responses[0].partitions[0].error_code)

    def fetched(topic: str, topic_id: UUID) -> None:
        while (code := fetch(setup.leader(topic), topic_id)) == NOT_LEADER:
            pass
        assert code == 0

    with reserved(setup, "t") as prefix:
        for topic, code in ((f"{prefix}t", INVALID_REQUEST), (setup.create_topic(f"free-{next(_numbers)}"), 0)):
            for _ in range(3):
                before = setup.described(topic).topic_id
                assert produce(setup.leader(topic), before) == code
                fetched(topic, before)
                setup.delete_topic(topic)
                setup.create_topic(topic)
                after = setup.described(topic).topic_id
                assert after != before
                assert produce(setup.leader(topic), after) == code
                fetched(topic, after)
                assert produce(setup.leader(topic), before) in (UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, code)
                assert setup.end(topic) == (0 if code else 1)


def test_the_proxies_own_topic_is_protected(setup: Setup) -> None:
    end = setup.end(CONTROL_TOPIC)
    errors: list[KafkaError] = []
    producer = Producer(setup.client)
    producer.produce(CONTROL_TOPIC, "x", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(30) == 0
    assert errors[0].code() == INVALID_REQUEST
    with Wire(setup.controller().bootstrap) as wire:
        deletion = {"topics": [{"name": CONTROL_TOPIC}], "timeout": 30_000}
        [deleted] = wire.request(ApiKey.DELETE_TOPICS, 6, deletion).responses
        assert deleted.error_code == POLICY_VIOLATION
        assert "an internal topic of Isthmus" in (deleted.error_message or ""), deleted.error_message
        more = {"topics": [{"name": CONTROL_TOPIC, "count": 2}], "timeout": 30_000}
        assert wire.request(ApiKey.CREATE_PARTITIONS, 3, more).results[0].error_code == POLICY_VIOLATION
    assert end <= setup.end(CONTROL_TOPIC)  # renewals of leases may have come
    assert CONTROL_TOPIC in setup.topics()


def test_the_proxies_own_topic_is_not_read_by_clients(setup: Setup) -> None:
    """Secrets of links stand in it. Consumers of every topic never hear of it, or they would run into the refusal."""
    assert CONTROL_TOPIC in setup.topics()
    assert CONTROL_TOPIC not in AdminClient(setup.client).list_topics(timeout=20).topics
    described = setup.described(CONTROL_TOPIC)
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    for version, asked in ((12, {"topic": CONTROL_TOPIC}), (13, {"topic_id": described.topic_id})):
        with Wire(setup.leader(CONTROL_TOPIC).bootstrap) as wire:
            values = {"max_wait": 100, "min_bytes": 0, "max_bytes": 1 << 20, "session_epoch": -1}
            answer = wire.request(ApiKey.FETCH, version, {**values, "topics": [{**asked, "partitions": [partition]}]})
            [read] = answer.responses[0].partitions
            assert (read.error_code, read.records) == (TOPIC_AUTHORIZATION_FAILED, b"")


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_a_reservation_waits_for_open_transactions(setup: Setup) -> None:
    """Their markers are writes: on a follower they would shift offsets."""
    prefix = f"reserved-{next(_numbers)}-"
    topic = setup.create_topic(prefix + "t")
    producer = Producer({**setup.client, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, "x")
    assert producer.flush(30) == 0
    ends: list[int] = []

    def reserve_and_look() -> None:
        reserve(setup.proxies[2], prefix)
        ends.append(setup.end(topic))

    reserving = threading.Thread(target=reserve_and_look)
    reserving.start()
    while "reservation waits for transactions" not in setup.proxies[1].log + setup.proxies[2].log:
        assert reserving.is_alive(), "the reservation did not wait"
        reserving.join(0.1)
    assert not ends
    producer.commit_transaction(30)
    reserving.join(60)
    assert ends == [setup.end(topic)] == [2]


def test_who_does_not_wait_is_told_which_proxies_are_waited_for(setup: Setup) -> None:
    prefix = f"reserved-{next(_numbers)}-"
    body = {"type": "topic", "prefix": prefix, "reserved": True, "reason": None}
    setup.proxies[2].pause()
    try:
        answer = httpx.post(
            f"{setup.proxies[1].url}/v1/namespaces", json=body, params={"wait": False}, timeout=30, trust_env=False
        )
        assert answer.status_code == 202
        assert answer.json()["state"] == "reserving"
        assert "sidecar-2" in answer.json()["waiting_for"]
    finally:
        setup.proxies[2].resume()
    deleted = httpx.delete(
        f"{setup.proxies[1].url}/v1/namespaces/topic", params={"prefix": prefix}, timeout=30, trust_env=False
    )
    assert deleted.is_success


def test_aiokafka(setup: Setup) -> None:
    async def scenario(prefix: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=setup.client["bootstrap.servers"]) as producer:
            with pytest.raises(InvalidRequestError):
                await producer.send_and_wait(f"{prefix}t", b"x")
        admin = AIOKafkaAdminClient(bootstrap_servers=setup.client["bootstrap.servers"])
        await admin.start()
        try:
            answer = await admin.create_topics([AioNewTopic(f"{prefix}n", 1, 1)])
            assert [error[1] for error in answer.topic_errors] == [PolicyViolationError.errno]
        finally:
            await admin.close()

    with reserved(setup, "t") as prefix:
        asyncio.run(scenario(prefix))


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_java(setup: Setup) -> None:
    with reserved(setup, "t") as prefix:
        topic = f"{prefix}t"

        def run(tool: str, *arguments: str, **more: Any) -> str:
            bootstrap = ("--bootstrap-server", setup.proxies[2].bootstrap)
            done = setup.kafka.tool(tool, *bootstrap, *arguments, check=False, **more)
            return done.stdout + done.stderr

        for refused in (
            run("kafka-topics", "--create", "--topic", f"{prefix}n"),
            run("kafka-topics", "--alter", "--topic", topic, "--partitions", "3"),
            run("kafka-configs", "--alter", "--topic", topic, "--add-config", "retention.ms=1"),
        ):
            assert "PolicyViolationException" in refused
            assert names_namespace(refused, prefix)
        produced = run("kafka-console-producer", "--topic", topic, stdin="x\n")
        assert "InvalidRequestException" in produced
        assert names_namespace(produced, prefix)
        transactional = setup.kafka.tool(
            "kafka-producer-perf-test",
            *("--topic", topic, "--num-records", "10", "--record-size", "10", "--throughput", "-1"),
            *("--transactional-id", "t", "--producer-props", f"bootstrap.servers={setup.proxies[2].bootstrap}"),
            check=False,
        )
        assert transactional.returncode != 0
        assert setup.end(topic) == 0
