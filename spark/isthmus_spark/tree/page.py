"""The report of a tree's proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from isthmus_spark.report import Report, Section
from isthmus_spark.tree import copies
from isthmus_spark.tree.run import NO_TOPIC, Proof

_ROWS_MAX: Final = 500
_ADVICE: Final = {
    copies.MISSING: "What is missing was not given (`isthmus tree show` at its origin says what waits, and for what), "
    "or retention has taken it before, there or at the cluster that lacks it.",
    copies.TWICE: "A message that is there too often was given again: without transactions a distributor that dies "
    "does so, and a target that is given up leads to it.",
    copies.ON_THE_WAY: "What is on its way is younger than --on-the-way-s: look again.",
    copies.REFUSED: "Messages whose flags cannot be read stay where they are: find out what writes that header.",
    copies.NO_WAY: "No distributor of this tree writes such flags: they are of another tree, or somebody produces them "
    "past the proxies.",
    NO_TOPIC: "Make the topic there, with as many partitions.",
}


def tree_report(proof: Proof, about: Mapping[str, str]) -> Report:
    """Of :func:`isthmus_spark.tree.run.prove`."""
    kinds = dict.fromkeys(str(row["finding"]) for row in proof.findings)
    found = " ".join(_ADVICE[kind] for kind in kinds) or "Every message is on every cluster, once."
    ways = (
        f"{proof.messages:,} messages. A copy comes by the level at which its origin and the cluster part, and then by "
        "lower ones. `filled` is what a new cluster was given."
    )
    return Report(
        "Distribution over a tree",
        about,
        [_table("Findings", found, proof.findings), _table("Who got what, by which path", ways, proof.ways)],
    )


def _table(title: str, meaning: str, rows: Sequence[Mapping[str, Any]]) -> Section:
    columns = list(rows[0]) if rows else []
    return Section(title, meaning, columns, [[row[column] for column in columns] for row in rows[:_ROWS_MAX]])
