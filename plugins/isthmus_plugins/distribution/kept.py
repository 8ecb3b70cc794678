"""How positions are written: as the offsets that two consumer groups have committed, with metadata.

=====================  ===================================  ==============================  ======================
of                     group                                committed offset                metadata
=====================  ===================================  ==============================  ======================
a course, at the       ``__isthmus_tree_courses_LEVEL``     what is settled                 :class:`KeptCourse`
source
what was given, at     ``__isthmus_tree_given_LEAF_LEVEL``  where the source's log goes on  :class:`KeptGiven`
the target
what other clusters    ``__isthmus_tree_reached``           where the log was read to       :class:`KeptReached`
have, at the source
=====================  ===================================  ==============================  ======================

All are for the partition of the topic's name and number, and JSON of at most :data:`METADATA_BYTES_MAX`. Where the
target has fewer partitions, those that it lacks are kept beside others (:func:`given_at`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from isthmus_plugins.distribution.positions import Course, Given, PositionError, Stretch, Term

METADATA_BYTES_MAX: Final = 4_096
"""A broker's ``offset.metadata.max.bytes``, by default."""
_PREFIX: Final = "__isthmus_tree_"
"""Topics, groups and transactional ids of the proxies' own: they are in no namespace."""
TIMES_TOPIC: Final = f"{_PREFIX}times"
"""Where groups' times go from cluster to cluster (:mod:`isthmus_plugins.distribution.group_times`)."""
REACHED_GROUP: Final = f"{_PREFIX}reached"
STILL: Final = 2**63 - 1
"""In the place of the time (ms) before which messages went by their keys."""
MINUTE_MS: Final = 60_000
TIMES_ID: Final = f"{_PREFIX}times"
"""The transactional id with which a cluster's offset distributor sends times, and commits what it has reached."""


def courses_group(level: int) -> str:
    """Also the transactional id with which distributors of the level commit it, at their own cluster."""
    return f"{_PREFIX}courses_{level}"


def given_group(leaf: str, level: int) -> str:
    """Also the transactional id with which the leaf's distributor of this level produces, at its target."""
    return f"{_PREFIX}given_{leaf}_{level}"


@dataclass(frozen=True, slots=True)
class KeptCourse:
    """``version``: of the tree that the source has. ``topic_id``: of the source's topic, as hexadecimal digits.

    ``read``: the source's log was read before this offset; ``epoch``: leader epoch of the record there, -1: not known.
    ``digest``: of the tree in that version, see TreeDocument; empty: not known.
    ``spread_ms``: messages of this log went by their keys before that time, to whichever partition, from here or from
    a cluster that was given them; 0: none ever did, :data:`STILL`: they do now.
    ``has_all_of``: the version in which the source came to the tree, once it has all that was there then; 0: not known.
    """

    course: Course
    version: int
    topic_id: str
    read: int = 0
    epoch: int = -1
    digest: str = ""
    spread_ms: int = 0
    has_all_of: int = 0

    def metadata(self) -> str:
        """Raises PositionError where there are too many stretches that are not settled."""
        text = _text(
            {
                "version": self.version,
                "digest": self.digest,
                "topic_id": self.topic_id,
                "read": [self.read, self.epoch],
                "spread_ms": self.spread_ms,
                "has_all_of": self.has_all_of,
                "fill_until": self.course.fill_until,
                "stretches": [[*each.term, each.leaf, each.start, each.settled] for each in self.course.stretches],
            }
        )
        if len(text.encode()) > METADATA_BYTES_MAX:
            raise PositionError(
                f"{len(self.course.stretches)} targets were given messages that are not settled: no other target is "
                "chosen before some of them are"
            )
        return text

    @classmethod
    def of(cls, metadata: str) -> KeptCourse:
        """Raises PositionError: it is not one of these."""
        with _Reading(metadata) as found:
            stretches = tuple(
                Stretch(Term(int(version), int(number)), str(leaf), int(start), int(settled))
                for version, number, leaf, start, settled in found["stretches"]
            )
            if not stretches:
                raise ValueError
            read, epoch = found["read"]
            course = Course(stretches, int(found["fill_until"]))
            more = str(found.get("digest", "")), int(found.get("spread_ms", 0)), int(found.get("has_all_of", 0))
            return cls(course, int(found["version"]), _topic_id(found), int(read), int(epoch), *more)


@dataclass(frozen=True, slots=True)
class KeptGiven:
    """``topic_id``: of the source's topic, as hexadecimal digits; ``epoch``: leader epoch of the source's record before
    the position; -1: not known. ``fill_until``: the leaf has all that was there once it was given that.
    ``spread``: messages went by their keys in this term, to whichever partition. ``filled``: of how many partitions of
    all topics the leaf gets what was there; 0: of none, or nobody has said it."""

    given: Given
    topic_id: str
    epoch: int = -1
    fill_until: int = 0
    spread: bool = False
    filled: int = 0

    @property
    def fills(self) -> bool:
        """Whether the leaf does not have all that was there yet."""
        return self.given.position < self.fill_until


def given_at(partition: int, partitions: int) -> int:
    """Where what was given of a partition is kept, if the target has so many: brokers keep none of others."""
    return partition % partitions


def given_metadata(partition: int, kept: Mapping[int, KeptGiven]) -> tuple[int, str]:
    """The offset and metadata to commit at a partition of the target, which keeps what was given of these partitions.

    All are of one topic of the source. Raises PositionError where they are too many.
    """
    own = kept.get(partition)
    text = _text(
        {
            "topic_id": next(iter(kept.values())).topic_id,
            "term": None if own is None else list(own.given.term),
            "epoch": -1 if own is None else own.epoch,
            "fill_until": 0 if own is None else own.fill_until,
            "spread": own is not None and own.spread,
            "filled": max(each.filled for each in kept.values()),
            "others": [
                [number, *each.given.term, each.given.position, each.epoch, each.fill_until, int(each.spread)]
                for number, each in sorted(kept.items())
                if number != partition
            ],
        }
    )
    if len(text.encode()) > METADATA_BYTES_MAX:
        raise PositionError(
            f"what was given of {len(kept)} partitions is to be kept at one of the target: give it more partitions"
        )
    return 0 if own is None else own.given.position, text


def read_given(partition: int, offset: int, metadata: str) -> dict[int, KeptGiven]:
    """By partition of the source: what is kept at one of the target. Raises PositionError: it is none of these."""
    found: dict[int, KeptGiven] = {}
    with _Reading(metadata) as read:
        topic_id, filled = _topic_id(read), int(read.get("filled", 0))
        if read["term"] is not None:
            version, number = read["term"]
            more = int(read["epoch"]), int(read.get("fill_until", 0)), bool(read.get("spread")), filled
            found[partition] = KeptGiven(Given(Term(int(version), int(number)), offset), topic_id, *more)
        for other, version, number, position, epoch, fill_until, spread in read.get("others", ()):
            given = Given(Term(int(version), int(number)), int(position))
            found[int(other)] = KeptGiven(given, topic_id, int(epoch), int(fill_until), bool(spread), filled)
    return found


def out_of_place(kept: Mapping[int, Collection[int]], partitions: int) -> set[int]:
    """Partitions of the source that are to be committed anew, in one transaction, where the target has so many now.

    ``kept``: by partition of the target, those of which something is kept there. What is committed there next would
    leave out the ones that belong elsewhere now, and nothing would be known of them.
    """
    return {
        each
        for at, found in kept.items()
        for partition in found
        if given_at(partition, partitions) != at
        for each in (partition, at)
    }


def latest(kept: Iterable[tuple[int, KeptGiven]]) -> dict[int, KeptGiven]:
    """The last of each partition: what was kept at another one, before the target had more, stands there still."""
    found: dict[int, KeptGiven] = {}
    for partition, each in kept:
        known = found.get(partition)
        if known is None or known.given < each.given:
            found[partition] = each
    return found


_VERSION: Final = 0
_SPREAD: Final = -1


@dataclass(frozen=True, slots=True)
class KeptReached:
    """By level: a time (ms) that no message has that this cluster holds, and has not settled there, is earlier than.

    ``spread_ms``: as far as the cluster knows, the last time before which messages of the topic went by their keys
    anywhere in the tree, see :class:`KeptCourse`. ``version``: of the tree that the cluster has; 0: not known.

    What is no time is written as of a level that no tree has: so those who know of levels alone read it, too.
    """

    times: Mapping[int, int]
    spread_ms: int = 0
    version: int = 0

    def metadata(self) -> str:
        times = {str(level): time for level, time in self.times.items()}
        return _text(times | {str(_VERSION): self.version, str(_SPREAD): self.spread_ms})

    @classmethod
    def of(cls, metadata: str) -> KeptReached:
        """Raises PositionError: it is not one of these."""
        with _Reading(metadata) as found:
            times = {int(level): int(time) for level, time in found.items()}
            return cls(spread_ms=times.pop(_SPREAD, 0), version=times.pop(_VERSION, 0), times=times)


def time_of(spread_ms: int, now_ms: int) -> int:
    """Before which time messages went by their keys, as another cluster says: :data:`STILL` is the minute that is under
    way, since it is kept whenever it changes."""
    return (now_ms // MINUTE_MS + 1) * MINUTE_MS if spread_ms == STILL else spread_ms


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _topic_id(found: Mapping[str, Any]) -> str:
    """Raises ValueError where it has other digits."""
    topic_id = str(found["topic_id"])
    bytes.fromhex(topic_id)
    return topic_id


class _Reading:
    """Whatever does not have the expected shape was written by something else."""

    def __init__(self, metadata: str) -> None:
        self._metadata = metadata

    def __enter__(self) -> dict[str, Any]:
        try:
            found = json.loads(self._metadata)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._error()
        return found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | OverflowError):
            raise self._error() from None

    def _error(self) -> PositionError:
        return PositionError(
            f"a position is kept as {self._metadata[:100]!r}, which no distributor of this version has written"
        )
