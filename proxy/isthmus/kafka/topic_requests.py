"""What the proxy asks of a cluster about topics, configurations, and the cluster itself."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from isthmus.errors import KafkaError, UnsupportedVersion
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.cluster_connections import ClusterConnections
from isthmus.kafka.joined_requests import JoinedRequests
from isthmus.kafka.results import (
    Broker,
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    CreatedTopic,
    NewTopic,
    ResourceConfigs,
    ResourceType,
    TopicPartition,
    as_error,
)
from isthmus_protocol.error_codes import NETWORK_EXCEPTION, UNKNOWN_TOPIC_ID
from isthmus_protocol.messages import build_request, decode_response
from isthmus_protocol.schema import ApiKey, response_header_flexible
from isthmus_protocol.wire import response_body

DELETE_BY_ID_VERSION: Final = 6
CREATED_AT_ONCE: Final = 100
"""Topics that are created in one request, where many are at once."""
DESCRIBED_AT_ONCE: Final = 100
"""Likewise resources whose configurations are described."""
METADATA_BY_ID_VERSION: Final = 12
_THROTTLE_TIME_BYTES: Final = 4
"""What stands first in the bodies of most answers, and differs in equal ones."""


class TopicRequests(ClusterConnections):
    """Topics and configurations: creating, deleting, describing, altering."""

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_s: float | None = None
    ) -> dict[str, CreatedTopic]:
        """Create topics. Not repeated after a lost connection: TOPIC_ALREADY_EXISTS may then mean that it was us."""
        timeout_s = timeout_s or self.request_timeout_s
        connection = await self.controller()

        async def send(together: Mapping[str, NewTopic]) -> Mapping[str, CreatedTopic]:
            return await self._create_topics(connection, together.values(), validate_only, timeout_s)

        kind = (int(validate_only), int(timeout_s * 1000))
        joined: JoinedRequests[str, NewTopic, CreatedTopic] = self._joined(connection, ApiKey.CREATE_TOPICS, *kind)
        answered = await joined.ask({topic.name: topic for topic in topics}, send, at_most=CREATED_AT_ONCE, once=True)
        return {topic.name: answered[topic.name] for topic in topics if topic.name in answered}

    async def _create_topics(
        self, connection: BrokerConnection, topics: Iterable[NewTopic], validate_only: bool, timeout_s: float
    ) -> dict[str, CreatedTopic]:
        answer = await connection.call(
            ApiKey.CREATE_TOPICS,
            {
                "topics": [
                    {
                        "name": topic.name,
                        "num_partitions": topic.partitions,
                        "replication_factor": topic.replication_factor,
                        "configs": [{"name": name, "value": value} for name, value in topic.configs.items()],
                    }
                    for topic in topics
                ],
                "timeout": int(timeout_s * 1000),
                "validate_only": validate_only,
            },
            timeout=timeout_s + 5,
        )
        return {
            topic.name: CreatedTopic(
                topic.name,
                getattr(topic, "topic_id", None),
                getattr(topic, "num_partitions", -1),
                getattr(topic, "replication_factor", -1),
                as_error(topic.error_code, topic.error_message),
            )
            for topic in answer.topics
        }

    async def delete_topics(
        self, names: Sequence[str], *, timeout_s: float | None = None
    ) -> dict[str, KafkaError | None]:
        """Delete topics by name."""
        timeout_s = timeout_s or self.request_timeout_s
        answer = await (await self.controller()).call(
            ApiKey.DELETE_TOPICS,
            {
                "topics": [{"name": name} for name in names],
                "topic_names": names,
                "timeout": int(timeout_s * 1000),
            },
            timeout=timeout_s + 5,
        )
        for result in answer.responses:
            if not result.error_code:
                self._forget_topic(result.name)
        return {
            result.name: as_error(result.error_code, getattr(result, "error_message", None))
            for result in answer.responses
        }

    async def delete_topic_id(self, topic_id: UUID, *, timeout_s: float | None = None) -> KafkaError | None:
        """Delete the topic with this id, whatever its name is now (KIP-516)."""
        timeout_s = timeout_s or self.request_timeout_s
        connection = await self.controller()
        if connection.version(ApiKey.DELETE_TOPICS) < DELETE_BY_ID_VERSION:
            raise UnsupportedVersion(f"{connection.address} deletes topics by name only: it must be Kafka 2.8 or later")
        answer = await connection.call(
            ApiKey.DELETE_TOPICS,
            {"topics": [{"name": None, "topic_id": topic_id}], "timeout": int(timeout_s * 1000)},
            timeout=timeout_s + 5,
        )
        if len(answer.responses) != 1:
            raise KafkaError(NETWORK_EXCEPTION, f"{connection.address} says nothing of it in its answer")
        return as_error(answer.responses[0].error_code, answer.responses[0].error_message)

    async def unknown_topic_ids(self, node_id: int, asked: frozenset[UUID], cluster_id: str) -> frozenset[UUID]:
        """Of these topics, those that a broker does not know (KIP-516); one that may not be described is known.

        Raises KafkaError where the broker is of another cluster than ``cluster_id``.
        """
        connection = await self.to(node_id)
        if connection.version(ApiKey.METADATA) < METADATA_BY_ID_VERSION:
            raise UnsupportedVersion(f"{connection.address} knows topics by name only: it must be Kafka 3.1 or later")
        answer = await connection.call(
            ApiKey.METADATA,
            {
                "topics": [{"topic_id": topic_id, "name": None} for topic_id in sorted(asked)],
                "allow_auto_topic_creation": False,
            },
            timeout=self.request_timeout_s,
        )
        if answer.cluster_id != cluster_id:
            raise KafkaError(NETWORK_EXCEPTION, f"{connection.address} is of another cluster, {answer.cluster_id}")
        return asked & {topic.topic_id for topic in answer.topics if topic.error_code == UNKNOWN_TOPIC_ID}

    async def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False, timeout_s: float | None = None
    ) -> dict[str, KafkaError | None]:
        """Raise topics to new totals of partitions."""
        timeout_s = timeout_s or self.request_timeout_s
        answer = await (await self.controller()).call(
            ApiKey.CREATE_PARTITIONS,
            {
                "topics": [{"name": name, "count": count, "assignments": None} for name, count in counts.items()],
                "timeout": int(timeout_s * 1000),
                "validate_only": validate_only,
            },
            timeout=timeout_s + 5,
        )
        return {result.name: as_error(result.error_code, result.error_message) for result in answer.results}

    async def list_partition_reassignments(self) -> frozenset[TopicPartition]:
        """The partitions whose replicas are being changed (KIP-455). Raises KafkaError."""
        answer = await (await self.controller()).call(
            ApiKey.LIST_PARTITION_REASSIGNMENTS,
            {"timeout": int(self.request_timeout_s * 1000), "topics": None},
            timeout=self.request_timeout_s + 5,
        )
        if answer.error_code:
            raise KafkaError(answer.error_code, answer.error_message)
        return frozenset(
            TopicPartition(topic.name, partition.partition_index)
            for topic in answer.topics
            for partition in topic.partitions
        )

    async def alter_partition_reassignments(
        self, replicas: Mapping[TopicPartition, Sequence[int]]
    ) -> dict[TopicPartition, KafkaError | None]:
        """Have partitions get these replicas (KIP-455); it is under way when they answer. Raises KafkaError."""
        topics: dict[str, list[dict[str, Any]]] = {}
        for place, wanted in replicas.items():
            asked = {"partition_index": place.partition, "replicas": list(wanted)}
            topics.setdefault(place.topic, []).append(asked)
        answer = await (await self.controller()).call(
            ApiKey.ALTER_PARTITION_REASSIGNMENTS,
            {
                "timeout": int(self.request_timeout_s * 1000),
                "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
            },
            timeout=self.request_timeout_s + 5,
        )
        if answer.error_code:
            raise KafkaError(answer.error_code, answer.error_message)
        return {
            TopicPartition(topic.name, partition.partition_index): as_error(
                partition.error_code, partition.error_message
            )
            for topic in answer.responses
            for partition in topic.partitions
        }

    async def describe_configs(
        self,
        resource_type: ResourceType,
        names: Sequence[str],
        keys: Sequence[str] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> dict[str, ResourceConfigs]:
        """Configurations with their synonyms, all keys by default. BROKER resources are asked of the broker itself.

        The name "" of a BROKER resource stands for the cluster-wide dynamic settings.
        """
        groups: dict[int | None, list[str]] = {}
        for name in names:
            groups.setdefault(int(name) if resource_type == ResourceType.BROKER and name else None, []).append(name)

        async def ask(node_id: int | None, asked: list[str]) -> Mapping[str, ResourceConfigs]:
            connection = await (self.any() if node_id is None else self.to(node_id))

            async def send(together: Mapping[str, None]) -> Mapping[str, ResourceConfigs]:
                return await self._describe_configs(connection, resource_type, together, keys)

            kind = (int(resource_type), "" if keys is None else ",".join(keys))
            joined: JoinedRequests[str, None, ResourceConfigs] = self._joined(
                connection, ApiKey.DESCRIBE_CONFIGS, *kind
            )
            return await joined.ask(dict.fromkeys(asked), send, at_most=DESCRIBED_AT_ONCE)

        results: dict[str, ResourceConfigs] = {}
        for node_id, asked in groups.items():
            answered = await self.retrying(functools.partial(ask, node_id, asked), deadline_s=deadline_s)
            results |= {name: answered[name] for name in asked if name in answered}
        return results

    async def _describe_configs(
        self,
        connection: BrokerConnection,
        resource_type: ResourceType,
        names: Iterable[str],
        keys: Sequence[str] | None,
    ) -> dict[str, ResourceConfigs]:
        answer = await connection.call(
            ApiKey.DESCRIBE_CONFIGS,
            {
                "include_synonyms": True,
                "include_documentation": False,
                "resources": [
                    {"resource_type": int(resource_type), "resource_name": name, "configuration_keys": keys}
                    for name in names
                ],
            },
            timeout=self.request_timeout_s,
        )
        return {
            result.resource_name: ResourceConfigs(
                MappingProxyType({entry.name: _config_entry(entry) for entry in result.configs}),
                as_error(result.error_code, result.error_message),
            )
            for result in answer.results
        }

    async def describe_configs_raw(
        self, resource_type: ResourceType, names: Sequence[str], known: bytes | None
    ) -> tuple[bytes, Any]:
        """A digest of what the broker says of these resources, and its answer unless the digest is ``known``.

        To find that nothing changed takes a tenth of what decoding takes. Without synonyms, and not repeated.
        """
        # Always the same broker: the defaults of two may differ.
        connection = await (self.to(min(self._brokers)) if self._brokers else self.any())
        version = connection.version(ApiKey.DESCRIBE_CONFIGS)
        resources = [
            {"resource_type": int(resource_type), "resource_name": name, "configuration_keys": None} for name in names
        ]
        frame = await connection.request_raw(
            build_request(
                ApiKey.DESCRIBE_CONFIGS,
                version,
                {"resources": resources, "include_synonyms": False, "include_documentation": False},
            ),
            timeout=self.request_timeout_s,
        )
        body = response_body(frame, response_header_flexible(ApiKey.DESCRIBE_CONFIGS, version))
        digest = hashlib.blake2b(memoryview(frame)[body + _THROTTLE_TIME_BYTES :], digest_size=16).digest()
        return digest, None if digest == known else decode_response(ApiKey.DESCRIBE_CONFIGS, version, frame)[1]

    async def incremental_alter_configs(
        self,
        resource_type: ResourceType,
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Set configurations of one resource; None as value removes the setting. Raises KafkaError."""
        connection = await (self.to(int(name)) if resource_type == ResourceType.BROKER and name else self.controller())
        answer = await connection.call(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            {
                "resources": [
                    {
                        "resource_type": int(resource_type),
                        "resource_name": name,
                        "configs": [
                            {"name": key, "config_operation": 1 if value is None else 0, "value": value}
                            for key, value in changes.items()
                        ],
                    }
                ],
                "validate_only": validate_only,
            },
            timeout=self.request_timeout_s,
        )
        for result in answer.responses:
            if result.error_code:
                raise KafkaError(result.error_code, result.error_message)

    async def describe_cluster(self) -> ClusterDescription:
        """Cluster id, controller and brokers, read now."""
        answer = await self.retrying(self._describe_cluster)
        brokers = {
            broker.broker_id: Broker(broker.broker_id, broker.host, broker.port, broker.rack)
            for broker in answer.brokers
        }
        return ClusterDescription(answer.cluster_id, answer.controller_id, MappingProxyType(brokers))

    async def _describe_cluster(self) -> Any:
        answer = await (await self.any()).call(
            ApiKey.DESCRIBE_CLUSTER, {"endpoint_type": 1}, timeout=self.request_timeout_s
        )
        if answer.error_code:
            raise KafkaError(answer.error_code, answer.error_message)
        return answer


def _config_entry(entry: Any) -> ConfigEntry:
    return ConfigEntry(
        entry.name,
        entry.value,
        entry.config_source,
        entry.read_only,
        entry.is_sensitive,
        tuple(ConfigSynonym(synonym.name, synonym.value, synonym.source) for synonym in entry.synonyms),
    )
