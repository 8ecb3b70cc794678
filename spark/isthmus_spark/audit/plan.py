"""What an audit is asked for, and what that is: pairs of partitions, with ranges of offsets that both sides have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from isthmus_spark.audit.admin import AuditError, Cluster, Limits, Place
from isthmus_spark.audit.reading import Range
from isthmus_spark.jobs import audit as job

PARTITIONS_SCHEMA: Final = (
    "left_topic string, right_topic string, partition int, state string, compared_from bigint, compared_to bigint, "
    "left_records bigint, right_records bigint, buckets bigint, differing_buckets bigint, "
    "left_end bigint, right_end bigint, lag bigint"
)
"""``lag``: how many offsets the right side is behind the left one; negative where the left one is behind."""
EQUAL, DIFFERENT, NOTHING = "equal", "different", "nothing to compare"

TOPIC_MISSING, PARTITION_MISSING = "topic missing on the {}", "partition missing on the {}"
STARTS_LATER, ENDS_EARLIER = "log starts later on the {}", "log ends earlier on the {}"
SIDES: Final = ("left", "right")
START: Final = "start"
"""Stands among ignored fields for where logs begin."""


@dataclass(frozen=True)
class Asked:
    """What is to be compared."""

    topics: Sequence[str]
    """Names or prefixes; LEFT=RIGHT where the right side has other ones."""
    groups: Sequence[str] = ()
    committed: bool = True
    """What consumers with read_committed see; False: also what is open or was aborted."""
    ignored: Collection[str] = ()
    """Fields of records, and :data:`START`, that are not compared."""
    partitions: Collection[int] = ()
    """Empty: all."""
    from_offset: int = 0
    to_offset: int | None = None
    whole: bool = False
    """What one side has beyond the other's end is a finding."""
    buckets: int = 4
    """So many of a partition's differing buckets are read again at a time."""
    width: int = job.BUCKET_OFFSETS

    @property
    def fields(self) -> list[str]:
        return [name for name in job.FIELDS if name not in self.ignored]

    def limited(self, end: int) -> int:
        return end if self.to_offset is None else min(end, self.to_offset)


class Finding(NamedTuple):
    """A row of :data:`isthmus_spark.jobs.audit.SCHEMA`."""

    finding: str
    left_topic: str
    right_topic: str
    partition: int | None = None
    group_id: str | None = None
    first_offset: int | None = None
    last_offset: int | None = None
    records: int | None = None
    left_offset: int | None = None
    right_offset: int | None = None


@dataclass(slots=True)
class Partition:
    """A partition of both sides."""

    left_topic: str
    right_topic: str
    number: int
    limits: tuple[Limits, Limits]
    """When the audit began."""
    range: Range
    starts: list[int]
    """Where the logs began after the last reading."""
    left_records: int = 0
    right_records: int = 0
    buckets: int = 0
    differing: int = 0

    @property
    def place(self) -> Place:
        """By the left side's name, as everywhere but at the right side itself."""
        return (self.left_topic, self.number)

    def place_at(self, side: int) -> Place:
        return ((self.left_topic, self.right_topic)[side], self.number)

    @property
    def start(self) -> int:
        """From where on both sides still have what they had."""
        return max(self.range[0], *self.starts)


@dataclass(slots=True)
class Plan:
    """All that is to be compared."""

    clusters: tuple[Cluster, Cluster]
    asked: Asked
    names: dict[str, str]
    """Of topics: left and right; ``groups`` likewise."""
    partitions: dict[Place, Partition] = field(default_factory=dict)
    compacted: set[str] = field(default_factory=set)
    """Topics that either side compacts."""
    groups: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    """Topics and partitions that one side does not have."""

    def look_again(self) -> None:
        """See where the logs begin by now."""
        chosen = list(self.partitions.values())
        sides = [cluster.starts([each.place_at(side) for each in chosen]) for side, cluster in enumerate(self.clusters)]
        for each in chosen:
            each.starts = [starts[each.place_at(side)] for side, starts in enumerate(sides)]

    def limit_findings(self) -> list[Finding]:
        """Where logs begin, if that differed before and after; and where they end, if asked for."""
        found: list[Finding] = []
        for each in self.partitions.values():
            names = (each.left_topic, each.right_topic, each.number)
            before, starts = (
                [max(self.asked.from_offset, start) for start in starts]
                for starts in ([side.start for side in each.limits], each.starts)
            )
            ends = [self.asked.limited(side.end) for side in each.limits]
            if START not in self.asked.ignored and before[0] != before[1] and starts[0] != starts[1]:
                later = STARTS_LATER.format(SIDES[starts.index(max(starts))])
                found.append(Finding(later, *names, left_offset=starts[0], right_offset=starts[1]))
            if self.asked.whole and ends[0] != ends[1]:
                earlier = ENDS_EARLIER.format(SIDES[ends.index(min(ends))])
                found.append(Finding(earlier, *names, left_offset=ends[0], right_offset=ends[1]))
        return found

    def rows(self, findings: Sequence[Finding]) -> list[tuple[Any, ...]]:
        """Of :data:`PARTITIONS_SCHEMA`."""
        different = {(each.left_topic, each.partition) for each in findings if each.group_id is None}
        rows: list[tuple[Any, ...]] = []
        for each in self.partitions.values():
            first, to = each.range
            ends = [self.asked.limited(side.end) for side in each.limits]
            empty = first >= to and ends[0] != ends[1]
            state = DIFFERENT if each.place in different else NOTHING if empty else EQUAL
            counts = (each.left_records, each.right_records, each.buckets, each.differing)
            names = (each.left_topic, each.right_topic, each.number)
            rows.append((*names, state, min(each.start, to), to, *counts, *ends, ends[0] - ends[1]))
        return rows


def pairs(specs: Sequence[str], left: Collection[str], right: Collection[str], what: str) -> dict[str, str]:
    """Names on the left side with those on the right. Raises AuditError for what neither side has.

    A spec is a name if either side has it, else a prefix. The empty one stands for all there are but names with an
    underscore in front.
    """
    found: dict[str, str] = {}
    for spec in specs:
        ours, equals, theirs = spec.partition("=")
        theirs = theirs if equals else ours
        if ours in left or theirs in right:
            found[ours] = theirs
            continue
        rests = {name[len(ours) :] for name in left if name.startswith(ours) and (ours or name[0] != "_")}
        rests |= {name[len(theirs) :] for name in right if name.startswith(theirs) and (theirs or name[0] != "_")}
        if not rests and spec:
            raise AuditError(f"{spec!r}: neither side has a {what} with this name or prefix")
        found |= {ours + rest: theirs + rest for rest in sorted(rests)}
    if len(set(found.values())) < len(found):
        raise AuditError(f"several {what}s of the left side stand for one of the right side: {sorted(found)}")
    return found


def plan(clusters: tuple[Cluster, Cluster], asked: Asked) -> Plan:
    """See what there is on both sides. Raises AuditError."""
    counts = [cluster.topics() for cluster in clusters]
    made = Plan(clusters, asked, pairs(asked.topics, counts[0], counts[1], "topic"))
    if asked.groups:
        made.groups = pairs(asked.groups, clusters[0].groups(), clusters[1].groups(), "group")
    places: list[tuple[str, str, int]] = []
    for names in made.names.items():
        had = [counts[side].get(names[side], 0) for side in (0, 1)]
        fewer = SIDES[had.index(min(had))]
        if 0 in had:
            made.findings.append(Finding(TOPIC_MISSING.format(fewer), *names))
            continue
        for number in range(max(had)):
            if asked.partitions and number not in asked.partitions:
                continue
            if number < min(had):
                places.append((*names, number))
            else:
                made.findings.append(Finding(PARTITION_MISSING.format(fewer), *names, number))
    if not places:
        if not made.findings:
            raise AuditError("neither side has any of these partitions")
        return made
    ours = clusters[0].limits([(left, number) for left, _, number in places], asked.committed)
    theirs = clusters[1].limits([(right, number) for _, right, number in places], asked.committed)
    for left, right, number in places:
        limits = (ours[left, number], theirs[right, number])
        range_ = (
            max(asked.from_offset, *(each.start for each in limits)),
            asked.limited(min(each.end for each in limits)),
        )
        made.partitions[left, number] = Partition(left, right, number, limits, range_, [each.start for each in limits])
    both = {left: right for left, right, _ in places}
    compacted = clusters[0].compacted(both), clusters[1].compacted(both.values())
    made.compacted = {left for left, right in both.items() if left in compacted[0] or right in compacted[1]}
    return made
