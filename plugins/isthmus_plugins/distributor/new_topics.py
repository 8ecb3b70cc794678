"""Topics of a tree that other clusters have and this one lacks: made here when an operator applies the tree.

With as many partitions as there, replicas and settings as far as this cluster can have them. Of settings, those that
the topic has of its own: the others are each cluster's.
"""

from __future__ import annotations

import asyncio
from typing import Final

from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, KafkaRefused, NewTopic, TopicInfo
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distributor.changes import distributed, unfit
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import some_at_once
from isthmus_plugins.trees import ComparedTopic
from isthmus_protocol.error_codes import TOPIC_ALREADY_EXISTS

AT_ONCE: Final = 10
NOT_COPIED: Final = frozenset({"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"})
"""About the brokers of one cluster."""
IN_SYNC_MIN: Final = "min.insync.replicas"


class NewTopics:
    """Of the cluster that is called ``leaf`` in a version of the tree."""

    def __init__(self, context: PluginContext, document: TreeDocument, leaf: str) -> None:
        self._cluster: ClusterApi = context.cluster
        self._document = document
        self._leaf = leaf
        self._leaves = Leaves(context, document, leaf)
        self.unfit: list[str] = []
        """Topics of this cluster whose names no other one can translate."""
        self.not_asked: dict[str, str] = {}
        """Clusters that do not say which topics they have, and why."""

    async def close(self) -> None:
        """Close connections to other clusters."""
        await self._leaves.close()

    async def make(self, dry_run: bool) -> list[ComparedTopic]:
        """Make what is missing, or say what would be made; also the topics that have other counts elsewhere.

        Raises BrokerUnavailable, KafkaRefused of this cluster.
        """
        found = await self._cluster.topics()
        here = distributed(self._document, self._leaf, found)
        self.unfit = sorted(unfit(self._document, self._leaf, found))
        there: dict[str, dict[str, TopicInfo]] = {}
        others = [leaf for leaf in self._document.tree.leaves if leaf != self._leaf]
        for leaf, found in zip(others, await asyncio.gather(*map(self._topics_of, others)), strict=True):
            for name, info in found.items():
                there.setdefault(name, {})[leaf] = info
        compared: list[ComparedTopic] = []
        missing: list[ComparedTopic] = []
        for name, infos in sorted(there.items()):
            counts = {leaf: len(info.partitions) for leaf, info in infos.items()}
            partitions = len(here[name].partitions) if name in here else max(counts.values())
            differing = {leaf: count for leaf, count in counts.items() if count != partitions}
            topic = ComparedTopic(topic=name, partitions=partitions, elsewhere=differing)
            if name not in here:
                topic.like = next(leaf for leaf, count in counts.items() if count == partitions)
                missing.append(topic)
            if name not in here or differing:
                compared.append(topic)
        brokers = len(await self._cluster.broker_racks())

        async def made(topic: ComparedTopic) -> None:
            assert topic.like is not None
            await self._make(topic, there[topic.topic][topic.like], topic.like, brokers, dry_run)

        await some_at_once(AT_ONCE, made, missing)
        return compared

    async def _topics_of(self, leaf: str) -> dict[str, TopicInfo]:
        try:
            return distributed(self._document, self._leaf, await (await self._leaves.reached(leaf)).topics())
        except (Waits, BrokerUnavailable, KafkaRefused) as error:
            self.not_asked[leaf] = str(error)
            return {}

    async def _make(self, topic: ComparedTopic, like: TopicInfo, leaf: str, brokers: int, dry_run: bool) -> None:
        try:
            described = await (await self._leaves.reached(leaf)).topic_configs(topic.topic)
        except (Waits, BrokerUnavailable, KafkaRefused) as error:
            topic.reason = f"{leaf} does not say its settings: {error}"
            return
        topic.replication_factor = min(like.replication_factor, brokers)
        chosen = {
            name: value
            for name, (value, inherited) in described.items()
            if value is not None and value != inherited and name not in NOT_COPIED
        }
        if IN_SYNC_MIN in chosen:
            chosen[IN_SYNC_MIN] = str(min(int(chosen[IN_SYNC_MIN]), topic.replication_factor))
        new = NewTopic(topic.topic, topic.partitions, topic.replication_factor, chosen)
        try:
            taken, refused = await setting_changes.creatable(self._cluster, new, ())
            topic.settings, topic.settings_refused = dict(taken), {name: str(why) for name, why in refused.items()}
            if not dry_run:
                await self._cluster.create_topic(*new._replace(configs=taken))
        except KafkaRefused as error:
            if error.error_code != TOPIC_ALREADY_EXISTS:  # made meanwhile, by whomever
                topic.reason = f"the brokers here refuse it: {error}"
