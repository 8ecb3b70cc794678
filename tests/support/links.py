"""Linked pairs of real clusters, for tests: a proxy on each side, one link, names that no other test uses.

A :class:`Side` is a cluster with the proxies in front of it; :func:`linked` starts them, creates a link and cleans up.
Everything here blocks; waiting ends as soon as what is waited for is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, ResourceType

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_control.levels import KNOWN_LEVEL
from support import raw_log
from support.kafka import unique
from support.relay import Relay
from support.wire import Wire

VERIFICATION: Final = "transaction.partition.verification.enable"
WAIT_S: Final = 60.0
TRUNCATED_WITHIN_S: Final = 120.0
"""A truncation lets some seconds pass itself, and asks brokers for dozens of things one after the other."""
LEASE_S: Final = 3.0
"""Short, so that a proxy which was killed is not waited for long."""


def until(what: str, ready: Callable[[], Any], timeout_s: float = WAIT_S, interval_s: float = 0.05) -> Any:
    """Wait until ``ready()`` is true, and return it. Raises AssertionError that says what was waited for."""
    deadline = time.monotonic() + timeout_s
    last: Exception | None = None
    while True:
        try:
            if found := ready():
                return found
            last = None
        except Exception as error:  # a proxy or broker that is being restarted
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s") from last
        time.sleep(interval_s)


def _limits(consumer: Consumer, place: TopicPartition, deadline: float) -> tuple[int, int]:
    """Where a partition begins and ends, asked again where that is not available, as consumers do: a follower that is
    In-Sync at its source records that a moment later, and is Syncing until then."""
    while True:
        try:
            return consumer.get_watermark_offsets(place, timeout=deadline - time.monotonic())
        except KafkaException as error:
            if error.args[0].code() != KafkaError.OFFSET_NOT_AVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class Read(NamedTuple):
    """One record as a consumer sees it."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: tuple[int, int]
    headers: tuple[tuple[str, bytes | None], ...]

    @classmethod
    def of(cls, message: Message) -> Read:
        return cls(
            message.offset(), message.key(), message.value(), message.timestamp(), tuple(message.headers() or ())
        )


def read_all(servers: str, topics: Sequence[str], isolation: str, timeout_s: float = 60.0) -> dict[str, list[Read]]:
    """All that a consumer reads of topics of one partition. ``isolation``: read_committed or read_uncommitted."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    found: dict[str, list[Read]] = {topic: [] for topic in topics}
    ended: set[str] = set()
    deadline = time.monotonic() + timeout_s
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in topics])
        while ended < set(topics):
            assert time.monotonic() < deadline, f"not read to the end: {set(topics) - ended}"
            for message in consumer.consume(500, 0.5):
                error = message.error()
                if error is None:
                    found[message.topic()].append(Read.of(message))
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.topic())
                else:
                    raise KafkaException(error)
    finally:
        consumer.close()
    return found


class Side:
    """A cluster, and the proxies in front of it: one for all brokers, or one for each."""

    def __init__(self, kafka: KafkaCluster, proxies: Sequence[ProxyProcess]) -> None:
        self.kafka = kafka
        self.proxies = list(proxies)
        self._admins: dict[bool, AdminClient] = {}

    @property
    def proxy(self) -> ProxyProcess:
        return self.proxies[0]

    @property
    def bootstrap(self) -> str:
        return ",".join(proxy.bootstrap for proxy in self.proxies)

    def admin(self, direct: bool = False) -> AdminClient:
        """A client of the proxies, or of the brokers themselves."""
        if direct not in self._admins:
            servers = self.kafka.bootstrap_servers if direct else self.bootstrap
            # Of two threads at once the first one's stays: a client that is dropped fails what it was asked.
            self._admins.setdefault(direct, AdminClient({"bootstrap.servers": servers, "log_level": 0}))
        return self._admins[direct]

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        direct: bool = False,
        replicas: int = 1,
    ) -> None:
        topic = NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=dict(config or {}))
        self.admin(direct).create_topics([topic])[name].result(30)

    def delete_topic(self, name: str, direct: bool = False) -> None:
        self.admin(direct).delete_topics([name])[name].result(30)

    def add_partitions(self, name: str, total: int) -> None:
        self.admin().create_partitions([NewPartitions(name, total)])[name].result(30)

    def topics(self) -> dict[str, int]:
        """The cluster's topics with their partitions, as its brokers know them."""
        found = self.admin(direct=True).list_topics(timeout=20).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def topic_config(self, name: str) -> dict[str, str]:
        """The effective configuration of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, name)
        entries = self.admin(direct=True).describe_configs([resource])[resource].result(30)
        return {entry.name: entry.value for entry in entries.values()}

    def producer(self, direct: bool = False, **settings: Any) -> Producer:
        """``settings`` are librdkafka's, with underscores for dots."""
        servers = self.kafka.bootstrap_servers if direct else self.bootstrap
        chosen = {name.replace("_", "."): value for name, value in settings.items()}
        return Producer({"bootstrap.servers": servers, "linger.ms": 5, **chosen})

    def produce(
        self, topic: str, values: Sequence[bytes], partition: int = 0, direct: bool = False, **settings: Any
    ) -> list[int]:
        """Write records; their offsets. Raises KafkaException for the first that is refused."""
        offsets: list[int] = []
        errors: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                offsets.append(message.offset())

        producer = self.producer(direct, **settings)
        for value in values:
            producer.produce(topic, value, partition=partition, on_delivery=delivered)
            producer.poll(0)
        producer.flush(60)
        if errors:
            raise KafkaException(errors[0])
        return offsets

    def verify_transactions(self, enabled: bool) -> None:
        """Set the cluster-wide setting that keeps copies of transactions out (KIP-890); the default is true."""
        self.alter_brokers({VERIFICATION: str(enabled).lower()})

    def alter_brokers(self, configs: Mapping[str, str | None]) -> None:
        """Set dynamic settings of all brokers; None: back to what it was."""
        with Wire(self.kafka.bootstrap_servers.split(",")[0]) as wire:
            raw_log.alter_brokers(wire, configs)

    def read(
        self,
        topic: str,
        partition: int = 0,
        direct: bool = False,
        timeout_s: float = 30.0,
        isolation: str = "read_uncommitted",
    ) -> list[Read]:
        """All records of a partition up to the high watermark, or the last stable offset, at the start."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers if direct else self.bootstrap,
                "group.id": unique("reader"),
                "enable.auto.commit": False,
                "isolation.level": isolation,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,  # a marker at the end is no record: that it is the end is seen by waiting
            }
        )
        found: list[Read] = []
        try:
            deadline = time.monotonic() + timeout_s
            start, end = _limits(consumer, TopicPartition(topic, partition), deadline)
            consumer.assign([TopicPartition(topic, partition, start)])
            while start < end and (not found or found[-1].offset < end - 1):
                message = consumer.poll(1.0)
                if message is not None and message.error() is None:
                    found.append(Read.of(message))
                elif message is not None and message.error().code() == KafkaError._PARTITION_EOF:
                    break
                assert time.monotonic() < deadline, f"{topic}-{partition}: read {len(found)} records up to {end}"
        finally:
            consumer.close()
        return found

    def end(self, topic: str, partition: int = 0, isolation: str = "read_uncommitted") -> int:
        """The high watermark, as the brokers know it; of read_committed, the last stable offset."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers,
                "group.id": "ends",
                "isolation.level": isolation,
            }
        )
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=20)[1])
        finally:
            consumer.close()

    def decided_end(self, topic: str, partition: int = 0) -> int:
        """The high watermark when no transaction is open: a commit is answered before its markers are written."""

        def decided() -> bool:
            return self.end(topic, partition, "read_committed") == self.end(topic, partition)

        until(f"no transaction is open in {topic}-{partition}", decided)
        return self.end(topic, partition)

    def read_decided(self, topic: str, partition: int = 0) -> list[Read]:
        """All committed records, when no transaction is open."""
        self.decided_end(topic, partition)
        return self.read(topic, partition, isolation="read_committed")

    def link(self, name: str, proxy: ProxyProcess | None = None) -> dict[str, Any]:
        """A link's status, as one proxy tells it."""
        found: dict[str, Any] = (proxy or self.proxy).get(f"/v1/links/{name}")
        return found

    def partitions(self, name: str, topic: str | None = None) -> list[dict[str, Any]]:
        """The partitions of a link that all proxies of this side tell of."""
        return [
            partition
            for proxy in self.proxies
            for partition in self.link(name, proxy)["partitions"]
            if topic is None or partition["topic"] == topic
        ]

    def partition(self, name: str, topic: str, partition: int = 0) -> dict[str, Any] | None:
        return next((each for each in self.partitions(name, topic) if each["partition"] == partition), None)

    def reason(self, name: str, topic: str, partition: int = 0) -> tuple[str | None, str]:
        """Why a partition of a link is as it is: the code, and what is said about it."""
        found = self.partition(name, topic, partition) or {}
        return found.get("reason"), found.get("message") or ""


GRANTED: Final = "follow:,lead:,replace:,follow:consumer-group:,lead:consumer-group:"


class Linked:
    """Two sides and the link between them, A leading."""

    def __init__(self, a: Side, b: Side, name: str) -> None:
        self.a = a
        self.b = b
        self.name = name
        self.local = unique("local-") + "-"
        self.remote = unique("remote-") + "-"

    def names(self, topic: str) -> tuple[str, str]:
        """A new topic's name at both sides."""
        name = unique(topic)
        return self.local + name, self.remote + name

    def attach(self, local: str | None = None, remote: str | None = None, *more: str) -> Any:
        """Attach namespaces, A's leading; by default the pair's own. Waits for a link that connects again."""
        local, remote = local or self.local, remote or self.remote
        until("the link is connected", lambda: self.a.link(self.name)["state"] != "Disconnected")
        return self.a.proxy.cli(
            "link", "attach", self.name, "--local", local, "--remote", remote, "--role", "leader", *more
        )

    def detach(self, local: str | None = None) -> None:
        self.a.proxy.cli("link", "detach", self.name, "--local", local or self.local)

    def raise_levels(self) -> None:
        """Have both control logs hold what is new; each side has the other attach what it likes."""
        for side in (self.a, self.b):
            until("raised", lambda side=side: side.proxy.cli("control", "upgrade")["after"] == KNOWN_LEVEL)
            side.proxy.cli("link", "grant", self.name, "--may", GRANTED, "--broker-settings")

    def verify(self, check: bool = True) -> dict[str, Any]:
        report: dict[str, Any] = self.a.proxy.cli("verify", self.name, check=check)
        return report

    def follower_state(self, topic: str, partition: int = 0) -> str | None:
        found = self.b.partition(self.name, topic, partition)
        return None if found is None else str(found["state"])

    def wait_state(self, topic: str, state: str, partition: int = 0, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for the state of a follower partition (by its name at B), and return its status."""
        until(f"{topic}-{partition} is {state}", lambda: self.follower_state(topic, partition) == state, timeout_s)
        found = self.b.partition(self.name, topic, partition)
        assert found is not None
        return found

    def wait_end(self, topic: str, end: int, partition: int = 0, timeout_s: float = WAIT_S) -> None:
        """Wait until B's topic has this high watermark."""
        try:
            until(
                f"{topic}-{partition} ends at {end}",
                lambda: topic in self.b.topics() and self.b.end(topic, partition) >= end,
                timeout_s,
            )
        except AssertionError as error:
            sides = [side.partitions(self.name) for side in (self.a, self.b)]
            told = [each for side in sides for each in side if each["partition"] == partition]
            raise AssertionError(f"{error}; it ends at {self.b.end(topic, partition)}; {told}") from error
        assert self.b.end(topic, partition) == end

    def wait_following(self, topics: int = 1, timeout_s: float = WAIT_S) -> None:
        """Wait until every partition of both ends is Following, without lag."""

        def following() -> bool:
            sides = [self.a.partitions(self.name), self.b.partitions(self.name)]
            return all(len({each["topic"] for each in side}) >= topics for side in sides) and all(
                each["state"] == "Following" and each["partition_mirror_lag"] == 0 for side in sides for each in side
            )

        until("the link is Following", following, timeout_s)


def truncation(side: Side, link: str, topic: str) -> dict[str, Any] | None:
    """What a side tells of a truncation of a topic that is over."""
    found = side.proxy.get(f"/v1/links/{link}/truncations")["items"]
    return next((each for each in found if each["topic"] == topic and each["phase"] == "done"), None)


def truncated_at(side: Side, link: str, topic: str) -> dict[str, Any]:
    """Wait until a topic of a side was truncated; what is told of that."""
    try:
        return dict(until(f"{topic} is truncated", lambda: truncation(side, link, topic), TRUNCATED_WITHIN_S))
    except AssertionError as error:
        told = side.proxy.get(f"/v1/links/{link}/truncations")["items"], side.partitions(link, topic)
        raise AssertionError(f"{error}; {told}") from error


def truncated(link: Linked, topic: str) -> dict[str, Any]:
    """The same of B's."""
    return truncated_at(link.b, link.name, topic)


@contextmanager
def taking_transactions(*sides: Side) -> Iterator[None]:
    """Brokers that take copies of transactions, as an operator may have set them up."""
    for side in sides:
        side.verify_transactions(False)
    try:
        yield
    finally:
        for side in sides:
            side.verify_transactions(True)


@contextmanager
def cleaning_often(*sides: Side) -> Iterator[None]:
    """Brokers whose log cleaners look for work several times a second."""
    for side in sides:
        side.alter_brokers({"log.cleaner.backoff.ms": "200"})
    try:
        yield
    finally:
        for side in sides:
            side.alter_brokers({"log.cleaner.backoff.ms": None})


def whole(
    kafka: KafkaCluster,
    environment: Mapping[str, str] | None = None,
    *,
    descriptors: int | None = None,
    only_dials: bool = False,
    **more: Any,
) -> ProxyProcess:
    """One proxy for all brokers of a cluster, started by whoever enters it. ``only_dials``: without a link listener."""
    return ProxyProcess(
        kafka.bootstrap_servers,
        name=unique("proxy"),
        extra=_extra(more),
        environment=environment,
        descriptors=descriptors,
        **({"link_reach": None} if only_dials else {}),
    )


def sidecars(kafka: KafkaCluster, environment: Mapping[str, str] | None = None, **more: Any) -> list[ProxyProcess]:
    """One proxy for each broker."""
    return [
        ProxyProcess(
            kafka.bootstrap_servers,
            name=unique(f"proxy-{broker_id}-"),
            broker_id=broker_id,
            extra=_extra(more),
            environment=environment,
        )
        for broker_id in kafka.broker_ids
    ]


def _extra(more: Mapping[str, Any]) -> dict[str, Any]:
    extra = {table: dict(settings) for table, settings in more.items()}
    extra.setdefault("proxy", {}).setdefault("lease_s", LEASE_S)
    return extra


def keep_logs(proxies: Iterable[ProxyProcess]) -> None:
    """With ISTHMUS_TEST_LOGS proxies' logs are kept in that directory."""
    if (keep := os.environ.get("ISTHMUS_TEST_LOGS")) is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        for proxy in proxies:
            (Path(keep) / f"{proxy.name}.log").write_text(proxy.log)


@contextmanager
def linked(
    a: KafkaCluster,
    b: KafkaCluster,
    *,
    a_proxies: Sequence[ProxyProcess] | None = None,
    b_proxies: Sequence[ProxyProcess] | None = None,
    remote: str | None = None,
    options: Sequence[str] = (),
    token: Path | None = None,
) -> Iterator[Linked]:
    """Proxies on both clusters, and a link that A created. ``remote``: the address that A dials, B's own by default.

    ``token``: a file for one of B's, which A leads topics by; without it, B takes links of its own machine.

    The proxies' logs may be kept: ``keep_logs``.
    """
    with ExitStack() as stack:
        sides = []
        for kafka, proxies in ((a, a_proxies), (b, b_proxies)):
            chosen = list(proxies) if proxies is not None else [whole(kafka)]
            for proxy in chosen:
                proxy.spawn()
                stack.callback(proxy.close)
            sides.append(Side(kafka, chosen))
        for side in sides:
            for proxy in side.proxies:
                proxy.wait_ready()
        pair = Linked(*sides, unique("link"))
        if token is not None:
            pair.b.proxy.write_token(token, "lead:")
            options = (*options, "--token-file", str(token))
        pair.a.proxy.cli("link", "create", pair.name, "--remote", remote or pair.b.proxy.link_address, *options)
        try:
            yield pair
        finally:
            keep_logs((*pair.a.proxies, *pair.b.proxies))
        try:
            pair.a.proxy.cli("link", "delete", pair.name)
        except Exception:
            pass  # the clusters are shared, names are unique: what is left behind disturbs nobody


@contextmanager
def relayed(
    a: KafkaCluster,
    b: KafkaCluster,
    *,
    a_proxies: Sequence[ProxyProcess] | None = None,
    b_environment: Mapping[str, str] | None = None,
    bytes_per_s: int | None = None,
) -> Iterator[tuple[Linked, Relay]]:
    """A link that A dials through a relay, which can be cut, stalled and slowed down."""
    with Relay(bytes_per_s=bytes_per_s) as relay:
        proxy = whole(b, b_environment, link_listener={"advertised": relay.address})
        host, _, port = proxy.link_address.partition(":")
        relay.target = (host, int(port))
        with linked(a, b, a_proxies=a_proxies, b_proxies=[proxy], remote=relay.address) as pair:
            yield pair, relay
