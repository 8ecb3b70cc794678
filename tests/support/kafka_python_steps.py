"""A transactional producer of kafka-python that does what it is told on standard input, as TransactionSteps.java does.

``python -P kafka_python_steps.py SETTINGS``, which are JSON: a process of its own, since connections that fail leave
sockets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

from kafka import KafkaProducer

STEP_S: Final = 60


def main(settings: str) -> None:
    """Say what came of each line: ``done``, or the error."""
    producer = KafkaProducer(**json.loads(settings))
    steps: dict[str, Callable[..., Any]] = {
        "init": producer.init_transactions,
        "begin": producer.begin_transaction,
        "send": lambda topic, value: producer.send(topic, value.encode(), partition=0).get(STEP_S),
        "commit": producer.commit_transaction,
        "abort": producer.abort_transaction,
    }
    for line in sys.stdin:
        step, *words = line.split()
        said = "done"
        try:
            steps[step](*words)
        except Exception as error:
            said = repr(error).replace("\n", " ")
        print(said, flush=True)
    producer.close(STEP_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
