"""Reads the topics of a tree at all of its clusters, and says what of them is where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from isthmus_spark.audit.admin import AuditError, Cluster, Place
from isthmus_spark.audit.reading import read, union
from isthmus_spark.tree import copies as c
from isthmus_spark.tree.document import Tree

Say = Callable[[str], None]
Rows = list[dict[str, Any]]
NO_TOPIC: Final = "the topic is not there"


@dataclass(slots=True)
class Proof:
    """What was found; all is well where nothing but what is on its way is among the findings."""

    messages: int
    """What applications produced, as far as it is there."""
    records: dict[str, int]
    """By cluster."""
    ways: Rows
    findings: Rows

    @property
    def proven(self) -> bool:
        """Whether every message is on every cluster once, but for those that are on their way."""
        return all(row["finding"] == c.ON_THE_WAY for row in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"proven": self.proven, **asdict(self)}


def prove(
    spark: SparkSession,
    tree: Tree,
    properties: Mapping[str, Mapping[str, str]],
    topics: Sequence[str],
    until_ms: int,
    say: Say = lambda _: None,
) -> Proof:
    """``properties`` of Kafka's clients, by cluster; ``topics``: prefixes; ``until_ms``: what is later may be missing.

    Raises AuditError.
    """
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(Cluster(spark, servers, properties.get(name, {})))
            for name, servers in tree.servers.items()
        }
        there = {name: _topics(tree, name, cluster) for name, cluster in clusters.items()}
        prefixes = tuple(topics)
        names = sorted({each for its in there.values() for each, topic in its.items() if topic[0].startswith(prefixes)})
        if not names:
            raise AuditError(f"no cluster of the tree has a topic that begins with {' or '.join(topics)}")
        frames, records = [], {}
        for name, cluster in clusters.items():
            found = [there[name][each] for each in names if each in there[name]]
            places: list[Place] = [(topic, number) for topic, count in found for number in range(count)]
            limits = cluster.limits(places, committed=True)
            records[name] = 0
            ranges = {place: (limit.start, limit.end) for place, limit in limits.items() if limit.start < limit.end}
            say(f"{name}: {len(places)} partitions, {sum(end - start for start, end in ranges.values()):,} offsets")
            if ranges:
                frames.append(
                    c.copies(read(spark, cluster, ranges, committed=True), name, tree.header, tree.names.get(name))
                )
        lacking = [
            _finding(NO_TOPIC, topic, name) for topic in names for name, its in there.items() if topic not in its
        ]
        if not frames:
            return Proof(0, records, [], lacking)
        return _proof(union(frames), tree, records, lacking, until_ms)


def _proof(found: DataFrame, tree: Tree, records: dict[str, int], lacking: Rows, until_ms: int) -> Proof:
    found = found.cache()
    messages = c.messages(found, list(tree.servers)).cache()
    try:
        records |= {row["cluster"]: row["count"] for row in found.groupBy("cluster").count().collect()}
        findings = lacking + _rows(c.counted_wrongly(messages, until_ms).orderBy("finding", "topic", "cluster"))
        findings += _rows(c.refused(found))
        ways = c.named([tuple(row) for row in c.ways(messages).collect()], tree)
        findings += [
            _finding(c.NO_WAY, None, each["cluster"], each["origin"], each["messages"])
            for each in ways
            if each["path"] is None
        ]
        total = messages.selectExpr("sum(produced) AS produced").collect()[0]["produced"]
        return Proof(int(total or 0), records, ways, findings)
    finally:
        messages.unpersist()
        found.unpersist()


def _topics(tree: Tree, name: str, cluster: Cluster) -> dict[str, tuple[str, int]]:
    """What a cluster has of the tree, by what is the same everywhere: the topics' names there, and partitions."""
    named = ((tree.shared_name(name, topic), topic, count) for topic, count in cluster.topics().items())
    return {shared: (topic, count) for shared, topic, count in named if shared is not None}


def _rows(found: DataFrame) -> Rows:
    return [row.asDict() for row in found.collect()]


def _finding(finding: str, topic: str | None, cluster: Any, origin: Any = None, messages: Any = None) -> dict[str, Any]:
    return {
        "finding": finding,
        "topic": topic,
        "cluster": cluster,
        "origin": origin,
        "messages": messages,
        "partition": None,
        "offset": None,
        "first": None,
    }
