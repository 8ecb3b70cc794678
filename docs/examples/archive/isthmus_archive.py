"""An example of a plugin with a condition of its own for acks: "the archive has it, too".

Records of topics whose names begin with ISTHMUS_ARCHIVE_PREFIX are copied into files in ISTHMUS_ARCHIVE_DIRECTORY, one
for each partition, as the brokers have them. Producers are acked when their records are on that disk: a record that was
acked is in the archive, whatever happens to the cluster. When the archive does not keep up for ten seconds, producers
are told REQUEST_TIMED_OUT, and try again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from isthmus_plugins.api import BrokerUnavailable, FetchPartition, KafkaRefused, PluginContext
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import walk

Partition = tuple[str, int]

DISCOVERY_INTERVAL_S = 1.0
WAIT_MS = 500
BYTES_MAX = 1024 * 1024


class Archive(Confirmer):
    """The files, and up to where they have each partition."""

    name = "the archive"
    limit_s = 10.0

    def __init__(self, prefix: str, directory: Path) -> None:
        self._prefix = prefix
        self._directory = directory
        self._acks: Acks = NoAcks()
        self._ends: dict[Partition, int] = {}
        self._tasks = Tasks("archive")

    # ---- what acks need ----

    def bound(self, acks: Acks) -> None:
        self._acks = acks

    def concerns(self, topic: str) -> bool:
        return topic.startswith(self._prefix)

    def confirmed_end(self, place: Partition, epoch: int, transactional: bool) -> int:
        return self._ends.get(place, 0)

    # ---- how the archive gets it ----

    def start(self, context: PluginContext) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tasks.start("discover", self._discover_for_ever(context))

    async def stop(self) -> None:
        await self._tasks.close()

    async def _discover_for_ever(self, context: PluginContext) -> None:
        known: set[Partition] = set()
        while True:
            try:
                for topic in (await context.cluster.topics()).values():
                    for partition in range(len(topic.partitions)):
                        place = topic.name, partition
                        if self.concerns(topic.name) and place not in known:
                            known.add(place)
                            self._tasks.start(
                                f"{topic.name}-{partition}", self._copy_for_ever(context, topic.topic_id, place)
                            )
            except (BrokerUnavailable, KafkaRefused):
                pass  # it is looked again
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    async def _copy_for_ever(self, context: PluginContext, topic_id: bytes, place: Partition) -> None:
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
                self._ends[place] = end
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


class ArchivePlugin:
    """The hooks: see ``isthmus_plugins/hookspecs.py``."""

    def __init__(self) -> None:
        self._archive: Archive | None = None

    @hookimpl
    def isthmus_start(self, context: PluginContext) -> None:
        self._archive = Archive(os.environ["ISTHMUS_ARCHIVE_PREFIX"], Path(os.environ["ISTHMUS_ARCHIVE_DIRECTORY"]))
        self._archive.start(context)

    @hookimpl
    def isthmus_confirmers(self) -> Sequence[Confirmer]:
        return [self._archive] if self._archive is not None else []

    @hookimpl
    async def isthmus_stop(self) -> None:
        if self._archive is not None:
            await self._archive.stop()


plugin = ArchivePlugin()
