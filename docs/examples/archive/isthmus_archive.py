"""An example of a plugin for namespaces, with a condition of its own for acks: "the archive has it, too".

    isthmus plugin enable archive --namespace orders- --set directory=/var/lib/archive

Records of the namespace's topics are copied into files, one for each partition, as the brokers have them. Producers are
acked when their records are on that disk: a record that was acked is in the archive, whatever happens to the cluster.
When the archive does not keep up for ``limit_s``, producers are answered REQUEST_TIMED_OUT, and try again. Its metric
says how much it has of each partition. A topic that is deleted and made anew is another one, with files of its own,
from when that is seen (a second later at most).
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from isthmus_plugins.cluster import BrokerUnavailable, FetchPartition, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.namespace_plugins import Enabled, NamespacePlugin, Scope, Settings
from isthmus_plugins.private_files import for_owner, make_directory, sync_directory
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import walk

log = logging.getLogger("isthmus_plugins.archive")

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
        self._copies: dict[TopicPartition, tuple[bytes, asyncio.Task[None]]] = {}
        """By partition: its topic's id, and what copies it. Not in the loop, which would forget it where it fails."""
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
        self._tasks.keep("discover", partial(self._discover_for_ever, self._scope.context))

    async def stop(self) -> None:
        await self._tasks.close()

    async def _discover_for_ever(self, context: PluginContext) -> None:
        while True:
            try:
                self._follow(context, (await context.cluster.topics()).values())
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("topics not looked at", extra={"detail": str(error)})  # it is looked again
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    def _follow(self, context: PluginContext, topics: Iterable[TopicInfo]) -> None:
        """Copy the partitions that there are, each once, and no others: a topic that is made anew has another id."""
        wanted = {
            (topic.name, partition): topic.topic_id
            for topic in topics
            if self.concerns(topic.name)
            for partition in range(len(topic.partitions))
        }
        for place, (topic_id, copying) in list(self._copies.items()):
            if wanted.get(place) != topic_id:
                copying.cancel()
                del self._copies[place]
                self.ends.pop(place, None)
        for place, topic_id in wanted.items():
            if place not in self._copies:
                copy = partial(self._copy_for_ever, context, topic_id, place)
                self._copies[place] = topic_id, self._tasks.keep(f"{place[0]}-{place[1]}", copy)

    async def _copy_for_ever(self, context: PluginContext, topic_id: bytes, place: TopicPartition) -> None:
        """Where this fails it begins anew, with what the file has by then."""
        path = self._directory / place[0] / f"{uuid.UUID(bytes=topic_id)}-{place[1]}.log"
        end = await asyncio.to_thread(_opened, path)
        with path.open("ab") as file:
            while True:
                try:
                    leader = await context.cluster.leader_of(*place)
                    if leader is None:
                        raise BrokerUnavailable("no leader")
                    connection = await context.cluster.fetch_connection(leader, f"archive-{place[0]}-{place[1]}")
                    wanted = FetchPartition(topic_id, place[1], end, BYTES_MAX)
                    (found,) = await connection.fetch([wanted], WAIT_MS, BYTES_MAX)
                    if found.error_code:
                        raise BrokerUnavailable(f"error {found.error_code} at offset {end}")
                except (BrokerUnavailable, KafkaRefused) as error:
                    log.warning("not archived", extra={"topic": place[0], "partition": place[1], "detail": str(error)})
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


def _opened(path: Path) -> int:
    """Where an archived log ends; it is there when this returns, its owner's alone, also after a loss of power.

    What a crash left half written at its end is cut off.
    """
    make_directory(path.parent)
    with open(path, "ab", opener=for_owner):
        sync_directory(path.parent)
    end, size = 0, 0
    for _, stop, header in walk(memoryview(path.read_bytes())):
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
