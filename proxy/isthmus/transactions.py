"""Open transactions in reserved namespaces: their markers are writes, so a reservation waits for them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from isthmus.errors import PeerFault
from isthmus.kafka.client import ClusterClient
from isthmus.kafka.results import TopicPartition
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType, contains
from isthmus_protocol.producer_ids import is_replicated

log = logging.getLogger("isthmus.transactions")

POLL_INTERVAL_S: Final = 0.5
NO_TRANSACTION: Final = -1


class OpenTransactions:
    """Asks partition leaders for producers with an open transaction (DescribeProducers, KIP-664)."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def ended(self, state: ControlState) -> None:
        """Return when no transaction is open in a topic of a reserved namespace that follows no link.

        A namespace that follows has the source's transactions, which only the link ends; what is promoted, or was
        detached, may still have some, which end before its reservation does. What is open where a reversal holds is
        ended by whoever hands it over, once every proxy refuses more.
        """
        logged = False
        while open_in := await self._open(state):
            if not logged:
                logged = True
                log.info("reservation waits for transactions", extra={"partitions": len(open_in), "first": open_in[0]})
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _open(self, state: ControlState) -> list[str]:
        if not any(key.type is ResourceType.TOPIC and each.reserved for key, each in state.namespaces.items()):
            return []
        while True:
            try:
                topics = await self._client.refresh()
                places = [
                    TopicPartition(name, partition)
                    for name, info in topics.items()
                    if _reserved_here(state, name)
                    for partition in info.partitions
                ]
                producers = await self._client.describe_producers(places) if places else {}
            except PeerFault as error:
                log.warning("open transactions not read", extra={"error": str(error)})
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            return [
                f"{place.topic}-{place.partition}"
                for place, found in producers.items()
                if any(
                    each.current_txn_start_offset != NO_TRANSACTION and not is_replicated(each.producer_id)
                    for each in found.states
                )
            ]


def _reserved_here(state: ControlState, topic: str) -> bool:
    reservation = state.lookup.topic_reservation(topic)
    promoted = any(contains(*key, topic) for key in state.promotions)
    handed_over = state.lookup.reversing(ResourceType.TOPIC, topic) is not None
    return reservation is not None and reservation.link is None and not (promoted or handed_over)
