"""Which groups earlier transactions have committed offsets in: read from the log, once, for those that are asked for.

A transaction's log entry says when it began, so its records are not far: no earlier than that, as clocks of brokers go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_plugins.replication.transactions.groups_as_read import Producer, groups_in
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.records import BatchError

LANE: Final = "past-groups"
CLOCKS_APART_MS: Final = 300_000
"""The group's coordinator may be so much behind that of the transaction."""


class PastTransaction(NamedTuple):
    """A transaction of which is asked in which groups it has committed offsets."""

    producer: Producer
    started_ms: int
    """By the clock of its coordinator."""
    end: int
    """All of it stands below, in the partition that is read."""


async def read_groups_in_log(
    context: PluginContext, partition: int, transactions: Sequence[PastTransaction]
) -> dict[Producer, set[str | None]]:
    """In which groups producers have committed offsets with these epochs, as :meth:`GroupsAsRead.groups_of` has
    it.

    Raises BrokerUnavailable, KafkaRefused, OperationError.
    """
    place, cluster = (OFFSETS_TOPIC, partition), context.cluster
    since = max(0, min(each.started_ms for each in transactions) - CLOCKS_APART_MS)
    topic = await cluster.topic(OFFSETS_TOPIC)
    start = (await cluster.offsets_for_times({place: since})).get(place)
    if topic is None or partition >= len(topic.partitions) or start is None:
        raise BrokerUnavailable(f"{OFFSETS_TOPIC}-{partition} cannot be read")
    found: dict[Producer, set[str | None]] = {each.producer: set() for each in transactions}
    if start[0] < 0:  # nothing came since
        return found
    try:
        end = max(each.end for each in transactions)
        async for batch, header, _ in read_batches(context, topic, partition, start[0], end, lane=LANE):
            groups = found.get((header.producer_id, header.producer_epoch))
            if groups is not None and header.is_transactional and not header.is_control:
                groups |= groups_in(batch)
    except BatchError as error:
        raise BrokerUnavailable(f"{OFFSETS_TOPIC}-{partition}: {error}") from error
    return found
