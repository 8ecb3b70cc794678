"""Kafka's own admin client, in Spark's JVM: the properties that serve the Kafka source serve it as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, cast

from py4j.java_gateway import JavaPackage
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

Place = tuple[str, int]
"""Topic and partition."""

GROUPS_AT_ONCE: Final = 200
_TIMEOUT: Final = {"default.api.timeout.ms": "30000", "request.timeout.ms": "15000"}
# What a consumer's file may say, and what this job decides itself.
_NOT_TAKEN: Final = ("group.id", "group.instance.id", "auto.offset.reset", "enable.auto.commit", "isolation.level")


class AuditError(Exception):
    """The audit cannot be made; says what to do."""


class Limits(NamedTuple):
    """Of a partition's log."""

    start: int
    end: int
    """What a consumer of the chosen isolation may read ends here."""


class CommittedOffset(NamedTuple):
    """What a group has committed."""

    offset: int
    metadata: str


class Cluster:
    """One side. Everything raises AuditError."""

    def __init__(self, spark: SparkSession, servers: str, properties: Mapping[str, str]) -> None:
        self.servers = servers
        self.properties = {name: value for name, value in properties.items() if not _is_left_out(name)}
        self.properties["bootstrap.servers"] = servers
        self._java = cast(Any, spark._jvm)
        admin = self._java.org.apache.kafka.clients.admin.Admin
        if isinstance(admin, JavaPackage):  # there is no such class
            raise AuditError("this Spark session has no Kafka connector: give it to spark-submit by --packages")
        with self._errors("connect"):
            self._admin = admin.create(self._map(_TIMEOUT | self.properties))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admin.close()

    def topics(self) -> dict[str, int]:
        """How many partitions each topic has; Kafka's own are left out."""
        with self._errors("list topics"):
            names = self._admin.listTopics().names().get()
            described = self._admin.describeTopics(names).allTopicNames().get()
            return {str(each.name()): int(each.partitions().size()) for each in described.values()}

    def compacted(self, topics: Collection[str]) -> set[str]:
        """Which of these topics a cleaner compacts."""
        resource = self._java.org.apache.kafka.common.config.ConfigResource
        kind = getattr(self._java, "org.apache.kafka.common.config.ConfigResource$Type").TOPIC
        with self._errors("read the topics' settings"):
            asked = self._list([resource(kind, name) for name in topics])
            found = self._admin.describeConfigs(asked).all().get()
            return {
                str(each.getKey().name())
                for each in found.entrySet()
                if "compact" in str(each.getValue().get("cleanup.policy").value())
            }

    def limits(self, places: Collection[Place], committed: bool) -> dict[Place, Limits]:
        """``committed``: the end is the last stable offset."""
        starts, ends = self.starts(places), self.ends(places, committed)
        return {place: Limits(starts[place], ends[place]) for place in places}

    def starts(self, places: Collection[Place]) -> dict[Place, int]:
        """Where logs begin."""
        with self._errors("read where logs begin"):
            return self._offsets(places, self._spec.earliest(), committed=False)

    def ends(self, places: Collection[Place], committed: bool) -> dict[Place, int]:
        """Last stable offsets (``committed``), or high watermarks."""
        with self._errors("read where logs end"):
            return self._offsets(places, self._spec.latest(), committed)

    @property
    def _spec(self) -> Any:
        return self._java.org.apache.kafka.clients.admin.OffsetSpec

    def groups(self) -> list[str]:
        """The ids of all consumer groups."""
        with self._errors("list groups"):
            return [str(each.groupId()) for each in self._admin.listConsumerGroups().all().get()]

    def committed_offsets(self, groups: Sequence[str]) -> dict[str, dict[Place, CommittedOffset]]:
        """What groups have committed."""
        found: dict[str, dict[Place, CommittedOffset]] = {}
        spec = self._java.org.apache.kafka.clients.admin.ListConsumerGroupOffsetsSpec
        with self._errors("read what groups have committed"):
            for at in range(0, len(groups), GROUPS_AT_ONCE):
                chunk = groups[at : at + GROUPS_AT_ONCE]
                answer = self._admin.listConsumerGroupOffsets(self._map({name: spec() for name in chunk}))
                for name in chunk:
                    committed = answer.partitionsToOffsetAndMetadata(name).get()
                    found[name] = {
                        (str(each.getKey().topic()), int(each.getKey().partition())): CommittedOffset(
                            int(each.getValue().offset()), str(each.getValue().metadata())
                        )
                        for each in committed.entrySet()
                        if each.getValue() is not None
                    }
        return found

    def _offsets(self, places: Collection[Place], spec: Any, committed: bool) -> dict[Place, int]:
        partition = self._java.org.apache.kafka.common.TopicPartition
        levels = self._java.org.apache.kafka.common.IsolationLevel
        isolation = levels.READ_COMMITTED if committed else levels.READ_UNCOMMITTED
        options = self._java.org.apache.kafka.clients.admin.ListOffsetsOptions(isolation)
        asked = {partition(*place): spec for place in places}
        found = self._admin.listOffsets(self._map(asked), options).all().get()
        return {
            (str(each.getKey().topic()), int(each.getKey().partition())): int(each.getValue().offset())
            for each in found.entrySet()
        }

    def _map(self, items: Mapping[Any, Any]) -> Any:
        made = self._java.java.util.HashMap()
        for key, value in items.items():
            made.put(key, value)
        return made

    def _list(self, items: Sequence[Any]) -> Any:
        made = self._java.java.util.ArrayList()
        for each in items:
            made.add(each)
        return made

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Py4JJavaError as error:
            cause = error.java_exception
            while cause.getCause() is not None:
                cause = cause.getCause()
            raise AuditError(f"{self.servers}: cannot {doing}: {cause.getMessage() or cause.toString()}") from None


def _is_left_out(name: str) -> bool:
    return name in _NOT_TAKEN or name.endswith((".serializer", ".deserializer"))


def properties_file(spark: SparkSession, path: Path) -> dict[str, str]:
    """A file of Java properties, as Kafka's tools take it with ``--command-config``. Raises AuditError."""
    java = cast(Any, spark._jvm)
    properties = java.java.util.Properties()
    try:
        stream = java.java.io.FileInputStream(str(path.absolute()))
        try:
            properties.load(stream)
        finally:
            stream.close()
    except Py4JJavaError as error:
        raise AuditError(f"{path} is no file of properties: {error.java_exception.getMessage()}") from None
    return {str(name): str(properties.getProperty(name)) for name in properties.stringPropertyNames()}
