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

All are for the partition of the topic's name and number, and JSON of at most :data:`METADATA_BYTES_MAX`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """

    course: Course
    version: int
    topic_id: str
    read: int = 0
    epoch: int = -1

    def metadata(self) -> str:
        """Raises PositionError where there are too many stretches that are not settled."""
        text = _text(
            {
                "version": self.version,
                "topic_id": self.topic_id,
                "read": [self.read, self.epoch],
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
            return cls(course, int(found["version"]), str(found["topic_id"]), int(read), int(epoch))


@dataclass(frozen=True, slots=True)
class KeptGiven:
    """``topic_id``: of the source's topic, as hexadecimal digits; ``epoch``: leader epoch of the source's record before
    the position; -1: not known."""

    given: Given
    topic_id: str
    epoch: int = -1

    def metadata(self) -> str:
        return _text({"term": list(self.given.term), "topic_id": self.topic_id, "epoch": self.epoch})

    @classmethod
    def of(cls, position: int, metadata: str) -> KeptGiven:
        """Raises PositionError: it is not one of these."""
        with _Reading(metadata) as found:
            version, number = found["term"]
            given = Given(Term(int(version), int(number)), position)
            return cls(given, str(found["topic_id"]), int(found["epoch"]))


@dataclass(frozen=True, slots=True)
class KeptReached:
    """By level: a time (ms) that no message has that this cluster holds, and has not settled there, is earlier than."""

    times: Mapping[int, int]

    def metadata(self) -> str:
        return _text({str(level): time for level, time in self.times.items()})

    @classmethod
    def of(cls, metadata: str) -> KeptReached:
        """Raises PositionError: it is not one of these."""
        with _Reading(metadata) as found:
            return cls({int(level): int(time) for level, time in found.items()})


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Reading:
    """Whatever does not have the expected shape was written by something else."""

    def __init__(self, metadata: str) -> None:
        self._metadata = metadata

    def __enter__(self) -> dict[str, Any]:
        try:
            found = json.loads(self._metadata)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._error()
        return found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError):
            raise self._error() from None

    def _error(self) -> PositionError:
        return PositionError(
            f"a position is kept as {self._metadata[:100]!r}, which no distributor of this version has written"
        )
