"""The audit's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from isthmus_spark.report import Report, Section, bars

_ROWS_MAX: Final = 500
_BARS_MAX: Final = 40

# By what a finding begins with.
_ADVICE: Final = {
    "missing": "A record that only one side has was lost, was written past the link, or its transaction ended "
    "otherwise there: see it with kafka-dump-log, and who wrote to the follower with `isthmus spark rejections`.",
    "log starts": "One side has deleted what the other still has: compare retention, and see whether the topic was "
    "truncated (`isthmus link truncations`).",
    "log ends": "One side has not got all yet, or lost its end: see `isthmus link describe`.",
    "topic": "A topic that was never created there, or was deleted: see `isthmus topic list`.",
    "partition": "Partitions were added on one side only.",
    "not committed": "Positions that did not arrive, or were deleted: see `isthmus verify` for the link's groups.",
    "committed": "Somebody commits on both sides in one group, or positions did not arrive.",
    "checksums": "Only some of the differing buckets were read again: `--buckets` sets how many, `--from` where to "
    "begin.",
}
_CHANGED: Final = (
    "A record that differs in a field was written twice, not copied: the follower takes writes past the "
    "link, or another tool copies into it. Timestamps alone: one side has LogAppendTime (`--ignore timestamp`)."
)


def audit_report(
    partitions: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    groups: Mapping[str, int],
    about: Mapping[str, str],
) -> Report:
    """Of :func:`isthmus_spark.audit.run.audit`."""
    records = sum(row["left_records"] for row in partitions)
    lagging = sorted((row for row in partitions if row["lag"]), key=lambda row: -abs(row["lag"]))
    nothing = sum(row["state"] == "nothing to compare" for row in partitions)
    plot = bars(
        [(f"{row['left_topic']}-{row['partition']}", [abs(row["lag"])]) for row in lagging[:_BARS_MAX]],
        ("lag",),
        "offsets",
    )
    meaning = (
        f"{records:,} records of the left side were compared up to the end of the shorter logs. {len(lagging)} "
        f"partitions end at different offsets, which is lag (negative where the left side is behind) and no difference."
    )
    if nothing:
        meaning += f" {nothing} have no offset in common: nothing is known of them."
    if groups["positions"]:
        meaning += (
            f" {groups['positions']:,} committed offsets were compared; {groups['waiting']:,} of them are beyond the "
            "other side's data and wait for it."
        )
    return Report(
        "Audit",
        about,
        [
            _table("Findings", _found(findings), findings),
            _table("Partitions", meaning, partitions, plot if lagging else ""),
        ],
    )


def _found(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return "No difference was found."
    kinds = dict.fromkeys(str(row["finding"]) for row in findings)
    advice = dict.fromkeys(
        next((text for start, text in _ADVICE.items() if kind.startswith(start)), _CHANGED) for kind in kinds
    )
    text = (
        f"{len(findings)} findings. first offset and last offset say where; records is how many there are in what was "
        "read again; left offset and right offset are what the two sides have. " + " ".join(advice)
    )
    return text + (
        f" The first {_ROWS_MAX} are below, all are in the Parquet file." if len(findings) > _ROWS_MAX else ""
    )


def _table(title: str, meaning: str, rows: Sequence[Mapping[str, Any]], plot: str = "") -> Section:
    columns = list(rows[0]) if rows else []
    cells = [[row[column] for column in columns] for row in rows[:_ROWS_MAX]]
    return Section(title, meaning, [column.replace("_", " ") for column in columns], cells, plot)
