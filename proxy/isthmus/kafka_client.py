"""The proxy's own Kafka client: a cluster's brokers, leaders and topics, and the requests that the proxy makes.

:class:`ClusterClient` keeps connections by node and *lane* (a broker reads a connection's next request only after it
answered the last one, so a long poll needs a lane of its own), connects again with exponential backoff, and retries
what is safe to retry until a deadline. What may have been carried out already is never sent twice: after a lost
connection, ``produce_raw`` and the admin calls that change something say so, and the caller looks before it acts.

Errors are PeerFaults: ConnectionLost, RequestTimedOut, AuthenticationFailed, UnsupportedVersion, and KafkaError for an
error code in an answer. Results for several items carry their own ``error`` each.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import hashlib
import random
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeVar
from uuid import UUID

from isthmus.broker_connection import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, SOFTWARE_NAME, BrokerConnection
from isthmus.errors import (
    AuthenticationFailed,
    ConnectionLost,
    KafkaError,
    PeerFault,
    RequestTimedOut,
    UnsupportedVersion,
)
from isthmus.kafka_results import (
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
    as_error,
)
from isthmus.upstream_security import SecuritySpec
from isthmus_protocol.messages import build_request, decode_response
from isthmus_protocol.schema import ApiKey, response_header_flexible
from isthmus_protocol.wire import response_body

__all__ = (
    "AuthenticationFailed",
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
)

T = TypeVar("T")

RETRY_DEADLINE_S: Final = 30.0
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
EXPIRY_MARGIN_S: Final = 5.0
SAME_ANSWERS_MAX: Final = 32
"""Brokers name different controllers, so what they all say comes in several forms."""
RESPONSE_HEAD_BYTES: Final = 8
"""Size and correlation id."""
"""A connection whose authentication ends within this time (KIP-368) takes no new requests."""

EARLIEST: Final = -2
LATEST: Final = -1
MAX_TIMESTAMP: Final = -3
"""Special timestamps of ListOffsets."""

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
LOG_END: Final = -1
"""For ``list_offsets`` only: the leader's log end, which may be above the high watermark."""
_DEBUGGING_REPLICA: Final = -2
"""A ``replica_id`` that is no consumer's, so that ListOffsets is not limited to the high watermark."""

DELETE_BY_ID_VERSION: Final = 6

_STALE_METADATA: Final = frozenset(
    {
        3,  # UNKNOWN_TOPIC_OR_PARTITION: also while a new topic spreads
        5,  # LEADER_NOT_AVAILABLE
        6,  # NOT_LEADER_OR_FOLLOWER
        8,  # BROKER_NOT_AVAILABLE
        9,  # REPLICA_NOT_AVAILABLE
        13,  # NETWORK_EXCEPTION
        56,  # KAFKA_STORAGE_ERROR
        74,  # FENCED_LEADER_EPOCH
        75,  # UNKNOWN_LEADER_EPOCH
        78,  # OFFSET_NOT_AVAILABLE: a new leader does not know its high watermark yet
        100,  # UNKNOWN_TOPIC_ID
    }
)
"""Read the metadata again, and try again."""
_THROTTLE_TIME_BYTES: Final = 4
"""What stands first in the bodies of most answers, and differs in equal ones."""
_UNKNOWN_TOPIC: Final = 3
_LEADER_NOT_AVAILABLE: Final = 5
_REQUEST_TIMED_OUT: Final = 7
_NETWORK_EXCEPTION: Final = 13


class _HasError(Protocol):
    @property
    def error(self) -> KafkaError | None: ...


R = TypeVar("R", bound=_HasError)


def is_stale_metadata(error: KafkaError) -> bool:
    """Whether the leader may be another one than we thought: read the metadata again, and try again."""
    return error.code in _STALE_METADATA


class Backoff:
    """Exponential, with jitter, from the first failure on."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        """How long to wait after one more failure, in seconds."""
        delay: float = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        return delay * random.uniform(0.8, 1.2)

    def reset(self) -> None:
        self._failures = 0


class _Slot:
    """One lane to one address: a connection, or what is known of why there is none."""

    __slots__ = ("backoff", "connection", "lock", "not_before")

    def __init__(self) -> None:
        self.connection: BrokerConnection | None = None
        self.lock = asyncio.Lock()
        self.backoff = Backoff()
        self.not_before = 0.0


class ClusterClient:
    """A client of one cluster. Use as ``async with ClusterClient(["host:9092"]) as cluster``, or start and close it."""

    def __init__(
        self,
        bootstrap: Sequence[str],
        security: SecuritySpec | None = None,
        *,
        client_id: str = SOFTWARE_NAME,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        retry_deadline_s: float = RETRY_DEADLINE_S,
    ) -> None:
        """``bootstrap`` lists ``host:port`` addresses (``[::1]:9092`` for IPv6)."""
        if not bootstrap:
            raise ValueError("no bootstrap address")
        self.security = security or SecuritySpec()
        self.client_id = client_id
        self.request_timeout_s = request_timeout_s
        self.retry_deadline_s = retry_deadline_s
        self.cluster_id: str | None = None
        self.controller_id: int = -1
        """As the last metadata has it; with KRaft, some broker that forwards to the controller."""
        self._bootstrap = [parse_address(address) for address in bootstrap]
        self._connect_timeout_s = connect_timeout_s
        self._brokers: Mapping[int, Broker] = MappingProxyType({})
        self._topics: dict[str, TopicInfo] = {}
        self._names: dict[UUID, str] = {}
        self._slots: dict[tuple[str, int, str], _Slot] = {}
        self._same_answers: dict[bytes, int] = {}
        """Answers about all topics that say what is known: they need not be decoded. By body, the controller's id."""
        self._refresh_lock = asyncio.Lock()
        self._reads = 0
        """Metadata requests so far."""
        self._refreshed: dict[frozenset[str] | None, int] = {}
        """What the last of them asked for, and its number."""
        self._tls_context: ssl.SSLContext | None = None
        self._retiring: set[BrokerConnection] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Read brokers and topics once. Raises ConnectionLost if no bootstrap address answers."""
        await self.refresh()

    async def close(self) -> None:
        """Close all connections; what is outstanding fails with ConnectionLost."""
        self._closed = True
        connections = [slot.connection for slot in self._slots.values() if slot.connection is not None]
        await asyncio.gather(*(connection.close() for connection in (*connections, *self._retiring)))

    # --- What is known ---

    @property
    def brokers(self) -> Mapping[int, Broker]:
        return self._brokers

    @property
    def topics(self) -> Mapping[str, TopicInfo]:
        """Topics as last read. Those that are read by name later are added."""
        return MappingProxyType(self._topics)

    def topic_name(self, topic_id: UUID) -> str | None:
        """The name of a topic id, as last read."""
        return self._names.get(topic_id)

    async def refresh(self, topics: Iterable[str] | None = None) -> Mapping[str, TopicInfo]:
        """Read brokers and the named topics (all by default) again; returns the topics found.

        A topic that does not exist is left out, and dropped from the cache. Topics are never created by this.
        """
        wanted = None if topics is None else frozenset(topics)
        reads_before = self._reads
        async with self._refresh_lock:
            # Somebody may have asked the same while this call waited for the lock. Counted, not timed: two calls within
            # a tick of the clock are two.
            if self._refreshed.get(wanted, 0) <= reads_before:
                self._reads = number = self._reads + 1
                await self._read_metadata(wanted)
                self._refreshed = {wanted: number}
        if wanted is None:
            return self.topics
        return {name: self._topics[name] for name in wanted if name in self._topics}

    async def _read_metadata(self, wanted: frozenset[str] | None) -> None:
        connection = await self.any()
        version = connection.version(ApiKey.METADATA)
        request = build_request(
            ApiKey.METADATA,
            version,
            {
                "topics": None if wanted is None else [{"name": name} for name in sorted(wanted)],
                "allow_auto_topic_creation": False,
            },
        )
        frame = await connection.request_raw(request, timeout=self.request_timeout_s)
        body = bytes(memoryview(frame)[RESPONSE_HEAD_BYTES:])
        if wanted is None and body in self._same_answers:
            self.controller_id = self._same_answers[body]
            return
        answer = connection.decode(ApiKey.METADATA, version, frame)
        if getattr(answer, "error_code", 0):
            raise KafkaError(answer.error_code)
        before = (self._brokers, self._topics)
        if answer.brokers:
            self._brokers = MappingProxyType(
                {
                    broker.node_id: Broker(broker.node_id, broker.host, broker.port, getattr(broker, "rack", None))
                    for broker in answer.brokers
                }
            )
        self.cluster_id = getattr(answer, "cluster_id", None) or self.cluster_id
        self.controller_id = getattr(answer, "controller_id", -1)
        found: dict[str, TopicInfo] = {}
        gone: set[str] = set()
        for topic in answer.topics:
            if topic.error_code in (0, _LEADER_NOT_AVAILABLE):
                found[topic.name] = self._topic_info(topic)
            elif topic.error_code == _UNKNOWN_TOPIC:
                gone.add(topic.name)
        self._topics = found if wanted is None else {**self._topics, **found}
        for name in gone:
            self._topics.pop(name, None)
        if before != (self._brokers, self._topics) or len(self._same_answers) == SAME_ANSWERS_MAX:
            self._same_answers.clear()
        if wanted is None:
            self._same_answers[body] = self.controller_id
        self._names = {info.topic_id: name for name, info in self._topics.items() if info.topic_id is not None}

    def _topic_info(self, topic: Any) -> TopicInfo:
        topic_id = getattr(topic, "topic_id", None)
        cached = self._topics.get(topic.name)
        known = cached.partitions if cached is not None and cached.topic_id == topic_id else {}
        partitions = {}
        for partition in topic.partitions:
            info = PartitionInfo(
                partition.partition_index,
                partition.leader_id,
                getattr(partition, "leader_epoch", -1),
                partition.replica_nodes,
                partition.isr_nodes,
            )
            # A broker that lags behind the controller answers with an older epoch than another one did.
            newer = known.get(info.partition)
            partitions[info.partition] = newer if newer is not None and newer.leader_epoch > info.leader_epoch else info
        return TopicInfo(topic.name, topic_id, getattr(topic, "is_internal", False), MappingProxyType(partitions))

    async def topic(self, name: str) -> TopicInfo:
        """A topic, from the cache or read now. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
        info = self._topics.get(name) or (await self.refresh([name])).get(name)
        if info is None:
            raise KafkaError(_UNKNOWN_TOPIC, name)
        return info

    async def leader(self, topic: str, partition: int) -> PartitionInfo:
        """The partition with its leader, from the cache or read now.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION, or LEADER_NOT_AVAILABLE.
        """
        for attempt in range(2):
            info = (await self.topic(topic)).partitions.get(partition)
            if info is not None and info.leader in self._brokers:
                return info
            if attempt == 0:
                await self.refresh([topic])
        raise KafkaError(_UNKNOWN_TOPIC if info is None else _LEADER_NOT_AVAILABLE, f"{topic}-{partition}")

    # --- Connections ---

    async def to(self, node_id: int, lane: str = "") -> BrokerConnection:
        """The connection of a lane to a broker, made if need be (after the backoff, if it failed lately).

        Raises ConnectionLost, AuthenticationFailed.
        """
        broker = self._brokers.get(node_id)
        if broker is None:
            raise ConnectionLost(f"broker {node_id} is not known")
        return await self._connect(broker.host, broker.port, lane)

    async def any(self, lane: str = "") -> BrokerConnection:
        """A connection to some broker: an open one, else the first that can be reached."""
        brokers = [(broker.host, broker.port) for broker in self._brokers.values()]
        random.shuffle(brokers)
        candidates = [*brokers, *(address for address in self._bootstrap if address not in brokers)]
        for address in candidates:
            slot = self._slots.get((*address, lane))
            if slot is not None and slot.connection is not None and self._usable(slot.connection):
                return slot.connection
        reasons = []
        # Those that did not fail lately first: a dead broker's backoff must not hold up what another can answer.
        candidates.sort(key=lambda address: self._slots.setdefault((*address, lane), _Slot()).not_before)
        for address in candidates:
            try:
                return await self._connect(*address, lane)
            except ConnectionLost as error:
                reasons.append(str(error))
        raise ConnectionLost("no broker can be reached: " + "; ".join(reasons))

    async def controller(self, lane: str = "") -> BrokerConnection:
        """A connection to the broker that metadata calls the controller, or to any if there is none."""
        return await (self.to(self.controller_id, lane) if self.controller_id in self._brokers else self.any(lane))

    async def _connect(self, host: str, port: int, lane: str) -> BrokerConnection:
        slot = self._slots.setdefault((host, port, lane), _Slot())
        if slot.connection is not None and self._usable(slot.connection):
            return slot.connection
        loop = asyncio.get_running_loop()
        async with slot.lock:
            if slot.connection is not None:
                if self._usable(slot.connection):
                    return slot.connection
                self._retire(slot.connection)
                slot.connection = None
            if (wait_s := slot.not_before - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if self._closed:
                raise ConnectionLost("this client is closed")
            if self._tls_context is None:
                self._tls_context = self.security.tls_context()
            try:
                slot.connection = await BrokerConnection.connect(
                    host,
                    port,
                    self.security,
                    client_id=self.client_id,
                    timeout=self._connect_timeout_s,
                    tls_context=self._tls_context,
                )
            except PeerFault:
                # The files may have been renewed since they were read.
                self._tls_context = None
                slot.not_before = loop.time() + slot.backoff.next_s()
                raise
            slot.backoff.reset()
            return slot.connection

    def _usable(self, connection: BrokerConnection) -> bool:
        if not connection.is_open:
            return False
        now = asyncio.get_running_loop().time()
        return connection.expires_at is None or now < connection.expires_at - EXPIRY_MARGIN_S

    def _retire(self, connection: BrokerConnection) -> None:
        """Let a connection whose authentication ends answer what is under way; the broker closes it then."""
        if connection.is_open:
            self._retiring.add(connection)
            told = connection.on_lost

            def lost(reason: ConnectionLost) -> None:
                self._retiring.discard(connection)
                if told is not None:
                    told(reason)

            connection.on_lost = lost

    # --- Retrying ---

    async def retrying(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        topics: Collection[str] | None = None,
        deadline_s: float | None = None,
    ) -> T:
        """Call ``attempt`` until it succeeds, for what is safe to repeat.

        Again after ConnectionLost, RequestTimedOut and retriable KafkaErrors, with backoff and metadata of ``topics``
        read anew (None: brokers only), until ``deadline_s`` have passed; then the last error is raised.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.retry_deadline_s if deadline_s is None else deadline_s)
        backoff = Backoff()
        while True:
            try:
                return await attempt()
            except (ConnectionLost, RequestTimedOut, KafkaError) as error:
                if isinstance(error, KafkaError) and not (error.retriable or is_stale_metadata(error)):
                    raise
                wait_s = backoff.next_s()
                if self._closed or loop.time() + wait_s >= deadline:
                    raise
            await asyncio.sleep(wait_s)
            try:
                async with asyncio.timeout_at(deadline):
                    await self.refresh(topics or ())
            except (PeerFault, TimeoutError):
                pass  # the attempt says what is wrong

    async def request_leader(
        self,
        topic: str,
        partition: int,
        attempt: Callable[[BrokerConnection, PartitionInfo], Awaitable[T]],
        *,
        lane: str = "",
        deadline_s: float | None = None,
    ) -> T:
        """Call ``attempt`` with a connection to the partition's leader, and again while the leader moves.

        ``attempt`` raises KafkaError for the partition's error code. For requests that may be repeated only.
        """

        async def at_leader() -> T:
            info = await self.leader(topic, partition)
            return await attempt(await self.to(info.leader, lane), info)

        return await self.retrying(at_leader, topics=[topic], deadline_s=deadline_s)

    async def _at_leaders(
        self,
        partitions: Collection[TopicPartition],
        ask: Callable[[BrokerConnection, Sequence[TopicPartition]], Awaitable[Mapping[TopicPartition, R]]],
        failed: Callable[[KafkaError], R],
        *,
        lane: str = "",
        deadline_s: float | None = None,
        repeat: bool = True,
    ) -> dict[TopicPartition, R]:
        """Ask each partition's leader, all leaders at once; ``repeat`` those whose leader was another one.

        Without ``repeat`` everything is in the results: NETWORK_EXCEPTION for a lost connection and REQUEST_TIMED_OUT
        for no answer, which leave open whether the request was carried out, as they do for any Kafka client.
        """
        results: dict[TopicPartition, R] = {}

        async def ask_leader(node_id: int, asked: Sequence[TopicPartition]) -> None:
            try:
                results.update(await ask(await self.to(node_id, lane), asked))
            except (ConnectionLost, RequestTimedOut) as error:
                if repeat:
                    raise
                code = _NETWORK_EXCEPTION if isinstance(error, ConnectionLost) else _REQUEST_TIMED_OUT
                results.update(dict.fromkeys(asked, failed(KafkaError(code, str(error)))))

        async def attempt() -> None:
            by_leader: dict[int, list[TopicPartition]] = {}
            for wanted in partitions:
                known = results.get(wanted)
                if known is None or (known.error is not None and is_stale_metadata(known.error)):
                    try:
                        info = await self.leader(*wanted)
                    except KafkaError as error:
                        results[wanted] = failed(error)
                    else:
                        by_leader.setdefault(info.leader, []).append(wanted)
            outcomes = await asyncio.gather(
                *(ask_leader(node_id, asked) for node_id, asked in by_leader.items()), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            for result in results.values():
                if repeat and result.error is not None and is_stale_metadata(result.error):
                    raise result.error

        if not repeat:
            await attempt()
            return results
        topics = {wanted.topic for wanted in partitions}
        try:
            await self.retrying(attempt, topics=topics, deadline_s=deadline_s)
        except KafkaError:
            # The deadline has passed: errors stand in the results of their partitions.
            if len(results) < len(set(partitions)):
                raise
        return results

    # --- Topics and configurations ---

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_s: float | None = None
    ) -> dict[str, CreatedTopic]:
        """Create topics. Not repeated after a lost connection: TOPIC_ALREADY_EXISTS may then mean that it was us."""
        timeout_s = timeout_s or self.request_timeout_s
        answer = await (await self.controller()).call(
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
                self._topics.pop(result.name, None)
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
        (result,) = answer.responses
        return as_error(result.error_code, result.error_message)

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
        values = {"include_synonyms": True, "include_documentation": False}
        groups: dict[int | None, list[str]] = {}
        for name in names:
            groups.setdefault(int(name) if resource_type == ResourceType.BROKER and name else None, []).append(name)

        async def ask(node_id: int | None, asked: list[str]) -> Any:
            connection = await (self.any() if node_id is None else self.to(node_id))
            resources = [
                {"resource_type": int(resource_type), "resource_name": name, "configuration_keys": keys}
                for name in asked
            ]
            return await connection.call(
                ApiKey.DESCRIBE_CONFIGS, {**values, "resources": resources}, timeout=self.request_timeout_s
            )

        results: dict[str, ResourceConfigs] = {}
        for node_id, asked in groups.items():
            answer = await self.retrying(functools.partial(ask, node_id, asked), deadline_s=deadline_s)
            for result in answer.results:
                results[result.resource_name] = ResourceConfigs(
                    MappingProxyType({entry.name: _config_entry(entry) for entry in result.configs}),
                    as_error(result.error_code, result.error_message),
                )
        return results

    async def describe_configs_raw(
        self, resource_type: ResourceType, names: Sequence[str], known: bytes | None
    ) -> tuple[bytes, Any]:
        """A digest of what the broker says of these resources, and its answer unless the digest is ``known``.

        Telling that nothing changed takes a tenth of what decoding takes. Without synonyms, and not repeated.
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

    # --- Logs ---

    async def list_offsets(
        self,
        timestamps: Mapping[TopicPartition, int],
        *,
        isolation: int = READ_UNCOMMITTED,
        deadline_s: float | None = None,
    ) -> dict[TopicPartition, ListedOffset]:
        """Offsets by timestamp (milliseconds, or EARLIEST, LATEST, MAX_TIMESTAMP), asked of the leaders.

        LATEST is the high watermark, with READ_COMMITTED the last stable offset, and with LOG_END the log end.
        """

        def entry(one: TopicPartition) -> dict[str, Any]:
            return {
                "partition_index": one.partition,
                "timestamp": timestamps[one],
                # Without it, a broker that is no longer the leader would answer LOG_END, too.
                "current_leader_epoch": self._topics[one.topic].partitions[one.partition].leader_epoch,
            }

        async def ask(
            connection: BrokerConnection, asked: Sequence[TopicPartition]
        ) -> dict[TopicPartition, ListedOffset]:
            answer = await connection.call(
                ApiKey.LIST_OFFSETS,
                {
                    "replica_id": _DEBUGGING_REPLICA if isolation == LOG_END else -1,
                    "isolation_level": max(isolation, READ_UNCOMMITTED),
                    "topics": _by_topic(asked, entry),
                    "timeout": int(self.request_timeout_s * 1000),
                },
                timeout=self.request_timeout_s,
            )
            return {
                TopicPartition(topic.name, result.partition_index): ListedOffset(
                    result.offset,
                    result.timestamp,
                    getattr(result, "leader_epoch", -1),
                    as_error(result.error_code),
                )
                for topic in answer.topics
                for result in topic.partitions
            }

        return await self._at_leaders(
            timestamps.keys(), ask, lambda error: ListedOffset(-1, -1, -1, error), deadline_s=deadline_s
        )

    async def fetch_raw(
        self,
        node_id: int,
        wanted: Sequence[FetchFrom],
        *,
        wait_ms_max: int = 500,
        bytes_min: int = 1,
        bytes_max: int = 50 << 20,
        isolation: int = READ_UNCOMMITTED,
        lane: str = "fetch",
        at_most: int | None = None,
    ) -> RawFetch:
        """Fetch partitions of one leader, without a fetch session and without decoding. Not repeated."""
        connection = await self.to(node_id, lane)
        version = connection.version(ApiKey.FETCH, at_most)
        topics: dict[str, list[dict[str, int]]] = {}
        for one in wanted:
            topics.setdefault(one.topic, []).append(
                {
                    "partition": one.partition,
                    "current_leader_epoch": one.leader_epoch,
                    "fetch_offset": one.offset,
                    "partition_max_bytes": one.bytes_max,
                }
            )
        ids = {name: (await self.topic(name)).topic_id for name in topics} if version >= 13 else {}
        payload = build_request(
            ApiKey.FETCH,
            version,
            {
                "replica_id": -1,
                "max_wait": wait_ms_max,
                "min_bytes": bytes_min,
                "max_bytes": bytes_max,
                "isolation_level": isolation,
                "session_id": 0,
                "session_epoch": -1,
                "topics": [
                    {"topic": name, "topic_id": ids.get(name), "partitions": partitions}
                    for name, partitions in topics.items()
                ],
            },
        )
        frame = await connection.request_raw(payload, timeout=self.request_timeout_s + wait_ms_max / 1000)
        return RawFetch(version, frame, {topic_id: name for name, topic_id in ids.items() if topic_id is not None})

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int = 1 << 20,
        wait_ms_max: int = 500,
        isolation: int = READ_UNCOMMITTED,
        lane: str = "fetch",
        deadline_s: float | None = None,
    ) -> Fetched:
        """Fetch one partition from its leader, wherever that moves. Other errors are in the result."""

        async def attempt() -> Fetched:
            info = await self.leader(topic, partition)
            raw = await self.fetch_raw(
                info.leader,
                [FetchFrom(topic, partition, offset, bytes_max, info.leader_epoch)],
                wait_ms_max=wait_ms_max,
                isolation=isolation,
                lane=lane,
            )
            fetched = decode_fetch(raw)[TopicPartition(topic, partition)]
            if fetched.error is not None and is_stale_metadata(fetched.error):
                raise fetched.error
            return fetched

        return await self.retrying(attempt, topics=[topic], deadline_s=deadline_s)

    async def produce_raw(
        self,
        batches: Mapping[TopicPartition, bytes | bytearray | memoryview],
        *,
        acks: int = -1,
        transactional_id: str | None = None,
        timeout_s: float | None = None,
        at_most: int = 11,
        lane: str = "produce",
    ) -> dict[TopicPartition, Produced]:
        """Append one record batch (base offset 0) to each partition. Never repeated.

        ``acks`` is -1 or 1. ``at_most`` keeps to topic names (v13 has ids), and to versions that do not add partitions
        to transactions (v12). NETWORK_EXCEPTION and REQUEST_TIMED_OUT leave open whether a batch was appended.
        """
        if acks == 0:
            raise ValueError("acks=0 has no answer")
        timeout_s = timeout_s or self.request_timeout_s

        async def ask(connection: BrokerConnection, asked: Sequence[TopicPartition]) -> dict[TopicPartition, Produced]:
            version = connection.version(ApiKey.PRODUCE, at_most)
            ids = {one.topic: (await self.topic(one.topic)).topic_id for one in asked} if version >= 13 else {}
            names = {topic_id: name for name, topic_id in ids.items()}
            topics = _by_topic(
                asked,
                lambda one: {"index": one.partition, "records": bytes(batches[one])},
                array="partition_data",
            )
            answer = await connection.request(
                build_request(
                    ApiKey.PRODUCE,
                    version,
                    {
                        "transactional_id": transactional_id,
                        "acks": acks,
                        "timeout": int(timeout_s * 1000),
                        "topic_data": [{**topic, "topic_id": ids.get(topic["name"])} for topic in topics],
                    },
                ),
                timeout=timeout_s + 5,
            )
            return {
                TopicPartition(topic.name if version < 13 else names[topic.topic_id], result.index): Produced(
                    result.base_offset,
                    -1 if result.log_append_time is None else _milliseconds(result.log_append_time),
                    getattr(result, "log_start_offset", -1),
                    as_error(result.error_code, getattr(result, "error_message", None)),
                )
                for topic in answer.responses
                for result in topic.partition_responses
            }

        return await self._at_leaders(
            batches.keys(), ask, lambda error: Produced(-1, -1, -1, error), lane=lane, repeat=False
        )

    async def epoch_end(
        self, topic: str, partition: int, epoch: int, *, deadline_s: float | None = None
    ) -> tuple[int, int]:
        """(Largest leader epoch of the log up to ``epoch``, where it ends), (-1, -1) if there is none (KIP-101)."""

        async def ask(connection: BrokerConnection, info: PartitionInfo) -> tuple[int, int]:
            answer = await connection.call(
                ApiKey.OFFSET_FOR_LEADER_EPOCH,
                {
                    "replica_id": _DEBUGGING_REPLICA,
                    "topics": [
                        {
                            "topic": topic,
                            "partitions": [
                                {
                                    "partition": partition,
                                    "current_leader_epoch": info.leader_epoch,
                                    "leader_epoch": epoch,
                                }
                            ],
                        }
                    ],
                },
                timeout=self.request_timeout_s,
            )
            (found,) = answer.topics[0].partitions
            if (error := as_error(found.error_code)) is not None:
                raise error
            return found.leader_epoch, found.end_offset

        return await self.request_leader(topic, partition, ask, deadline_s=deadline_s)

    async def describe_producers(
        self, partitions: Collection[TopicPartition], *, deadline_s: float | None = None
    ) -> dict[TopicPartition, Producers]:
        """The producer states of partitions, as their leaders have them (KIP-664)."""

        async def ask(connection: BrokerConnection, asked: Sequence[TopicPartition]) -> dict[TopicPartition, Producers]:
            topics: dict[str, list[int]] = {}
            for one in asked:
                topics.setdefault(one.topic, []).append(one.partition)
            answer = await connection.call(
                ApiKey.DESCRIBE_PRODUCERS,
                {"topics": [{"name": name, "partition_indexes": indexes} for name, indexes in topics.items()]},
                timeout=self.request_timeout_s,
            )
            return {
                TopicPartition(topic.name, result.partition_index): Producers(
                    tuple(
                        ProducerState(
                            state.producer_id,
                            state.producer_epoch,
                            state.last_sequence,
                            state.last_timestamp,
                            state.coordinator_epoch,
                            state.current_txn_start_offset,
                        )
                        for state in result.active_producers
                    ),
                    as_error(result.error_code, result.error_message),
                )
                for topic in answer.topics
                for result in topic.partitions
            }

        return await self._at_leaders(partitions, ask, lambda error: Producers((), error), deadline_s=deadline_s)

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, deadline_s: float | None = None
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete records below an offset (-1: all below the high watermark). Doing it twice changes nothing."""

        async def ask(
            connection: BrokerConnection, asked: Sequence[TopicPartition]
        ) -> dict[TopicPartition, DeletedRecords]:
            answer = await connection.call(
                ApiKey.DELETE_RECORDS,
                {
                    "topics": _by_topic(asked, lambda one: {"partition_index": one.partition, "offset": before[one]}),
                    "timeout": int(self.request_timeout_s * 1000),
                },
                timeout=self.request_timeout_s + 5,
            )
            return {
                TopicPartition(topic.name, result.partition_index): DeletedRecords(
                    result.low_watermark, as_error(result.error_code)
                )
                for topic in answer.topics
                for result in topic.partitions
            }

        return await self._at_leaders(
            before.keys(), ask, lambda error: DeletedRecords(-1, error), deadline_s=deadline_s
        )

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
            answer = await connection.call(
                ApiKey.INIT_PRODUCER_ID,
                {
                    "transactional_id": transactional_id,
                    "transaction_timeout": transaction_timeout_ms,
                    "producer_id": -1,
                    "producer_epoch": -1,
                },
                timeout=self.request_timeout_s,
            )
            if answer.error_code:
                raise KafkaError(answer.error_code)
            return ProducerIdentity(answer.producer_id, answer.producer_epoch)

        return await self.retrying(attempt, deadline_s=deadline_s)


def decode_fetch(raw: RawFetch) -> dict[TopicPartition, Fetched]:
    """The partitions of a Fetch response. Raises KafkaError for an error of the whole request, MalformedFrame."""
    answer: Any = decode_response(ApiKey.FETCH, raw.version, raw.frame)[1]
    if getattr(answer, "error_code", 0):
        raise KafkaError(answer.error_code)
    return {
        TopicPartition(
            topic.topic if raw.version < 13 else raw.topic_names[topic.topic_id], partition.partition_index
        ): Fetched(
            partition.records or b"",
            partition.high_watermark,
            partition.last_stable_offset,
            getattr(partition, "log_start_offset", -1),
            tuple((aborted.producer_id, aborted.first_offset) for aborted in partition.aborted_transactions or ()),
            as_error(partition.error_code),
        )
        for topic in answer.responses
        for partition in topic.partitions
    }


def parse_address(address: str) -> tuple[str, int]:
    """``host:port``, with an IPv6 host in brackets. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def _by_topic(
    partitions: Iterable[TopicPartition], entry: Callable[[TopicPartition], dict[str, Any]], array: str = "partitions"
) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for one in partitions:
        topics.setdefault(one.topic, []).append(entry(one))
    return [{"name": name, array: entries} for name, entries in topics.items()]


def _config_entry(entry: Any) -> ConfigEntry:
    return ConfigEntry(
        entry.name,
        entry.value,
        entry.config_source,
        entry.read_only,
        entry.is_sensitive,
        tuple(ConfigSynonym(synonym.name, synonym.value, synonym.source) for synonym in entry.synonyms),
    )


def _milliseconds(moment: datetime.datetime) -> int:
    return round(moment.timestamp() * 1000)
