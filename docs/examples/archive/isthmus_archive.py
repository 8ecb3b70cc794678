"""An example of a plugin for namespaces, with a condition of its own for acks: "the archive has it, too".

    isthmus plugin enable archive --namespace orders- --set directory=/var/lib/archive

Records of the namespace's topics are copied into files, one for each partition, as the brokers have them. Producers are
acked when their records are on that disk: a record that was acked is in the archive, whatever happens to the cluster.
When the archive does not keep up for ``limit_s``, producers are answered REQUEST_TIMED_OUT, and try again. Its metric
says how much it has of each partition.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from isthmus_plugins.cluster import BrokerUnavailable, FetchPartition, KafkaRefused, TopicPartition
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.namespace_plugins import Enabled, NamespacePlugin, Scope, Settings
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import walk

DISCOVERY_INTERVAL_S = 1.0
WAIT_MS = 500
BYTES_MAX = 1024 * 1024


class ArchiveSettings(Settings):
    directory: Path
    """Where the files are: a directory of its own on each proxy."""
    limit_s: float = Field(default=10.0, gt=0, le=600)
    """How long acks wait for the archive, in seconds."""


class Archive(Confirmer):
    """The files of one namespace, and up to where they have each partition."""

    name = "the archive"

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._directory: Path = scope.settings.directory
        self.limit_s = scope.settings.limit_s
        self._acks: Acks = NoAcks()
        self.ends: dict[TopicPartition, int] = {}
        self._tasks = Tasks("archive", scope.context.supervision)

    # ---- what acks need ----

    def bound(self, acks: Acks) -> None:
        self._acks = acks

    def concerns(self, topic: str) -> bool:
        return topic in self._scope

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int:
        return self.ends.get(place, 0)

    # ---- how the archive gets it ----

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tasks.keep("discover", partial(self._discover_for_ever, self._scope.context))

    async def stop(self) -> None:
        await self._tasks.close()

    async def _discover_for_ever(self, context: PluginContext) -> None:
        known: set[TopicPartition] = set()
        while True:
            try:
                for topic in (await context.cluster.topics()).values():
                    for partition in range(len(topic.partitions)):
                        place = topic.name, partition
                        if self.concerns(topic.name) and place not in known:
                            known.add(place)
                            copy = partial(self._copy_for_ever, context, topic.topic_id, place)
                            self._tasks.keep(f"{topic.name}-{partition}", copy)
            except (BrokerUnavailable, KafkaRefused):
                pass  # it is looked again
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    async def _copy_for_ever(self, context: PluginContext, topic_id: bytes, place: TopicPartition) -> None:
        path = self._directory / f"{place[0]}-{place[1]}.log"
        end = _end_of(path)
        with path.open("ab") as file:
            while True:
                try:
                    leader = await context.cluster.leader_of(*place)
                    if leader is None:
                        raise BrokerUnavailable("no leader")
                    connection = await context.cluster.fetch_connection(leader, f"archive-{place[0]}-{place[1]}")
                    wanted = FetchPartition(topic_id, place[1], end, BYTES_MAX)
                    (found,) = await connection.fetch([wanted], WAIT_MS, BYTES_MAX)
                except (BrokerUnavailable, KafkaRefused):
                    await asyncio.sleep(DISCOVERY_INTERVAL_S)
                    continue
                batches = [(start, stop, header.next_offset) for start, stop, header in walk(found.records)]
                if batches:
                    file.write(found.records[: batches[-1][1]])
                    file.flush()
                    await asyncio.to_thread(os.fdatasync, file.fileno())
                    end = batches[-1][2]
                self.ends[place] = end
                self._acks.confirmed(place)


def _end_of(path: Path) -> int:
    """Where an archived log ends. What a crash left half written at its end is cut off."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    end, size = 0, 0
    for _, stop, header in walk(memoryview(data)):
        end, size = header.next_offset, stop
    os.truncate(path, size)
    return end


class Archiving(Enabled):
    """The archive at work for one namespace."""

    def __init__(self, plugin: ArchivePlugin, scope: Scope) -> None:
        self._plugin = plugin
        self._archive = Archive(scope)

    def confirmers(self) -> Sequence[Confirmer]:
        return [self._archive]

    async def start(self) -> None:
        self._archive.start()
        self._plugin.running.append(self._archive)

    async def stop(self) -> None:
        self._plugin.running.remove(self._archive)
        await self._archive.stop()


class ArchivePlugin(NamespacePlugin):
    """What the proxy finds: see ``isthmus_plugins/hookspecs.py`` and ``isthmus_plugins/namespace_plugins.py``."""

    about = "acks wait until the namespace's records are in files of an archive"
    settings = ArchiveSettings

    def __init__(self) -> None:
        self.running: list[Archive] = []

    def enabled(self, scope: Scope) -> Enabled:
        return Archiving(self, scope)

    @hookimpl
    def isthmus_namespace_plugin(self) -> NamespacePlugin:
        return self

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "isthmus_archive_end_offset", "Up to where the archive has a partition", labels=["topic", "partition"]
        )
        for archive in self.running:
            for (topic, partition), end in sorted(archive.ends.items()):
                family.add_metric([topic, str(partition)], end)
        yield family


plugin = ArchivePlugin()
