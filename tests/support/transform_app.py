"""A consume-transform-produce application, to be run as a process and killed: exactly once, with transactions.

``python transform_app.py BOOTSTRAP GROUP INPUT OUTPUT TRANSACTIONAL_ID``. Each input record becomes one output record,
with the input's partition and offset in its key. It ends with an error for whatever it cannot go on after, as such
applications do, and is then started again.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

BATCH_RECORDS = 7


def run(bootstrap: str, group: str, source: str, sink: str, transactional_id: str) -> None:
    """Work until killed."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
        }
    )
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "transaction.timeout.ms": 20_000}
    )
    producer.init_transactions(30)
    consumer.subscribe([source])
    while True:
        messages = [each for each in consumer.consume(BATCH_RECORDS, 0.2) if each.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in messages:
            producer.produce(
                sink,
                key=b"%d:%d" % (message.partition(), message.offset()),
                value=b"transformed " + message.value(),
                partition=message.partition(),
            )
            ends[message.partition()] = message.offset() + 1
        offsets = [TopicPartition(source, partition, end) for partition, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)


if __name__ == "__main__":
    try:
        run(*sys.argv[1:6])
    except KafkaException as failed:
        print(failed, file=sys.stderr)
        sys.exit(1)
