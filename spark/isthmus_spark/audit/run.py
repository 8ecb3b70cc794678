"""The passes of an audit, from what is asked for to findings.

Up to the end of the shorter log (or a given offset) both sides' checksums are compared; what differs is read again and
compared exactly, some buckets of each partition at a time until one has a difference. Logs go on meanwhile: what comes
after the ends was not asked for, and what is below a log's start after a reading was deleted and is no finding.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from isthmus_spark.audit import groups
from isthmus_spark.audit.admin import Cluster, Place
from isthmus_spark.audit.plan import PARTITIONS_SCHEMA, Asked, Finding, Partition, Plan, plan
from isthmus_spark.audit.reading import Range, joined, read, read_parts
from isthmus_spark.jobs import audit as job

NOT_READ_AGAIN: Final = "checksums differ further on"
"""In buckets after those that were read again; where exactly is not known."""
LATEST_LOOKS: Final = 2
"""A cleaner may be at work while the latest records of keys are looked for."""


@dataclass(slots=True)
class Audited:
    """What came out."""

    partitions: DataFrame
    """:data:`isthmus_spark.audit.plan.PARTITIONS_SCHEMA`."""
    findings: DataFrame
    """:data:`isthmus_spark.jobs.audit.SCHEMA`."""
    positions: int
    """Committed offsets that were compared."""
    waiting: int
    """Those of them that wait for the other side's data."""


def audit(
    spark: SparkSession, left: Cluster, right: Cluster, asked: Asked, say: Callable[[str], None] = lambda line: None
) -> Audited:
    """Compare two clusters. Raises AuditError."""
    found = plan((left, right), asked)
    passes = _Passes(spark, found, say)
    passes.compare()
    committed = groups.Groups(0, 0, [])
    if found.groups:
        say(f"comparing what {len(found.groups)} groups have committed")
        committed = groups.compare(spark, found)
    found.look_again()
    findings = found.findings + found.limit_findings() + passes.findings + committed.findings
    return Audited(
        spark.createDataFrame(found.rows(findings), PARTITIONS_SCHEMA),
        spark.createDataFrame(findings, job.SCHEMA),
        committed.positions,
        committed.waiting,
    )


class _Passes:
    def __init__(self, spark: SparkSession, plan: Plan, say: Callable[[str], None]) -> None:
        self._spark = spark
        self._plan = plan
        self._asked = plan.asked
        self._say = say
        self._salt = secrets.token_hex(8)
        self.findings: list[Finding] = []

    def compare(self) -> None:
        todo = [each for each in self._plan.partitions.values() if each.range[0] < each.range[1]]
        offsets = sum(each.range[1] - each.range[0] for each in todo)
        self._say(
            f"comparing {len(todo)} partitions of {len(self._plan.names)} topics, {offsets:,} offsets of each side"
        )
        if not todo:
            return
        compared = self._checksums(todo).cache()
        self._count(compared)
        different = [each for each in todo if each.differing]
        if different:
            self._look_again(different, compared)
        compared.unpersist()

    def _checksums(self, todo: Sequence[Partition]) -> DataFrame:
        sums = [
            job.checksums(
                self._read(side, {each.place_at(side): each.range for each in todo}, self._asked.committed),
                self._salt,
                self._asked.fields,
                self._asked.width,
            )
            for side in (0, 1)
        ]
        return job.buckets(sums[0], self._by_left_names(sums[1]))

    def _read(self, side: int, ranges: Mapping[Place, Range], committed: bool) -> DataFrame:
        return read(self._spark, self._plan.clusters[side], ranges, committed)

    def _by_left_names(self, frame: DataFrame) -> DataFrame:
        return job.renamed(frame, {right: left for left, right in self._plan.names.items()})

    def _count(self, compared: DataFrame) -> None:
        counted = compared.groupBy("topic", "partition").agg(
            *(f.sum(each).alias(each) for each in ("left_records", "right_records")),
            f.count(f.lit(1)).alias("buckets"),
            f.count_if("differs").alias("differing"),
        )
        for row in counted.collect():
            partition = self._plan.partitions[row.topic, row.partition]
            partition.left_records, partition.right_records = row.left_records, row.right_records
            partition.buckets, partition.differing = row.buckets, row.differing

    def _look_again(self, different: Sequence[Partition], compared: DataFrame) -> None:
        self._plan.look_again()
        width = self._asked.width
        starts = {each.place: each.start for each in different if each.left_topic not in self._plan.compacted}
        starts |= self._latest([each for each in different if each.left_topic in self._plan.compacted])
        froms = {place: start // width for place, start in starts.items()}
        while froms:
            chosen = job.first_buckets(compared, self._froms(froms), self._asked.buckets).collect()
            parts: dict[Place, list[Range]] = {}
            for row in sorted(chosen):
                place = (row.topic, row.partition)
                start = max(row.bucket * width, starts[place])
                end = min((row.bucket + 1) * width, self._plan.partitions[place].range[1])
                if start < end:  # else it was deleted
                    parts.setdefault(place, []).append((start, end))
                froms[place] = row.bucket + 1
            if parts:
                self._say(f"reading {sum(map(len, parts.values()))} buckets of {len(parts)} partitions again")
            found = self._exactly(parts) if parts else []
            self.findings += found
            known = {(each.left_topic, each.partition) for each in found}
            self._add_unread(compared, {place: froms[place] for place in froms if place in known})
            froms = {place: froms[place] for place in {(row.topic, row.partition) for row in chosen} - known}

    def _exactly(self, parts: Mapping[Place, list[Range]]) -> list[Finding]:
        left, right = (
            read_parts(
                self._spark,
                cluster,
                {self._plan.partitions[place].place_at(side): joined(ranges) for place, ranges in parts.items()},
                self._asked.committed,
            )
            for side, cluster in enumerate(self._plan.clusters)
        )
        return self._summary(job.differences(left, self._by_left_names(right), self._asked.fields))

    def _latest(self, todo: Sequence[Partition]) -> dict[Place, int]:
        """Compare what counts of compacted topics. Returns from where on partitions are to be compared exactly.

        That is above the last stable offset, where no cleaner has been; below it, aborted records do not count either.
        """
        rest: dict[Place, int] = {}
        found: list[Finding] = []
        for look in range(LATEST_LOOKS):
            if not todo or (look and not found):
                break
            self._say(f"comparing the latest records of keys in {len(todo)} partitions of compacted topics")
            limits = [
                cluster.limits([each.place_at(side) for each in todo], committed=True)
                for side, cluster in enumerate(self._plan.clusters)
            ]
            found = []
            ends: dict[Place, int] = {}
            ranges: tuple[dict[Place, Range], dict[Place, Range]] = ({}, {})
            for each in todo:
                now = [limits[side][each.place_at(side)] for side in (0, 1)]
                start = max(each.range[0], *(side.start for side in now))
                end = min(each.range[1], *(side.end for side in now))
                if end < each.range[1]:
                    rest[each.place] = end
                if start < end:
                    ends[each.place] = end
                    for side in (0, 1):
                        ranges[side][each.place_at(side)] = (start, now[side].end)
            if not ends:
                break
            frame = self._frame(ends, "end bigint")
            left, right = self._read(0, ranges[0], True), self._by_left_names(self._read(1, ranges[1], True))
            ours, theirs = (job.latest(each, frame, self._salt, self._asked.fields) for each in (left, right))
            found = self._summary(job.latest_differences(ours, theirs, self._asked.fields))
        self.findings += found
        return rest

    def _summary(self, differences: DataFrame) -> list[Finding]:
        """What is found, but for what has been deleted by the time it is."""
        differences = differences.persist()
        differences.count()
        self._plan.look_again()
        starts = {place: each.start for place, each in self._plan.partitions.items()}
        rows = job.summary(differences, self._frame(starts, "start bigint")).collect()
        differences.unpersist()
        return [
            Finding(
                row.finding,
                row.topic,
                self._plan.names[row.topic],
                row.partition,
                first_offset=row.first_offset,
                last_offset=row.last_offset,
                records=row.records,
            )
            for row in sorted(rows, key=lambda row: (row.topic, row.partition, row.first_offset, row.finding))
        ]

    def _add_unread(self, compared: DataFrame, froms: Mapping[Place, int]) -> None:
        """What differs, too, in partitions of which enough is known."""
        if not froms:
            return
        rest = job.differing(compared, self._froms(froms)).groupBy("topic", "partition")
        for row in rest.agg(f.min("bucket").alias("first"), f.max("bucket").alias("last")).collect():
            names = (row.topic, self._plan.names[row.topic], row.partition)
            first = row.first * self._asked.width
            last = min(self._plan.partitions[row.topic, row.partition].range[1], (row.last + 1) * self._asked.width) - 1
            self.findings.append(Finding(NOT_READ_AGAIN, *names, first_offset=first, last_offset=last))

    def _froms(self, froms: Mapping[Place, int]) -> DataFrame:
        return self._frame(froms, "from_bucket bigint")

    def _frame(self, values: Mapping[Place, int], column: str) -> DataFrame:
        rows = [(*place, value) for place, value in values.items()]
        return self._spark.createDataFrame(rows, f"topic string, partition int, {column}")
