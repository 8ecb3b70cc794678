"""Two sides' consumer groups compared by what they have committed.

Groups go on committing meanwhile, and copies of committed offsets arrive a moment later: a side that is where the
other was when last looked at is not behind, and a committed offset beyond the other side's data waits for that data.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

POSITIONS_SCHEMA: Final = (
    "group_id string, topic string, partition int, offset bigint, metadata string, before array<bigint>"
)
"""Names as on the left side. ``before``: what the same group had committed there when it was looked at earlier."""
ENDS_SCHEMA: Final = "topic string, partition int, left_end bigint, right_end bigint"
SCHEMA: Final = "group_id string, topic string, partition int, finding string, left_offset bigint, right_offset bigint"
"""``finding`` is NULL where the committed offsets are equal."""

MISSING_LEFT, MISSING_RIGHT = "not committed on the left", "not committed on the right"
OFFSET, METADATA, WAITING = "committed offset differs", "committed metadata differs", "waits for data"
_PLACE: Final = ("topic", "partition")
_KEY: Final = ("group_id", *_PLACE)


def positions(left: DataFrame, right: DataFrame, ends: DataFrame) -> DataFrame:
    """Each committed offset of either side, with what is found: the columns of :data:`SCHEMA`.

    ``left``, ``right``: :data:`POSITIONS_SCHEMA`; ``ends``: :data:`ENDS_SCHEMA`, high watermarks.
    """
    sides = [
        each.select(*_KEY, *(f.col(name).alias(f"{side}_{name}") for name in ("offset", "metadata", "before")))
        for side, each in (("left", left), ("right", right))
    ]
    both = sides[0].join(sides[1], list(_KEY), "full_outer").join(f.broadcast(ends), list(_PLACE), "left")
    ours, theirs = f.col("left_offset"), f.col("right_offset")
    moved = _has_been(ours, "right_before") | _has_been(theirs, "left_before")
    finding = (
        f.when(ours == theirs, f.when(~f.col("left_metadata").eqNullSafe(f.col("right_metadata")), METADATA))
        .when(moved, f.lit(None))
        .when(_waits(ours, theirs, "right_end") | _waits(theirs, ours, "left_end"), WAITING)
        .when(ours.isNull(), MISSING_LEFT)
        .when(theirs.isNull(), MISSING_RIGHT)
        .otherwise(OFFSET)
    )
    return both.select(*_KEY, finding.alias("finding"), "left_offset", "right_offset")


def _has_been(offset: Column, before: str) -> Column:
    return f.coalesce(f.array_contains(f.col(before), offset), f.lit(False))


def _waits(ahead: Column, behind: Column, end: str) -> Column:
    """Whether a committed offset is beyond the data of the side that is behind."""
    further = (ahead > f.coalesce(f.col(end), f.lit(0))) & (behind.isNull() | (behind < ahead))
    return f.coalesce(further, f.lit(False))
