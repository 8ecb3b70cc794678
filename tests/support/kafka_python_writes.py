"""A producer of kafka-python that writes numbers to a topic until its standard input ends: prints what becomes of each.

``python -P kafka_python_writes.py TOPIC SETTINGS``, which are JSON: a process of its own, since connections that fail
leave sockets.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from typing import Any

from kafka import KafkaProducer

PAUSE_S = 0.003


def main(topic: str, settings: str) -> None:
    """Write until it is over."""
    producer = KafkaProducer(acks="all", **json.loads(settings))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    number = 0
    while not over.is_set():
        sent = producer.send(topic, b"%d" % number, partition=0)
        sent.add_callback(partial(_acked, number))
        sent.add_errback(partial(_failed, number))
        number += 1
        time.sleep(PAUSE_S)
    producer.close(30)


def _acked(number: int, sent: Any) -> None:
    print("acked", number, sent.offset, flush=True)


def _failed(number: int, error: Exception) -> None:
    print("failed", number, repr(error), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
