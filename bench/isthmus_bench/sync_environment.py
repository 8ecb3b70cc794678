"""Clusters, proxies and a link over a WAN, as a scenario of ``isthmus bench sync`` needs them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, Final

from isthmus_bench.affinity import run_on
from isthmus_bench.children import Child
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.kafka.settings import Reach
from isthmus_bench.load import RawClient, Target, newest_versions, wait_for_topic
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_bench.sync_load import COORDINATOR, Shape
from isthmus_bench.sync_plan import ASYNCHRONOUS, PARTITIONS, SYNC, SYNCHRONOUS, Beside, Scenario, named
from isthmus_bench.wan import Wan
from isthmus_protocol.schema import ApiKey

HEAP_MB: Final = 1024
JVM_FLAGS: Final = (
    "-XX:TieredStopAtLevel=4",
    "-XX:-UseSerialGC",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    f"-Xms{HEAP_MB}m",
    "-XX:+AlwaysPreTouch",
    "-XX:+UseTransparentHugePages",
)
"""As Kafka's own start script has them, and memory is there from the start, as in a broker that has run for long: the
serial collector that tests start quickly with stops a broker for 25 to 100 ms under 500 requests/s. Memory in huge
pages, where the kernel has them: a broker that has slept for 20 ms takes 0.1 ms less for a record."""
BIG_BUFFER_BYTES: Final = 4 << 20
TOPIC_SETTINGS: Final = {"file.delete.delay.ms": "1000"}
LINK: Final = "bench"
LINK_TIMEOUT_S: Final = 60.0


def set_mode(proxy: ProxyProcess, link: str, mode: str) -> None:
    """Have a link in a mode: what to run where that is not the mode that links have at first. Raises ProxyFailed."""
    if mode != ASYNCHRONOUS:
        proxy.cli("link", "set-mode", link, mode)


LINKED_STATES: Final[Mapping[str, str]] = {ASYNCHRONOUS: "Following", SYNCHRONOUS: "In-Sync"}
"""By a link's mode the state of partitions in which nothing is missing."""


def wait_for_link(proxy: ProxyProcess, link: str, state: str, partitions: int) -> None:
    """Wait until so many partitions are in a state. Raises ProxyFailed."""
    _wait(proxy, link, lambda status: [each["state"] for each in status["partitions"]], [state] * partitions)


def wait_for_groups(proxy: ProxyProcess, link: str) -> None:
    """Wait until acks of commits mean that the other side has them. Raises ProxyFailed."""

    def states(status: Mapping[str, Any]) -> set[str | None]:
        return {(each["sync"] or {}).get("state") for each in status["groups"]}

    _wait(proxy, link, states, {LINKED_STATES[SYNCHRONOUS]})


def _wait(proxy: ProxyProcess, link: str, states: Callable[[Mapping[str, Any]], object], wanted: object) -> None:
    """Wait until a link's status has these states. Raises ProxyFailed."""
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while (found := states(proxy.get(f"/v1/links/{link}"))) != wanted:
        if time.monotonic() > deadline:
            raise ProxyFailed(f"after {LINK_TIMEOUT_S:.0f} s, not {wanted} but {found}:\n{proxy.log[-1500:]}")
        time.sleep(0.05)


class Environment:
    """Clusters, and where each scenario writes. ``stack`` ends what it starts."""

    def __init__(self, scenarios: Sequence[Scenario], version: str, wan: Wan, stack: ExitStack) -> None:
        self._version = version
        self._wan = wan
        self._stack = stack
        self._reach = Reach(bind=wan.near, advertised=wan.far)
        self.brokers: list[int] = []
        self.proxies: list[int] = []
        self._cluster = self._start("a", scenarios[0])
        self._proxy: ProxyProcess | None = None
        self._proxies: list[ProxyProcess] = []
        if any(each.proxied for each in scenarios):
            self._start_proxies(scenarios[0].environment == SYNCHRONOUS or any(each.linked for each in scenarios))
        beside = any(each.beside is not Beside.NOTHING for each in scenarios)
        for each in dict.fromkeys((*scenarios, *((named(SYNC),) if beside else ()))):
            self._prepare(each)

    def _start(self, name: str, scenario: Scenario) -> KafkaCluster:
        cluster = KafkaCluster(
            name=name,
            version=self._version,
            brokers=scenario.brokers,
            settings=broker_settings(scenario),
            heap_mb=HEAP_MB,
            jvm_flags=JVM_FLAGS,
            between_brokers=self._reach if scenario.brokers > 1 else None,
            say=lambda _: None,
        )
        self._stack.enter_context(cluster)
        self.brokers += cluster.pids
        return cluster

    def _start_proxies(self, linked: bool) -> None:
        directory = FilePath(self._stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        clusters = [self._cluster]
        if linked:
            clusters.append(self._start("b", Scenario("b", "", "", "")))
        proxies = [
            self._stack.enter_context(
                ProxyProcess(
                    each.bootstrap_servers,
                    name=each.spec.name,
                    directory=directory,
                    extra={"link": {"remotes_allowed": [self._reach.advertised]}},
                    link_reach=self._reach,
                )
            )
            for each in clusters
        ]
        self._proxy = proxies[0]
        self._proxies = proxies
        self.proxies = [each.pid for each in proxies]
        if linked:
            token = directory / "token"  # the far address is another machine's
            proxies[1].write_token(token, "lead:", "lead:consumer-group:")
            remote = ("--remote", proxies[1].link_address, "--token-file", str(token))
            self._proxy.cli("link", "create", LINK, *remote)

    def place(self, near: Collection[int], far: Collection[int]) -> None:
        """Give each site its cores. The WAN has the far site's, since clients have a share of the near site's."""
        run_on(near, [*self.brokers[:1], *self.proxies[:1]])
        run_on(far, [*self.brokers[1:], *self.proxies[1:], self._wan.pid])

    def _prepare(self, scenario: Scenario) -> None:
        """Topics, of 1 and of 8 partitions, led by the first broker, and what copies them."""
        replicas = range(1, scenario.brokers + 1)
        for partitions in PARTITIONS:
            create_topic(self._direct(topic_of(scenario, partitions)), partitions, replicas)
        if scenario.linked:
            assert self._proxy is not None
            prefix = prefix_of(scenario)
            for kind in ("topic", "consumer-group"):
                pair = ("--type", kind, "--local", prefix, "--remote", prefix, "--role", "leader")
                self._proxy.cli("namespace", "create", prefix, "--type", kind)
                self._proxy.cli("link", "attach", LINK, *pair)
            wait_for_link(self._proxy, LINK, LINKED_STATES[ASYNCHRONOUS], sum(PARTITIONS))
            set_mode(self._proxy, LINK, scenario.environment)
            wait_for_link(self._proxy, LINK, LINKED_STATES[scenario.environment], sum(PARTITIONS))
        if scenario.proxied:
            for partitions in PARTITIONS:
                wait_for_topic(self.target(scenario, partitions))

    def _direct(self, topic: str) -> Target:
        return Target(*self._cluster.addresses()[COORDINATOR], topic)

    def target(self, scenario: Scenario, partitions: int) -> Target:
        """Where a scenario writes to a topic of so many partitions."""
        topic = topic_of(scenario, partitions)
        if not scenario.proxied:
            return self._direct(topic)
        assert self._proxy is not None
        client = RawClient(Target(*_split(self._proxy.bootstrap), topic))
        try:
            answer: Any = client.ask(ApiKey.METADATA, newest_versions(client)[ApiKey.METADATA], {"topics": None})
        finally:
            client.close()
        (broker,) = (each for each in answer.brokers if each.node_id == COORDINATOR)
        return Target(broker.host, broker.port, topic)

    @contextmanager
    def beside(self, what: Beside, shape: Shape) -> Iterator[None]:
        """Have that go on meanwhile: requests as ``shape`` says, begun when this begins. Raises ChildFailed."""
        if what is Beside.NOTHING:
            yield
            return
        other_side = self._proxies[1].pid
        with Child("isthmus_bench.sync_load") as generator:
            if what is Beside.STANDSTILL:
                os.kill(other_side, signal.SIGSTOP)
            try:
                target = self.target(named(SYNC), shape.partitions)
                generator.tell(do="open", target=asdict(target), shape=asdict(shape), pids={})
                yield
            finally:
                os.kill(other_side, signal.SIGCONT)
            generator.read()
        assert self._proxy is not None
        wait_for_link(self._proxy, LINK, LINKED_STATES[SYNCHRONOUS], sum(PARTITIONS))

    def wait_for_groups(self, scenario: Scenario) -> None:
        """Wait until what a scenario's commits mean is so. Raises ProxyFailed."""
        if scenario.environment == SYNCHRONOUS:
            assert self._proxy is not None
            wait_for_groups(self._proxy, LINK)

    def log(self) -> str:
        """The end of what the proxies said."""
        return "\n".join(each.log[-3000:] for each in self._proxies)

    @property
    def pids(self) -> dict[str, list[int]]:
        """By what they do."""
        return {"brokers": self.brokers, "proxies": self.proxies, "wan": [self._wan.pid]}


def broker_settings(scenario: Scenario) -> dict[str, str]:
    """Settings of all brokers; with big buffers a connection over the WAN takes what a round trip holds."""
    settings = {
        "transaction.partition.verification.enable": "false",  # as on every target of transactions
        "min.insync.replicas": str(min(2, scenario.brokers)),
    }
    if scenario.big_buffers:
        names = ("socket.send.buffer.bytes", "socket.receive.buffer.bytes", "replica.socket.receive.buffer.bytes")
        settings |= dict.fromkeys(names, str(BIG_BUFFER_BYTES))
    return settings


def prefix_of(scenario: Scenario) -> str:
    """Of the names of its topics, groups and transactional ids."""
    return f"{scenario.name}-"


def topic_of(scenario: Scenario, partitions: int) -> str:
    return f"{prefix_of(scenario)}{partitions}"


def create_topic(target: Target, partitions: int, replicas: Sequence[int]) -> None:
    """A topic on those brokers, led by the first; both sites have what is acked. Raises LoadError."""
    settings = {**TOPIC_SETTINGS, "min.insync.replicas": str(min(2, len(replicas)))}
    topic = {
        "name": target.topic,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [{"partition_index": index, "broker_ids": list(replicas)} for index in range(partitions)],
        "configs": [{"name": name, "value": value} for name, value in settings.items()],
    }
    client = RawClient(target)
    try:
        version = newest_versions(client)[ApiKey.CREATE_TOPICS]
        client.ask(ApiKey.CREATE_TOPICS, version, {"topics": [topic], "timeout": 30_000})
    finally:
        client.close()
    wait_for_topic(target)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
