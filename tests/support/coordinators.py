"""Transaction coordinators of a model cluster: they keep its transaction log, and abort what they are asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from isthmus_protocol.offsets_log import partition_of
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Transaction, TransactionState
from support.fake_cluster import FakeCluster
from support.partition_log import Partition
from support.transaction_state import state_batch, state_key, state_value

PARTITIONS: Final = 3
STARTED_MS: Final = 1_700_000_000_000


class Coordinators:
    """Those of one cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.partitions: list[Partition] = cluster.add_topic(TRANSACTION_TOPIC, PARTITIONS).partitions
        cluster.fence = self._fence
        self.aborts_in_s: float | None = 0.05
        """How long an abort's markers take; None: they cannot be written for now."""
        self.fenced: list[str] = []
        """Who was asked to be aborted, each time."""
        self.latest: dict[str, Transaction] = {}
        self.completed: Callable[[str, Transaction], None] = lambda transactional_id, transaction: None
        """Writes the markers of a transaction: called before it is recorded that it is complete."""

    def log_of(self, transactional_id: str) -> Partition:
        """The partition of the log that has an id."""
        return self.partitions[partition_of(transactional_id, PARTITIONS)]

    def has(
        self, transactional_id: str, state: TransactionState, *topics: str, epoch: int = 0, producer_id: int = 7
    ) -> None:
        """Write that a transaction is in this state, in partition 0 of each of the topics."""
        places = tuple((topic, 0) for topic in topics)
        transaction = Transaction(producer_id, epoch, state, places, 1, STARTED_MS)
        if state in (TransactionState.COMPLETE_ABORT, TransactionState.COMPLETE_COMMIT):
            self.completed(transactional_id, transaction)
        self.latest[transactional_id] = transaction
        self.write(self.log_of(transactional_id), state_key(transactional_id), state_value(transaction))

    @staticmethod
    def write(log: Partition, key: bytes, value: bytes | None) -> None:
        """Write a record."""
        log.write(state_batch(log.end, [(key, value)], log.leader_epoch))

    def _fence(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        self.fenced.append(transactional_id)
        known = self.latest[transactional_id]
        is_same = (producer_id, epoch) == (known.producer_id, known.producer_epoch)
        if known.state is not TransactionState.ONGOING or not is_same:
            return
        of_it = {"epoch": epoch + 1, "producer_id": producer_id}
        topics = [topic for topic, _ in known.partitions]
        self.has(transactional_id, TransactionState.PREPARE_ABORT, *topics, **of_it)
        if self.aborts_in_s is not None:
            done = TransactionState.COMPLETE_ABORT
            later = asyncio.get_running_loop().call_later
            later(self.aborts_in_s, lambda: self.has(transactional_id, done, **of_it))
