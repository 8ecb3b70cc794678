"""What many topics cost a link: attaching, verifying, and a new topic beside them, for several numbers of topics.

For each size two fresh clusters, a proxy in front of each, and a link. A Java AdminClient creates as many topics at the
target as the link will have to, with the same settings, a hundred in a request, until all partitions have leaders that
say where their logs end; they are deleted again, and those that are to follow created at the source, empty, until they
can be read. Then:

1. a namespace that holds them is attached: the time until all partitions follow, as the source's proxy says;
2. both sides are verified, several times: of few topics that takes less than a second;
3. topics are created at the source, through its proxy, one after the other, with a record: the time until the target
   has that;
4. the source's brokers are restarted, one after the other (``rolling_restart``).

CPU is that of both proxies together; of 2. and 4. without what they take idle in that time, which is shown beside it:
topics are looked after all the time. What each topic takes at the largest size against the smallest says whether it
grows with their number. Brokers run on the same machine, and take most of it while topics are made.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import httpx

from isthmus.kafka.client import LATEST, ClusterClient, NewTopic, ResourceType, TopicPartition
from isthmus_bench import rolling_restart
from isthmus_bench.children import cpu_seconds, resident_bytes
from isthmus_bench.command import python_build
from isthmus_bench.java_topics import JavaTopics
from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_bench.load import batch
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_bench.rolling_restart import RollingRestart

Say = Callable[[str], None]

LINK: Final = "scale"
TOPICS: Final = "many."
"""What the names of the topics begin with."""
ATTACH_RATIO_MAX: Final = 1.5
VERIFY_MAX_S: Final = 30.0
NEW_TOPIC_MAX_S: Final = 2.0
GROWTH_MAX: Final = 1.2
"""What a topic takes among the most, against the fewest."""
FOLLOW_TIMEOUT_S: Final = 900.0
API_TIMEOUT_S: Final = 120.0
LOOK_S: Final = 0.25
LOOK_MAX_S: Final = 10.0
LOOKS_IN_REST: Final = 2
"""The states of partitions are looked at again after this part of the time that all of them may still take: looking
costs the proxy something, too."""
LOOKS_MAX: Final = 50
"""And not before this part of the time that it took: it is not known more exactly."""
NEW_TOPIC_LOOK_S: Final = 0.02
TOPIC_OWN: Final = 1
"""ConfigSource of a topic's own settings."""
CLUSTER_SETTINGS: Final = {
    "transaction.partition.verification.enable": "false",  # as on every target of transactions
    "log.segment.delete.delay.ms": "1000",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    version: str = DEFAULT_VERSION
    sizes: tuple[int, ...] = (250, 500, 1_000, 2_000)
    partitions: int = 3
    brokers: int = 3
    """Of each cluster, and replicas of each partition, up to three."""
    at_once: int = 100
    """Topics in a request of the AdminClient."""
    warm_topics: int = 100
    """Created, attached and deleted before anything is measured."""
    new_topics: int = 5
    verify_rounds: int = 5
    """How often they are verified; the medians count."""
    restarts: bool = True
    """Whether brokers are restarted, which takes most of the time."""
    idle_s: float = 10.0
    """How long it is looked at what proxies take idle."""

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        return cls(version, (10, 20), brokers=1, warm_topics=5, new_topics=2, verify_rounds=1, idle_s=1.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured with one number of topics. Times in seconds."""

    topics: int
    partitions: int
    """Of all topics."""
    created_s: float
    """By a Java AdminClient, until it is said who leads them."""
    usable_s: float
    """And until these lead them, and say where their logs end: a broker makes logs after it was told that it leads, and
    nothing can be written before."""
    attached_s: float
    """Until all partitions follow."""
    attach_cpu_s: float
    verified_s: float
    verify_cpu_s: float
    """Beyond what is idle."""
    idle_cores: float
    """What the topics cost when nothing happens: seconds of CPU in a second."""
    new_topic_s: float
    """Until a record of a new topic is on the target: the median."""
    new_topic_max_s: float
    new_topic_acked_s: float
    """How long the source's own brokers took of that, until all replicas of a new topic had the record: the median."""
    new_topic_max_acked_s: float
    """The same of the slowest one."""
    new_topic_behind_s: float
    """From then on until the target has the record: of the topic of which that took longest."""
    resident_mb: float
    """Of both proxies."""
    restart: RollingRestart | None
    """Of the source's brokers, CPU beyond what is idle; None: not measured."""

    @property
    def attach_ratio(self) -> float:
        """Attaching, against creating the topics directly until their leaders lead."""
        return self.attached_s / self.usable_s


class _NewTopic(NamedTuple):
    """One that is created beside the others, and written to. Seconds from its creation."""

    acked_s: float
    """Until the source's brokers have acked its record."""
    followed_s: float
    """Until the target has it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured: None if it was not."""

    target: str
    limit: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    machine: str
    broker: str
    figures: list[Figure]
    verdicts: list[Verdict] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        verdicts = [{**asdict(each), "met": each.met} for each in self.verdicts]
        return {**asdict(self), "verdicts": verdicts}


def growth(figures: Sequence[Figure], of: Callable[[Figure], float]) -> float | None:
    """What a topic takes with the most topics, against what it takes with the fewest; None of one size."""
    if len(figures) < 2:
        return None
    fewest, most = figures[0], figures[-1]
    return (of(most) / most.topics) / (of(fewest) / fewest.topics)


def verdicts_of(figures: Sequence[Figure]) -> Iterator[Verdict]:
    """Of figures in the order of their sizes."""
    most = figures[-1]
    yield Verdict(f"attach of {most.topics} topics against creating them", ATTACH_RATIO_MAX, most.attach_ratio)
    yield Verdict(f"verify of {most.topics} topics, s", VERIFY_MAX_S, most.verified_s)
    yield Verdict(f"a new topic beside {most.topics}, s", NEW_TOPIC_MAX_S, most.new_topic_max_s)
    yield Verdict("of which after the source's replicas have it, s", NEW_TOPIC_MAX_S, most.new_topic_behind_s)
    compared: Mapping[str, Callable[[Figure], float]] = {
        "attach": lambda each: each.attached_s,
        "CPU to attach": lambda each: each.attach_cpu_s,
        "verify": lambda each: each.verified_s,
        "CPU to verify": lambda each: each.verify_cpu_s,
    }
    for what, of in compared.items():
        yield Verdict(f"{what}, a topic, most against fewest", GROWTH_MAX, growth(figures, of))


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises EmbeddedKafkaError, ProxyFailed, HTTPError."""
    figures = []
    for size in sorted(plan.sizes):
        with ExitStack() as stack:
            say(f"{size} topics: starting two clusters of {plan.brokers}")
            figures.append(_Scale(plan, stack, say).measure(size))
    return Report(
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {python_build()}",
        f"Kafka {plan.version}, two clusters of {plan.brokers}",
        figures,
        list(verdicts_of(figures)),
    )


def _beyond(idle: float, took_s: float, cpu_s: float) -> float:
    """The CPU of some work without what is taken idle meanwhile, in seconds of CPU in a second."""
    return max(0.0, cpu_s - idle * took_s)


class _Scale:
    """Two clusters, an AdminClient and a proxy of each, and a link. ``stack`` ends what it starts."""

    def __init__(self, plan: Plan, stack: ExitStack, say: Say) -> None:
        self._plan = plan
        self._say = say
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        self._a, self._b = (self._cluster(stack, name) for name in "ab")
        self._java_a, self._java_b = (
            stack.enter_context(JavaTopics(plan.version, each.bootstrap_servers, plan.partitions, plan.at_once))
            for each in (self._a, self._b)
        )
        self._proxies = [
            stack.enter_context(ProxyProcess(each.bootstrap_servers, name=f"bench-{name}", directory=directory))
            for name, each in (("a", self._a), ("b", self._b))
        ]
        a, b = self._proxies
        self._http = stack.enter_context(httpx.Client(base_url=a.url, timeout=API_TIMEOUT_S, trust_env=False))
        for proxy in self._proxies:
            proxy.raise_level()
        a.cli("link", "create", LINK, "--remote", b.link_address)
        b.cli("link", "grant", LINK, "--may", "lead:", "--broker-settings")

    def _cluster(self, stack: ExitStack, name: str) -> KafkaCluster:
        replicas = min(3, self._plan.brokers)
        return stack.enter_context(
            KafkaCluster(
                name=name,
                version=self._plan.version,
                brokers=self._plan.brokers,
                settings={**CLUSTER_SETTINGS, "default.replication.factor": str(replicas)},
                heap_mb=768,
                jvm_flags=("-XX:TieredStopAtLevel=4",),
                say=lambda _: None,
            )
        )

    def measure(self, size: int) -> Figure:
        """All of one size."""
        settings = self._warm_up()
        self._say(f"{size} topics: created at the target")
        began = time.monotonic()
        created_s = self._java_b.create("direct.", size, settings)
        asyncio.run(self._until_usable(self._b, "direct.", size))
        usable_s = time.monotonic() - began
        self._java_b.delete("direct.", size)
        self._say(f"{size} topics: created in {created_s:.1f} s; now at the source")
        self._java_a.create(TOPICS, size, {})
        asyncio.run(self._until_usable(self._a, TOPICS, size))
        self._until_gone(self._b, "direct.")
        attached_s, attach_cpu_s = self._timed(lambda: self._attach(TOPICS, size))
        self._say(f"{size} topics: attached in {attached_s:.1f} s")
        verified = [self._timed(self._verify) for _ in range(self._plan.verify_rounds)]
        verified_s, verify_cpu_s = map(statistics.median, zip(*verified, strict=True))
        self._say(f"{size} topics: verified in {verified_s:.1f} s")
        idle_s, idle_cpu_s = self._timed(lambda: time.sleep(self._plan.idle_s))
        idle = idle_cpu_s / idle_s
        new = asyncio.run(self._new_topics())
        slowest = max(new, key=lambda each: each.followed_s)
        resident_mb = sum(resident_bytes(proxy.pid) for proxy in self._proxies) / 1e6
        restart = asyncio.run(self._restart(size, idle)) if self._plan.restarts else None
        return Figure(
            size,
            size * self._plan.partitions,
            created_s,
            usable_s,
            attached_s,
            attach_cpu_s,
            verified_s,
            _beyond(idle, verified_s, verify_cpu_s),
            idle,
            statistics.median(each.followed_s for each in new),
            slowest.followed_s,
            statistics.median(each.acked_s for each in new),
            slowest.acked_s,
            max(each.followed_s - each.acked_s for each in new),
            resident_mb,
            restart,
        )

    def _warm_up(self) -> Mapping[str, str]:
        """Have both clusters and the link do all of it once; the settings that topics have as they follow."""
        warm = self._plan.warm_topics
        self._java_a.create("warm.", warm, {})
        self._attach("warm.", warm)
        settings = asyncio.run(self._own_settings("warm.0"))
        self._verify()
        self._http.delete(f"/v1/links/{LINK}/mappings", params={"local": "warm."}).raise_for_status()
        for java, kafka in ((self._java_a, self._a), (self._java_b, self._b)):
            java.delete("warm.", warm)
            self._until_gone(kafka, "warm.")
        return settings

    async def _until_usable(self, kafka: KafkaCluster, prefix: str, size: int) -> None:
        """Wait until the leaders of topics say where their logs end. Raises ProxyFailed."""
        places = self._places(prefix, size)
        async with ClusterClient(kafka.bootstrap_servers.split(",")) as client:
            await self._until(client, places, 0, FOLLOW_TIMEOUT_S)

    @staticmethod
    def _until_gone(kafka: KafkaCluster, prefix: str) -> None:
        """Wait until brokers have deleted the logs of topics that nobody lists any more. Raises ProxyFailed."""
        deadline = time.monotonic() + FOLLOW_TIMEOUT_S
        while any(next(data.glob(f"{prefix}*"), None) is not None for data in kafka.log_directories):
            if time.monotonic() > deadline:
                raise ProxyFailed(f"brokers of {kafka.spec.name} have not deleted the logs of {prefix}*")
            time.sleep(LOOK_S)

    async def _own_settings(self, topic: str) -> Mapping[str, str]:
        async with ClusterClient([self._b.bootstrap_servers.split(",")[0]]) as client:
            described = (await client.describe_configs(ResourceType.TOPIC, [topic]))[topic]
        return {
            entry.name: entry.value
            for entry in described.entries.values()
            if entry.source == TOPIC_OWN and entry.value is not None
        }

    def _timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """How long it takes, and the CPU of the proxies meanwhile."""
        pids = [proxy.pid for proxy in self._proxies]
        began, before = time.monotonic(), sum(map(cpu_seconds, pids))
        work()
        return time.monotonic() - began, sum(map(cpu_seconds, pids)) - before

    def _attach(self, prefix: str, size: int) -> None:
        """Attach a namespace, and wait until all partitions of its topics follow."""
        self._http.post("/v1/namespaces", json={"type": "topic", "prefix": prefix}).raise_for_status()
        body = {"type": "topic", "local": prefix, "remote": prefix, "role": "leader"}
        self._http.post(f"/v1/links/{LINK}/mappings", json=body).raise_for_status()
        wanted, began = size * self._plan.partitions, time.monotonic()
        while True:
            partitions = self._http.get(f"/v1/links/{LINK}").raise_for_status().json()["partitions"]
            following = sum(each["state"] == "Following" and each["topic"].startswith(prefix) for each in partitions)
            if following == wanted:
                return
            took_s = time.monotonic() - began
            if took_s > FOLLOW_TIMEOUT_S:
                raise ProxyFailed(f"{following} of {wanted} partitions follow:\n{self._log()}")
            rest_s = took_s * (wanted - following) / following if following else took_s
            time.sleep(min(LOOK_MAX_S, max(LOOK_S, took_s / LOOKS_MAX, rest_s / LOOKS_IN_REST)))

    def _verify(self) -> None:
        operation = self._http.post(f"/v1/links/{LINK}/verify").raise_for_status().json()
        deadline = time.monotonic() + FOLLOW_TIMEOUT_S
        while operation["state"] == "running":
            if time.monotonic() > deadline:
                raise ProxyFailed(f"verified {operation['done']} of {operation['total']}:\n{self._log()}")
            operation = self._http.get(f"/v1/operations/{operation['id']}", params={"wait_s": 20}).json()
        if operation["state"] != "done" or not operation["result"]["equal"]:
            raise ProxyFailed(f"not equal: {operation['error']}\n{self._log()}")

    async def _new_topics(self) -> list[_NewTopic]:
        source, target = (ClusterClient([each.bootstrap_servers.split(",")[0]]) for each in (self._a, self._b))
        client = ClusterClient([self._proxies[0].bootstrap])
        async with source, target, client:
            found = []
            for number in range(self._plan.new_topics):
                place = TopicPartition(f"{TOPICS}new-{number}", 0)
                began = time.monotonic()
                created = await client.create_topics([NewTopic(place.topic, self._plan.partitions, -1, {})])
                if (error := created[place.topic].error) is not None:
                    raise ProxyFailed(f"{place.topic} was not created: {error}")
                await self._until(source, [place], 0)
                await source.produce_raw({place: batch(1, 100)})
                acked_s = time.monotonic() - began
                await self._until(target, [place], 1)
                found.append(_NewTopic(acked_s, time.monotonic() - began))
        return found

    async def _until(
        self, client: ClusterClient, places: Sequence[TopicPartition], end: int, timeout_s: float = API_TIMEOUT_S
    ) -> None:
        """Wait until topics are there and their leaders say that the logs end at an offset, or beyond it.

        Raises ProxyFailed.
        """
        names, deadline = {place.topic for place in places}, time.monotonic() + timeout_s
        while True:
            known = await client.refresh(names)
            asked = [place for place in places if place.topic in known]
            said = await client.list_offsets(dict.fromkeys(asked, LATEST), deadline_s=0) if asked else {}
            if sum(each.error is None and each.offset >= end for each in said.values()) == len(places):
                return
            if time.monotonic() > deadline:
                raise ProxyFailed(f"{places[0].topic} and others do not end at {end}:\n{self._log()}")
            await asyncio.sleep(NEW_TOPIC_LOOK_S)

    async def _restart(self, size: int, idle: float) -> RollingRestart:
        """Have the source's brokers restarted, one after the other."""

        async def until(client: ClusterClient, places: Sequence[TopicPartition], end: int) -> None:
            await self._until(client, places, end, FOLLOW_TIMEOUT_S)

        pids = [proxy.pid for proxy in self._proxies]
        found = await rolling_restart.measure(
            self._a, self._b, pids, self._places(TOPICS, size), until, FOLLOW_TIMEOUT_S
        )
        self._say(f"{size} topics: brokers restarted in {found.took_s:.1f} s")
        return replace(found, cpu_s=_beyond(idle, found.took_s, found.cpu_s))

    def _places(self, prefix: str, size: int) -> list[TopicPartition]:
        return [TopicPartition(f"{prefix}{n}", p) for n in range(size) for p in range(self._plan.partitions)]

    def _log(self) -> str:
        return "\n".join(proxy.log[-1500:] for proxy in self._proxies)
