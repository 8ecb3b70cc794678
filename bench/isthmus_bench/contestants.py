"""Ways to copy topics from one cluster to another, which benchmarks measure beside each other."""

from __future__ import annotations

import json
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Any, Final, Protocol
from urllib.parse import quote

import httpx

from isthmus_bench import mirror_maker, turn_topics
from isthmus_bench.affinity import run_on
from isthmus_bench.kafka import EmbeddedKafkaError, KafkaCluster
from isthmus_bench.load import Target
from isthmus_bench.mirror_maker import MirrorMaker
from isthmus_bench.proxies import ProxyProcess

Say = Callable[[str], None]

LINK: Final = "link"
MIRROR: Final = "MirrorMaker 2"
TUNED: Final = "MirrorMaker 2, tuned"
TREE: Final = "tree, exactly once"
TREE_AT_LEAST_ONCE: Final = "tree, at least once"
API_TIMEOUT_S: Final = 60.0
CAUGHT_UP_S: Final = 60.0
DISTRIBUTION: Final = {"plugins": {"enabled": ["reservation", "replication", "distribution"]}}


class Contestant(Protocol):
    """A way to copy topics from A to B. One at a time copies one topic."""

    name: str
    equal_offsets: bool
    """Whether a record has the same offset at B. If not, B's logs hold the markers of transactions as well."""

    @abstractmethod
    def begin(self, topic: str) -> float:
        """Have the topic copied; returns at once, with the time at which it was asked to."""

    @abstractmethod
    def begun(self) -> None:
        """Wait until it has taken the topic on. Raises httpx.HTTPError."""

    @abstractmethod
    def wait_caught_up(self) -> None:
        """Wait until B has every record of the topic, which has about as many."""

    @abstractmethod
    def end(self) -> None:
        """Copy it no more."""

    @property
    @abstractmethod
    def pids(self) -> Sequence[int]:
        """The processes that copy."""

    @abstractmethod
    def target_topic(self, topic: str) -> str:
        """What the topic is called at B."""

    @abstractmethod
    def log(self) -> str:
        """The end of what its processes said."""


class LinkContestant(Contestant):
    """Two proxies and a link that is made before; a topic is copied by attaching a namespace."""

    def __init__(self, stack: ExitStack, a: ProxyProcess, b: ProxyProcess) -> None:
        self.name, self.equal_offsets = LINK, True
        self._proxies = (a, b)
        self._http = stack.enter_context(httpx.Client(base_url=a.url, timeout=API_TIMEOUT_S, trust_env=False))
        self._pool = stack.enter_context(ThreadPoolExecutor(1))
        self._attached: Any = None
        self._topic = ""
        self._link = "bench"
        a.cli("link", "create", self._link, "--remote", b.link_address)

    def begin(self, topic: str) -> float:
        self._topic = topic
        self._http.post("/v1/namespaces", json={"type": "topic", "prefix": topic}).raise_for_status()
        body = {"type": "topic", "local": topic, "remote": topic, "role": "leader"}
        asked_at = time.monotonic()
        self._attached = self._pool.submit(self._http.post, f"/v1/links/{self._link}/mappings", json=body)
        return asked_at

    def begun(self) -> None:
        self._attached.result().raise_for_status()

    def wait_caught_up(self) -> None:
        """Equal offsets say so."""

    def end(self) -> None:
        query = f"local={quote(self._topic, safe='')}&type=topic"
        self._http.delete(f"/v1/links/{self._link}/mappings?{query}").raise_for_status()

    @property
    def pids(self) -> Sequence[int]:
        return [proxy.pid for proxy in self._proxies]

    def target_topic(self, topic: str) -> str:
        return topic

    def log(self) -> str:
        return "\n".join(proxy.log[-1500:] for proxy in self._proxies)


class MirrorContestant(Contestant):
    """MirrorMaker 2, started for each topic."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, str],
        source: KafkaCluster,
        target: KafkaCluster,
        directory: FilePath,
        say: Say,
    ) -> None:
        self.name, self.equal_offsets = name, True
        self._settings = settings
        self._clusters = (source, target)
        self._directory = directory
        self._say = say
        self._running: MirrorMaker | None = None
        mirror_maker.distribution(source.version, say)  # what must be downloaded is downloaded before anything runs

    def begin(self, topic: str) -> float:
        source, target = self._clusters
        running = MirrorMaker(
            source.bootstrap_servers,
            target.bootstrap_servers,
            topic,
            version=source.version,
            directory=self._directory / topic,
            settings=self._settings,
            say=self._say,
        )
        asked_at = time.monotonic()
        self._running = running.__enter__()
        return asked_at

    def begun(self) -> None:
        assert self._running is not None
        if not self._running.running:
            raise EmbeddedKafkaError(f"{self.name} ended:\n{self.log()}")

    def wait_caught_up(self) -> None:
        """Equal offsets say so."""

    def end(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)

    @property
    def pids(self) -> Sequence[int]:
        assert self._running is not None
        return [self._running.pid]

    def target_topic(self, topic: str) -> str:
        return mirror_maker.target_topic(topic)

    def log(self) -> str:
        return "" if self._running is None else self._running.log_path.read_text()[-3000:]


class Tree:
    """Two proxies whose clusters are the leaves of a tree. A's, which distributes, has one core."""

    def __init__(self, stack: ExitStack, clusters: Sequence[KafkaCluster], directory: FilePath) -> None:
        self.clusters = clusters
        self.proxies = [
            stack.enter_context(
                ProxyProcess(each.bootstrap_servers, name=f"tree-{side}", directory=directory, extra=DISTRIBUTION)
            )
            for side, each in zip("ab", clusters, strict=True)
        ]
        self.http = [
            stack.enter_context(httpx.Client(base_url=proxy.url, timeout=API_TIMEOUT_S, trust_env=False))
            for proxy in self.proxies
        ]
        for proxy in self.proxies:
            proxy.raise_level()
        run_on({min(os.sched_getaffinity(0))}, [self.proxies[0].pid])

    def document(self, topic: str, exactly_once: bool) -> str:
        """A tree of the two clusters for one topic. JSON is YAML."""
        clusters = {
            name: {"cluster_id": each.cluster_id, "bootstrap_servers": each.bootstrap_servers}
            for name, each in zip("ab", self.clusters, strict=True)
        }
        tree = {"version": 1, "topics": [topic], "clusters": clusters, "tree": ["a", "b"], "exactly_once": exactly_once}
        return json.dumps(tree)


class TreeContestant:
    """Distribution over a tree; a topic is copied by applying one that has it. Nobody writes to B, which reads all."""

    def __init__(self, name: str, tree: Tree, partitions: int, pool: ThreadPoolExecutor) -> None:
        self.name, self.equal_offsets = name, False
        self._tree = tree
        self._partitions = partitions
        self._pool = pool
        self._applied: list[Any] = []

    def begin(self, topic: str) -> float:
        target = Target(*self._tree.clusters[1].addresses()[1], topic)
        turn_topics.create(target, self._partitions)
        body = {"document": self._tree.document(topic, self.name == TREE)}
        asked_at = time.monotonic()
        self._applied = [self._pool.submit(each.put, "/v1/tree", json=body) for each in self._tree.http]
        return asked_at

    def begun(self) -> None:
        for each in self._applied:
            each.result().raise_for_status()

    def wait_caught_up(self) -> None:
        deadline = time.monotonic() + CAUGHT_UP_S
        while self._lag() != 0:
            if time.monotonic() > deadline:
                raise EmbeddedKafkaError(f"{self.name} has not caught up:\n{self.log()}")
            time.sleep(0.1)

    def _lag(self) -> int | None:
        """Of A's distributor, which has looked at the log's end; None: not all partitions have one."""
        (distributor,) = self._tree.http[0].get("/v1/tree").raise_for_status().json()["distributors"]
        lags = [each["lag"] for each in distributor["partitions"]]
        return sum(lags) if lags and None not in lags else None

    def end(self) -> None:
        for each in self._tree.http:
            each.delete("/v1/tree?give_up=true").raise_for_status()

    @property
    def pids(self) -> Sequence[int]:
        return [proxy.pid for proxy in self._tree.proxies]

    def target_topic(self, topic: str) -> str:
        return topic

    def log(self) -> str:
        return "\n".join(proxy.log[-1500:] for proxy in self._tree.proxies)


def contestants(
    names: Collection[str],
    clusters: tuple[KafkaCluster, KafkaCluster],
    partitions: int,
    stack: ExitStack,
    directory: FilePath,
    say: Say,
) -> list[Contestant]:
    """By their names. ``stack`` ends what they start; ``partitions``: of the topics that are copied."""
    found: list[Contestant] = []
    if LINK in names:
        a, b = (
            stack.enter_context(ProxyProcess(cluster.bootstrap_servers, name=f"bench-{side}", directory=directory))
            for side, cluster in zip("ab", clusters, strict=True)
        )
        found.append(LinkContestant(stack, a, b))
    trees = [name for name in (TREE, TREE_AT_LEAST_ONCE) if name in names]
    if trees:
        tree, pool = Tree(stack, clusters, directory), stack.enter_context(ThreadPoolExecutor(2))
        found += [TreeContestant(name, tree, partitions, pool) for name in trees]
    found += [
        MirrorContestant(name, settings, *clusters, directory, say)
        for name, settings in ((MIRROR, mirror_maker.DEFAULT), (TUNED, mirror_maker.TUNED))
        if name in names
    ]
    return sorted(found, key=lambda each: list(names).index(each.name))
