"""``isthmus demo --tree``: three clusters that all take writes to one topic; who gets what, by which way, how often."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from isthmus.cli.output import columns
from isthmus_bench.demo.telling import Telling
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

NAMES: Final = ("cluster-1", "cluster-2", "cluster-3")
TREE: Final = [["cluster-1", "cluster-2"], "cluster-3"]
PREFIX: Final = "orders-"
TOPIC: Final = "orders-clicks"
PARTITIONS: Final = 2
LEASE_S: Final = 3.0
PARTS: Final = 2
"""What is produced at each cluster comes in so many parts: a proxy is killed between them."""
EVERYWHERE_S: Final = 120.0
LOOK_S: Final = 0.2


class TreeDemo:
    """One run. ``stack`` ends what it starts."""

    def __init__(self, stack: ExitStack, telling: Telling, directory: Path, records: int, version: str) -> None:
        """``records``: at each cluster."""
        self._stack = stack
        self._telling = telling
        self._directory = directory
        self._records = records
        self._version = version

    def run(self) -> dict[str, Any]:
        """Tell the whole story. Returns what was found out. Raises ProxyFailed, EmbeddedKafkaError."""
        say = self._telling
        say.step(f"Three Kafka clusters of version {self._version}, a proxy in front of each")
        with ThreadPoolExecutor(len(NAMES)) as pool:
            clusters = dict(zip(NAMES, pool.map(self._cluster, NAMES), strict=True))
        proxies = {name: self._proxy(name, cluster) for name, cluster in clusters.items()}
        for proxy in proxies.values():
            proxy.spawn()
        for name, proxy in proxies.items():
            proxy.wait_ready()
            say.line(
                f"{name}: brokers {clusters[name].bootstrap_servers}  clients {proxy.bootstrap}  admin {proxy.url}"
            )

        say.step(f"A topic {TOPIC!r} at cluster-1, and a tree of which all three are leaves: each takes writes")
        asyncio.run(_create_topic(proxies["cluster-1"].bootstrap))
        file = self._document(clusters)
        for name, proxy in proxies.items():
            proxy.raise_level()
            applied = proxy.cli("tree", "apply", str(file))
            if name == NAMES[0]:
                for line in applied["plan"]["drawing"].splitlines():
                    say.line(line)
            say.line(f"isthmus tree apply {file.name} --url {proxy.url}")
            for topic in applied["topics"]:
                if topic["like"] is not None:
                    say.line(f"    {name} makes {topic['topic']} as {topic['like']} has it")
        targets = {
            (cluster["name"], each["level"]): each["target"]
            for cluster in applied["plan"]["clusters"]
            for each in cluster["distributors"]
        }
        self._wait("every level is distributed", lambda: all(map(_distributes, proxies.values())))

        dies = proxies["cluster-1"]
        say.step(f"{self._records:,} messages are produced at each cluster; {dies.name} is killed on the way")
        for part in range(PARTS):
            asyncio.run(_produce({name: proxy.bootstrap for name, proxy in proxies.items()}, self._records, part))
            if not part:
                dies.kill()
                say.line(f"kill -9 of {dies.name}, which distributes for cluster-1; it is started again")
                dies.start()

        say.step("Every cluster is read, until each has all")
        expected = {f"{name} {number}" for name in NAMES for number in range(self._records)}
        found: dict[str, Counter[tuple[str, int]]] = {}

        def everywhere() -> bool:
            found.update(asyncio.run(_read_all({name: each.bootstrap_servers for name, each in clusters.items()})))
            return all(expected <= {value for value, _ in read} for read in found.values())

        try:
            self._wait("every message is on every cluster", everywhere)
        except ProxyFailed as error:
            say.line(str(error))
        copies = [copy for origin in NAMES for copy in _copies(origin, found, targets)]
        for line in columns(
            ("PRODUCED AT", "IS AT", "BY THE WAY OF", "MESSAGES", "TIMES EACH"),
            [(each["origin"], each["cluster"], each["way"], f"{each['messages']:,}", each["times"]) for each in copies],
        ):
            say.line(line)
        by_cluster = [Counter(value for value, _ in read.elements()) for read in found.values()]
        lost = sum(len(expected - counted.keys()) for counted in by_cluster)
        doubled = sum(count - 1 for counted in by_cluster for count in counted.values())
        say.line(f"{lost:,} lost, {doubled:,} doubled")
        return {
            "records": self._records * len(NAMES),
            "copies": copies,
            "lost": lost,
            "doubled": doubled,
            "killed": dies.name,
            "clusters": {name: each.bootstrap_servers for name, each in clusters.items()},
        }

    def _wait(self, what: str, ready: Any) -> None:
        deadline = time.monotonic() + EVERYWHERE_S
        while not ready():
            if time.monotonic() > deadline:
                raise ProxyFailed(f"{what}: not within {EVERYWHERE_S:.0f} s")
            time.sleep(LOOK_S)

    def _document(self, clusters: Mapping[str, KafkaCluster]) -> Path:
        document = {
            "version": 1,
            "topics": [PREFIX],
            "clusters": {
                name: {"cluster_id": each.cluster_id, "bootstrap_servers": each.bootstrap_servers}
                for name, each in clusters.items()
            },
            "tree": TREE,
        }
        path = self._directory / "tree.yaml"
        path.write_text(json.dumps(document))
        return path

    def _cluster(self, name: str) -> KafkaCluster:
        cluster = KafkaCluster(name=name, version=self._version)
        cluster.start()
        self._stack.callback(cluster.stop)
        return cluster

    def _proxy(self, name: str, cluster: KafkaCluster) -> ProxyProcess:
        proxy = ProxyProcess(
            cluster.bootstrap_servers,
            name=f"proxy-{name[-1]}",
            directory=self._directory,
            extra={
                "proxy": {"lease_s": LEASE_S},
                "plugins": {"enabled": ["reservation", "replication", "distribution"]},
            },
        )
        self._stack.callback(proxy.close)
        return proxy


def _distributes(proxy: ProxyProcess) -> bool:
    return all(
        each["state"] == "Distributing"
        and each["partitions"]
        and all(part["position"] is not None for part in each["partitions"])
        for each in proxy.get("/v1/tree")["distributors"]
    )


def _copies(
    origin: str, found: Mapping[str, Counter[tuple[str, int]]], targets: Mapping[tuple[str, int], str]
) -> list[dict[str, Any]]:
    """What of the messages of one cluster is where, and how it came there, by their copy flags."""
    copies = []
    for cluster, read in found.items():
        by_flags: dict[int, Counter[str]] = {}
        for (value, flags), count in read.items():
            if value.split()[0] == origin:
                by_flags.setdefault(flags, Counter())[value] += count
        for flags, counted in sorted(by_flags.items()):
            times = sorted({*counted.values()})
            copies.append(
                {
                    "origin": origin,
                    "cluster": cluster,
                    "way": _way(origin, flags, targets),
                    "messages": len(counted),
                    "times": "-".join(map(str, times if len(times) == 1 else (times[0], times[-1]))),
                }
            )
    return copies


def _way(origin: str, flags: int, targets: Mapping[tuple[str, int], str]) -> str:
    """The hops of a copy: levels get lower on its way."""
    way = [origin]
    for level in sorted((each + 1 for each in range(flags.bit_length()) if flags >> each & 1), reverse=True):
        way += [f"level {level}", targets.get((way[-1], level), "?")]
    return " > ".join(way)


async def _create_topic(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])
    finally:
        await admin.close()


async def _produce(bootstraps: Mapping[str, str], records: int, part: int) -> None:
    """One part of each cluster's messages, at all clusters at a time."""

    async def produce(name: str, bootstrap: str) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, linger_ms=5)
        await producer.start()
        try:
            sent = [
                await producer.send(TOPIC, f"{name} {number}".encode(), key=b"%d" % (number % 100))
                for number in range(part, records, PARTS)
            ]
            await asyncio.gather(*sent)
        finally:
            await producer.stop()

    await asyncio.gather(*(produce(name, bootstrap) for name, bootstrap in bootstraps.items()))


async def _read_all(bootstraps: Mapping[str, str]) -> dict[str, Counter[tuple[str, int]]]:
    """By cluster: how often it has each message with which copy flags, as its brokers say; 0: without the header."""
    read = await asyncio.gather(*map(_read, bootstraps.values()))
    return dict(zip(bootstraps, read, strict=True))


async def _read(bootstrap: str) -> Counter[tuple[str, int]]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    counted: Counter[tuple[str, int]] = Counter()
    await consumer.start()
    try:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        left = {place for place in places if ends[place]}
        async with asyncio.timeout(EVERYWHERE_S):
            while left:
                for batch in (await consumer.getmany(*left, timeout_ms=500)).values():
                    counted.update((each.value.decode(), _flags(each.headers)) for each in batch)
                left = {place for place in left if await consumer.position(place) < ends[place]}
    finally:
        await consumer.stop()
    return counted


def _flags(headers: Sequence[tuple[str, bytes]]) -> int:
    return next((int.from_bytes(value, "big") for name, value in headers if name == "isthmus-copy-flags"), 0)
