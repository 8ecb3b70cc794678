"""Two clusters of a broker each, a proxy beside each broker, and links between them, for ``isthmus bench reverse``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from isthmus_bench.children import Child
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.kafka.settings import Reach
from isthmus_bench.load import RawClient, Target, newest_versions
from isthmus_bench.proxies import HOST, ProxyFailed, ProxyProcess
from isthmus_bench.replication_load import ends
from isthmus_bench.sync_environment import (
    HEAP_MB,
    JVM_FLAGS,
    LINKED_STATES,
    create_topic,
    set_mode,
    wait_for_groups,
    wait_for_link,
)
from isthmus_bench.sync_load import Shape
from isthmus_bench.sync_plan import ASYNCHRONOUS, SYNCHRONOUS
from isthmus_bench.wan import Wan

BROKER: Final = 1
CLUSTER_SETTINGS: Final = {"transaction.partition.verification.enable": "false"}  # as on every target of transactions
GRANTS: Final = ("lead:", "follow:", "lead:consumer-group:", "follow:consumer-group:")
ONCE: Final = "once"
"""The link of what is promoted or failed over, each once; links that are reversed are called as their modes."""
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.02
COMMIT_S: Final = 0.1


class Environment:
    """The first cluster leads all of it in the beginning. ``stack`` ends what it starts.

    ``wan``: what the link goes over; None: nothing delays it. ``once``: prefixes of what is led over :data:`ONCE`, with
    the partitions of their only topic.
    """

    def __init__(
        self,
        version: str,
        wan: Wan | None,
        partitions: int,
        once: Mapping[str, int],
        generator: Child,
        stack: ExitStack,
    ) -> None:
        self._partitions = partitions
        self._once = once
        reach = Reach(bind=HOST, advertised=HOST) if wan is None else Reach(bind=wan.near, advertised=wan.far)
        self.directory = directory = Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        self.clusters = [
            stack.enter_context(
                KafkaCluster(
                    name=name,
                    version=version,
                    settings=CLUSTER_SETTINGS,
                    heap_mb=HEAP_MB,
                    jvm_flags=JVM_FLAGS,
                    say=lambda _: None,
                )
            )
            for name in "ab"
        ]
        self.proxies = [
            stack.enter_context(
                ProxyProcess(
                    each.bootstrap_servers,
                    name=each.spec.name,
                    directory=directory,
                    broker_id=BROKER,
                    extra={"link": {"remotes_allowed": [reach.advertised]}},
                    link_reach=reach,
                )
            )
            for each in self.clusters
        ]
        self._http = [
            stack.enter_context(httpx.Client(base_url=each.url, timeout=TIMEOUT_S, trust_env=False))
            for each in self.proxies
        ]
        for each in self.proxies:
            each.raise_level()
        self._generator = generator
        for mode in (ASYNCHRONOUS, SYNCHRONOUS):
            self._link(mode, directory / mode, {prefix_of(mode): partitions})
            self._lead_group(mode)
        if once:
            self._link(ONCE, directory / ONCE, once)
        for link in (ASYNCHRONOUS, SYNCHRONOUS):
            self.wait(link, 0)

    def _link(self, name: str, token: Path, prefixes: Mapping[str, int]) -> None:
        """A link over which the first cluster leads a topic of each prefix."""
        a, b = self.proxies
        b.write_token(token, *GRANTS)
        a.cli("link", "create", name, "--remote", b.link_address, "--token-file", str(token))
        a.cli("link", "grant", name, *(each for grant in GRANTS for each in ("--may", grant)))
        for prefix, partitions in prefixes.items():
            create_topic(Target(*self.clusters[0].addresses()[BROKER], topic_of(prefix)), partitions, [BROKER])
            a.cli("link", "attach", name, "--local", prefix, "--remote", prefix, "--role", "leader")
        wait_for_link(a, name, LINKED_STATES[ASYNCHRONOUS], sum(prefixes.values()))
        if name in LINKED_STATES:
            set_mode(a, name, name)

    def _lead_group(self, link: str) -> None:
        """Lead a consumer group that has committed."""
        prefix = prefix_of(link)
        pair = ("--type", "consumer-group", "--local", prefix, "--remote", prefix, "--role", "leader")
        self.proxies[0].cli("link", "attach", link, *pair)
        shape = asdict(Shape(warmup_s=0, seconds=COMMIT_S))
        self._generator.ask(do="commit", target=asdict(self.target(0, prefix)), shape=shape, pids={}, prefix=prefix)

    def target(self, side: int, prefix: str) -> Target:
        """Where clients of a cluster write to the topic of a prefix."""
        host, _, port = self.proxies[side].bootstrap.rpartition(":")
        return Target(host, int(port), topic_of(prefix))

    def write(self, prefix: str, rate: int, seconds: float) -> None:
        """Write so many records a second at the first cluster. Raises ChildFailed."""
        shape = Shape(rate=rate, connections=10, record_bytes=100, warmup_s=0, seconds=seconds)
        self._generator.ask(do="open", target=asdict(self.target(0, prefix)), shape=asdict(shape), pids={})

    def wait(self, link: str, leader: int) -> None:
        """Wait until all that one cluster leads over a link that is reversed is followed. Raises ProxyFailed."""
        wait_for_link(self.proxies[leader], link, LINKED_STATES[link], self._partitions)
        if link == SYNCHRONOUS:
            wait_for_groups(self.proxies[leader], link)

    def wait_once(self, prefix: str) -> None:
        """Wait until the second cluster has all of what the first leads over :data:`ONCE`. Raises ProxyFailed."""
        self._until(f"{prefix} is followed", lambda: self._ends(0, prefix) == self._ends(1, prefix))

    def _ends(self, side: int, prefix: str) -> list[int | None]:
        topic = topic_of(prefix)
        client = RawClient(Target(*self.clusters[side].addresses()[BROKER], topic))
        try:
            return ends(client, newest_versions(client), topic, self._once[prefix])
        finally:
            client.close()

    def wait_connected(self, connected: bool) -> None:
        """Wait until :data:`ONCE` is connected, or is not, as the second cluster sees it. Raises ProxyFailed."""

        def is_so() -> bool:
            return (self.proxies[1].get(f"/v1/links/{ONCE}")["state"] != "Disconnected") is connected

        self._until("connected" if connected else "disconnected", is_so)

    def do(self, side: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have a proxy do something and wait until that is done: what it reports. Raises ProxyFailed, HTTPError."""
        http = self._http[side]
        operation = http.post(path, json=body).raise_for_status().json()
        deadline = time.monotonic() + TIMEOUT_S
        while operation["state"] == "running" and time.monotonic() < deadline:
            operation = http.get(f"/v1/operations/{operation['id']}", params={"wait_s": 20}).raise_for_status().json()
        if operation["state"] != "done":
            raise ProxyFailed(f"{path}: {operation['state']}: {operation['error']}\n{self.log()}")
        result: dict[str, Any] = operation["result"]
        return result

    def _until(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline:
                raise ProxyFailed(f"not within {TIMEOUT_S:.0f} s: {what}\n{self.log()}")
            time.sleep(POLL_S)

    def log(self) -> str:
        """The end of what the proxies said."""
        return "\n".join(each.log[-3000:] for each in self.proxies)


def prefix_of(link: str) -> str:
    """Of what is led over a link that is reversed."""
    return f"{link}-"


def topic_of(prefix: str) -> str:
    return f"{prefix}topic"
