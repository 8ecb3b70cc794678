"""The proxy's own Kafka client: a cluster's brokers, leaders and topics, and the requests that the proxy makes.

What may have been carried out already is never sent twice: after a lost connection, ``produce_raw`` and the admin calls
that change something say so, and the caller looks before it acts.

Errors are PeerFaults: ConnectionLost, RequestTimedOut, AuthenticationFailed, UnsupportedVersion, and KafkaError for an
error code in an answer. Results for several items carry their own ``error`` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from isthmus.errors import (
    AuthenticationFailed,
    ConnectionLost,
    KafkaError,
    PeerFault,
    RequestTimedOut,
    UnsupportedVersion,
)
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.cluster_connections import Backoff, is_stale_metadata, is_transient, parse_address
from isthmus.kafka.log_requests import (
    EARLIEST,
    LATEST,
    LOG_END,
    MAX_TIMESTAMP,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    LogRequests,
    decode_fetch,
)
from isthmus.kafka.results import (
    Broker,
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    CreatedTopic,
    DeletedRecords,
    Fetched,
    FetchFrom,
    ListedOffset,
    NewTopic,
    PartitionInfo,
    Produced,
    ProducerIdentity,
    Producers,
    ProducerState,
    RawFetch,
    ResourceConfigs,
    ResourceType,
    TopicInfo,
    TopicPartition,
)
from isthmus.kafka.security import SecuritySpec
from isthmus.kafka.topic_requests import TopicRequests
from isthmus_protocol.error_codes import CONCURRENT_TRANSACTIONS, INVALID_PRODUCER_EPOCH, PRODUCER_FENCED
from isthmus_protocol.schema import ApiKey

__all__ = (
    "EARLIEST",
    "LATEST",
    "LOG_END",
    "MAX_TIMESTAMP",
    "READ_COMMITTED",
    "READ_UNCOMMITTED",
    "AuthenticationFailed",
    "Backoff",
    "Broker",
    "BrokerConnection",
    "ClusterClient",
    "ClusterDescription",
    "ConfigEntry",
    "ConfigSynonym",
    "ConnectionLost",
    "CreatedTopic",
    "DeletedRecords",
    "FetchFrom",
    "Fetched",
    "KafkaError",
    "ListedOffset",
    "NewTopic",
    "PartitionInfo",
    "PeerFault",
    "Produced",
    "ProducerIdentity",
    "ProducerState",
    "Producers",
    "RawFetch",
    "RequestTimedOut",
    "ResourceConfigs",
    "ResourceType",
    "SecuritySpec",
    "TopicInfo",
    "TopicPartition",
    "UnsupportedVersion",
    "decode_fetch",
    "is_stale_metadata",
    "is_transient",
    "parse_address",
)


FENCED_TIMEOUT_MS: Final = 1_000
"""Of transactions of a producer that is fenced, which begins none any more: less than any cluster allows at most."""


class ClusterClient(TopicRequests, LogRequests):
    """A client of one cluster. Use as ``async with ClusterClient(["host:9092"]) as cluster``, or start and close it."""

    # --- Coordinators and producers ---

    async def coordinator(self, key: str, *, transaction: bool = False, deadline_s: float | None = None) -> int:
        """The node id of a group's (or transaction's) coordinator."""

        async def attempt() -> int:
            answer = await (await self.any()).call(
                ApiKey.FIND_COORDINATOR,
                {"key_type": int(transaction), "key": key, "coordinator_keys": [key]},
                timeout=self.request_timeout_s,
            )
            found = answer.coordinators[0] if hasattr(answer, "coordinators") else answer
            if found.error_code:
                raise KafkaError(found.error_code, getattr(found, "error_message", None))
            node_id: int = found.node_id
            return node_id

        return await self.retrying(attempt, deadline_s=deadline_s)

    async def list_transactions(self, states: Sequence[str]) -> list[str]:
        """Transactional ids of the transactions in these states, as all coordinators know them (KIP-664)."""
        await self.refresh(())
        found: set[str] = set()
        for node_id in self._brokers:
            answer = await (await self.to(node_id)).call(
                ApiKey.LIST_TRANSACTIONS, {"state_filters": list(states)}, timeout=self.request_timeout_s
            )
            if answer.error_code:
                raise KafkaError(answer.error_code)
            found |= {state.transactional_id for state in answer.transaction_states}
        return sorted(found)

    async def init_producer_id(
        self,
        transactional_id: str | None = None,
        *,
        transaction_timeout_ms: int = 60_000,
        deadline_s: float | None = None,
    ) -> ProducerIdentity:
        """A producer id of the cluster's own range; with a transactional id, this fences its other users."""

        async def attempt() -> ProducerIdentity:
            if transactional_id is None:
                connection = await self.any()
            else:
                connection = await self.to(await self.coordinator(transactional_id, transaction=True))
            return await self._init_producer_id(
                connection, transactional_id, transaction_timeout_ms, ProducerIdentity(-1, -1)
            )

        return await self.retrying(attempt, deadline_s=deadline_s)

    async def fence_transaction(
        self, transactional_id: str, producer: ProducerIdentity, *, deadline_s: float | None = None
    ) -> None:
        """Have the coordinator abort what a producer has open, unless the id is another producer's by now.

        Asked once: whoever has begun with the id since is left alone. Whether it is aborted, the transaction log says:
        where it is being ended already, or was, there is nothing to do.
        """
        connection = await self.to(await self.coordinator(transactional_id, transaction=True, deadline_s=deadline_s))
        try:
            await self._init_producer_id(connection, transactional_id, FENCED_TIMEOUT_MS, producer)
        except KafkaError as error:
            if error.code not in (CONCURRENT_TRANSACTIONS, PRODUCER_FENCED, INVALID_PRODUCER_EPOCH):
                raise

    async def _init_producer_id(
        self,
        connection: BrokerConnection,
        transactional_id: str | None,
        transaction_timeout_ms: int,
        expected: ProducerIdentity,
    ) -> ProducerIdentity:
        """``expected``: what the id has now (KIP-360), -1 for whatever it has."""
        answer = await connection.call(
            ApiKey.INIT_PRODUCER_ID,
            {
                "transactional_id": transactional_id,
                "transaction_timeout": transaction_timeout_ms,
                "producer_id": expected.producer_id,
                "producer_epoch": expected.producer_epoch,
            },
            timeout=self.request_timeout_s,
        )
        if answer.error_code:
            raise KafkaError(answer.error_code)
        return ProducerIdentity(answer.producer_id, answer.producer_epoch)
