"""A cluster in memory, with the faults of a real one, for simulations and unit tests of the replication plugin.

:class:`FakeCluster` is what plugins see of a cluster (``ClusterApi``), over the model of a broker's log in
``support.partition_log``. Its requests take time, get lost with or without effect, land late. :class:`FakeControl`
applies commands with the real rules. Everything runs on the loop's clock, which :func:`run_simulated` replaces by one
that jumps from event to event.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from isthmus_control import apply as rules
from isthmus_control.anchors import Anchor
from isthmus_control.commands import Body, Command
from isthmus_control.concerns import Beyond, Concerns
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KNOWN_LEVEL
from isthmus_control.outcome import Outcome
from isthmus_control.sealing import Sealed, Sealer, Secret
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    Fetched,
    FetchPartition,
    KafkaRefused,
    NewTopic,
    PartitionInfo,
    ProduceResult,
    ProducerState,
    TopicInfo,
    TopicPartition,
    TransactionMarkers,
)
from isthmus_plugins.link_policy import LinkPolicy
from isthmus_plugins.observers import LinkObservers
from isthmus_plugins.process import CaptureAllowed, LinkListenerSpec
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.records import whole_header
from support.fake_acls import FakeAcls
from support.fake_groups import BROKER_DEFAULTS, FakeGroups
from support.partition_log import (
    COORDINATOR_FENCED,
    INVALID_PRODUCER_EPOCH,
    INVALID_RECORD,
    INVALID_TIMESTAMP,
    INVALID_TXN_STATE,
    NONE,
    OUT_OF_ORDER,
    OUT_OF_RANGE,
    TIMESTAMP,
    Partition,
)

T = TypeVar("T")
Write: TypeAlias = Callable[[Partition], tuple[int, int]]
Results: TypeAlias = dict[TopicPartition, ProduceResult]

TOO_LARGE, LIST_TOO_LARGE = 10, 18
UNKNOWN_TOPIC, NOT_LEADER, TIMED_OUT, NOT_ENOUGH_REPLICAS, AFTER_APPEND = 3, 6, 7, 19, 20
FENCED, UNKNOWN_ID, STORAGE_ERROR = 74, 100, 56
NAMES: Final = {
    NONE: "NONE",
    TOO_LARGE: "MESSAGE_TOO_LARGE",
    LIST_TOO_LARGE: "RECORD_LIST_TOO_LARGE",
    UNKNOWN_TOPIC: "UNKNOWN_TOPIC_OR_PARTITION",
    NOT_LEADER: "NOT_LEADER_OR_FOLLOWER",
    TIMED_OUT: "REQUEST_TIMED_OUT",
    NOT_ENOUGH_REPLICAS: "NOT_ENOUGH_REPLICAS",
    STORAGE_ERROR: "KAFKA_STORAGE_ERROR",
    AFTER_APPEND: "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    OUT_OF_ORDER: "OUT_OF_ORDER_SEQUENCE_NUMBER",
    INVALID_TIMESTAMP: "INVALID_TIMESTAMP",
    INVALID_PRODUCER_EPOCH: "INVALID_PRODUCER_EPOCH",
    INVALID_TXN_STATE: "INVALID_TXN_STATE",
    INVALID_RECORD: "INVALID_RECORD",
    COORDINATOR_FENCED: "TRANSACTION_COORDINATOR_FENCED",
}
LATE_MAX_S: Final = 1.9
"""A request whose connection broke lands within this time, or never."""
SOME_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
}


# ---- time ----


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting, moves the loop's clock."""

    now = 1000.0
    threads = 0
    """In which something is being done."""

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(None if self.threads and timeout != 0 else 0)
        if not ready:
            assert timeout is not None, "nothing will ever happen any more"
            self.now += max(timeout, 0.0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on which time passes only while nothing is to be done."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """No time passes while a thread works."""

        def done(_: asyncio.Future[T]) -> None:
            self._jumping.threads -= 1

        self._jumping.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(done)
        return future

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        """Wait for its threads. ``timeout``: as from Python 3.12 on."""
        self._jumping.threads += 1
        await super().shutdown_default_executor(*timeout)
        self._jumping.threads -= 1

    def time(self) -> float:
        return self._jumping.now


def simulated_now() -> float:
    """Seconds on the monotonic clock of the loop that runs."""
    return asyncio.get_running_loop().time()


class LoopClock:
    """The clocks of the loop that runs; the wall clock of a simulated one began at ``TIMESTAMP``."""

    def monotonic(self) -> float:
        return simulated_now()

    def time(self) -> float:
        loop = asyncio.get_running_loop()
        return TIMESTAMP / 1000 + loop.time() if isinstance(loop, SimulatedLoop) else time.time()


def run_simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on a loop whose clock jumps; without asyncio's debug mode, which more than doubles what it takes."""
    with asyncio.Runner(debug=False, loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


# ---- topics ----


@dataclass
class Topic:
    name: str
    topic_id: bytes
    partitions: list[Partition]
    configs: dict[str, str]
    replication_factor: int = 1
    replicas: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By partition, where they are not the leader alone."""


class FakeCluster(FakeAcls, FakeGroups):
    """A cluster as a plugin sees it. ``trouble``: how likely a request meets some."""

    def __init__(self, rng: random.Random, brokers: Sequence[int] = (1,)) -> None:
        FakeAcls.__init__(self)
        FakeGroups.__init__(self, rng)
        self.random = rng
        self.brokers = list(brokers)
        self.down: set[int] = set()
        self.trouble = 0.0
        self.found: dict[str, Topic] = {}
        self.on_new_partition: Callable[[str, int, Partition], None] = lambda topic, index, partition: None
        self.defaults = dict(SOME_CONFIGS)
        self.policy: Callable[[str, str, str | None], str | None] = lambda topic, name, value: None
        """Why the brokers refuse a setting of a topic, if they do."""
        self.broker_defaults = {"transaction.partition.verification.enable": "true", **BROKER_DEFAULTS}
        self.cluster_configs: dict[str, str] = {}
        self.completing: list[str] = []
        """Transactions whose markers are on their way."""
        self.fence: Callable[[str, int, int], None] = lambda transactional_id, producer_id, epoch: None
        """What a coordinator does that is to abort a transaction."""
        self._recorded: dict[str, dict[str, str | None]] = {}
        """By topic name, what was said last of each setting; None: it was removed."""
        self.enforces_limits = False
        """Batches that are larger than their topic's limits are refused."""
        self.throttles: str | None = None
        self.hidden: dict[str, Topic] = {}
        """Topics that the proxies are not shown, and that are there all the same."""
        self.growing: dict[TopicPartition, int] = {}
        """Partitions of which only so many replicas have the records; taken out when the others are filled."""
        self.may_reassign = True
        self.requests = 0
        self.bursts = 0
        """How often batches were sent without waiting for the answer to the one before."""
        self.boots: Counter[int] = Counter()
        """How often each broker was restarted: no connection outlives that."""
        self._producing: dict[tuple[int, str], FakeProduceConnection] = {}
        self.fetch_sessions: dict[tuple[int, str], dict[FetchPartition, tuple[int, int, int]]] = {}

    # -- what tests do with it

    def add_topic(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> Topic:
        topic = Topic(name, uuid.UUID(int=self.random.getrandbits(128)).bytes, [], dict(configs or {}))
        self.found[name] = topic
        self._recorded.setdefault(name, {}).update(configs or {})
        self._grow(topic, partitions)
        return topic

    def _grow(self, topic: Topic, total: int) -> None:
        while len(topic.partitions) < total:
            partition = Partition(self.random.choice(self.brokers))
            topic.partitions.append(partition)
            self._configure(topic)
            self.on_new_partition(topic.name, len(topic.partitions) - 1, partition)

    def _configure(self, topic: Topic) -> None:
        for partition in topic.partitions:
            partition.compacted = "compact" in topic.configs.get("cleanup.policy", "delete")
            partition.log_append_time = topic.configs.get("message.timestamp.type") == "LogAppendTime"

    def partition(self, topic: str, partition: int = 0) -> Partition:
        return self.found[topic].partitions[partition]

    def lose_ends(self, broker: int, lost: Callable[[Partition], int]) -> None:
        """A broker without replicas is restarted after a power loss: of each log that it leads the last offsets are
        gone that were not flushed, whole batches of them. ``lost``: how many offsets."""
        self.boots[broker] += 1
        self.brokers_changed_at = asyncio.get_running_loop().time()
        for topic in self.found.values():
            for partition in topic.partitions:
                if partition.leader == broker and (offsets := lost(partition)):
                    partition.cut(max(partition.start, partition.end - offsets))
                    partition.lag = 0
                    partition.leader_epoch += 1

    # -- ClusterApi

    async def _request(self, broker: int | None = None) -> None:
        self.requests += 1
        await asyncio.sleep(self.random.uniform(0.0005, 0.005))
        if (broker is not None and broker in self.down) or self.random.random() < self.trouble / 4:
            raise BrokerUnavailable(f"broker {broker} does not answer")

    def _found(self, topic: str, partition: int) -> Partition:
        found = self.found.get(topic)
        if found is None or partition >= len(found.partitions):
            raise BrokerUnavailable(f"there is no {topic}-{partition}")
        if not self._is_led(topic, partition):
            raise BrokerUnavailable(f"the leader of {topic}-{partition} is down, or there is none")
        return found.partitions[partition]

    def throttled(self) -> str | None:
        return self.throttles

    async def topics(self) -> Mapping[str, TopicInfo]:
        await self._request()
        return {name: self._info(topic) for name, topic in self.found.items()}

    def _info(self, topic: Topic) -> TopicInfo:
        return TopicInfo(
            topic.name,
            topic.topic_id,
            tuple(self._partition_info(topic, index) for index in range(len(topic.partitions))),
            len(topic.replicas.get(0, ())) or topic.replication_factor,
            topic.name.startswith("__"),
        )

    def _partition_info(self, topic: Topic, index: int) -> PartitionInfo:
        found = topic.partitions[index]
        replicas = topic.replicas.get(index, (found.leader,))
        filled = replicas[: self.growing.get((topic.name, index))]
        in_sync = tuple(broker for broker in filled if broker not in self.down)
        return PartitionInfo(found.leader, found.leader_epoch, replicas, in_sync)

    async def topic(self, name: str) -> TopicInfo | None:
        return (await self.topics_named([name])).get(name)

    async def topics_named(self, names: Collection[str]) -> Mapping[str, TopicInfo]:
        await self._request()
        return {name: self._info(self.found[name]) for name in names if name in self.found}

    async def unknown_topics(self, topic_ids: Collection[bytes], cluster_id: str) -> frozenset[bytes]:
        await self._request()
        return frozenset(topic_ids) - {topic.topic_id for topic in (*self.found.values(), *self.hidden.values())}

    async def leader_of(self, topic: str, partition: int) -> int | None:
        await self._request()
        found = self.found.get(topic)
        if found is None or partition >= len(found.partitions) or found.partitions[partition].leader < 0:
            return None
        return found.partitions[partition].leader

    async def broker_racks(self) -> Mapping[int, str | None]:
        return {broker: None for broker in self.brokers if broker not in self.down}

    async def reassigned(self) -> Collection[TopicPartition]:
        await self._request()
        self._check_access()
        return set(self.growing)

    async def reassign(self, replicas: Mapping[TopicPartition, Sequence[int]]) -> Mapping[TopicPartition, KafkaRefused]:
        await self._request()
        self._check_access()
        for (topic, partition), wanted in replicas.items():
            found = self.found[topic]
            self.growing[topic, partition] = len(found.replicas.get(partition, (0,)))
            found.replicas[partition] = tuple(wanted)
        return {}

    def _check_access(self) -> None:
        if not self.may_reassign:
            raise KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "Cluster authorization failed.")

    async def log_end(self, topic: str, partition: int) -> int:
        await self._request()
        return self._found(topic, partition).end

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        await self._request()
        return {place: self.partition(*place).end for place in partitions if self._is_led(*place)}

    def _is_led(self, topic: str, partition: int) -> bool:
        """Whether a partition is there, and has a leader that answers."""
        found = self.found.get(topic)
        leader = -1 if found is None or partition >= len(found.partitions) else found.partitions[partition].leader
        return leader >= 0 and leader not in self.down

    async def high_watermark(self, topic: str, partition: int) -> int:
        await self._request()
        return self._high_watermark(self._found(topic, partition))

    def _high_watermark(self, partition: Partition) -> int:
        """It may have come further since it was asked for last."""
        partition.lag = 0 if self.random.random() < 0.7 else partition.lag
        return partition.high_watermark

    async def last_stable_offset(self, topic: str, partition: int) -> int:
        await self._request()
        return self._found(topic, partition).last_stable_offset

    async def high_watermarks(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        await self._request()
        return {place: self._high_watermark(self.partition(*place)) for place in partitions if self._is_led(*place)}

    async def offsets_for_times(self, asked: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, tuple[int, int]]:
        await self._request()
        return {place: self._found(*place).offset_for_time(time) for place, time in asked.items()}

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        await self._request()
        found = self._found(topic, partition)
        known = [header.leader_epoch for header in found.headers if header.leader_epoch <= epoch]
        if not known:
            return -1, -1
        later = [header.base_offset for header in found.headers if header.leader_epoch > epoch]
        return max(known), min(later, default=found.end)

    async def log_start(self, topic: str, partition: int) -> int:
        await self._request()
        return self._found(topic, partition).start

    async def delete_records(self, topic: str, partition: int, before: int) -> int:
        await self._request()
        found = self._found(topic, partition)
        if self.found[topic].configs.get("cleanup.policy") == "compact":
            raise KafkaRefused(44, "POLICY_VIOLATION", f"{topic} is compacted")
        code, start = found.delete_records(before)
        if code:
            raise KafkaRefused(code, "OFFSET_OUT_OF_RANGE", f"{topic}-{partition} ends before {before}")
        return start

    async def producers(self, topic: str, partition: int) -> Mapping[int, ProducerState]:
        await self._request()
        return {
            producer_id: ProducerState(
                known.epoch, known.last_sequence, known.coordinator_epoch, known.transaction_start
            )
            for producer_id, known in self._found(topic, partition).producers.items()
            if known.epoch >= 0
        }

    async def completing_transactions(self) -> Sequence[str]:
        await self._request()
        return self.completing

    async def fence_transaction(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        await self._request()
        self.fence(transactional_id, producer_id, producer_epoch)

    async def prepare_transactions(self) -> None:
        await self._request()

    async def topic_configs(
        self, topic: str, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[str | None, str | None]]:
        await self._request()
        own = self.found[topic].configs if topic in self.found else {}
        chosen = self.defaults.keys() if names is None else self.defaults.keys() & set(names)
        return {name: (own.get(name, value), value) for name, value in self.defaults.items() if name in chosen}

    async def effective_configs(
        self, topics: Sequence[str], known: bytes | None = None
    ) -> tuple[bytes, Mapping[str, Mapping[str, str | None]] | None]:
        await self._request()
        found: dict[str, dict[str, str | None]] = {
            name: {**self.defaults, **self.found[name].configs} for name in topics if name in self.found
        }
        digest = repr(found).encode()
        return digest, None if digest == known else found

    async def create_topic(
        self, topic: str, partitions: int, replication_factor: int, configs: Mapping[str, str]
    ) -> bytes:
        await self._request()
        self._check_new(topic, configs)
        if replication_factor > len(self.brokers):
            raise KafkaRefused(38, "INVALID_REPLICATION_FACTOR", f"only {len(self.brokers)} brokers are registered")
        made = self.add_topic(topic, partitions, configs)
        made.replication_factor = replication_factor
        for index, partition in enumerate(made.partitions):
            others = sorted(set(self.brokers) - {partition.leader}, key=lambda broker: broker in self.down)
            made.replicas[index] = (partition.leader, *others)[:replication_factor]
        if self.random.random() < self.trouble:
            raise BrokerUnavailable("the answer was lost")
        return made.topic_id

    async def try_topics(self, topics: Collection[NewTopic]) -> Mapping[str, KafkaRefused]:
        await self._request()
        refused = {}
        for topic in topics:
            try:
                self._check_new(topic.name, topic.configs)
            except KafkaRefused as error:
                refused[topic.name] = error
        return refused

    def _check_new(self, topic: str, configs: Mapping[str, str]) -> None:
        if topic in self.found:
            raise KafkaRefused(36, "TOPIC_ALREADY_EXISTS", f"{topic} exists")
        self._check_policy(topic, configs)

    async def delete_topic(self, topic: str) -> None:
        await self._request()
        self.found.pop(topic, None)

    async def delete_topic_id(self, topic_id: bytes) -> None:
        await self._request()
        for name in [name for name, topic in self.found.items() if topic.topic_id == topic_id]:
            del self.found[name]

    async def create_partitions(self, topic: str, total: int) -> None:
        await self._request()
        self._grow(self.found[topic], total)

    async def alter_topic_configs(
        self, topic: str, configs: Mapping[str, str | None], validate_only: bool = False
    ) -> None:
        await self._request()
        self._check_policy(topic, configs)
        if validate_only:
            return
        for name, value in configs.items():
            own = self.found[topic].configs
            if own.get(name) != value:
                self._recorded.setdefault(topic, {})[name] = value
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value
        self._configure(self.found[topic])

    def start_brokers_anew(self) -> None:
        """As they read their metadata from its beginning, a topic gets the settings back that one of its name had which
        was deleted, but for those that were said of itself since."""
        for name, topic in self.found.items():
            topic.configs = {key: value for key, value in self._recorded.get(name, {}).items() if value is not None}
            self._configure(topic)

    def _check_policy(self, topic: str, configs: Mapping[str, str | None]) -> None:
        for setting in configs.items():
            if (why := self.policy(topic, *setting)) is not None:
                raise KafkaRefused(44, "POLICY_VIOLATION", why)

    async def broker_configs(self, name: str) -> Mapping[int, str | None]:
        await self._request()
        value = self.cluster_configs.get(name, self.broker_defaults.get(name))
        return dict.fromkeys(self.brokers, value)

    async def cluster_config(self, name: str) -> str | None:
        await self._request()
        return self.cluster_configs.get(name)

    async def alter_cluster_config(self, name: str, value: str | None, validate_only: bool = False) -> None:
        await self._request()
        if validate_only:
            return
        if value is None:
            self.cluster_configs.pop(name, None)
        else:
            self.cluster_configs[name] = value

    async def produce_connection(self, broker_id: int, lane: str) -> FakeProduceConnection:
        known = self._producing.get((broker_id, lane))
        if known is None or not known.is_open:
            await self._request(broker_id)
            known = self._producing[broker_id, lane] = FakeProduceConnection(self, broker_id)
        return known

    async def fetch_connection(self, broker_id: int, lane: str) -> FakeFetchConnection:
        await self._request(broker_id)
        return FakeFetchConnection(self, broker_id, self.fetch_sessions.setdefault((broker_id, lane), {}))


class FakeProduceConnection:
    """Appends, of which some are lost before or after they land, and some land after they were taken for lost."""

    def __init__(self, cluster: FakeCluster, broker_id: int) -> None:
        self._cluster = cluster
        self._broker_id = broker_id
        self._closed = False
        self._boots = cluster.boots[broker_id]
        self.opened_at = asyncio.get_running_loop().time()

    @property
    def is_open(self) -> bool:
        return not self._closed and self._boots == self._cluster.boots[self._broker_id]

    async def produce(
        self,
        requests: Sequence[Mapping[TopicPartition, bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[TopicPartition, ProduceResult]]:
        for batches in requests:
            transactional = {
                header.producer_id for data in batches.values() if (header := whole_header(data)).is_transactional
            }
            assert len(transactional) <= 1, "brokers refuse transactional batches of several producers"
            assert not transactional or transactional_id is not None
        self._cluster.bursts += len(requests) > 1
        return await self._landing(
            [{place: partial(_produced, data) for place, data in batches.items()} for batches in requests]
        )

    async def write_markers(
        self, markers: Sequence[TransactionMarkers], timeout_ms: int
    ) -> dict[TopicPartition, ProduceResult]:
        return (await self._landing([{(each.topic, each.partition): partial(_marked, each) for each in markers}]))[0]

    async def _landing(self, requests: Sequence[Mapping[TopicPartition, Write]]) -> list[Results]:
        """The broker takes up one request after the other, and one of them meets the trouble.

        Those before the last are not replicated when they are answered.
        """
        cluster, rng, loop = self._cluster, self._cluster.random, asyncio.get_running_loop()
        if not self.is_open:
            raise BrokerUnavailable("closed")
        done: asyncio.Future[list[Results]] = loop.create_future()
        trouble = rng.random() < cluster.trouble
        fate = rng.choice(("lost", "unanswered", "late", "refused", "timed-out")) if trouble else "answered"
        last = len(requests) - 1
        troubled = rng.randint(0, last)
        answers: list[Results] = []

        def lose() -> None:
            if not done.done():
                done.set_exception(BrokerUnavailable(f"the connection broke ({fate})"))
                done.exception()

        def land(number: int) -> None:
            if self._broker_id in cluster.down or self._boots != cluster.boots[self._broker_id]:
                return  # that its connection was closed takes nothing back
            meets = fate if number == troubled else "answered"
            answers.append(
                {place: self._append(place, write, meets, number == last) for place, write in requests[number].items()}
            )
            if number < last:
                take_up(number + 1)
            elif fate in ("unanswered", "late"):
                lose()
            else:
                loop.call_later(rng.uniform(0.0002, 0.002), lambda: None if done.done() else done.set_result(answers))

        def take_up(number: int) -> None:
            delay = rng.uniform(0.0005, 0.01)
            if fate in ("lost", "late") and number == troubled:
                loop.call_later(delay, lose)
                delay += rng.uniform(0.0, LATE_MAX_S)
            if fate != "lost" or number != troubled:
                loop.call_later(delay, land, number)

        take_up(0)
        try:
            async with asyncio.timeout(5):
                return await done
        except TimeoutError:
            raise BrokerUnavailable("no answer") from None

    def _append(self, place: TopicPartition, write: Write, fate: str, acks_all: bool) -> ProduceResult:
        topic = self._cluster.found.get(place[0])
        if topic is None or place[1] >= len(topic.partitions):
            return ProduceResult(UNKNOWN_TOPIC, NAMES[UNKNOWN_TOPIC], -1, "")
        partition = topic.partitions[place[1]]
        if partition.leader != self._broker_id:
            return ProduceResult(NOT_LEADER, NAMES[NOT_LEADER], -1, "")
        if (code := self._too_large(topic, write)) != NONE:
            return ProduceResult(code, NAMES[code], -1, "")
        if fate == "refused":
            code = NOT_ENOUGH_REPLICAS if acks_all else STORAGE_ERROR
            return ProduceResult(code, NAMES[code], -1, "")
        code, base_offset = write(partition)
        replicate = partial(partition.replicated, partition.end, partition.leader_epoch)
        if acks_all and fate == "answered":
            replicate()
        else:
            asyncio.get_running_loop().call_later(self._cluster.random.choice((0.001, 0.02, 1.0)), replicate)
        if fate == "timed-out" and code == NONE and acks_all:
            code = self._cluster.random.choice((TIMED_OUT, AFTER_APPEND))
            base_offset = -1
        return ProduceResult(code, NAMES[code], base_offset, "")

    def _too_large(self, topic: Topic, write: Write) -> int:
        if not self._cluster.enforces_limits or not isinstance(write, partial) or write.func is not _produced:
            return NONE
        (data,), limits = write.args, {**self._cluster.defaults, **topic.configs}
        if len(data) > int(limits["max.message.bytes"]):
            return TOO_LARGE
        return LIST_TOO_LARGE if len(data) > int(limits.get("segment.bytes", 2**30)) else NONE

    def close(self) -> None:
        self._closed = True


def _produced(data: bytes, partition: Partition) -> tuple[int, int]:
    return partition.produce(data, replicated=False)


def _marked(marker: TransactionMarkers, partition: Partition) -> tuple[int, int]:
    code = NONE
    for _ in range(marker.times):
        code = partition.mark(marker, replicated=False) or code
    return code, -1


class FakeFetchConnection:
    """Reads whole batches."""

    def __init__(
        self, cluster: FakeCluster, broker_id: int, session: dict[FetchPartition, tuple[int, int, int]]
    ) -> None:
        self._cluster = cluster
        self._broker_id = broker_id
        self._session = session
        """What was answered last, where only changes are asked for."""
        self._closed = False
        self._boots = cluster.boots[broker_id]

    async def fetch(
        self,
        partitions: Sequence[FetchPartition],
        wait_max_ms: int,
        bytes_max: int,
        read_committed: bool = False,
        only_changes: bool = False,
    ) -> list[Fetched]:
        found = await self._fetch(partitions, wait_max_ms, bytes_max, read_committed)
        if not only_changes:
            return found
        limits = {
            each: (one.error_code, one.high_watermark, one.log_start)
            for each, one in zip(partitions, found, strict=True)
        }
        before = dict(self._session)
        self._session.clear()
        self._session |= limits
        return [
            one
            for each, one in zip(partitions, found, strict=True)
            if one.error_code or one.records or before.get(each) != limits[each]
        ]

    async def _fetch(
        self, partitions: Sequence[FetchPartition], wait_max_ms: int, bytes_max: int, read_committed: bool
    ) -> list[Fetched]:
        cluster = self._cluster
        deadline = asyncio.get_running_loop().time() + wait_max_ms / 1000
        while True:
            await cluster._request(self._broker_id)
            if self._closed or self._boots != cluster.boots[self._broker_id]:
                raise BrokerUnavailable("closed")
            found = [self._fetched(wanted, bytes_max, read_committed) for wanted in partitions]
            events = [each.grew for wanted in partitions if (each := self._partition(wanted)) is not None]
            left = deadline - asyncio.get_running_loop().time()
            if any(each.error_code or each.records for each in found) or left <= 0 or not events:
                return found
            waiting = [asyncio.get_running_loop().create_task(event.wait(), name="fetch") for event in events]
            try:
                await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()

    def _partition(self, wanted: FetchPartition) -> Partition | None:
        topic = next((each for each in self._cluster.found.values() if each.topic_id == wanted.topic_id), None)
        return topic.partitions[wanted.partition] if topic is not None else None

    def _fetched(self, wanted: FetchPartition, bytes_max: int, read_committed: bool) -> Fetched:
        def error(code: int) -> Fetched:  # as brokers do: an error comes without the log's limits
            return Fetched(wanted.topic_id, wanted.partition, code, -1, -1, memoryview(b""))

        partition = self._partition(wanted)
        if partition is None:
            return error(UNKNOWN_ID)
        if partition.leader != self._broker_id:
            return error(NOT_LEADER)
        if wanted.leader_epoch not in (-1, partition.leader_epoch):
            return error(FENCED)
        if not partition.start <= wanted.offset <= partition.end:
            return error(OUT_OF_RANGE)
        end = partition.last_stable_offset if read_committed else partition.high_watermark
        data = partition.read(wanted.offset, min(bytes_max, wanted.bytes_max), end)
        return Fetched(
            wanted.topic_id,
            wanted.partition,
            NONE,
            partition.high_watermark,
            partition.start,
            memoryview(data),
            partition.last_stable_offset,
            partition.aborted_from(wanted.offset) if read_committed and data else (),
        )

    def close(self) -> None:
        self._closed = True
        self._session.clear()


# ---- control ----


class FakeAnchors:
    """What proxies were told of control logs, and what they know."""

    def __init__(self) -> None:
        self.known: Anchor | None = None
        self.heard: dict[str, Anchor] = {}
        self.was_told: list[tuple[Anchor, str]] = []
        self.was_claimed: list[tuple[Anchor, str | None, str]] = []
        self.proven: dict[str, tuple[Anchor, str]] = {}

    def own(self) -> Anchor | None:
        return self.known

    def heard_of(self, cluster_id: str) -> Anchor | None:
        return self.heard.get(cluster_id)

    def proof(self, anchor: Anchor) -> str | None:
        return f"by {anchor.cluster_id}: {anchor.offset}"

    def proven_of(self, cluster_id: str) -> tuple[Anchor, str] | None:
        return self.proven.get(cluster_id)

    def hear(self, anchor: Anchor, proof: str | None = None) -> None:
        self.heard[anchor.cluster_id] = anchor
        if proof is not None:
            self.proven[anchor.cluster_id] = anchor, proof

    def told(self, anchor: Anchor, by: str) -> None:
        self.was_told.append((anchor, by))

    def claimed(self, anchor: Anchor, proof: str | None, by: str) -> None:
        self.was_claimed.append((anchor, proof, by))


class FakeControl:
    """A control log of one cluster, with the real rules. Shared by the processes of the cluster."""

    def __init__(self, cluster_id: str, rng: random.Random) -> None:
        self.state = ControlState(cluster_id, level=KNOWN_LEVEL)
        self.random = rng
        self.trouble = 0.0
        self.wall_ms = TIMESTAMP
        """What the proposers' clocks tell when the clock of the loop is at 0."""
        self.commands: list[Body] = []
        self.anchors = FakeAnchors()
        self._subscribers: list[Callable[[ControlState], None]] = []

    def apply(self, body: Body) -> Outcome:
        """Apply a command now."""
        offset = self.state.applied_offset + 1
        command_id = str(uuid.UUID(int=self.random.getrandbits(128), version=4))
        command = Command(command_id, self._now_ms() + offset, "p", offset - 1, body)
        self.state, outcome = rules.apply(self.state, offset, command)
        self.commands.append(body)
        for subscriber in self._subscribers:
            subscriber(self.state)
        return outcome

    def newer(self, concerns: Concerns) -> None:
        """A newer proxy has written a record about this that the processes here do not know."""
        beyond = Beyond(self.state.applied_offset + 1, concerns, "a newer proxy wrote of it: upgrade this proxy")
        self.state = self.state.evolve(applied_offset=beyond.offset, beyond=(beyond,))
        for subscriber in self._subscribers:
            subscriber(self.state)

    def _now_ms(self) -> int:
        try:
            return self.wall_ms + int(simulated_now() * 1000)
        except RuntimeError:  # before the loop runs
            return self.wall_ms

    async def append(self, body: Body) -> Outcome:
        await asyncio.sleep(self.random.uniform(0.001, 0.01))
        if self.random.random() < self.trouble / 2:
            raise BrokerUnavailable("the control log does not answer")
        outcome = self.apply(body)
        await asyncio.sleep(self.random.uniform(0.001, 0.01))
        if self.random.random() < self.trouble / 2:
            raise BrokerUnavailable("the control log did not answer")
        return outcome

    async def append_all(self, bodies: Sequence[Body]) -> Sequence[Outcome]:
        return [await self.append(body) for body in bodies]

    async def enforced(self, offset: int) -> None:
        await asyncio.sleep(0.01)

    async def caught_up(self) -> None:
        await asyncio.sleep(self.random.uniform(0.001, 0.01))
        if self.random.random() < self.trouble / 2:
            raise BrokerUnavailable("the control log cannot be read")

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        self._subscribers.append(changed)

    def unsubscribe_all(self) -> None:
        self._subscribers.clear()


class FakeContext:
    """The process as the plugin sees it."""

    def __init__(
        self, cluster: FakeCluster, control: FakeControl, name: str = "p", brokers: frozenset[int] | None = None
    ) -> None:
        self.proxy_name = name
        self.incarnation = str(uuid.UUID(int=cluster.random.getrandbits(128), version=4))
        self.cluster_id = control.state.cluster_id
        self.clock = LoopClock()
        self.cluster = cluster
        self.control = control
        self.link_listener: LinkListenerSpec | None = None
        self.link_client_tls = None
        self.link_policy = LinkPolicy(("127.0.0.1", "localhost"), allow_local_links=True)
        self.data_directory: Path | None = None
        self.capture_allowed = CaptureAllowed()
        self.offsets_keyring_file: Path | None = None
        self.partition_metrics = True
        self.link_observers = LinkObservers()
        self.supervision = Supervision()
        self.fronted_brokers = brokers
        self.lease_deadline = float("inf")
        self.port: int | None = None

    def fronts(self, broker_id: int) -> bool:
        return self.fronted_brokers is None or broker_id in self.fronted_brokers

    def link_listening(self, acceptor: Any) -> None:
        self.port = acceptor.port

    def hide_topic(self, topic_id: bytes) -> None:
        pass

    @property
    def link_address(self) -> str | None:
        return None if self.port is None else f"127.0.0.1:{self.port}"

    def seal(self, secret: bytes, purpose: str) -> Sealed:
        return Sealer(None).seal(Secret(secret), purpose)

    def unseal(self, sealed: Sealed, purpose: str) -> bytes:
        return Sealer(None).open(sealed, purpose).reveal()

    async def topic_names(self, topic_ids: Collection[bytes]) -> Mapping[bytes, str]:
        return {each: name for each in topic_ids if (name := self.known_topic_name(each)) is not None}

    def known_topic_name(self, topic_id: bytes) -> str | None:
        return next((name for name, topic in self.cluster.found.items() if topic.topic_id == topic_id), None)

    async def fence(self) -> None:
        return None
