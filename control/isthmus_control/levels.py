"""Feature levels of a control log: what its records may hold while proxies of several versions follow it.

A log begins at level 0, and every version understands what is written there. A level stands in the log once an operator
has raised it (:class:`~isthmus_control.commands.RaiseLevel`), which is refused while a proxy with a lease does not know
it; it is never lowered. Until then every downgrade works. From then on a version that does not know it reads no
further, and says why.

So a proxy writes what the log's level allows (:func:`level_of`), and reads all that it knows. What is new in a command
or in the state has the level that brings it: a kind as ``Body.SINCE``, a field as ``since(level)``
(:mod:`isthmus_control.codec`), which is left out where it has its default. What stands in a log, or in a snapshot of
it, is then the same whichever version wrote it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Final

from isthmus_control.codec import default_of, since_of

CONCERNS: Final = 1
"""Envelopes say what commands concern, and whether older versions may pass over them."""
SOURCE_LOSSES: Final = 1
"""What a source lost although it had acked it In-Sync is recorded, and may be held."""
PREFIXES: Final = 2
"""Records say of which log their writers had applied what was before them."""
SIGNING: Final = 2
"""Records are signed, where there is a control key."""
FROM_FIRST: Final = 3
"""Acks of a new partition of a synchronous link are held from its first record on, and that is recorded."""
SOURCE_DELETIONS: Final = 3
"""Follower topics may be deleted as their source's are."""
SECRET_ROTATION: Final = 4
"""A link may have a second secret, until both sides have it."""
KEY_ROTATION: Final = 4
"""The control key may be another one from some record on."""
CONSENT: Final = 4
"""Each side of a link grants what the other one may have attached here; links are made with tokens."""
ORIGINS: Final = 5
"""Of every partition of attached namespaces it is recorded which cluster wrote which offsets first, in which term."""
STALE_READS: Final = 5
"""Consumers of what follows over a synchronous link may be kept from reading what is older than at the source."""
INFORMATIONAL: Final = 5
"""Whether a namespace is informational can be altered."""
REVERSALS: Final = 6
"""What a cluster leads is handed over to the one that follows it, by a record."""
CAUGHT_UP_CUTS: Final = 6
"""A cut that was agreed to ends where the source has got by itself what was to be cut."""
BOTH_WAYS: Final = 6
"""A synchronous link may lead topics both ways."""
PROOFS: Final = 6
"""How far both logs were found equal, as brokers hold them, is recorded, and what was found different."""
CLIENT_MOVES: Final = 6
"""Clients of what another cluster leads now are told to look for it, for a time."""
DRILLS: Final = 6
"""A failover is tried on a copy of what follows, over a link that leads nowhere."""
TREES: Final = 6
"""Topics are distributed over a tree of clusters that all take writes."""
ESCAPED_IDS: Final = 6
"""Cluster ids that no topic can have in its name are escaped in the names of copies of offsets topics."""
LEVELS: Final[Mapping[int, str]] = {
    1: "records say what they concern, so that a proxy which does not know one refuses writes to that alone; "
    "what a source lost is told until it is acknowledged, and may be held (--on-source-loss)",
    2: "records say what their writers had applied, so that every proxy sees a log that lost its end or was written "
    "over; they are signed with the control key, where all proxies have one, and others do not count",
    3: "acks of a new topic or partition of a synchronous link wait for the other cluster from its first record on: it "
    "is In-Sync at once, and Out-Of-Sync where the other cluster does not get it; "
    "topics that were deleted at the source are deleted at the target, where that is set (--on-source-delete)",
    4: "the other cluster of a link attaches here what it was granted (isthmus link grants), all else waits for an "
    "operator; links keep what they have attached; links are made with tokens (isthmus link token create); secrets of "
    "links are rotated while they run (isthmus link rotate-secret), and the control key is",
    5: "of each partition of attached namespaces, at both sides, it is recorded which cluster wrote which offsets "
    "first, in which of its terms and leader epochs (isthmus topic describe --provenance): where two logs part is "
    "known, whichever links lie between them; "
    "consumers of a namespace that follows over a synchronous link wait while it is not known to be In-Sync, where "
    "that is set (--stale-reads no); whether a namespace is informational can be altered",
    6: "what a cluster leads over a link is handed over to the cluster that follows it, and back, by one command "
    "(isthmus link reverse); a synchronous link may lead topics both ways; "
    "a cut that was agreed to is dropped where the source gets by itself what was to be cut; "
    "clients that are still at the cluster which led are told to ask their bootstrap servers again (--move-clients); "
    "what follows is compared with its source again and again, as the brokers of both clusters hold it "
    "(isthmus link alter --verify-every, 7 days); how far it was found equal, and what differs, is recorded; "
    "a failover is tried on a copy of what follows (isthmus drill failover); "
    "topics are distributed over a tree of clusters that all take writes (isthmus tree); "
    "the offsets topic of a cluster is copied whatever its id is",
}
"""What each level brings, for people."""
KNOWN_LEVEL: Final = max(LEVELS)
"""The highest level that this version knows."""

_KNOWN: Final = re.compile(r"[+.](?:key\.([0-9a-f]{8})\.)?level\.([0-9]{1,9})\Z")


def with_known_level(version: str, key_id: str = "") -> str:
    """A proxy's version as its lease says it, with the id of its control key, if it has one, and the level that it
    knows.

    They stand behind the version, as a local label (``1.2+key.ab12cd34.level.2``): a field of its own would stop older
    proxies, and they show this text without reading it, but for the level.
    """
    key = f"key.{key_id}." if key_id else ""
    return f"{version}{'.' if '+' in version else '+'}{key}level.{KNOWN_LEVEL}"


def known_level(version: str) -> int:
    """The level that a proxy knows, by the version in its lease; 0 of one that says none."""
    found = _KNOWN.search(version)
    return int(found[2]) if found else 0


def key_id_of(version: str) -> str:
    """The id of a proxy's control key, by the version in its lease; empty of one that says none."""
    found = _KNOWN.search(version)
    return (found[1] or "") if found else ""


def plain_version(version: str) -> str:
    """The version in a lease, without what stands behind it."""
    return _KNOWN.sub("", version)


def level_of(value: Any) -> int:
    """The level that a log must have to hold ``value``, a command's body or a part of one."""
    if isinstance(value, str | int | Enum) or value is None:
        return 0
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        level: int = getattr(value, "SINCE", 0)
        for name, since, default in _fields(type(value)):
            each = getattr(value, name)
            level = max(level, level_of(each), since if since and each != default else 0)
        return level
    parts = value.values() if isinstance(value, Mapping) else value
    return max(map(level_of, parts), default=0)


@cache
def _fields(cls: type) -> tuple[tuple[str, int, Any], ...]:
    """Name, level and default of each field."""
    return tuple((field.name, since_of(field), default_of(field)) for field in dataclasses.fields(cls))
