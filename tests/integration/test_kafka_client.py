"""The Kafka client against real brokers: every convenience, each kind of security, brokers that go and come back."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.kafka import NOW_MS, Clusters, unique

from isthmus.kafka.client import (
    EARLIEST,
    LATEST,
    LOG_END,
    MAX_TIMESTAMP,
    AuthenticationFailed,
    BrokerConnection,
    ClusterClient,
    ConnectionLost,
    FetchFrom,
    KafkaError,
    NewTopic,
    ResourceType,
    SecuritySpec,
    TopicPartition,
    decode_fetch,
)
from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol import schema
from isthmus_protocol.messages import build_request, decode_response, encode_request, parse_request_head
from isthmus_protocol.records import verify_crc, walk
from isthmus_protocol.refusals import Refusal, refuse, refuse_all
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers


def run(test: Callable[[], Awaitable[None]], seconds: float = 120) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test()

    # The proxy's own loop; the unit tests run on asyncio's as well.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def in_cluster(kafka: KafkaCluster, test: Callable[[ClusterClient], Awaitable[None]]) -> None:
    async def started() -> None:
        async with ClusterClient(kafka.bootstrap_servers.split(",")) as cluster:
            await test(cluster)

    run(started)


def batch_of(values: list[bytes], *, timestamp_ms: int = NOW_MS, producer_id: int = -1, sequence: int = -1) -> bytes:
    """A plain record batch with base offset 0, written here by the format's definition (KIP-98)."""
    import crc32c

    def varint(number: int) -> bytes:
        encoded = (number << 1) ^ (number >> 63)
        out = bytearray()
        while encoded > 0x7F:
            out.append(encoded & 0x7F | 0x80)
            encoded >>= 7
        out.append(encoded)
        return bytes(out)

    records = b""
    for index, value in enumerate(values):
        body = b"\x00" + varint(0) + varint(index) + varint(-1) + varint(len(value)) + value + varint(0)
        records += varint(len(body)) + body
    last = len(values) - 1
    epoch = 0 if producer_id >= 0 else -1
    checked = struct.pack(">hiqqqhii", 0, last, timestamp_ms, timestamp_ms, producer_id, epoch, sequence, len(values))
    checked += records
    crc = crc32c.crc32c(checked)
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc) + checked


async def new_topic(cluster: ClusterClient, partitions: int = 1, **configs: str) -> str:
    """A topic whose leaders are ready for what is not repeated (Produce)."""
    name = unique("client-")
    settings = {key.replace("_", "."): value for key, value in configs.items()}
    created = await cluster.create_topics([NewTopic(name, partitions, -1, settings)])
    assert created[name].error is None
    await cluster.list_offsets({TopicPartition(name, partition): LATEST for partition in range(partitions)})
    return name


def test_topics_from_creation_to_deletion(kafka_of_each_version: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        assert cluster.cluster_id == kafka_of_each_version.cluster_id
        name, second = unique("client-"), unique("client-")
        created = await cluster.create_topics(
            [NewTopic(name, 2, 1, {"retention.ms": "1234567"}), NewTopic(second), NewTopic("not a name")]
        )
        assert created[name].error is None
        assert (created[name].partitions, created[name].replication_factor) == (2, 1)
        assert created["not a name"].error is not None
        assert created["not a name"].error.name == "INVALID_TOPIC_EXCEPTION"
        again = await cluster.create_topics([NewTopic(name)])
        assert again[name].error is not None
        assert again[name].error.code == 36
        leader = await cluster.request_leader(name, 1, lambda connection, info: _result(info))
        assert leader.leader in cluster.brokers
        assert cluster.topics[name].topic_id == created[name].topic_id
        grown = await cluster.create_partitions({name: 5, second: 0})
        assert grown[name] is None
        assert grown[second] is not None
        assert grown[second].name == "INVALID_PARTITIONS"
        await cluster.retrying(lambda: _leaders(cluster, name, 5), topics=[name])
        deleted = await cluster.delete_topics([name, second, "no-such-topic"])
        assert deleted[name] is None
        assert deleted["no-such-topic"] is not None
        assert deleted["no-such-topic"].code == 3

    in_cluster(kafka_of_each_version, test)


async def _result(value: Any) -> Any:
    return value


async def _leaders(cluster: ClusterClient, name: str, partitions: int) -> None:
    for partition in range(partitions):
        await cluster.leader(name, partition)


def test_configurations(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        name = await new_topic(cluster, retention_ms="1234567", segment_bytes="2000000")
        described = await cluster.describe_configs(ResourceType.TOPIC, [name, "no-such-topic"])
        entry = described[name].entries["retention.ms"]
        assert (entry.value, entry.source, entry.is_default) == ("1234567", 1, False)
        synonyms = described[name].entries["segment.bytes"].synonyms
        assert (synonyms[0].source, synonyms[0].value) == (1, "2000000")
        assert (synonyms[-1].source, synonyms[-1].value) == (5, "1073741824")
        assert described[name].entries["cleanup.policy"].is_default
        assert described["no-such-topic"].error is not None
        changes = {"retention.ms": None, "max.message.bytes": "2000"}
        await cluster.incremental_alter_configs(ResourceType.TOPIC, name, changes, validate_only=True)
        await cluster.incremental_alter_configs(ResourceType.TOPIC, name, changes)
        keys = ["retention.ms", "max.message.bytes"]

        async def altered() -> None:
            found = (await cluster.describe_configs(ResourceType.TOPIC, [name], keys))[name].entries
            assert set(found) == set(keys)
            if found["max.message.bytes"].value != "2000":
                raise KafkaError(41)  # another broker's metadata lags behind
            assert found["retention.ms"].is_default

        await cluster.retrying(altered)
        with pytest.raises(KafkaError, match="INVALID_CONFIG"):
            await cluster.incremental_alter_configs(ResourceType.TOPIC, name, {"retention.ms": "soon"})
        node = next(iter(cluster.brokers))
        brokers = await cluster.describe_configs(ResourceType.BROKER, [str(node), ""], ["node.id"])
        assert brokers[str(node)].entries["node.id"].value == str(node)
        key = "transaction.partition.verification.enable"
        await cluster.incremental_alter_configs(ResourceType.BROKER, "", {key: "false"}, validate_only=True)

    in_cluster(kafka, test)


def test_records_go_in_and_come_out(kafka_of_each_version: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        name = await new_topic(cluster, 2)
        first, second = TopicPartition(name, 0), TopicPartition(name, 1)
        produced = await cluster.produce_raw({first: batch_of([b"a", b"b", b"c"]), second: batch_of([b"d"])})
        assert [(result.base_offset, result.error) for result in produced.values()] == [(0, None)] * 2
        produced = await cluster.produce_raw({first: batch_of([b"e"], timestamp_ms=NOW_MS + 500)}, at_most=13)
        assert (produced[first].base_offset, produced[first].log_append_time_ms) == (3, -1)
        broken = bytearray(batch_of([b"x"]))
        broken[-1] ^= 1
        refused = await cluster.produce_raw({second: broken})
        assert refused[second].error is not None
        assert refused[second].error.name == "CORRUPT_MESSAGE"

        fetched = await cluster.fetch(name, 0, 0)
        assert (fetched.high_watermark, fetched.last_stable_offset, fetched.log_start_offset) == (4, 4, 0)
        headers = []
        for start, end, header in walk(fetched.records):
            verify_crc(fetched.records[start:end])
            headers.append((header.base_offset, header.record_count))
        assert headers == [(0, 3), (3, 1)]
        (node,) = cluster.brokers
        for version in range(4, 19):
            broker = await cluster.to(node, "fetch")
            if version > broker.version(ApiKey.FETCH):
                continue
            raw = await cluster.fetch_raw(node, [FetchFrom(name, 0, 0), FetchFrom(name, 1, 0)], at_most=version)
            assert raw.version == version
            assert [len(part.records) > 0 for part in decode_fetch(raw).values()] == [True, True]
        beyond = await cluster.fetch(name, 0, 99)
        assert beyond.error is not None
        assert beyond.error.name == "OFFSET_OUT_OF_RANGE"

        async def listed(timestamp: int, **options: int) -> int:
            return (await cluster.list_offsets({first: timestamp}, **options))[first].offset

        assert await listed(EARLIEST) == 0
        assert await listed(LATEST) == await listed(LATEST, isolation=1) == await listed(LATEST, isolation=LOG_END) == 4
        assert await listed(NOW_MS + 1) == 3
        assert await listed(MAX_TIMESTAMP) == 3
        assert await listed(NOW_MS + 501) == -1

        deleted = await cluster.delete_records({first: 2, second: -1})
        assert {key: (value.low_watermark, value.error) for key, value in deleted.items()} == {
            first: (2, None),
            second: (1, None),
        }
        assert await listed(EARLIEST) == 2

    in_cluster(kafka_of_each_version, test)


def test_a_topic_that_does_not_exist_is_given_up_and_not_created(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        missing = TopicPartition(unique("missing-"), 0)
        listed = await cluster.list_offsets({missing: LATEST}, deadline_s=0.5)
        assert listed[missing].error is not None
        assert listed[missing].error.code == 3
        assert missing.topic not in await cluster.refresh()

    in_cluster(kafka, test)


def test_producers(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        identity = await cluster.init_producer_id()
        assert identity.producer_id >= 0
        assert identity.producer_epoch == 0
        name = await new_topic(cluster)
        one = TopicPartition(name, 0)
        batch = batch_of([b"a", b"b"], producer_id=identity.producer_id, sequence=0)
        for _ in range(2):  # the second one is a duplicate, acked with the first one's offset
            produced = await cluster.produce_raw({one: batch})
            assert (produced[one].base_offset, produced[one].error) == (0, None)
        (state,) = (await cluster.describe_producers([one]))[one].states
        assert (state.producer_id, state.producer_epoch, state.last_sequence) == (identity.producer_id, 0, 1)
        assert (state.last_timestamp_ms, state.current_txn_start_offset) == (NOW_MS, -1)
        transactional = unique("tx-")
        first = await cluster.init_producer_id(transactional)
        second = await cluster.init_producer_id(transactional)
        assert second.producer_id == first.producer_id
        assert second.producer_epoch == first.producer_epoch + 1
        assert await cluster.coordinator(unique("group-")) in cluster.brokers
        described = await cluster.describe_cluster()
        assert described.cluster_id == kafka.cluster_id
        assert set(described.brokers) == set(cluster.brokers)

    in_cluster(kafka, test)


def test_every_version_of_the_client_facing_apis_can_be_negotiated(kafka_of_each_version: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        connection = await cluster.any()
        shared = [key for key in schema.supported() if key in connection.versions]
        assert len(shared) > 50
        for key in shared:
            connection.version(key)
        metadata_versions = range(connection.versions[ApiKey.METADATA][0], connection.version(ApiKey.METADATA) + 1)
        for version in metadata_versions:
            answer = await connection.call(ApiKey.METADATA, {"topics": []}, at_most=version)
            assert answer.__version__ == version
            assert answer.brokers

    in_cluster(kafka_of_each_version, test)


# --- Refused parts: what remains is served by a real broker, and the merged answer has everything ---


def test_a_merged_answer_of_a_real_broker(kafka: KafkaCluster) -> None:
    names = [unique("refused-"), unique("granted-"), unique("refused-"), unique("granted-")]

    async def test(cluster: ClusterClient) -> None:
        connection = await cluster.any()
        low, high = connection.versions[ApiKey.CREATE_TOPICS]
        for version in range(low, high + 1):
            values = {
                "topics": [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in names],
                "timeout": 30_000,
                "validate_only": version < high and version > 0,
            }
            request = build_request(ApiKey.CREATE_TOPICS, version, values)
            head = parse_request_head(encode_request(request, 7, None))
            refused = refuse(head, request, lambda part: Refusal(44) if part.topic in names[::2] else None)
            assert refused is not None
            assert refused.remaining is not None
            answer: Any = refused.merge(await connection.request(refused.remaining))
            assert [(topic.name, int(topic.error_code)) for topic in answer.topics] == [
                (names[0], 44),
                (names[1], 0),
                (names[2], 44),
                (names[3], 0),
            ]

    in_cluster(kafka, test)


def test_metadata_of_refused_topics_has_the_brokers_brokers(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        existing = await new_topic(cluster)
        connection = await cluster.any()
        for version in range(connection.versions[ApiKey.METADATA][0], connection.version(ApiKey.METADATA) + 1):
            request = build_request(ApiKey.METADATA, version, {"topics": [{"name": "refused"}, {"name": existing}]})
            head = parse_request_head(encode_request(request, 7, None))
            refused = refuse(head, request, lambda part: Refusal(17) if part.topic == "refused" else None)
            assert refused is not None
            answer: Any = refused.merge(await connection.request(refused.remaining))  # type: ignore[arg-type]
            assert [(topic.name, int(topic.error_code)) for topic in answer.topics] == [("refused", 17), (existing, 0)]
            everything = refuse_all(head, request, Refusal(17))
            assert everything is not None
            answer = everything.merge(await connection.request(everything.remaining))  # type: ignore[arg-type]
            assert [int(topic.error_code) for topic in answer.topics] == [17, 17]
            assert answer.brokers
        assert "refused" not in await cluster.refresh()

    in_cluster(kafka, test)


# --- Security ---


def spec_of(kafka: KafkaCluster, tmp_path: Path, listener: str, mechanism: str | None, **values: Any) -> SecuritySpec:
    password = tmp_path / "password"
    password.write_text(values.pop("password", "admin-secret"))
    tls = {"ssl_cafile": kafka.authority.ca_file} if listener.endswith("SSL") else {}
    sasl = {"sasl_mechanism": mechanism, "username": values.pop("username", "admin"), "password_file": password}
    return SecuritySpec.model_validate({"security_protocol": listener, **tls, **(sasl if mechanism else {}), **values})


MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


@pytest.mark.parametrize("listener", ["SASL_SSL", "SASL_PLAINTEXT"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_sasl(secured_kafka: KafkaCluster, tmp_path: Path, listener: Any, mechanism: str) -> None:
    async def test() -> None:
        security = spec_of(secured_kafka, tmp_path, listener, mechanism)
        async with ClusterClient(secured_kafka.bootstrap(listener).split(","), security) as cluster:
            await new_topic(cluster)
        # The password is read when it is needed: a wrong one now fails the next connection.
        (tmp_path / "password").write_text("guess")
        with pytest.raises(AuthenticationFailed) as caught:
            async with ClusterClient(secured_kafka.bootstrap(listener).split(","), security):
                pass
        assert "guess" not in str(caught.value)

    run(test)


def test_another_user_may_do_less(secured_kafka: KafkaCluster, tmp_path: Path) -> None:
    async def test() -> None:
        security = spec_of(
            secured_kafka, tmp_path, "SASL_SSL", "SCRAM-SHA-512", username="alice", password="alice-secret"
        )
        async with ClusterClient(secured_kafka.bootstrap("SASL_SSL").split(","), security) as cluster:
            name = unique("client-")
            created = await cluster.create_topics([NewTopic(name)])
            assert created[name].error is not None
            assert created[name].error.name == "TOPIC_AUTHORIZATION_FAILED"

    run(test)


def test_client_certificates(secured_kafka: KafkaCluster, tmp_path: Path) -> None:
    async def test() -> None:
        bootstrap = secured_kafka.bootstrap("SSL").split(",")
        pem = secured_kafka.authority.issue(unique("client"))
        mine = {"ssl_certfile": pem.with_suffix(".crt"), "ssl_keyfile": pem.with_suffix(".key")}
        async with ClusterClient(bootstrap, spec_of(secured_kafka, tmp_path, "SSL", None, **mine)) as cluster:
            assert cluster.cluster_id == secured_kafka.cluster_id
        with pytest.raises(ConnectionLost):
            async with ClusterClient(bootstrap, spec_of(secured_kafka, tmp_path, "SSL", None)):
                pass

    run(test)


def test_a_broker_that_cannot_prove_who_it_is(secured_kafka: KafkaCluster, tmp_path: Path) -> None:
    async def test() -> None:
        bootstrap = secured_kafka.bootstrap("SASL_SSL").split(",")
        of_system = SecuritySpec.model_validate(
            {**spec_of(secured_kafka, tmp_path, "SASL_SSL", "PLAIN").model_dump(), "ssl_cafile": None}
        )
        with pytest.raises(ConnectionLost, match="certificate verify failed"):
            async with ClusterClient(bootstrap, of_system):
                pass

    run(test)


def test_plain_text_to_a_tls_listener(secured_kafka: KafkaCluster) -> None:
    async def test() -> None:
        ((host, port),) = secured_kafka.addresses("SASL_SSL").values()
        with pytest.raises(ConnectionLost):
            await BrokerConnection.connect(host, port, timeout=5)

    run(test)


# --- Brokers that go and come back ---


def test_a_killed_leader_is_replaced(kafka_cluster: Clusters) -> None:
    kafka = kafka_cluster(brokers=3)

    async def test(cluster: ClusterClient) -> None:
        name = unique("client-")
        created = await cluster.create_topics([NewTopic(name, 1, 3, {"min.insync.replicas": "1"})])
        assert created[name].error is None
        one = TopicPartition(name, 0)
        await cluster.list_offsets({one: LATEST})
        produced = await cluster.produce_raw({one: batch_of([b"a"])})
        assert produced[one].error is None
        old = await cluster.leader(name, 0)
        connection = await cluster.to(old.leader)
        lost: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
        connection.on_lost = lost.set_result
        await asyncio.to_thread(kafka.kill, old.leader)
        await lost
        started = time.monotonic()
        listed = await cluster.list_offsets({one: LATEST}, deadline_s=60)
        assert listed[one].offset == 1
        now = await cluster.leader(name, 0)
        assert now.leader != old.leader
        assert now.leader_epoch > old.leader_epoch
        assert time.monotonic() - started < 40
        produced = await cluster.produce_raw({one: batch_of([b"b"])})
        assert produced[one].base_offset == 1
        await asyncio.to_thread(kafka.start_broker, old.leader)
        assert (await cluster.fetch(name, 0, 0)).high_watermark == 2

    in_cluster(kafka, test)


def test_a_paused_broker_times_out(kafka_cluster: Clusters) -> None:
    kafka = kafka_cluster()

    async def test() -> None:
        async with ClusterClient(kafka.bootstrap_servers.split(","), request_timeout_s=1) as cluster:
            connection = await cluster.any()
            await asyncio.to_thread(kafka.pause, kafka.broker_ids[0])
            try:
                with pytest.raises(Exception, match="no answer within 1 s"):
                    await cluster.refresh()
                assert not connection.is_open
            finally:
                await asyncio.to_thread(kafka.resume, kafka.broker_ids[0])
            await cluster.retrying(cluster.refresh)

    run(test)


def test_large_answers(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        name = await new_topic(cluster, max_message_bytes="10000000")
        one = TopicPartition(name, 0)
        for index in range(4):
            batch = batch_of([bytes([index]) * 900_000] * 5)
            produced = await cluster.produce_raw({one: batch})
            assert produced[one].base_offset == index * 5
        fetched = await cluster.fetch(name, 0, 0, bytes_max=50_000_000)
        assert [header.record_count for _, _, header in walk(fetched.records)] == [5] * 4
        for start, end, _ in walk(fetched.records):
            verify_crc(fetched.records[start:end])

    in_cluster(kafka, test)


def test_a_request_frame_can_be_sent_as_it_is(kafka: KafkaCluster) -> None:
    async def test(cluster: ClusterClient) -> None:
        connection = await cluster.any()
        frame = await connection.send_body(ApiKey.METADATA, 12, [b"\x00\x00\x00\x00"])
        _, answer = decode_response(ApiKey.METADATA, 12, frame)
        assert answer.cluster_id == kafka.cluster_id  # type: ignore[attr-defined]

    in_cluster(kafka, test)
