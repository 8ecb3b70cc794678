"""Groups' committed offsets, from cluster to cluster by time (document 000): all of it that one proxy does.

::

    commits here, timestamps here, what others have reached here  ->  the topic of times   (offset distributor)
    the topic of times, as distributors bring it                  ->  commits here         (offset committer)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from isthmus_control.model import DistributionTree, Reason, ResourceType, contains
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, ProducerFenced, TopicInfo, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.group_times import GroupTime
from isthmus_plugins.distribution.kept import TIMES_TOPIC
from isthmus_plugins.distributor import reasons
from isthmus_plugins.distributor.followed import Commits, Times, Timestamps
from isthmus_plugins.distributor.later import Later
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.offset_committer import OffsetCommitter
from isthmus_plugins.distributor.offset_distributor import TICK_S, OffsetDistributor
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_protocol.error_codes import INVALID_REPLICATION_FACTOR, TOPIC_ALREADY_EXISTS
from isthmus_protocol.offsets_log import OffsetKey

log = logging.getLogger("isthmus_plugins.distributor")

RETRY_S: Final = 0.5
REPLICATION_FACTOR: Final = 3
CREATE_TIMEOUT_S: Final = 30.0
CREATE_RETRY_S: Final = 0.2


class GroupOffsets:
    """Of this cluster, for one version of the tree. ``chosen``: what the control log has of the tree now."""

    def __init__(
        self,
        context: PluginContext,
        document: TreeDocument,
        leaf: str,
        chosen: Callable[[], DistributionTree | None],
    ) -> None:
        self._context = context
        self._cluster = context.cluster
        self._document = document
        self._leaf = leaf
        self._levels = [above.level for above in document.tree.above(leaf)]
        self._chosen = chosen
        self._leaves = Leaves(context, document, leaf)
        self.margin_ms = document.least_margin_ms
        """The least one of all groups."""
        self._commits = Commits(context, self._is_distributed)
        self._times = Times(context, document, leaf, self._prepare)
        self._timestamps = Timestamps(context, self._topics, self._needed)
        self.distributor = OffsetDistributor(
            context, document, leaf, self._commits, self._times, self._timestamps, self._leaves
        )
        self.committer = OffsetCommitter(
            context, self._commits, self._times, self._timestamps, Later(context.cluster), self.distributor.spreads
        )
        self._failed: Reason | None = Reason(reasons.SOURCE_UNAVAILABLE, "it begins")

    @property
    def waits(self) -> Reason | None:
        """What keeps all of it."""
        waits = self._failed or self._commits.waits or self._times.waits or self._timestamps.waits
        return waits or self._commits.broken or self._times.broken

    @property
    def warning(self) -> Reason | None:
        """Why times that are said do not cover what they should."""
        lag = self.distributor.lag()
        if lag is None or lag[0] <= self.margin_ms:
            return None
        return Reason(
            reasons.MARGIN_BELOW_LAG,
            f"messages of {lag[1]} may come {lag[0] / 1000:.0f} s late, and the least margin is "
            f"{self.margin_ms / 1000:.0f} s: groups go on that much earlier at other clusters. See why {lag[1]} lags, "
            f"or have a larger margin",
        )

    @property
    def waiting(self) -> Iterator[tuple[OffsetKey, GroupTime | None, Reason]]:
        """Partitions of groups that are not told to others (without a time), or not set here."""
        yield from ((key, None, reason) for key, reason in self.distributor.unsaid.items())
        yield from self.committer.waiting

    def _is_distributed(self, group: str) -> bool:
        return any(contains(ResourceType.CONSUMER_GROUP, prefix, group) for prefix in self._document.groups)

    async def _topics(self) -> Mapping[str, TopicInfo]:
        known = self._chosen()
        found = await self._cluster.topics()
        return {
            name: info
            for name, info in found.items()
            if known is not None and name in known and self._document.fits(self._leaf, name) and not info.internal
        }

    async def _needed(self) -> Mapping[TopicPartition, int]:
        """The earliest offset of each partition that somebody has not read, or that is not settled."""
        needed: dict[TopicPartition, int] = {}
        for (_, topic, partition, _), kept in (await self.distributor.courses(self._levels)).items():
            offset = kept.course.settled
            needed[topic, partition] = min(offset, needed.get((topic, partition), offset))
        for key, commit in self._commits.own().items():
            place = key.topic, key.partition
            if place in needed and commit.offset >= 0:
                needed[place] = min(commit.offset, needed[place])
        return needed

    async def run(self) -> None:
        """Distribute, and commit, until cancelled."""
        while True:
            try:
                await self._run()
            except Waits as waits:
                self._wait(waits.reason)
            except ProducerFenced as error:
                self._wait(Reason(reasons.TAKEN_OVER, str(error)))
            except (BrokerUnavailable, KafkaRefused) as error:
                self._wait(Reason(reasons.SOURCE_UNAVAILABLE, str(error)))
            finally:
                await self._leaves.close()
            await asyncio.sleep(RETRY_S)

    def _wait(self, reason: Reason) -> None:
        if self._failed is None or self._failed.code != reason.code:
            log.warning("groups' offsets wait", extra={"reason": reason.code, "detail": reason.message})
        self._failed = reason

    async def _run(self) -> None:
        check_lease(self._context)
        await self.distributor.begin()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commits.run(), name="tree-offsets/commits")
                group.create_task(self._times.run(), name="tree-offsets/times")
                group.create_task(self._timestamps.run(), name="tree-offsets/timestamps")
                for other in self.distributor.others:
                    group.create_task(self.distributor.ask_for_ever(other), name=f"tree-offsets/{other}")
                group.create_task(self._tick_for_ever(), name="tree-offsets/tick")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _tick_for_ever(self) -> None:
        while True:
            check_lease(self._context)
            await self.distributor.tick()
            await self.committer.tick()
            self._failed = None
            await asyncio.sleep(TICK_S)

    # ---- the topic of times ----

    async def _prepare(self) -> None:
        """Make the topic of times if need be. Raises Waits (it is not fit for it), BrokerUnavailable, KafkaRefused."""
        clock = self._context.clock
        deadline = clock.monotonic() + CREATE_TIMEOUT_S
        while (topic := await self._cluster.topic(TIMES_TOPIC)) is None or topic.partitions[0].leader < 0:
            if topic is None:
                await self._create()
            if clock.monotonic() > deadline:
                raise BrokerUnavailable(f"{TIMES_TOPIC} does not appear, or has no leader")
            await asyncio.sleep(CREATE_RETRY_S)
        policy = (await self._cluster.topic_configs(TIMES_TOPIC, ["cleanup.policy"]))["cleanup.policy"][0]
        if len(topic.partitions) != 1 or policy != "compact":
            raise Waits(
                reasons.TIMES_TOPIC_UNFIT,
                f"{TIMES_TOPIC} has {len(topic.partitions)} partitions and cleanup.policy={policy}: it is to have one, "
                f"and compact",
            )
        self._context.hide_topic(topic.topic_id)

    async def _create(self) -> None:
        brokers = len(await self._cluster.broker_racks())
        for factor in (REPLICATION_FACTOR, brokers):
            try:
                await self._cluster.create_topic(TIMES_TOPIC, 1, factor, _settings(factor))
                log.info("topic of times created", extra={"topic": TIMES_TOPIC, "replication_factor": factor})
                return
            except KafkaRefused as error:
                if error.error_code == TOPIC_ALREADY_EXISTS:
                    return
                if error.error_code != INVALID_REPLICATION_FACTOR or brokers >= REPLICATION_FACTOR:
                    raise


def _settings(factor: int) -> dict[str, str]:
    return {
        "cleanup.policy": "compact",
        "segment.bytes": str(64 * 1024 * 1024),  # what stands in the newest one is not compacted
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": "2" if factor >= REPLICATION_FACTOR else "1",
        "message.timestamp.type": "CreateTime",
    }
