"""The model of a partition's log (``support.partition_log``) against a real broker: the same operations, compared.

After each operation both gave the same answer, and know the same of producers, transactions and the log's limits; at
the end both logs read alike from every offset, read_committed and read_uncommitted.
"""

from __future__ import annotations

import random
import time
from typing import Final

import pytest
from support import raw_log
from support.kafka import Clusters, unique
from support.links import Side, until
from support.partition_log import Partition, batch
from support.wire import Wire

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_plugins.cluster import TransactionMarkers
from isthmus_protocol.record_equality import batch_digest
from isthmus_protocol.records import SEQUENCE_MAX, TRANSACTIONAL_BIT, walk

pytestmark = pytest.mark.brokers

SEEDS: Final = 6
STEPS: Final = 80
UNVERIFIED: Final = {"transaction.partition.verification.enable": "false"}
"""As on a link's target: the batches come with no transaction that the coordinator knows."""
IDS: Final = (-1, 7, 1 << 62 | 5 << 40 | 7, 1 << 62 | 5 << 40 | 8)


class Pair:
    """One partition of a real broker, and the model."""

    def __init__(self, wire: Wire, topic: str, seed: int) -> None:
        self.wire = wire
        self.topic = topic
        self.model = Partition(1)
        self.random = random.Random(seed)
        self.timestamp = int(time.time() * 1000)

    def produce(self) -> None:
        rng = self.random
        producer_id = rng.choice(IDS)
        values = [rng.randbytes(rng.randint(0, 20)) for _ in range(rng.randint(1, 4))]
        transactional = producer_id >= 0 and rng.random() < 0.5
        epoch = sequence = -1
        if producer_id >= 0:
            known = self.model.producers.get(producer_id)
            if known is None:
                epoch, sequence = rng.randint(0, 2), rng.choice((0, 0, 0, 5, SEQUENCE_MAX - 3))
            else:
                if known.transaction_start >= 0:
                    transactional = rng.random() < 0.95
                epoch = known.epoch + rng.choices((0, 1, -1), (90, 6, 4))[0]
                following = known.last_sequence + 1 if known.last_sequence < SEQUENCE_MAX else 0
                sequence = following if epoch == known.epoch else 0
                if rng.random() < 0.1:
                    sequence = max(0, sequence + rng.choice((-1, 1)))
                elif known.recent and rng.random() < 0.15:  # a resend, of a batch that may be known no more
                    first, last, _ = rng.choice(known.recent)
                    sequence, values = first, values[:1] * ((last - first) % (SEQUENCE_MAX + 1) + 1)
                epoch = max(epoch, 0)
        data = batch(
            0,
            values,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=rng.randint(0, 4) | (TRANSACTIONAL_BIT if transactional else 0),
            timestamp=self.timestamp,
        )
        acks = 1 if self.model.end % 2 else -1
        answer = raw_log.produce(self.wire, self.topic, data, transactional=transactional, acks=acks)
        assert answer == self.model.produce(data)

    def mark(self) -> None:
        rng = self.random
        known = self.model.producers.get(producer_id := rng.choice(IDS[1:]))
        epoch = 0 if known is None else max(0, known.epoch + rng.choices((0, 1, -1), (80, 12, 8))[0])
        coordinator_epoch = 3 if known is None else max(0, known.coordinator_epoch + rng.choice((0, 0, 0, 1, -1)))
        marker = TransactionMarkers(self.topic, 0, producer_id, epoch, rng.random() < 0.5, coordinator_epoch)
        assert raw_log.write_markers(self.wire, [marker]) == [self.model.mark(marker)]

    def delete(self) -> None:
        rng = self.random
        before = rng.choice((rng.randint(self.model.start, self.model.end + 1), self.model.start, -1))
        if rng.random() < 0.3:
            assert raw_log.delete_records(self.wire, self.topic, before) == self.model.delete_records(before)

    def step(self) -> None:
        self.random.choices((self.produce, self.mark, self.delete), (75, 20, 5))[0]()
        self.compare()

    def compare(self) -> None:
        model = self.model
        found = raw_log.fetch(self.wire, self.topic, model.end)
        # Where the start of an open transaction was deleted, versions differ in whether the offset tells it.
        stable = max(found.log_start_offset, found.last_stable_offset)
        assert (found.log_start_offset, found.high_watermark, stable) == (
            model.start,
            model.high_watermark,
            model.last_stable_offset,
        )
        theirs = raw_log.producers(self.wire, self.topic)
        assert theirs == {
            producer_id: (known.epoch, known.last_sequence, known.coordinator_epoch, known.transaction_start)
            for producer_id, known in model.producers.items()
        }

    def compare_logs(self) -> None:
        model = self.model
        for offset in range(model.start, model.end + 1):
            for committed in (False, True):
                found = raw_log.fetch(self.wire, self.topic, offset, committed=committed)
                theirs = bytes(found.records or b"")
                end = model.last_stable_offset if committed else model.high_watermark
                ours = model.read(offset, raw_log.FETCH_BYTES, end)
                assert digests(theirs) == digests(ours)
                if committed:
                    aborted = [(each.producer_id, each.first_offset) for each in found.aborted_transactions or ()]
                    assert sorted(aborted) == sorted(model.aborted_from(offset) if ours else ())


def digests(records: bytes) -> list[tuple[int, bytes]]:
    return [(header.base_offset, batch_digest(records[start:end], 0)) for start, end, header in walk(records)]


@pytest.fixture(scope="module", params=["3.9.2", DEFAULT_VERSION])
def broker(request: pytest.FixtureRequest, shared_kafka: Clusters) -> KafkaCluster:
    """One that takes transactional batches of transactions that it does not know, as a link's target does."""
    return shared_kafka(role="unverified", version=request.param, settings=UNVERIFIED)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_model_answers_as_a_broker_does(broker: KafkaCluster, seed: int) -> None:
    topic = unique("model-")
    Side(broker, []).create_topic(topic, direct=True)
    with Wire(broker.bootstrap_servers) as wire:
        until("the leader is there", lambda: raw_log.fetch(wire, topic, 0).error_code == 0)
        pair = Pair(wire, topic, seed)
        for step in range(STEPS):
            try:
                pair.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}") from error
        pair.compare_logs()


MESSAGE_TOO_LARGE, OUT_OF_ORDER = 10, 45


def test_what_goes_on_a_refused_batch_is_refused(broker: KafkaCluster) -> None:
    """What bursts build on (docs/adr/0001): of a producer that the partition knows, nothing overtakes."""
    topic = unique("burst-")
    Side(broker, []).create_topic(topic, config={"max.message.bytes": "1000"}, direct=True)
    with Wire(broker.bootstrap_servers) as wire:
        until("the leader is there", lambda: raw_log.fetch(wire, topic, 0).error_code == 0)

        def append(sequence: int, size: int = 1) -> tuple[int, int]:
            data = batch(0, [b"x" * size], producer_id=IDS[2], producer_epoch=0, base_sequence=sequence)
            return raw_log.produce(wire, topic, data, acks=1)

        assert [append(0), append(1)] == [(0, 0), (0, 1)]
        assert append(2, size=2000) == (MESSAGE_TOO_LARGE, -1)
        assert [append(3), append(4)] == [(OUT_OF_ORDER, -1)] * 2
        assert [append(2), append(3)] == [(0, 2), (0, 3)]
