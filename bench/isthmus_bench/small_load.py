"""Several producers that write small batches to one partition, each batch after the answer to its last one.

A part of what :mod:`isthmus_bench.replication_load` does, for how many batches a second a partition takes: records of
their own, without linger, acks=all. Batches are plain, idempotent, or a transaction each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from isthmus_bench.load import RawClient, Target, batch, newest_versions
from isthmus_bench.raw_writes import ADD_PARTITIONS_VERSION, END_TXN_VERSION, patiently, produce
from isthmus_protocol.records import TRANSACTIONAL_BIT, whole_header
from isthmus_protocol.schema import ApiKey

PLAIN: Final = "plain"
IDEMPOTENT: Final = "idempotent"
TRANSACTIONAL: Final = "transactional"
KINDS: Final = (PLAIN, IDEMPOTENT, TRANSACTIONAL)

RECORD_BYTES: Final = 100
RETRY_S: Final = 0.02
"""As a Java producer waits for the transaction before to be over."""


def write(target: Target, kind: str, producers: int, seconds: float) -> dict[str, Any]:
    """Write to partition 0, whose leader the target is, for a time. Raises LoadError."""
    with ThreadPoolExecutor(producers) as pool:
        writers = list(pool.map(lambda _: _Writer(target, kind), range(producers)))
        begin = time.monotonic()
        list(pool.map(lambda writer: writer.run(begin + seconds), writers))
        took = time.monotonic() - begin
    for writer in writers:
        writer.close()
    batches = sum(writer.batches for writer in writers)
    return {"batches": batches, "batches_per_s": batches / took}


class _Writer:
    """One producer. ``batches`` counts markers, too."""

    def __init__(self, target: Target, kind: str) -> None:
        self.batches = 0
        self._kind = kind
        self._topic = target.topic
        self._leader = RawClient(target)
        self._coordinator: RawClient | None = None
        self._versions = newest_versions(self._leader)
        self._transactional_id = None if kind != TRANSACTIONAL else f"bench-{time.monotonic_ns()}-{id(self)}"
        self._producer = (-1, -1)
        data = batch(1, RECORD_BYTES)
        self._header, self._payload = whole_header(data), data[len(whole_header(data).pack()) :]
        self._sequence = -1
        if kind != PLAIN:
            if self._transactional_id is not None:
                found = self._patiently(self._leader, ApiKey.FIND_COORDINATOR, self._newest(ApiKey.FIND_COORDINATOR), {
                    "key_type": 1, "key": self._transactional_id, "coordinator_keys": [self._transactional_id]
                })  # fmt: skip
                self._coordinator = RawClient(
                    replace(target, host=found.coordinators[0].host, port=found.coordinators[0].port)
                )
            who = self._patiently(self._coordinator or self._leader, ApiKey.INIT_PRODUCER_ID, 4, {
                "transactional_id": self._transactional_id, "transaction_timeout": 60_000,
                "producer_id": -1, "producer_epoch": -1,
            })  # fmt: skip
            self._producer, self._sequence = (who.producer_id, who.producer_epoch), 0

    def close(self) -> None:
        for client in (self._leader, self._coordinator):
            if client is not None:
                client.close()

    def run(self, end: float) -> None:
        """Write until then. Raises LoadError."""
        once: Callable[[], None] = self._transact if self._coordinator is not None else self._produce
        while time.monotonic() < end:
            once()

    def _produce(self) -> None:
        producer_id, epoch = self._producer
        attributes = TRANSACTIONAL_BIT if self._transactional_id is not None else 0
        header = self._header._replace(
            producer_id=producer_id, producer_epoch=epoch, base_sequence=self._sequence, attributes=attributes
        )
        produce(self._leader, self._topic, header, self._payload, self._transactional_id)
        self.batches += 1
        if self._sequence >= 0:
            self._sequence += 1

    def _transact(self) -> None:
        assert self._coordinator is not None
        producer_id, epoch = self._producer
        self._patiently(self._coordinator, ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, {
            "v3_and_below_transactional_id": self._transactional_id, "v3_and_below_producer_id": producer_id,
            "v3_and_below_producer_epoch": epoch,
            "v3_and_below_topics": [{"name": self._topic, "partitions": [0]}],
        })  # fmt: skip
        self._produce()
        self._patiently(self._coordinator, ApiKey.END_TXN, END_TXN_VERSION, {
            "transactional_id": self._transactional_id, "producer_id": producer_id, "producer_epoch": epoch,
            "committed": True,
        })  # fmt: skip
        self.batches += 1

    def _newest(self, api_key: int) -> int:
        return self._versions[api_key]

    @staticmethod
    def _patiently(client: RawClient, api_key: int, version: int, values: dict[str, Any]) -> Any:
        """Ask until a coordinator is ready. Raises LoadError."""
        return patiently(client, api_key, version, values, RETRY_S)[0]
