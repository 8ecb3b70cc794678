"""A cluster as far as a control log needs one: its topic, power losses, a place for anchors. In memory, on any loop."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from isthmus.anchor_places import PlaceUnavailable
from isthmus.control_topic import TOPIC
from isthmus.errors import ConnectionLost, KafkaError
from isthmus.kafka.client import (
    EARLIEST,
    ConfigEntry,
    CreatedTopic,
    DeletedRecords,
    Fetched,
    ListedOffset,
    NewTopic,
    PartitionInfo,
    Produced,
    ResourceConfigs,
    TopicInfo,
    TopicPartition,
)
from isthmus_control.anchors import Anchor
from isthmus_protocol.error_codes import OFFSET_OUT_OF_RANGE, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER

T = TypeVar("T")

LATENCY_S = 0.01
FETCH_RECORDS_MAX = 50


class ControlCluster:
    """One broker. ``up``: it answers. What it acked is in memory only until it loses power."""

    def __init__(self, rng: random.Random, cluster_id: str = "A") -> None:
        self.random = rng
        self.cluster_id = cluster_id
        self.up = True
        self.topic_id: uuid.UUID | None = None
        self.configs: dict[str, str] = {}
        self.log: list[tuple[bytes | None, int]] = []
        """Values, with the leader epochs in which they were written."""
        self.start = 0
        self.epoch = 0
        self.kept: dict[str, Anchor] = {}
        """What the group of the cluster has committed, by the cluster that it is of."""
        self._waiting: list[asyncio.Event] = []

    def changed(self) -> None:
        for event in self._waiting:
            event.set()

    def lose_power(self, records: int) -> None:
        """The last records are gone, and another leader epoch begins."""
        del self.log[max(self.start, len(self.log) - records) :]
        self.epoch += 1
        self.changed()

    def delete(self) -> None:
        self.topic_id, self.log, self.start, self.epoch = None, [], 0, 0
        self.changed()

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """As KIP-101 has it: the largest epoch up to this one that has records (the leader's own counts), its end."""
        starts: dict[int, int] = {}
        for offset, (_, written) in enumerate(self.log):
            starts.setdefault(written, offset)
        starts.setdefault(self.epoch, len(self.log))
        known = [each for each in starts if each <= epoch]
        if not known or epoch > self.epoch:
            return -1, -1
        later = [start for each, start in starts.items() if each > epoch]
        return max(known), min(later, default=len(self.log))

    async def more_than(self, offset: int, wait_s: float) -> None:
        """Return when the log has a record at ``offset``, or something else happened to it."""
        event = asyncio.Event()
        self._waiting.append(event)
        try:
            async with asyncio.timeout(wait_s):
                if offset >= len(self.log):
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(event)


class Client:
    """What :class:`~isthmus.kafka.client.ClusterClient` is for a control log."""

    def __init__(self, cluster: ControlCluster) -> None:
        self._cluster = cluster
        self._topics: dict[str, TopicInfo] = {}
        self.cluster_id = cluster.cluster_id
        self.brokers = {1: None}

    @property
    def topics(self) -> Mapping[str, TopicInfo]:
        return self._topics

    async def _answer(self) -> ControlCluster:
        await asyncio.sleep(self._cluster.random.uniform(0.1, 2) * LATENCY_S)
        if not self._cluster.up:
            raise ConnectionLost("the broker is down")
        return self._cluster

    async def refresh(self, topics: Iterable[str] | None = None) -> Mapping[str, TopicInfo]:
        cluster = await self._answer()
        self._topics.clear()
        if cluster.topic_id is not None:
            partition = PartitionInfo(0, 1, cluster.epoch, (1,), (1,))
            self._topics[TOPIC] = TopicInfo(TOPIC, cluster.topic_id, False, MappingProxyType({0: partition}))
        return self._topics

    async def topic(self, name: str) -> TopicInfo:
        info = self._topics.get(name) or (await self.refresh()).get(name)
        if info is None:
            raise KafkaError(UNKNOWN_TOPIC_OR_PARTITION, name)
        return info

    async def leader(self, topic: str, partition: int) -> PartitionInfo:
        return (await self.topic(topic)).partitions[partition]

    async def retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await attempt()

    async def create_topics(self, topics: list[NewTopic]) -> dict[str, CreatedTopic]:
        cluster = await self._answer()
        if cluster.topic_id is None:
            cluster.topic_id = uuid.UUID(int=cluster.random.getrandbits(128), version=4)
            cluster.configs = dict(topics[0].configs)
        return {TOPIC: CreatedTopic(TOPIC, cluster.topic_id, 1, 1, None)}

    async def delete_topics(self, names: list[str]) -> None:
        (await self._answer()).delete()

    async def describe_configs(self, kind: int, names: list[str], wanted: list[str]) -> dict[str, ResourceConfigs]:
        cluster = await self._answer()
        entries = {name: ConfigEntry(name, cluster.configs.get(name, ""), 1, False, False, ()) for name in wanted}
        return {TOPIC: ResourceConfigs(entries, None)}

    async def _led(self) -> ControlCluster:
        cluster = await self._answer()
        info = await self.topic(TOPIC)
        if cluster.topic_id != info.topic_id:
            await self.refresh()
        return cluster

    async def list_offsets(
        self, timestamps: Mapping[TopicPartition, int], **more: Any
    ) -> dict[TopicPartition, ListedOffset]:
        cluster = await self._led()
        ((place, timestamp),) = timestamps.items()
        offset = cluster.start if timestamp == EARLIEST else len(cluster.log)
        return {place: ListedOffset(offset, -1, cluster.epoch, None)}

    async def fetch(
        self, topic: str, partition: int, offset: int, *, wait_ms_max: int, fetched_epoch: int, **more: Any
    ) -> Fetched:
        cluster = await self._led()
        if fetched_epoch >= 0:
            epoch, end = cluster.epoch_end(fetched_epoch)
            if epoch < fetched_epoch or end < offset:
                return Fetched(b"", -1, -1, -1, (), None, (epoch, end))
        if not cluster.start <= offset <= len(cluster.log):
            return Fetched(b"", -1, -1, -1, (), KafkaError(OFFSET_OUT_OF_RANGE))
        epoch = cluster.epoch
        await cluster.more_than(offset, wait_ms_max / 1000)
        await self._led()
        records = b""
        if cluster.epoch == epoch:
            for at, (value, written) in enumerate(cluster.log[offset : offset + FETCH_RECORDS_MAX], offset):
                records += encode_batch([Record(at, 0, None, value)], PLAIN_HEADER._replace(leader_epoch=written))
        return Fetched(records, len(cluster.log), len(cluster.log), cluster.start, (), None)

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        return (await self._led()).epoch_end(epoch)

    async def produce_raw(self, batches: Mapping[TopicPartition, bytes], **more: Any) -> dict[TopicPartition, Produced]:
        cluster = await self._led()
        ((place, batch),) = batches.items()
        base = len(cluster.log)
        cluster.log += [(record.value, cluster.epoch) for record in decode_records(batch)]
        cluster.changed()
        if cluster.random.random() < 0.05:
            raise ConnectionLost("the answer is lost")
        await self._answer()
        return {place: Produced(base, -1, cluster.start, None)}

    async def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, DeletedRecords]:
        cluster = await self._led()
        ((place, offset),) = before.items()
        cluster.start = max(cluster.start, offset)
        return {place: DeletedRecords(cluster.start, None)}


class Group:
    """The place in the cluster."""

    name = "the group"

    def __init__(self, cluster: ControlCluster) -> None:
        self._cluster = cluster

    async def _answer(self) -> None:
        await asyncio.sleep(self._cluster.random.uniform(0.1, 2) * LATENCY_S)
        if not self._cluster.up or self._cluster.random.random() < 0.05:
            raise PlaceUnavailable("the coordinator does not answer")

    async def read(self, cluster_id: str) -> Anchor | None:
        await self._answer()
        return self._cluster.kept.get(cluster_id)

    async def write(self, anchor: Anchor) -> None:
        await self._answer()
        self._cluster.kept[anchor.cluster_id] = anchor
        await self._answer()


class Disk:
    """The place of one machine."""

    def __init__(self, name: str) -> None:
        self.name = f"the disk of {name}"
        self.kept: dict[str, Anchor] = {}

    async def read(self, cluster_id: str) -> Anchor | None:
        return self.kept.get(cluster_id)

    async def write(self, anchor: Anchor) -> None:
        await asyncio.sleep(0.001)
        self.kept[anchor.cluster_id] = anchor
