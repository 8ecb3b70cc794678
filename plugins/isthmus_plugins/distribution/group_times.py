"""What goes from cluster to cluster of a group's committed offsets: group|topic|partition -> time (document 000).

A record of the topic :data:`~isthmus_plugins.distribution.kept.TIMES_TOPIC`, which is compacted by key, and which
distributors pass on like any other, with copy flags in a header:

    key     group|topic|partition, the topic as all clusters write it (TreeDocument.shared_name)
    value   JSON: {"time": ms, "committed_ms": of the commit, "origin": cluster, "metadata": the application's own,
            "partitions": of the topic, "spread_ms": ms}; the last two lack in what earlier versions have written;
            null: the group has committed nothing any more, at the cluster that a header names

Of a key's records the last one of that cluster counts at which the group has committed last (:func:`counts`): those of
several clusters come in any order. Nobody reaches headers of the offsets topic: a commit that was set by such a record
has its flags in the metadata, before the application's own, and so nobody takes it for a commit of the group's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from isthmus_plugins.distribution.times import moves_on
from isthmus_protocol.offsets_log import OffsetKey

MARK: Final = "isthmus-copy-flags="
ORIGIN_HEADER: Final = "isthmus-origin"
"""Of a record without a value."""
_MARKED: Final = re.compile(rf"{MARK}([0-9a-f]{{16}});")


class MalformedTime(ValueError):
    """A record of the topic of times that no offset distributor of this version has written."""


class GroupTime(NamedTuple):
    """What a cluster says of a group's partition: all before this time was read there, and is on its way nowhere."""

    time: int
    """Milliseconds since 1970."""
    committed_ms: int
    """When the group committed there, by the clock of its coordinator."""
    origin: str
    metadata: str
    """The application's own."""
    flags: int = 0
    """Of the record; 0: it is this cluster's own."""
    partitions: int = 0
    """How many the topic has, as who says it had counted; 0: one of an earlier version, which does not say it."""
    spread_ms: int = 0
    """Before which time messages of the topic went by their keys, as who says it had heard; 0: never, or of an earlier
    version."""

    def value(self) -> bytes:
        said = self._asdict()
        del said["flags"]
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def of(cls, value: bytes, flags: int) -> GroupTime:
        """Raises MalformedTime."""
        try:
            found = json.loads(value)
            time, committed_ms, origin, metadata = (found[name] for name in cls._fields[:4])
            by_keys = found.get("partitions", 0), found.get("spread_ms", 0)
            if not (all(map(is_ms, (time, committed_ms, *by_keys))) and min(by_keys) >= 0):
                raise ValueError
            if not (isinstance(origin, str) and isinstance(metadata, str)):
                raise ValueError
            return cls(time, committed_ms, origin, metadata, flags, *by_keys)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise MalformedTime(f"{value[:100]!r} is no time of a group") from error

    def marked(self) -> str:
        """The metadata of the commit that is set by it."""
        return f"{MARK}{self.flags:016x};{self.metadata}"


class Spread(NamedTuple):
    """What may have gone by its key of a topic, so that it stands in other partitions elsewhere."""

    partitions: Collection[int]
    """How many the topic has, at each cluster."""
    spread_ms: int
    """Before which time messages went by their keys anywhere; 0: none ever did."""


def is_ms(value: object) -> bool:
    """Whether it is a time that brokers can be asked for, and so can the next one."""
    return type(value) is int and -(2**63) <= value < 2**63 - 1


def unmarked(metadata: str) -> tuple[int, str]:
    """The copy flags of a commit, and the application's own metadata; 0: it is the group's commit itself."""
    found = _MARKED.match(metadata)
    return (int(found[1], 16), metadata[found.end() :]) if found is not None else (0, metadata)


def key_of(place: OffsetKey) -> bytes:
    return f"{place.group}|{place.topic}|{place.partition}".encode()


def read_key(key: bytes | None) -> OffsetKey:
    """Raises MalformedTime. A group's name may hold the separator, a topic's cannot."""
    try:
        group, topic, partition = (key or b"").decode().rsplit("|", 2)
        return OffsetKey(group, topic, int(partition))
    except ValueError as error:
        raise MalformedTime(f"{key!r} is not group|topic|partition") from error


def origin_of(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """Which cluster says that a group has committed nothing any more; None: one of an earlier version, which does not
    name itself."""
    return next((value.decode(errors="replace") for name, value in headers if name == ORIGIN_HEADER and value), None)


def counts(said: GroupTime, known: GroupTime | None) -> bool:
    """Whether what a cluster says counts from now on. ``known``: what counts so far; None: nothing does.

    What it had said before is gone. Of what another one said, that of the group's later commit counts: what comes after
    it was said before, when less was known.
    """
    return known is None or said.origin == known.origin or said.committed_ms > known.committed_ms


def was_last_here(committed_ms: int, known: GroupTime | None) -> bool:
    """Whether a group's own commit at this cluster is its last one anywhere, as far as this cluster knows."""
    return known is None or not known.flags or committed_ms > known.committed_ms


def knows(said: GroupTime, spread: Spread) -> bool:
    """Whether who has said it knew of all that went by its key: else something older, and unread, may stand in the
    partition by now.

    One of an earlier version does not say what it knew: it knew if there is nothing to know.
    """
    return max(spread.partitions) <= (said.partitions or min(spread.partitions)) and spread.spread_ms <= said.spread_ms


def is_news(said: GroupTime, known: GroupTime | None, margin_ms: int) -> bool:
    """Whether what this cluster has to say of a group is not what stands there already."""
    if known is None or known != said._replace(time=known.time, committed_ms=known.committed_ms):
        return True
    return moves_on(known.time, said.time, margin_ms)
