"""A member of a group, of kafka-python, that prints the offsets and values that it reads until its input ends.

``python -P kafka_python_reads.py TOPIC SETTINGS``, which are JSON: a process of its own, since connections that fail
leave sockets.
"""

from __future__ import annotations

import json
import sys
import threading

from kafka import KafkaConsumer
from kafka.errors import KafkaError

POLL_MS = 100


def main(topic: str, settings: str) -> None:
    """Read until it is over."""
    consumer = KafkaConsumer(topic, **json.loads(settings))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.is_set():
        try:
            found = consumer.poll(POLL_MS)
        except KafkaError as error:
            print("failed", repr(error).replace("\n", " "), flush=True)
            continue
        for records in found.values():
            for record in records:
                print("read", record.offset, record.value.decode())
        sys.stdout.flush()
    consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
