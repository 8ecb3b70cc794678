"""Real clusters that distribute over a tree, for tests: each with its proxies, and names that no other test uses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support import groups
from support.kafka import unique
from support.links import WAIT_S, Read, Side, keep_logs, until

PLUGINS: Final = {"plugins": {"enabled": ["reservation", "replication", "distribution"]}}
HEADER: Final = "isthmus-copy-flags"
ANY_MARK: Final = f"{HEADER}="
"""Before the metadata of an offset that was set by what another cluster said."""
MARK: Final = f"{ANY_MARK}0000000000000008;"
"""The same, of what came over level 4: that of a tree of two clusters."""


class Distributing:
    """Clusters by the names that they have in the tree, each with its proxies."""

    def __init__(self, sides: Mapping[str, Side], directory: Path) -> None:
        self.sides = dict(sides)
        self.prefix = unique("tree-") + "-"
        self._directory = directory

    def document(self, tree: Any, version: int = 1, **more: Any) -> Path:
        """A file with a version of the tree, of all clusters that are in it now."""
        clusters = {
            name: {"cluster_id": side.kafka.cluster_id, "bootstrap_servers": side.kafka.bootstrap_servers}
            for name, side in self.sides.items()
        }
        document = {"version": version, "topics": [self.prefix], "clusters": clusters, "tree": tree, **more}
        path = self._directory / f"tree-{version}.yaml"
        path.write_text(json.dumps(document))
        return path

    def apply(self, file: Path) -> None:
        """Apply it at every cluster."""
        for side in self.sides.values():
            side.proxy.cli("tree", "apply", str(file))

    def create_topic(self, partitions: int) -> str:
        """The same topic at every cluster."""
        name = unique(self.prefix)
        for side in self.sides.values():
            side.create_topic(name, partitions, replicas=len(side.kafka.broker_ids))
        return name

    def levels(self, name: str, proxy: ProxyProcess | None = None) -> dict[int, dict[str, Any]]:
        """A cluster's distributors, by level, as a proxy tells of those that it runs, and of the others."""
        side = self.sides[name]
        found: dict[int, dict[str, Any]] = {}
        for each in side.proxies if proxy is None else [proxy]:
            if each.running:
                for status in each.get("/v1/tree")["distributors"]:
                    if status["level"] not in found or status["state"] in ("Distributing", "Waiting"):
                        found[status["level"]] = status
        return found

    def offsets(self, name: str) -> dict[str, Any]:
        """How a cluster distributes groups' offsets, as the proxy tells that does."""
        side = self.sides[name]
        found: list[dict[str, Any]] = [each.get("/v1/tree")["offsets"] for each in side.proxies if each.running]
        return next((each for each in found if each["state"] in ("Distributing", "Waiting")), found[0])

    def waiting(self, name: str, group: str) -> dict[tuple[str, int], str]:
        """What of a group is not set at a cluster, or not told by it, and why."""
        return {
            (each["topic"], each["partition"]): each["reason_code"]
            for each in self.offsets(name)["waiting"]
            if each["group"] == group
        }

    def wait_distributing(self) -> None:
        """Until every level of every cluster is distributed, with every partition."""

        def distributing() -> bool:
            return all(
                status["state"] == "Distributing" and all(each["position"] is not None for each in status["partitions"])
                for name in self.sides
                for status in self.levels(name).values()
            )

        until("every level is distributed", distributing)

    def wait_settled(self, topic: str, timeout_s: float = WAIT_S) -> None:
        """Until everything in a topic was given, and is settled."""

        def settled() -> bool:
            for name, side in self.sides.items():
                for status in self.levels(name).values():
                    for each in status["partitions"]:
                        end = side.end(topic, each["partition"], "read_committed")
                        if each["topic"] == topic and (each["lag"], each["settled"]) != (0, end):
                            return False
            return True

        until("everything is settled", settled, timeout_s)

    def read(self, topic: str, partitions: int) -> dict[str, list[list[Read]]]:
        """By cluster and partition: the committed records, as its brokers have them."""
        return {
            name: [
                side.read(topic, partition, direct=True, isolation="read_committed") for partition in range(partitions)
            ]
            for name, side in self.sides.items()
        }

    def wait_values(self, topic: str, partitions: int, expected: Sequence[bytes]) -> dict[str, list[list[Read]]]:
        """Until every cluster has these values; what they have then."""
        wanted = Counter(expected).keys()

        def all_there() -> dict[str, list[list[Read]]] | None:
            found = self.read(topic, partitions)
            there = [{each.value for reads in logs for each in reads} for logs in found.values()]
            return found if all(wanted <= values for values in there) else None

        found: dict[str, list[list[Read]]] = until("every message is on every cluster", all_there, interval_s=0.3)
        return found


def flags(read: Read) -> int | None:
    """The copy flags of a record; None: it has no such header."""
    values = [value for name, value in read.headers if name == HEADER]
    assert len(values) <= 1, read
    return int.from_bytes(values[0] or b"", "big") if values else None


def before_later(side: Side, topic: str, time_ms: int) -> int:
    """The offset before the first message that is later: markers of transactions have offsets, too."""
    return next(each.offset for each in side.read(topic, direct=True) if each.timestamp[1] > time_ms) - 1


def wait_set(side: Side, group: str, topic: str, unread_ms: int, margin_ms: int, metadata: str = "") -> int:
    """Until a group is set to the margin before what is unread, and up to a tenth of it earlier; the offset.

    It may have been set earlier before, and is moved on: what the other cluster has said last of what is on its way
    from there may be of a moment before that was settled (ADR 37). Later it was never set.
    """

    def is_set() -> bool:
        found.update(groups.committed(side, group))
        position, has = found.get((topic, 0), (-1, ""))
        return earliest <= position <= latest and has == MARK + metadata

    found: dict[tuple[str, int], groups.Committed] = {}
    latest = before_later(side, topic, unread_ms - margin_ms)
    earliest = before_later(side, topic, unread_ms - margin_ms - margin_ms // 10)
    until(f"{group} is set to {earliest} to {latest}", is_set, interval_s=0.2)
    ever = [
        at for place, (at, has) in groups.ever_committed(side, group) if place == (topic, 0) and has.startswith(MARK)
    ]
    assert ever
    assert max(ever) <= latest, f"{group} was set to {ever}, and all later than offset {latest} is to be read again"
    return found[topic, 0][0]


@contextmanager
def distributing(
    clusters: Mapping[str, KafkaCluster], proxies: Mapping[str, Sequence[ProxyProcess]], directory: Path
) -> Iterator[Distributing]:
    """The clusters with these proxies started. In the end each leaves its tree, as other tests use it, too."""
    with ExitStack() as stack:
        for each in (each for started in proxies.values() for each in started):
            each.spawn()
            stack.callback(each.close)
        sides = {name: Side(kafka, proxies[name]) for name, kafka in clusters.items()}
        for side in sides.values():
            for proxy in side.proxies:
                proxy.wait_ready()
            side.proxy.raise_level()
        try:
            yield Distributing(sides, directory)
        finally:
            keep_logs(each for started in proxies.values() for each in started)
            for side in sides.values():
                for proxy in side.proxies:
                    if proxy.running:
                        proxy.cli("tree", "leave", "--give-up", check=False)
                        break
