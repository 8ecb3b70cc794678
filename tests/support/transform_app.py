"""A consume-transform-produce application, to be run as a process and killed: exactly once, with transactions.

``python transform_app.py BOOTSTRAP GROUP INPUT OUTPUT TRANSACTIONAL_ID BATCH``. Each input record becomes one output
record, with the input's partition and offset in its key, BATCH of them in a transaction at most. It ends with an error
for whatever it cannot go on after, as such applications do, and is then started again. When a commit is acked it prints
the keys of what it wrote.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

ACKED = "acked:"
"""Begins a line of the output that names what a transaction wrote whose commit was acked."""


def run(bootstrap: str, group: str, source: str, sink: str, transactional_id: str, batch: str) -> None:
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
        messages = [each for each in consumer.consume(int(batch), 0.2) if each.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        ends: dict[int, int] = {}
        keys = [b"%d:%d" % (message.partition(), message.offset()) for message in messages]
        for key, message in zip(keys, messages, strict=True):
            producer.produce(
                sink,
                key=key,
                value=b"transformed " + message.value(),
                partition=message.partition(),
            )
            ends[message.partition()] = message.offset() + 1
        offsets = [TopicPartition(source, partition, end) for partition, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
        print(ACKED, *(key.decode() for key in keys), flush=True)


if __name__ == "__main__":
    try:
        run(*sys.argv[1:7])
    except KafkaException as failed:
        print(failed, file=sys.stderr)
        sys.exit(1)
