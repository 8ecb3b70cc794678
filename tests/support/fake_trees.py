"""Clusters of a tree in memory, as far as operators' requests look at them: topics, where logs end, what is kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, ProducerFenced, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import KeptCourse, KeptGiven, courses_group, given_group, given_metadata
from isthmus_plugins.distribution.positions import Course, Given, Stretch, Term
from support.fake_cluster import FakeCluster


class OffsetTransactions:
    """A producer of one transactional id that commits offsets alone."""

    def __init__(self, cluster: Member, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._epoch = 0

    async def begin(self) -> None:
        self._cluster.epochs[self._id] += 1
        self._epoch = self._cluster.epochs[self._id]

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        assert not batches
        if self._cluster.epochs[self._id] != self._epoch:
            raise ProducerFenced(self._id)
        self._cluster.offsets.setdefault(group, {}).update(offsets)
        return {}


class Member(FakeCluster):
    """One cluster."""

    def __init__(self, name: str) -> None:
        super().__init__(random.Random(1))
        self.name = name
        self.cluster_id = f"id-{name}"
        self.is_up = True
        self.epochs: Counter[str] = Counter()

    def transactions(self, transactional_id: str) -> OffsetTransactions:
        return OffsetTransactions(self, transactional_id)

    async def close(self) -> None:
        """Nothing is open."""

    def begin(self, document: TreeDocument, topic: str, settled: int = 0) -> None:
        """Each of its levels is at a version, with so much of a topic's first partition settled."""
        for above in document.tree.above(self.name):
            target = document.target(self.name, above.level)
            course = Course((Stretch(Term(document.tree.version, 0), target, 0, settled),))
            topic_id = self.found[topic].topic_id.hex()
            self.keep(above.level, topic, KeptCourse(course, document.tree.version, topic_id, digest=document.digest))

    def keep(self, level: int, topic: str, kept: KeptCourse) -> None:
        committed = CommittedOffset(kept.course.settled, kept.metadata())
        self.offsets.setdefault(courses_group(level), {})[topic, 0] = committed

    def fill(self, document: TreeDocument, topic: str, position: int, fill_until: int) -> None:
        """It was given so much by the cluster that fills it."""
        by, version = document.added[self.name]
        kept = KeptGiven(Given(Term(version, 0), position), "", fill_until=fill_until)
        group = given_group(by, document.tree.level_between(by, self.name))
        self.offsets.setdefault(group, {})[topic, 0] = CommittedOffset(*given_metadata(0, {0: kept}))


def members(names: Sequence[str]) -> dict[str, Member]:
    return {name: Member(name) for name in names}


def context(own: Member, others: Mapping[str, Member], control: Any) -> Any:
    """Of a proxy of one of them."""

    async def other_cluster(name: str, bootstrap: Sequence[str]) -> Member:
        if not others[name].is_up:
            raise BrokerUnavailable("no broker answers")
        return others[name]

    return SimpleNamespace(cluster_id=own.cluster_id, cluster=own, other_cluster=other_cluster, control=control)
