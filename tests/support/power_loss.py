"""What a power loss takes from a broker: the ends of logs that were not flushed."""

from __future__ import annotations

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.records import BatchHeader, walk


def lose_end(kafka: KafkaCluster, broker_id: int, topic: str, partition: int = 0, batches: int = 1) -> BatchHeader:
    """Cut the last batches off a log of a broker that was killed; the header of the first of them.

    Started again, the broker takes the log as it finds it: it ended without having said that it ends well.
    """
    assert not kafka.alive(broker_id)
    directory = kafka.directory / f"broker-{broker_id}" / "data" / f"{topic}-{partition}"
    segment = max(directory.glob("*.log"))
    found = list(walk(memoryview(segment.read_bytes())))
    start, _, header = found[-batches]
    with segment.open("r+b") as file:
        file.truncate(start)
    return header
