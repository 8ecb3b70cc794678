"""Audit lines in a topic of the cluster, ``__isthmus_audit``: written behind the changes that they tell of, read back.

No change waits for it, and none is refused because of it: a line stands in the log already. Lines that the topic does
not take wait here and are tried again; beyond :data:`WAITING_MAX` of them, or where the process dies, they are in the
log alone. One whose fate was unknown may be in the topic twice: :meth:`AuditTopic.read` tells it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from isthmus.control_topic import REPLICATION_FACTOR
from isthmus.errors import PeerFault
from isthmus.kafka.client import EARLIEST, LATEST, ClusterClient, NewTopic, TopicPartition
from isthmus_control.model import AUDIT_TOPIC as TOPIC
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.error_codes import INVALID_REPLICATION_FACTOR, TOPIC_ALREADY_EXISTS
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, BatchError, verify_crc, walk

log = logging.getLogger("isthmus.audit")

PLACE: Final = TopicPartition(TOPIC, 0)
LANE: Final = "audit"
WAITING_MAX: Final = 1_000
"""Lines."""
BATCH_BYTES_MAX: Final = 256 * 1024
"""Lines go together up to that size, which is far below what topics take; one is some kilobytes at most."""
RETENTION_MS: Final = 365 * 24 * 3600 * 1000
"""Of a topic that is made; operators may set another."""
REQUEST_TIMEOUT_S: Final = 10.0
LOOKED_FOR_S: Final = 10.0
"""How often the topic is looked for: any proxy may have made it, and clients may read it at none, by its id either."""
LISTED_S: Final = 0.1
"""How often a topic that was made is looked for, until brokers list it."""
RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
STOP_TIMEOUT_S: Final = 2.0
"""How long the end of the process waits for the last lines."""
READ_TIMEOUT_S: Final = 20.0

Line = Mapping[str, Any]


class AuditTopic:
    """The lines of one process on their way into the topic, and what the topic has."""

    def __init__(self, supervision: Supervision) -> None:
        self.left_out = 0
        """Lines that are in the log alone."""
        self.trouble: str | None = None
        """Why lines wait; None: the last were taken."""
        self._tasks = Tasks("audit-topic", supervision)
        self._waiting: list[Line] = []
        self._came = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._client: ClusterClient | None = None
        self._found: Callable[[bytes], None] = lambda topic_id: None
        self._known = False

    @property
    def waiting(self) -> int:
        """Lines that the topic does not have yet."""
        return len(self._waiting)

    def put(self, line: Line) -> None:
        """Have a line written, some time soon."""
        if len(self._waiting) >= WAITING_MAX:
            self.left_out += 1
            return
        self._waiting.append(line)
        self._all_sent.clear()
        self._came.set()

    def start(self, client: ClusterClient, found: Callable[[bytes], None]) -> None:
        """Begin to write. ``found`` is called with the topic's id."""
        self._client, self._found = client, found
        self._tasks.keep("send", self._send)

    async def stop(self) -> None:
        """Write what waits, if that does not take long, and end."""
        if self._client is not None:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._all_sent.wait()
            except TimeoutError:
                log.warning("audit lines not sent", extra={"lines": self.waiting, "error": self.trouble})
        await self._tasks.close()

    # ---- writing ----

    async def _send(self) -> None:
        pause = RETRY_MIN_S
        while True:
            if not self._waiting:
                await self._look()
                continue
            some = self._next()
            trouble = await self._appended(some)
            if trouble is None:
                del self._waiting[: len(some)]
                pause = RETRY_MIN_S
                if not self._waiting:
                    self._came.clear()
                    self._all_sent.set()
            elif trouble != self.trouble:
                log.warning("audit lines wait", extra={"topic": TOPIC, "lines": self.waiting, "error": trouble})
            self.trouble = trouble
            if trouble is not None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)

    async def _look(self) -> None:
        """See which id the topic has, and return when there are lines, or after a while."""
        try:
            self._known = False
            await self._find(make=False)
        except PeerFault:
            pass  # it is looked for again before it is written
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKED_FOR_S):
                await self._came.wait()

    def _next(self) -> list[bytes]:
        """The lines that go next, at least one."""
        lines, size = [], 0
        for line in self._waiting:
            lines.append(json.dumps(line, ensure_ascii=False).encode())
            size += len(lines[-1])
            if size > BATCH_BYTES_MAX:
                break
        return lines

    async def _appended(self, lines: list[bytes]) -> str | None:
        """Append lines once. None: they are there."""
        assert self._client is not None
        records = [Record(offset, 0, None, line) for offset, line in enumerate(lines)]
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S + 1):
                await self._find(make=True)
                batch = encode_batch(records, PLAIN_HEADER)
                produced = await self._client.produce_raw({PLACE: batch}, timeout_s=REQUEST_TIMEOUT_S, lane=LANE)
                error: Exception | None = produced[PLACE].error
        except PeerFault as fault:
            error = fault
        except TimeoutError:
            error = TimeoutError("no answer in time")
        if error is not None:
            self._known = False
        return None if error is None else str(error)

    async def _find(self, *, make: bool) -> bool:
        """Whether there is the topic; made if it is not there, where that is wanted. Raises PeerFault."""
        assert self._client is not None
        if self._known:
            return True
        found = await self._client.refresh([TOPIC])
        if TOPIC not in found:
            if not make:
                return False
            await self._create(REPLICATION_FACTOR)
            while TOPIC not in (found := await self._client.refresh([TOPIC])):  # noqa: ASYNC110
                await asyncio.sleep(LISTED_S)  # who calls does not wait for ever
        topic_id = found[TOPIC].topic_id
        if topic_id is not None:
            self._found(topic_id.bytes)
        self._known = True
        return True

    async def _create(self, factor: int) -> None:
        """Raises PeerFault."""
        assert self._client is not None
        configs = {
            "cleanup.policy": "delete",
            "retention.ms": str(RETENTION_MS),
            "min.insync.replicas": "2" if factor >= REPLICATION_FACTOR else "1",
            "message.timestamp.type": "LogAppendTime",
        }
        error = (await self._client.create_topics([NewTopic(TOPIC, 1, factor, configs)]))[TOPIC].error
        if error is None:
            log.info("audit topic created", extra={"topic": TOPIC, "replication_factor": factor})
        elif error.code == INVALID_REPLICATION_FACTOR and 0 < len(self._client.brokers) < factor:
            await self._create(len(self._client.brokers))
        elif error.code != TOPIC_ALREADY_EXISTS:
            raise error

    # ---- reading ----

    async def read(self, limit: int) -> list[Line]:
        """The last lines, the oldest first, with those of this process that wait. Raises PeerFault."""
        if self._client is None:
            return self._waiting[-limit:]
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                lines = await self._stored(limit) if await self._find(make=False) else []
        except TimeoutError:
            raise PeerFault(f"{TOPIC} was not read within {READ_TIMEOUT_S:g} s") from None
        except BatchError as error:
            raise PeerFault(f"the broker of {TOPIC} sent a damaged batch: {error}") from error
        # A line that was sent twice counts once, and so does one that waits although it was stored.
        told = {(line.get("change"), line.get("outcome")): line for line in [*lines, *self._waiting]}
        return list(told.values())[-limit:]

    async def _stored(self, limit: int) -> list[Line]:
        assert self._client is not None
        ends = {}
        for timestamp in (EARLIEST, LATEST):
            listed = (await self._client.list_offsets({PLACE: timestamp}))[PLACE]
            if listed.error is not None:
                self._known = False
                raise listed.error
            ends[timestamp] = listed.offset
        offset, end = max(ends[EARLIEST], ends[LATEST] - limit), ends[LATEST]
        lines: list[Line] = []
        while offset < end:
            fetched = await self._client.fetch(TOPIC, 0, offset, lane=LANE)
            if fetched.error is not None:
                raise fetched.error
            data, before = memoryview(fetched.records), offset
            for start, stop, header in walk(data):
                batch = data[start:stop]
                verify_crc(batch)
                offset = max(offset, header.next_offset)
                lines += [] if header.is_control else _lines(batch, before)
            if offset == before:
                break  # the rest are offsets without records
        return lines


def _lines(batch: memoryview, first: int) -> list[Line]:
    """The lines of a batch from an offset on. What somebody else wrote there, and is none, is passed over."""
    lines: list[Line] = []
    for record in decode_records(batch):
        if record.offset >= first and record.value is not None:
            try:
                line = json.loads(record.value)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                lines.append(line)
    return lines
