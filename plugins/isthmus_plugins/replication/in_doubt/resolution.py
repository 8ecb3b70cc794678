"""How transactions end that are open in a follower's logs when it follows no more: as the source decided, or aborted.

The target's coordinators know none of them. A decision of the source that was stored here (``in_doubt.store``) holds
for all partitions that it lists, whichever of its markers came; what has none is aborted. Ending it can be done again
from the beginning: what is ended is not open any more, and decisions stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TransactionMarkers
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.in_doubt.store import Stored, TransactionStore
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER, ProducerIdRange, is_links_own
from isthmus_protocol.records import BatchError

MARKER_TIMEOUT_MS: Final = 30_000
LANE: Final = "promotion"


class Ended(NamedTuple):
    """How many transactions, counted in each partition."""

    committed: int = 0
    aborted: int = 0

    def __add__(self, other: object) -> Ended:
        if not isinstance(other, Ended):
            return NotImplemented
        return Ended(self.committed + other.committed, self.aborted + other.aborted)


class Resolution:
    """Ends what links left open in this cluster's topics."""

    def __init__(self, context: PluginContext, store: TransactionStore) -> None:
        self._context = context
        self._store = store

    async def stored(self, link_name: str) -> Stored:
        """What the source decided, as far as it is known here. Raises OperationError, BrokerUnavailable."""
        link = self._context.control.state.links.get(link_name)
        if link is None:
            return Stored({}, {})  # it was deleted: nobody knows what is its
        try:
            return await self._store.read(link.link_id)
        except BatchError as error:
            raise OperationError("TRANSACTIONS_UNREADABLE", f"decisions cannot be read: {error}", 500) from error

    async def markers(
        self, topic: TopicInfo, source_cluster_id: str | None, stored: Stored
    ) -> list[TransactionMarkers]:
        """The ends of what is open in a topic's partitions. Raises BrokerUnavailable."""
        index = self._context.control.state.producer_id_ranges.get(source_cluster_id or "")
        ids = None if index is None else ProducerIdRange(index)
        found = []
        for partition in range(len(topic.partitions)):
            for producer_id, producer in (await self._context.cluster.producers(topic.name, partition)).items():
                if producer.transaction_start < 0:
                    continue
                decision = None
                if ids is not None and producer_id in ids and not is_links_own(producer_id):
                    place, start = (topic.name, partition), producer.transaction_start
                    decision = stored.commits(producer_id % IDS_PER_CLUSTER, producer.epoch, place, start)
                found.append(
                    TransactionMarkers(
                        topic.name,
                        partition,
                        producer_id,
                        producer.epoch if decision is None else decision.producer_epoch,
                        committed=decision is not None,
                        coordinator_epoch=producer.coordinator_epoch + 1,
                    )
                )
        return found

    async def end(self, markers: Sequence[TransactionMarkers]) -> Ended:
        """Write these ends; how many there were. Raises BrokerUnavailable."""
        for marker in markers:
            leader = await self._context.cluster.leader_of(marker.topic, marker.partition)
            if leader is None:
                raise BrokerUnavailable(f"{marker.topic}-{marker.partition} has no leader")
            connection = await self._context.cluster.produce_connection(leader, LANE)
            result = (await connection.write_markers([marker], MARKER_TIMEOUT_MS))[marker.topic, marker.partition]
            if result.error_code:
                raise BrokerUnavailable(
                    f"the transaction of producer {marker.producer_id} in {marker.topic}-{marker.partition} cannot be "
                    f"ended: {result.error_name} {result.message}".rstrip()
                )
        committed = sum(marker.committed for marker in markers)
        return Ended(committed, len(markers) - committed)
