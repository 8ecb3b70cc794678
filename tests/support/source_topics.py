"""Topics with every kind of log that a link has to copy, written by real producers to a real broker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.records import TRANSACTIONAL_BIT
from isthmus_protocol.schema import ApiKey
from support import raw_log
from support.equality import was_cleaned
from support.kafka import unique
from support.links import Side, until
from support.partition_log import batch
from support.wire import Wire

KEYS: Final = 7
"""Keys of records: few, so that compaction finds much to take out."""
CLEANED_OFTEN: Final = {
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "50",
    "min.compaction.lag.ms": "0",
}
NEVER: Final = str(2**62)
OPEN_MS_MAX: Final = 900_000
"""Transactions stay open while hundreds of topics are made: as long as brokers allow."""


@dataclass
class SourceTopic:
    """One topic of one partition. ``writers``: plain, idempotent, committed, aborted, open, interleaved, kip890."""

    side: Side
    name: str
    writers: str
    compression: str = "none"
    cleanup: str = "delete"
    append_time: bool = False
    head: bool = False
    """Whether the log is to start above 0, wherever that falls."""
    open: list[Producer] = field(default_factory=list)
    """Producers whose transactions are still open."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def compacted(self) -> bool:
        return "compact" in self.cleanup

    @property
    def transactional(self) -> bool:
        return self.writers not in ("plain", "idempotent")

    def make(self) -> None:
        """Create the topic and write to it; where it is compacted, until the cleaner comes."""
        config = {"message.timestamp.type": "LogAppendTime" if self.append_time else "CreateTime"}
        if self.compacted:
            config |= CLEANED_OFTEN
        # Brokers refuse DeleteRecords where the policy is compact alone.
        config["cleanup.policy"] = "delete" if self.head else self.cleanup
        self.side.create_topic(self.name, config=config, direct=True)
        write = getattr(self, f"_{self.writers}")
        if self.compacted and self.writers == "open":
            self._committed()  # the cleaner stops at the first open transaction: something has to stand before it
        else:
            write()
        if self.head:
            self._delete_head()
            if self.compacted:
                self.alter({"cleanup.policy": self.cleanup})
        if self.compacted:
            write()

    def wait_cleaned(self) -> None:
        """Wait for the cleaner; it will not come again."""
        with Wire(self.side.kafka.bootstrap_servers) as wire:
            # The active segment is never cleaned: a record rolls it when its time has passed.
            def cleaned() -> bool:
                log = raw_log.read_log(wire, self.name)
                if was_cleaned(log):
                    return True
                self._plain(1)
                return False

            until(f"{self.name} is cleaned", cleaned, 40, 0.5)
        self.alter({"min.compaction.lag.ms": NEVER, "max.compaction.lag.ms": NEVER, "min.cleanable.dirty.ratio": "1"})

    def alter(self, configs: dict[str, str]) -> None:
        alter_topic(self.side, self.name, configs)

    def more(self) -> None:
        """Write a little more, while it is copied."""
        if self.transactional:
            self._committed(3)
        self._plain(3)

    def end_open(self, commit: bool) -> None:
        """End the transactions that are open."""
        while self.open:
            producer = self.open.pop()
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)

    def _delete_head(self) -> None:
        with Wire(self.side.kafka.bootstrap_servers) as wire:
            log = raw_log.read_log(wire, self.name)
            # In the middle: of a batch and of a transaction, as it comes.
            before = log.high_watermark // 3
            assert raw_log.delete_records(wire, self.name, before) == (0, before)

    # ---- writers ----

    def _producer(self, transactional: bool = False, **more: Any) -> Producer:
        settings = {"compression_type": self.compression, "batch_num_messages": 5, "linger_ms": 1, **more}
        if transactional:
            settings |= {"transactional_id": unique("tx-"), "transaction_timeout_ms": OPEN_MS_MAX}
            producer = self.side.producer(direct=True, **settings)
            producer.init_transactions(30)
            return producer
        return self.side.producer(direct=True, **settings)

    def _records(self, producer: Producer, count: int, flush: bool = True) -> None:
        for number in itertools.islice(self._numbers, count):
            producer.produce(
                self.name,
                key=b"key-%d" % (number % KEYS),
                value=None if number % 11 == 5 else b"value %d " % number * (number % 4),
                headers=[("h", b"\x00\xff"), ("n", None)] if number % 3 == 0 else None,
            )
        if flush:
            assert producer.flush(30) == 0

    def _plain(self, count: int = 23) -> None:
        self._records(self._producer(enable_idempotence=False, acks="all"), count)

    def _idempotent(self, count: int = 23) -> None:
        self._records(self._producer(enable_idempotence=True), count)

    def _transactions(self, outcomes: str, count: int) -> None:
        """One producer, a transaction for each letter: (c)ommitted, (a)borted, (o)pen, the last one."""
        producer = self._producer(transactional=True)
        for outcome in outcomes:
            producer.begin_transaction()
            self._records(producer, count)
            if outcome == "c":
                producer.commit_transaction(30)
            elif outcome == "a":
                producer.abort_transaction(30)
            else:
                self.open.append(producer)

    def _committed(self, count: int = 9) -> None:
        self._transactions("cc", count)

    def _aborted(self, count: int = 9) -> None:
        self._transactions("cac", count)

    def _open(self, count: int = 9) -> None:
        self._transactions("co", count)

    def _interleaved(self, count: int = 4) -> None:
        """Three transactions and a plain producer, batch by batch; one commits, two abort."""
        producers = [self._producer(transactional=True) for _ in range(3)]
        plain = self._producer(enable_idempotence=True)
        for producer in producers:
            producer.begin_transaction()
        for _ in range(3):
            for producer in (*producers, plain):
                self._records(producer, count)
        producers[0].abort_transaction(30)
        self._records(plain, count)
        producers[1].commit_transaction(30)
        self._records(producers[2], count)
        producers[2].abort_transaction(30)
        self._records(plain, count)

    def _kip890(self, count: int = 5) -> None:
        """A client of KIP-890 part 2, whose epoch rises with each transaction; before 4.0, one of before."""
        with TransactionClient(self.side.kafka) as client:
            for commit in (True, False, True, True):
                numbers = list(itertools.islice(self._numbers, count))
                for half in (numbers[:2], numbers[2:]):
                    client.produce(self.name, [b"key-%d" % (number % KEYS) for number in half])
                client.end(commit)


def alter_topic(side: Side, topic: str, configs: dict[str, str]) -> None:
    """Set settings of a topic past the proxy."""
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in configs.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    side.admin(direct=True).incremental_alter_configs([resource])[resource].result(30)


class TransactionClient:
    """A transactional producer that speaks the newest protocol of its broker, request by request."""

    def __init__(self, kafka: KafkaCluster) -> None:
        self._second = int(kafka.version.split(".")[0]) >= 4
        """Whether the broker serves KIP-890 part 2."""
        self._id = unique("tx-")
        self._wire = Wire(kafka.bootstrap_servers)
        self._sequence = 0
        self._added: set[str] = set()
        self._producer_id, self._epoch = -1, -1

    def __enter__(self) -> TransactionClient:
        until("the coordinator is there", self._init)
        return self

    def __exit__(self, *error: object) -> None:
        self._wire.close()

    def _init(self) -> bool:
        found = self._wire.request(ApiKey.FIND_COORDINATOR, 3, {"key": self._id, "key_type": 1})
        answer = self._wire.request(
            ApiKey.INIT_PRODUCER_ID,
            4,
            {"transactional_id": self._id, "transaction_timeout": OPEN_MS_MAX, "producer_id": -1, "producer_epoch": -1},
        )
        self._producer_id, self._epoch = int(answer.producer_id), int(answer.producer_epoch)
        return not found.error_code and not answer.error_code

    def produce(self, topic: str, values: list[bytes]) -> None:
        if not self._second and topic not in self._added:
            until("the partition is added", lambda: self._add(topic))
            self._added.add(topic)
        data = batch(
            0,
            values,
            keys=values,
            attributes=TRANSACTIONAL_BIT,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=self._sequence,
            timestamp=int(time.time() * 1000),
        )
        until("the batch is taken", lambda: self._produce(topic, data))
        self._sequence += len(values)

    def _add(self, topic: str) -> bool:
        answer = self._wire.request(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            3,
            {
                "v3_and_below_transactional_id": self._id,
                "v3_and_below_producer_id": self._producer_id,
                "v3_and_below_producer_epoch": self._epoch,
                "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
            },
        )
        return not answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

    def _produce(self, topic: str, data: bytes) -> bool:
        answer = self._wire.request(
            ApiKey.PRODUCE,
            12 if self._second else 11,
            {
                "transactional_id": self._id,
                "acks": -1,
                "timeout": 10_000,
                "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": data}]}],
            },
        )
        code = int(answer.responses[0].partition_responses[0].error_code)
        assert code in (0, 3, 6, 7, 19, 51), code  # CONCURRENT_TRANSACTIONS: the last one's markers are on their way
        return code == 0

    def end(self, commit: bool) -> None:
        until("the transaction ends", lambda: self._end(commit))
        self._added.clear()

    def _end(self, commit: bool) -> bool:
        answer = self._wire.request(
            ApiKey.END_TXN,
            5 if self._second else 3,
            {
                "transactional_id": self._id,
                "producer_id": self._producer_id,
                "producer_epoch": self._epoch,
                "committed": commit,
            },
        )
        if answer.error_code:
            return False
        if self._second:
            self._producer_id, self._epoch = int(answer.producer_id), int(answer.producer_epoch)
            self._sequence = 0
        return True
