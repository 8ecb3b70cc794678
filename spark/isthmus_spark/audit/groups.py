"""What groups have committed on both sides, looked at until nothing differs, or several times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from isthmus_spark.audit.admin import CommittedOffset, Place
from isthmus_spark.audit.plan import Finding, Plan
from isthmus_spark.jobs import audit_groups as job

LOOKS: Final = 4
LOOK_AGAIN_S: Final = 1.0
"""Groups commit all the time, and copies of their committed offsets arrive within a second."""

Key = tuple[str, Place]
"""Group and place, by the left side's names."""


class Groups(NamedTuple):
    """What came out."""

    positions: int
    waiting: int
    """Those committed offsets that are beyond the other side's data."""
    findings: list[Finding]


def compare(spark: SparkSession, plan: Plan) -> Groups:
    """The groups that were asked for, by their committed offsets in the topics that are compared. Raises AuditError."""
    before: tuple[dict[Key, set[int]], dict[Key, set[int]]] = ({}, {})
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_AGAIN_S)
        sides = [_committed_offsets(plan, side) for side in (0, 1)]
        ends = _ends(plan, {place for offsets in sides for _, place in offsets})
        ours, theirs = (_frame(spark, offsets, seen) for offsets, seen in zip(sides, before, strict=True))
        compared = job.positions(ours, theirs, spark.createDataFrame(ends, job.ENDS_SCHEMA)).cache()
        found = compared.where("finding is not null").collect()
        total = compared.count()
        compared.unpersist()
        differing = [row for row in found if row.finding != job.WAITING]
        if not differing:
            break
        for offsets, seen in zip(sides, before, strict=True):
            for key, committed in offsets.items():
                seen.setdefault(key, set()).add(committed.offset)
    findings = [
        Finding(
            row.finding,
            row.topic,
            plan.names[row.topic],
            row.partition,
            row.group_id,
            left_offset=row.left_offset,
            right_offset=row.right_offset,
        )
        for row in sorted(differing, key=lambda row: (row.group_id, row.topic, row.partition))
    ]
    return Groups(total, len(found) - len(differing), findings)


def _committed_offsets(plan: Plan, side: int) -> dict[Key, CommittedOffset]:
    group_names = {(left, right)[side]: left for left, right in plan.groups.items()}
    topic_names = {(left, right)[side]: left for left, right in plan.names.items()}
    wanted = plan.asked.partitions
    return {
        (group_names[group], (topic_names[topic], partition)): committed
        for group, offsets in plan.clusters[side].committed_offsets(list(group_names)).items()
        for (topic, partition), committed in offsets.items()
        if topic in topic_names and (not wanted or partition in wanted)
    }


def _ends(plan: Plan, places: set[Place]) -> list[tuple[str, int, int, int]]:
    """High watermarks, of those partitions that both sides have."""
    chosen = [plan.partitions[place] for place in places if place in plan.partitions]
    left, right = (
        cluster.ends([each.place_at(side) for each in chosen], committed=False)
        for side, cluster in enumerate(plan.clusters)
    )
    return [(*each.place, left[each.place_at(0)], right[each.place_at(1)]) for each in chosen]


def _frame(spark: SparkSession, offsets: Mapping[Key, CommittedOffset], before: Mapping[Key, set[int]]) -> DataFrame:
    rows = [
        (group, *place, *committed, sorted(before.get((group, place), ())))
        for (group, place), committed in offsets.items()
    ]
    return spark.createDataFrame(rows, job.POSITIONS_SCHEMA)
