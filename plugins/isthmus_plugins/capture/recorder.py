"""The proxy's side of captured traffic: takes notes on the traffic path, and hands them to a process that reads them.

What happens there for a request and its answer is some values in a list; a fifth of a second later they are packed,
many at a time, which is several times as quick as where each comes into cold caches. Nothing waits: where the other
process does not keep up, notes are dropped and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import time_ns
from typing import Any, Final

from isthmus_plugins import descriptors
from isthmus_plugins.api import TapNote
from isthmus_plugins.capture.notes import VALUES, Kind, pack, pack_parts, told
from isthmus_plugins.capture.sampling import is_chosen
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.partition_scan import ScannedPartition

log = logging.getLogger("isthmus_plugins.capture")

FLUSH_S: Final = 0.2
"""So long notes wait to be handed over. What costs is how often, and not how many: at 5,000 requests/s a quarter of it
cost the traffic path twice as much."""
FLUSH_NOTES: Final = 500
"""So many are packed at a time: traffic waits meanwhile, some 60 microseconds."""
BEHIND_BYTES_MAX: Final = 16 * 1024 * 1024
"""When the other process has so much to read yet, notes are dropped."""
PARTS_MAX: Final = 1000
"""Partitions in one note."""
WAITING_MAX: Final = 20_000
"""Notes that are kept while the other process is started."""
RESTART_S: Final = 1.0
START_DESCRIPTORS: Final = 16
"""More than starting a process takes."""
STOP_S: Final = 10.0


class Recorder:
    """Takes notes while it runs: an :class:`isthmus_plugins.api.Tap`."""

    def __init__(self, context: PluginContext, directory: Path, connections: Iterable[TapNote] = ()) -> None:
        """``directory``: where sealed files go. ``connections``: notes of all that are open, whenever asked."""
        self._context = context
        self._source = {"proxy": context.proxy_name, "cluster": context.cluster_id}
        self._directory = directory
        self._tasks = Tasks("capture", context.supervision)
        self._values: list[Any] = []
        """Of notes, one behind the other."""
        self.note: Callable[[TapNote], object] = self._values.extend
        self._process: Process | None = None
        self._settings: list[dict[str, Any]] = []
        self._sampling = 0.0
        """The most that is recorded of any namespace."""
        self.dropped = 0
        """Notes that were not handed over, for the whole life of this."""
        self.written: dict[str, int] = {}
        """What the other process says of itself: events, dropped, bytes, files."""
        self._connections = connections

    # ---- life ----

    def start(self) -> None:
        self._tasks.keep("run", self._run_for_ever)
        self._tasks.keep("flush", self._flush_for_ever)

    async def stop(self) -> None:
        """Hand over what there is, and have the files sealed."""
        self._flush()
        process, self._process = self._process, None
        await self._tasks.close()
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                log.warning("capture not sealed in time")
                process.kill()
                await process.wait()

    def configure(self, settings: list[dict[str, Any]]) -> None:
        """What is captured of which namespace from here on."""
        self._settings = settings
        self._sampling = max((each["sampling"] for each in settings), default=0.0)
        if self._process is not None:  # one that is started gets them as the first thing
            self._note_settings()

    def _note_settings(self) -> None:
        about = {"source": self._source, "namespaces": self._settings, "monotonic_ns": int(monotonic() * 1e9)}
        text = json.dumps({**about, "wall_ns": time_ns()}).encode()
        self.note(told(Kind.SETTINGS, 0, text))
        self._flush(however_far_behind=True)

    async def _run_for_ever(self) -> None:
        while True:
            descriptors.require(START_DESCRIPTORS)  # where they do not suffice, uvloop leaves some open each time
            command = (sys.executable, "-m", "isthmus_plugins.capture.writer", str(self._directory))
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
            self._process = process
            begun = self._taken()
            self._note_settings()
            for note in self._connections:
                self.note(note)
            self._values += begun
            try:
                await self._listen(process)
            except Exception:
                self._process = None
                process.kill()  # the next one would write beside it
                raise
            self._process = None
            log.error("capture writer ended, it is started again", extra={"exit": await process.wait()})
            await asyncio.sleep(RESTART_S)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Note what the writer reports, until it ends."""
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            unnamed = [bytes.fromhex(each) for each in said.pop("unnamed")]
            self.written = said
            await self._name(unnamed)

    async def _name(self, topic_ids: Iterable[bytes]) -> None:
        try:
            names = await self._context.topic_names(tuple(topic_ids))
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("topic ids not resolved", extra={"detail": str(error)})
            return
        for topic_id, name in names.items():
            self.note(told(Kind.TOPIC, 0, topic_id + name.encode()))

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            noted = len(self._values)
            if self._process is None and noted <= WAITING_MAX * VALUES:
                continue
            for _ in range(0, noted, FLUSH_NOTES * VALUES):
                self._flush(FLUSH_NOTES)
                await asyncio.sleep(0)  # traffic that came meanwhile is first

    def _flush(self, count: int | None = None, however_far_behind: bool = False) -> None:
        """Hand over so many of the oldest notes, or all."""
        values, process = self._taken(count), self._process
        if not values:
            return
        pipe = None if process is None else process.stdin
        if pipe is None or (pipe.transport.get_write_buffer_size() > BEHIND_BYTES_MAX and not however_far_behind):
            self.dropped += len(values) // VALUES
        else:
            pipe.write(pack(values))

    def _taken(self, count: int | None = None) -> list[Any]:
        end = None if count is None else count * VALUES
        values = self._values[:end]
        del self._values[:end]  # the list stays: ``note`` extends it
        return values

    # ---- on the traffic path ----

    def wants_parts(self, session: int, at: float, correlation_id: int) -> bool:
        """Whether a request may become events. One that was held may be chosen in spite of that: it is partial then."""
        return is_chosen(self._sampling, session, correlation_id, at)

    def parts(self, session: int, key: int, correlation_id: int, found: Sequence[ScannedPartition], total: int) -> None:
        """Partitions of a request or answer, of which the first bytes do not say all."""
        for at in range(0, len(found) or bool(total), PARTS_MAX):
            said = pack_parts(found[at : at + PARTS_MAX])
            count = total if at + PARTS_MAX >= len(found) else 0
            self.note(told(Kind.PARTS, session, said, number=count, key=key, correlation_id=correlation_id))

    def sent(self, session: int, correlation_id: int) -> None:
        """An answer that had waited at a gate goes out."""
        self.note(told(Kind.SENT, session, correlation_id=correlation_id))
