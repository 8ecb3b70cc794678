"""Another cluster of a tree, by the names that topics have at this one.

So nothing that distributes knows of other names than its own cluster's. Topics that have none here are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from isthmus_plugins.cluster import (
    ClusterApi,
    CommittedOffset,
    PartitionsRefused,
    TopicInfo,
    TopicPartition,
    Transactions,
)
from isthmus_plugins.distribution.kept import TIMES_TOPIC
from isthmus_plugins.distribution.names import Names

T = TypeVar("T")


class LeafApi(Protocol):
    """What is asked of any cluster of a tree, as :class:`~isthmus_plugins.cluster.ClusterApi` has it."""

    async def topics(self) -> Mapping[str, TopicInfo]: ...

    async def topics_named(self, names: Collection[str]) -> Mapping[str, TopicInfo]: ...

    async def topic_configs(
        self, topic: str, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[str | None, str | None]]: ...

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]: ...


class Renaming:
    """Between the names of two clusters: of ``here``, which asks, and of ``there``."""

    def __init__(self, names: Names, here: str, there: str) -> None:
        self._names = names
        self._here, self._there = here, there
        self._known: dict[tuple[str, bool], str | None] = {}

    def there(self, name: str) -> str | None:
        """What a topic of this cluster is called there; None: nothing."""
        return self._translated(name, self._here, self._there)

    def here(self, name: str) -> str | None:
        """What a topic of the other cluster is called here; None: nothing."""
        return self._translated(name, self._there, self._here)

    def _translated(self, name: str, of: str, to: str) -> str | None:
        if name == TIMES_TOPIC:
            return name
        asked = name, of == self._here
        if asked not in self._known:
            self._known[asked] = self._names.translated(name, of, to)
        return self._known[asked]

    def places_there(self, found: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
        """By partitions of this cluster, as by those of the other one."""
        return _renamed(self.there, found)

    def places_here(self, found: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
        """By partitions of the other cluster, as by those of this one."""
        return _renamed(self.here, found)


def _renamed(translated: Callable[[str], str | None], found: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
    named = ((translated(topic), partition, each) for (topic, partition), each in found.items())
    return {(topic, partition): each for topic, partition, each in named if topic is not None}


class RenamedLeaf:
    """A :class:`LeafApi`. ``itself``: by the other cluster's own names."""

    def __init__(self, itself: ClusterApi, renaming: Renaming) -> None:
        self._itself = itself
        self._renaming = renaming

    async def topics(self) -> Mapping[str, TopicInfo]:
        return self._topics(await self._itself.topics())

    async def topics_named(self, names: Collection[str]) -> Mapping[str, TopicInfo]:
        return self._topics(await self._itself.topics_named(self._there(names)))

    def _topics(self, found: Mapping[str, TopicInfo]) -> dict[str, TopicInfo]:
        named = ((self._renaming.here(name), info) for name, info in found.items())
        return {name: info._replace(name=name) for name, info in named if name is not None}

    def _there(self, names: Iterable[str]) -> list[str]:
        return [name for name in map(self._renaming.there, names) if name is not None]

    async def topic_configs(
        self, topic: str, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[str | None, str | None]]:
        (there,) = self._there([topic])  # it was found under this name
        return await self._itself.topic_configs(there, names)

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        asked = self._renaming.places_there(dict.fromkeys(partitions))
        return self._renaming.places_here(await self._itself.log_ends(asked.keys()))

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
        found = await self._itself.committed_offsets(groups, stable)
        return {group: self._renaming.places_here(offsets) for group, offsets in found.items()}


class RenamedTransactions:
    """:class:`~isthmus_plugins.cluster.Transactions` of the other cluster, ``itself`` by its own names.

    Every topic that is given something was found there, so it has a name.
    """

    def __init__(self, itself: Transactions, renaming: Renaming) -> None:
        self._itself = itself
        self._renaming = renaming

    async def begin(self) -> None:
        await self._itself.begin()

    async def open(self, places: Collection[TopicPartition], group: str) -> None:
        there = self._renaming.places_there(dict.fromkeys(places))
        try:
            await self._itself.open(there.keys(), group)
        except PartitionsRefused as error:
            raise self._refused(error) from error

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        renaming = self._renaming
        try:
            ends = await self._itself.commit(renaming.places_there(batches), group, renaming.places_there(offsets))
        except PartitionsRefused as error:
            raise self._refused(error) from error
        return renaming.places_here(ends)

    def _refused(self, error: PartitionsRefused) -> PartitionsRefused:
        return PartitionsRefused(self._renaming.places_here(error.refused), self._renaming.places_here(error.ends))
