"""Cluster A leads a namespace over two synchronous links, to B and to C, in memory (see ``support.replicas``)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Final

from isthmus_control.commands import AttachNamespace, CreateLink, RegisterProducerIds
from isthmus_control.grants import EVERYTHING
from isthmus_control.model import ResourceType, Role
from isthmus_control.sealing import Sealer, Secret
from isthmus_plugins.replication.partitions import LinkPartition
from support.fake_cluster import FakeCluster, FakeControl
from support.replicas import INDEX, LINK, SECRET, End, Replicas, Wire, connected

SECOND: Final = "a-to-c"
SECOND_ID: Final = str(uuid.UUID(int=8, version=4))
LINKS: Final = {"B": LINK, "C": SECOND}
"""By target."""
INDEX_OF_C: Final = 33


class Three(Replicas):
    """As :class:`Replicas`, and C's ``remote-*`` follows A's ``local-*``, too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, brokers=1)
        self.c = FakeCluster(rng, range(1, 2))
        self.c.add_topic("__isthmus_control")
        self.controls["C"] = FakeControl("C", rng)
        self.targets = {"B": self.b, "C": self.c}
        self.wires: dict[str, Wire] = {}
        self.controls["A"].apply(RegisterProducerIds("C", INDEX_OF_C))
        for cluster_id, index in {"A": INDEX["A"], "C": INDEX_OF_C}.items():
            self.controls["C"].apply(RegisterProducerIds(cluster_id, index))
        secret = Sealer(None).seal(Secret(SECRET), SECOND_ID)
        topic = ResourceType.TOPIC
        for name, remote in (("A", "C"), ("C", "A")):
            link = CreateLink(SECOND, SECOND_ID, remote, name == "A", ("127.0.0.1:1",), (), secret, grants=EVERYTHING)
            self.controls[name].apply(link)
        self.controls["A"].apply(AttachNamespace(SECOND, topic, "local-", "remote-", Role.LEADER))
        self.controls["C"].apply(
            AttachNamespace(SECOND, topic, "remote-", "local-", Role.FOLLOWER, create_missing=True)
        )

    def lead_groups(self, prefix: str) -> None:
        """Groups of A follow at both, as ``far-`` and their name."""
        group = ResourceType.CONSUMER_GROUP
        for target, link in LINKS.items():
            for name, local, remote, role in (
                ("A", prefix, f"far-{prefix}", Role.LEADER),
                (target, f"far-{prefix}", prefix, Role.FOLLOWER),
            ):
                self.controls[name].apply(AttachNamespace(link, group, local, remote, role, create_missing=True))

    def start(self, which: str = "ABC") -> None:
        for name in which:
            cluster = self.a if name == "A" else self.targets[name]
            self.ends[name] = End(cluster, self.controls[name], offsets_keyring_file=self.keyring_file)

    async def stop(self, which: str = "ABC") -> None:
        for name in "BC" if "A" in which else which:
            self.cut_off(name)
        for name in which:
            end = self.ends.pop(name, None)
            if end is not None:
                self.controls[name].unsubscribe_all()
                await end.stop()

    def cut_off(self, target: str) -> None:
        if target in self.wires:
            self.wires[target].cut()

    def join(self, target: str) -> None:
        """Connect, unless it is."""
        wire = self.wires.get(target)
        if (wire is None or not wire.open) and {"A", target} <= self.ends.keys():
            self.wires[target] = connected(self.random, self.ends["A"], self.ends[target], LINKS[target])

    def has(self, target: str, topic: str, partition: int) -> int:
        """Up to where a target's in-sync replicas have a partition."""
        found = self.targets[target].found.get(topic)
        return found.partitions[partition].high_watermark if found is not None else 0

    def all_equal(self) -> bool:
        return all(
            (target := cluster.found.get("remote-" + name.removeprefix("local-"))) is not None
            and [each.end for each in target.partitions] == [each.end for each in topic.partitions]
            for cluster in self.targets.values()
            for name, topic in self.a.found.items()
            if name.startswith("local-")
        )

    def holds(self, topic: str, partitions: int) -> Callable[[], bool]:
        """Whether A's proxy knows all in sync, over both links."""
        keys = [LinkPartition(link, topic, index) for link in LINKS.values() for index in range(partitions)]
        return lambda: "A" in self.ends and all(self.ends["A"].sync_confirmer.partitions.in_sync(key) for key in keys)
