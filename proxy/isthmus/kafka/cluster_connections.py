"""A cluster's brokers, leaders and topics, connections to them, and when a request is repeated.

Connections are kept by node and *lane* (a broker reads a connection's next request only after it answered the last one,
so a long poll needs a lane of its own), and made again with exponential backoff. What is safe to retry is retried until
a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import ssl
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from isthmus.errors import ConfigurationError, ConnectionLost, KafkaError, PeerFault, RequestTimedOut
from isthmus.kafka.broker_connection import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, SOFTWARE_NAME, BrokerConnection
from isthmus.kafka.joined_requests import JoinedRequests
from isthmus.kafka.results import Broker, PartitionInfo, TopicInfo, TopicPartition
from isthmus.kafka.security import SecuritySpec
from isthmus_plugins.clock import monotonic
from isthmus_protocol.error_codes import (
    BROKER_NOT_AVAILABLE,
    FENCED_LEADER_EPOCH,
    KAFKA_STORAGE_ERROR,
    LEADER_NOT_AVAILABLE,
    NETWORK_EXCEPTION,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_NOT_AVAILABLE,
    REPLICA_NOT_AVAILABLE,
    REQUEST_TIMED_OUT,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_LEADER_EPOCH,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import build_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.topic_entries import topic_entries
from isthmus_protocol.wire import MalformedFrame

T = TypeVar("T")

RETRY_DEADLINE_S: Final = 30.0
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
RETRY_STEP_S: Final = 0.05
EXPIRY_MARGIN_S: Final = 5.0
"""A connection whose authentication ends within this time (KIP-368) takes no new requests."""
THROTTLED_SHOWN_S: Final = 2.0
"""So long after a broker has throttled this client it counts as doing it: the next request may be throttled, too."""
SAME_ANSWERS_MAX: Final = 64
"""Brokers name different controllers, so what they all say comes in several forms."""
UNDESCRIBED_MAX: Final = 1000
"""Topics of which is remembered that this client may not be told of them."""
RESPONSE_HEAD_BYTES: Final = 8
"""Size and correlation id."""

_FOUND: Final = frozenset({0, LEADER_NOT_AVAILABLE})
"""Errors of topics that there are."""
_NO_TOPIC: Final = ""
"""No topic has this name: asked for, it stands for the brokers alone."""
_STALE_METADATA: Final = frozenset(
    {
        UNKNOWN_TOPIC_OR_PARTITION,  # also while a new topic spreads
        LEADER_NOT_AVAILABLE,
        NOT_LEADER_OR_FOLLOWER,
        BROKER_NOT_AVAILABLE,
        REPLICA_NOT_AVAILABLE,
        NETWORK_EXCEPTION,
        KAFKA_STORAGE_ERROR,
        FENCED_LEADER_EPOCH,
        UNKNOWN_LEADER_EPOCH,
        OFFSET_NOT_AVAILABLE,  # a new leader does not know its high watermark yet
        UNKNOWN_TOPIC_ID,
    }
)
"""Read the metadata again, and try again."""


_Entries: TypeAlias = dict[bytes, TopicInfo]
"""What is known by the bytes of a topic's entry in an answer."""
_Kinds: TypeAlias = dict[tuple[object, ...], JoinedRequests[Any, Any, Any]]


class _HasError(Protocol):
    @property
    def error(self) -> KafkaError | None: ...


R = TypeVar("R", bound=_HasError)


def is_stale_metadata(error: KafkaError) -> bool:
    """Whether the leader may be another one than we thought: read the metadata again, and try again."""
    return error.code in _STALE_METADATA


def is_transient(error: PeerFault) -> bool:
    """Whether it may be gone when the same is asked again."""
    if isinstance(error, KafkaError):
        return error.retriable or is_stale_metadata(error)
    return isinstance(error, ConnectionLost | RequestTimedOut)


def together_at(moment: float) -> float:
    """The next moment from this one on at which this client tries again whatever has failed.

    Of a thousand partitions that have no leader yet each is asked about by itself: so they go in one request.
    """
    return math.ceil(moment / RETRY_STEP_S) * RETRY_STEP_S


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


class ClusterConnections:
    """Use as ``async with ClusterClient(["host:9092"]) as cluster``, or start and close it."""

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
        self._undescribed: set[str] = set()
        """Names that were asked for, and that this client may not be told of, whether there are such topics or not."""
        self._slots: dict[tuple[str, int, str], _Slot] = {}
        self._entries: _Entries = {}
        """Of the latest answer about all topics."""
        self._same_answers: dict[tuple[frozenset[str] | None, bytes], int] = {}
        """Answers that say what is known: they need not be decoded. By question and body, the controller's id.

        The internal topics are asked about every second, and have 50 partitions each: a millisecond to decode.
        """
        self._reading: JoinedRequests[str | None, None, None] = JoinedRequests()
        """Metadata is read of these topics; None: of all."""
        self._joining: WeakKeyDictionary[BrokerConnection, dict[tuple[object, ...], JoinedRequests[Any, Any, Any]]] = (
            WeakKeyDictionary()
        )
        self.tls_context: ssl.SSLContext | None = None
        """Of connections to come; None: it is made of the files when the next one is."""
        self._retiring: set[BrokerConnection] = set()
        self.throttled_s: defaultdict[tuple[str, int], float] = defaultdict(float)
        """By a broker's address and API: for how long quotas kept this client waiting, since the start."""
        self._throttled_until: dict[tuple[str, int], float] = {}
        self.brokers_changed_at = float("-inf")
        """Monotonic seconds: when the last connection to a broker was lost, or the first one made."""
        self._open: Counter[str] = Counter()
        """By a broker's address: its connections."""
        self._started = self._closed = False

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
        self._started = True

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

    def may_describe(self, topic: str) -> bool:
        """Whether this client is told whether there is a topic, as far as it has asked for it by name."""
        return topic not in self._undescribed

    def topic_name(self, topic_id: UUID) -> str | None:
        """The name of a topic id, as last read."""
        return self._names.get(topic_id)

    async def refresh(self, topics: Iterable[str] | None = None) -> Mapping[str, TopicInfo]:
        """Read brokers and the named topics (all by default) again; returns the topics found.

        A topic that does not exist is left out, and dropped from the cache. Topics are never created by this.
        """
        wanted = None if topics is None else frozenset(topics)
        await self._reading.ask(dict.fromkeys([None] if wanted is None else wanted or [_NO_TOPIC]), self._read_together)
        if wanted is None:
            return self.topics
        return {name: self._topics[name] for name in wanted if name in self._topics}

    async def _read_together(self, wanted: Mapping[str | None, None]) -> Mapping[str | None, None]:
        names = None if None in wanted else frozenset(name for name in wanted if name)
        await self._read_metadata(names)
        return wanted

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
        said = wanted, bytes(memoryview(frame)[RESPONSE_HEAD_BYTES:])
        if said in self._same_answers:
            self.controller_id = self._same_answers[said]
            return
        news: list[bytes] = []
        others: _Entries = {}
        if wanted is None:
            frame, news, others = self._news(version, frame)
        answer = connection.decode(ApiKey.METADATA, version, frame)
        if getattr(answer, "error_code", 0):
            raise KafkaError(answer.error_code)
        brokers_before, topics_before = self._brokers, self._topics
        if answer.brokers:
            self._brokers = MappingProxyType(
                {
                    broker.node_id: Broker(broker.node_id, broker.host, broker.port, getattr(broker, "rack", None))
                    for broker in answer.brokers
                }
            )
        self.cluster_id = getattr(answer, "cluster_id", None) or self.cluster_id
        self.controller_id = getattr(answer, "controller_id", -1)
        self._take_topics(answer.topics, None if wanted is not None else others.values())
        if wanted is None:
            taken = {entry: self._topics.get(topic.name) for entry, topic in zip(news, answer.topics, strict=False)}
            self._entries = others | {entry: info for entry, info in taken.items() if info is not None}
        if brokers_before != self._brokers or topics_before is not self._topics:
            self._same_answers.clear()
            if brokers_before != self._brokers:
                self._forget_addresses()
        elif len(self._same_answers) == SAME_ANSWERS_MAX:  # those about all topics, which may be large, go last
            by_name = (each for each in self._same_answers if each[0] is not None)
            del self._same_answers[next(by_name, next(iter(self._same_answers)))]
        self._same_answers[said] = self.controller_id

    def _news(self, version: int, frame: bytes | bytearray) -> tuple[bytes | bytearray, list[bytes], _Entries]:
        """Of an answer about all topics: the part that is not known, the entries of its topics, and all others.

        Among thousands of topics mostly few are new, or changed, and to decode them all takes a tenth of a second.
        """
        news: list[bytes] = []
        others: _Entries = {}

        def is_new(entry: bytes) -> bool:
            info = self._entries.get(entry)
            if info is not None and self._topics.get(info.name) is info:
                others[entry] = info
                return False
            news.append(entry)
            return True

        try:
            return topic_entries(ApiKey.METADATA, version).only(bytes(frame), is_new), news, others
        except MalformedFrame:
            return frame, [], {}  # who decodes it says so

    def _take_topics(self, answered: Collection[Any], others: Iterable[TopicInfo] | None) -> None:
        """Note what an answer says of topics. The same objects where it is known.

        ``others``: all other topics that there are; None: it is not about all of them.
        """
        known = self._topics
        found: dict[str, TopicInfo] = {}
        gone: set[str] = set()
        undescribed: set[str] = set()
        for topic in answered:
            if topic.error_code in _FOUND:
                found[topic.name] = self._topic_info(topic)
            elif topic.error_code == UNKNOWN_TOPIC_OR_PARTITION:
                gone.add(topic.name)
            if topic.error_code == TOPIC_AUTHORIZATION_FAILED:
                undescribed.add(topic.name)
        if undescribed or self._undescribed:
            self._note_undescribed(undescribed, {topic.name for topic in answered})
        gone &= known.keys()
        if others is not None:
            gone = known.keys() - found.keys() - {info.name for info in others}
        found = {name: info for name, info in found.items() if known.get(name) is not info}
        if not found and not gone:
            return
        self._topics = dict(known)
        for name in (*gone, *found):
            self._forget_topic(name)
        self._topics |= found
        self._names |= {info.topic_id: name for name, info in found.items() if info.topic_id is not None}

    def _note_undescribed(self, undescribed: set[str], answered: set[str]) -> None:
        """``undescribed``: those of the topics that were answered of which the broker says nothing."""
        kept = self._undescribed - answered if len(self._undescribed) < UNDESCRIBED_MAX else set[str]()
        if (known := kept | undescribed) != self._undescribed:
            self._undescribed = known
            self._same_answers.clear()

    def _forget_topic(self, name: str) -> None:
        """It is gone, or will be read anew."""
        info = self._topics.pop(name, None)
        if info is not None and info.topic_id is not None:
            self._names.pop(info.topic_id, None)

    def _forget_addresses(self) -> None:
        """Brokers that are made anew may have another address each time: forget what is known of those before."""
        known = {*self._bootstrap, *((broker.host, broker.port) for broker in self._brokers.values())}
        for key, slot in list(self._slots.items()):
            in_use = slot.lock.locked() or (slot.connection is not None and slot.connection.is_open)
            if key[:2] not in known and not in_use:
                del self._slots[key]
        addresses = {f"{host}:{port}" for host, port in known} | {each for each, count in self._open.items() if count}
        for counts in (self.throttled_s, self._throttled_until):
            for place in [place for place in counts if place[0] not in addresses]:
                del counts[place]
        for address in self._open.keys() - addresses:
            del self._open[address]

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
        found = TopicInfo(topic.name, topic_id, getattr(topic, "is_internal", False), MappingProxyType(partitions))
        return cached if cached == found else found

    async def topic(self, name: str) -> TopicInfo:
        """A topic, from the cache or read now. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
        info = self._topics.get(name) or (await self.refresh([name])).get(name)
        if info is None:
            raise KafkaError(UNKNOWN_TOPIC_OR_PARTITION, name)
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
        raise KafkaError(UNKNOWN_TOPIC_OR_PARTITION if info is None else LEADER_NOT_AVAILABLE, f"{topic}-{partition}")

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
        slot = self._slots.get((host, port, lane))
        if slot is None:
            slot = self._slots[host, port, lane] = _Slot()
        elif slot.connection is not None and self._usable(slot.connection):
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
            try:
                if self.tls_context is None:
                    self.tls_context = self.security.tls_context()
                slot.connection = await BrokerConnection.connect(
                    host,
                    port,
                    self.security,
                    client_id=self.client_id,
                    timeout=self._connect_timeout_s,
                    tls_context=self.tls_context,
                )
            except (PeerFault, ConfigurationError) as error:
                self._read_tls_again()
                slot.not_before = loop.time() + slot.backoff.next_s()
                if isinstance(error, ConfigurationError) and self._started:
                    # It was right when this began: a file is being replaced, or there are no descriptors left.
                    raise ConnectionLost(f"{host}:{port} cannot be connected to: {error}") from error
                raise
            slot.backoff.reset()
            slot.connection.on_throttled = partial(self._note_throttled, slot.connection.address)
            if slot.connection.is_open:
                slot.connection.on_lost = partial(self._note_connections, slot.connection.address, -1)
                self._note_connections(slot.connection.address, 1)
            return slot.connection

    def _note_connections(self, address: str, more: int, reason: ConnectionLost | None = None) -> None:
        had = self._open[address]
        self._open[address] += more
        if not had or not self._open[address]:
            self.brokers_changed_at = monotonic()

    def _note_throttled(self, address: str, api_key: int, seconds: float) -> None:
        self.throttled_s[address, api_key] += seconds
        self._throttled_until[address, api_key] = asyncio.get_running_loop().time() + seconds + THROTTLED_SHOWN_S

    def throttled(self) -> list[tuple[str, int]]:
        """The brokers (addresses) and APIs for which quotas keep this client waiting now, or did a moment ago."""
        now = asyncio.get_running_loop().time()
        self._throttled_until = {key: until for key, until in self._throttled_until.items() if until > now}
        return sorted(self._throttled_until)

    def _usable(self, connection: BrokerConnection) -> bool:
        if not connection.is_open:
            return False
        now = asyncio.get_running_loop().time()
        return connection.expires_at is None or now < connection.expires_at - EXPIRY_MARGIN_S

    def _read_tls_again(self) -> None:
        """The files may have been renewed. Those that cannot be used as they are now leave what was read before."""
        with contextlib.suppress(ConfigurationError):
            self.tls_context = self.security.tls_context()

    def _retire(self, connection: BrokerConnection) -> None:
        """Let a connection whose authentication ends answer what is under way; the broker closes it then."""
        if connection.is_open:
            self._retiring.add(connection)
            on_lost = connection.on_lost

            def lost(reason: ConnectionLost) -> None:
                self._retiring.discard(connection)
                if on_lost is not None:
                    on_lost(reason)

            connection.on_lost = lost

    def _joined(self, connection: BrokerConnection, api_key: int, *kind: object) -> JoinedRequests[Any, Any, Any]:
        """Where requests of one API and kind over a connection meet."""
        kinds = self._joining.setdefault(connection, {})
        return kinds.setdefault((api_key, *kind), JoinedRequests())

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
            except PeerFault as error:
                if not is_transient(error):
                    raise
                now = loop.time()
                again_at = together_at(now + backoff.next_s())
                if self._closed or again_at >= deadline:
                    raise
            await asyncio.sleep(again_at - now)
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

    async def at_leaders(
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
                connection = await self.to(node_id, lane)
                answers = await ask(connection, asked)
                results.update({one: answers[one] for one in asked if one in answers})
                if left := [one for one in asked if one not in answers]:
                    lacking = KafkaError(NETWORK_EXCEPTION, f"{connection.address} says nothing of it in its answer")
                    results.update(dict.fromkeys(left, failed(lacking)))
            except (ConnectionLost, RequestTimedOut) as error:
                if repeat:
                    raise
                code = NETWORK_EXCEPTION if isinstance(error, ConnectionLost) else REQUEST_TIMED_OUT
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


def parse_address(address: str) -> tuple[str, int]:
    """``host:port``, with an IPv6 host in brackets. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)
