"""The transaction log as real coordinators write it, of old and new versions and clients."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from support.kafka import Clusters, unique
from support.raw_log import read_log
from support.wire import Wire

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_protocol.record_codec import Marker, decode_control
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import (
    TRANSACTION_TOPIC,
    Change,
    Transaction,
    TransactionLog,
    TransactionState,
    partition_of,
)

pytestmark = pytest.mark.brokers

PARTITIONS = 4


@pytest.fixture(scope="module", params=["3.9.2", DEFAULT_VERSION])
def coordinator(request: pytest.FixtureRequest, shared_kafka: Clusters) -> KafkaCluster:
    return shared_kafka() if request.param == DEFAULT_VERSION else shared_kafka(version=request.param)


def history(wire: Wire, transactional_id: str, partitions: int) -> list[Transaction]:
    log = TransactionLog()
    changes: list[Change] = []
    for header, data in read_log(wire, TRANSACTION_TOPIC, partition_of(transactional_id, partitions)):
        changes += log.take(data, header)
    assert not log.unknown
    assert not log.unreadable
    return [each.transaction for each in changes if each.transactional_id == transactional_id and each.transaction]


def transaction_partitions(wire: Wire) -> int:
    asked = {"topics": [{"name": TRANSACTION_TOPIC}], "allow_auto_topic_creation": False}
    return len(wire.request(ApiKey.METADATA, 8, asked).topics[0].partitions)


def test_decisions_stand_in_it(coordinator: KafkaCluster) -> None:
    topic = unique("topic-")
    address = coordinator.bootstrap_servers
    create = "--create", "--topic", topic, "--partitions", "2"
    coordinator.tool("kafka-topics", "--bootstrap-server", address, *create)
    old, new = unique("librdkafka-"), unique("java-")
    producer = Producer({"bootstrap.servers": address, "transactional.id": old})
    producer.init_transactions(30)
    for commits in (True, False):
        producer.begin_transaction()
        for partition in range(2):
            producer.produce(topic, b"x", partition=partition)
        if commits:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)
    coordinator.tool(
        "kafka-producer-perf-test",
        *("--topic", topic, "--num-records", "1", "--record-size", "10", "--throughput", "-1"),
        *("--transactional-id", new, "--transaction-duration-ms", "50"),
        *("--producer-props", f"bootstrap.servers={address}"),
    )
    with Wire(address) as wire:
        partitions = transaction_partitions(wire)
        told = {name: history(wire, name, partitions) for name in (old, new)}
        logs = [read_log(wire, topic, partition) for partition in range(2)]
    decided = [
        each for each in told[old] if each.state in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
    ]
    assert [each.state for each in decided] == [TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT]
    assert all(sorted(each.partitions) == [(topic, 0), (topic, 1)] for each in decided)
    assert {TransactionState.ONGOING, TransactionState.COMPLETE_COMMIT} <= {each.state for each in told[old]}
    (commit,) = (each for each in told[new] if each.state is TransactionState.PREPARE_COMMIT)
    for decision, number in ((decided[0], 0), (decided[1], 1), (commit, 0)):
        for index in {partition for _, partition in decision.partitions}:
            mine = [batch for batch in logs[index] if batch.header.producer_id == decision.producer_id]
            data = [batch for batch in mine if not batch.header.is_control]
            markers = [decode_control(batch.data) for batch in mine if batch.header.is_control]
            assert data[number].header.producer_epoch == decision.data_epoch
            assert markers[number].producer_epoch == decision.producer_epoch
            committed = decision.state is TransactionState.PREPARE_COMMIT
            assert markers[number].marker is (Marker.COMMIT if committed else Marker.ABORT)
    if coordinator.version >= "4":  # what epochs it gives its clients, and whether it tells, is the version's
        assert commit.producer_epoch == commit.data_epoch + 1
