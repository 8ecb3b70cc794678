"""What is known of a cluster's control log outside of it: how far it went, and what stood there.

The log is a topic, and a topic can be deleted, lose its end in a power loss, be written over or be made again. Nothing
in it tells. So proxies keep *anchors* elsewhere, and compare them with the log before they vouch for what it says
(``docs/adr/0015-control-topic.md``).

    offset   0        window_start(n)                       n
    log      |--------|=====================================|--------
                       digest of the anchor at n: these records

An anchor's digest is that of the records up to it from the window's start on, a fixed offset for each ``n``. So every
proxy comes to the same one, wherever it began to read; no snapshot has to carry anything, and any reader of the log can
compare an anchor as long as the log has these records. Each command has an id of its own: so many records are never the
same in two logs.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from isthmus_control.codec import MalformedValue, UnknownField, canonical, from_json, parse
from isthmus_control.replica import Halted

if TYPE_CHECKING:
    from _hashlib import HASH

WINDOW = 512
"""Windows start at multiples of this: a digest is of more than so many records, and of at most twice as many. All
versions have the same."""

TOPIC_LOST = "control-topic-lost"
TOPIC_REPLACED = "topic-replaced"
LOG_CUT = "control-log-cut"
LOG_REWRITTEN = "control-log-rewritten"
ANCHORS_UNKNOWN = "control-anchors-unknown"
LOST = frozenset((TOPIC_LOST, TOPIC_REPLACED, LOG_CUT, LOG_REWRITTEN, ANCHORS_UNKNOWN))
"""Why a proxy does not vouch that has nothing wrong itself: an operator decides what becomes of the log."""

_HEAD = struct.Struct(">qi")
_NULL = -1


class LogRecord(NamedTuple):
    """One record of the control topic. ``leader_epoch``: of the leader that took it."""

    offset: int
    value: bytes | None
    leader_epoch: int = -1


class MalformedAnchor(ValueError):
    """The text is no anchor, or one of a newer version."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A proxy of ``cluster_id`` has applied the record at ``offset`` of the control topic ``topic_id``.

    ``generation``: how often an operator accepted another log (:attr:`ControlState.generation`); whatever is said of an
    earlier one does not count any more. ``digest``: see the module. Older versions read it, and take one with another
    field for none: no field is ever added.
    """

    cluster_id: str
    topic_id: str
    generation: int
    offset: int
    leader_epoch: int
    digest: str

    @property
    def age(self) -> tuple[int, int]:
        """Of two anchors of a cluster the one with more says more."""
        return self.generation, self.offset

    @property
    def log(self) -> str:
        """Which control log it is of: of another topic, or accepted as it stood after a loss, it is another one."""
        return f"{self.topic_id}/{self.generation}"

    def encode(self) -> str:
        return canonical(self).decode()

    @staticmethod
    def decode(text: str) -> Anchor:
        """Raises :class:`MalformedAnchor`."""
        try:
            return from_json(Anchor, parse(text.encode("utf-8", "surrogateescape")), "anchor")
        except (MalformedValue, UnknownField) as error:
            raise MalformedAnchor(str(error)) from None


def window_start(offset: int) -> int:
    """The offset of the first record that an anchor's digest is of."""
    return max(0, (offset // WINDOW - 1) * WINDOW)


def kept_from(offset: int) -> int:
    """From where on records have to be read to know the digests of ``offset`` and of a window of records before it."""
    return max(0, window_start(offset) - WINDOW)


def digest(records: Iterable[LogRecord]) -> str:
    """Of the records' offsets and values; who led when they were written does not count."""
    hashed = hashlib.sha256()
    for record in records:
        _add(hashed, record)
    return hashed.hexdigest()


def _add(hashed: HASH, record: LogRecord) -> None:
    value = record.value
    hashed.update(_HEAD.pack(record.offset, _NULL if value is None else len(value)))
    hashed.update(value or b"")


class RecentRecords:
    """The records that were read last, without a gap, and the digest of each, once the records since its window's
    start are known.

    Windows overlap, so two digests run along: that of the window that anchors are of now, and of the next one.
    """

    def __init__(self) -> None:
        self._records: deque[LogRecord] = deque()
        self._digests: dict[int, str] = {}
        """By offset, of those that are kept."""
        self._current: HASH | None = None
        self._next: HASH | None = None

    @property
    def last(self) -> LogRecord | None:
        return self._records[-1] if self._records else None

    def add(self, record: LogRecord) -> None:
        """The record that comes next. One that was added already changes nothing."""
        last = self.last
        if last is not None and record.offset <= last.offset:
            return
        if last is not None and record.offset != last.offset + 1:
            raise ValueError(f"offset {record.offset} does not follow {last.offset}")
        self._records.append(record)
        self._run(record)
        keep_from = kept_from(record.offset)
        while self._records[0].offset < keep_from:
            self._digests.pop(self._records.popleft().offset, None)

    def _run(self, record: LogRecord) -> None:
        offset = record.offset
        if offset % WINDOW == 0:
            self._current, self._next = self._next, hashlib.sha256()
        if offset == 0:
            self._current = hashlib.sha256()  # the first two windows begin here
        if self._next is not None:
            _add(self._next, record)
        if self._current is not None:
            _add(self._current, record)
            self._digests[offset] = self._current.hexdigest()

    def since(self, offset: int) -> list[LogRecord] | None:
        """Those from ``offset`` on; None where some are not there any more."""
        if not self._records or self._records[0].offset > offset:
            return None
        return [record for record in self._records if record.offset >= offset]

    def digest_at(self, offset: int) -> str | None:
        """What an anchor at ``offset`` has as its digest; None where that is not known here."""
        return self._digests.get(offset)

    def anchor(self, cluster_id: str, topic_id: str, generation: int) -> Anchor | None:
        """The anchor of the last record; None where the log begins later than its window does."""
        last = self.last
        if last is None or (known := self.digest_at(last.offset)) is None:
            return None
        return Anchor(cluster_id, topic_id, generation, last.offset, last.leader_epoch, known)


class LogFacts(NamedTuple):
    """What the log is now, for an anchor at an offset of it."""

    topic_id: str
    generation: int
    end: int
    digest: str | None
    """At the anchor's offset; None: the log does not have these records any more (or does not reach it)."""
    epoch_end: int
    """Where the anchor's leader epoch ends in the log; 0: there is no such one."""


def why_lost(anchor: Anchor, log: LogFacts, told_by: str) -> Halted | None:
    """Why the log is not the one that the anchor is of, or not all of it; None: it goes on from there."""
    known = f"offset {anchor.offset} of {anchor.topic_id} had been applied, as {told_by} knows"
    if anchor.generation < log.generation:
        return None  # an operator has accepted another log since
    if anchor.generation > log.generation:
        return Halted(LOG_CUT, f"the log does not have the operator's last word on it: {known}")
    if anchor.topic_id != log.topic_id:
        return Halted(TOPIC_REPLACED, f"the topic was deleted and made again, its id is {log.topic_id}: {known}")
    if log.end <= anchor.offset:
        return Halted(LOG_CUT, f"the log ends at {log.end}, it lost its end: {known}")
    # The records themselves say more than epochs: a log that was repaired has them again, in a later epoch.
    intact = log.epoch_end > anchor.offset if log.digest is None else log.digest == anchor.digest
    return None if intact else Halted(LOG_REWRITTEN, f"other records were written in the place of those: {known}")
