"""Whether every message of a tree is on every cluster, as it was produced, by one path: told from what their logs hold.

A message is told by its value, ``CLUSTER-...-NUMBER``: which cluster took it from which producer, as which one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from confluent_kafka import TIMESTAMP_CREATE_TIME

from isthmus_plugins.distribution.copy_flags import passed_on
from isthmus_plugins.distribution.tree import Tree
from support.at_work import PARTITIONS, Beside
from support.distributing import HEADER, flags
from support.links import Read

TOLD: Final = 5
"""So many messages are named of those that have the same fault."""


class Place(NamedTuple):
    """Where a message stands."""

    partition: int
    offset: int


def ways(tree: Tree) -> dict[str, list[dict[str, int]]]:
    """By the cluster that took a message: the flags of its copies, by cluster, for each choice of all targets."""
    found: dict[str, list[dict[str, int]]] = {leaf: [] for leaf in tree.leaves}
    distributors = [(leaf, above) for leaf in tree.leaves for above in tree.above(leaf)]
    for chosen in product(*(above.beside for _, above in distributors)):
        targets = {(leaf, above.level): target for (leaf, above), target in zip(distributors, chosen, strict=True)}
        for origin, of_origin in found.items():
            copies, going_on = {origin: 0}, [origin]
            while going_on:
                leaf = going_on.pop()
                for above in tree.above(leaf):
                    has = passed_on(copies[leaf], above.level)
                    if has is not None:
                        target = targets[leaf, above.level]
                        assert target not in copies, "no message gets anywhere by two paths"
                        copies[target] = has
                        going_on.append(target)
            del copies[origin]
            if copies not in of_origin:
                of_origin.append(copies)
    return found


class Proof:
    """``beside``: what producers have given each message beside its value."""

    def __init__(self, tree: Tree, beside: Beside) -> None:
        self._ways = ways(tree)
        self._beside = beside
        self.own: dict[str, dict[bytes, Place]] = defaultdict(dict)
        """By the cluster that took them, messages as they stand there."""
        self._copies: dict[str, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
        """By cluster and message, the flags of each copy."""
        self._latest: dict[tuple[str, int, bytes], int] = {}
        """By cluster, partition and producer: the number of the latest message so far."""
        self._disordered: dict[str, list[str]] = defaultdict(list)
        self._faults: list[str] = []

    def read(self, cluster: str, partition: int, reads: Iterable[Read]) -> list[Read]:
        """Take in the committed records of a partition; those among them that the cluster took itself."""
        own: list[Read] = []
        for read in reads:
            assert read.value is not None
            origin, number, has = _origin(read.value), _number(read.value), flags(read)
            where = f"{read.value.decode()} at {cluster}, {partition}-{read.offset}"
            if origin not in self._ways:
                self._faults.append(f"{where}: nobody's")
            elif not self._is_as_produced(read, partition, number):
                self._faults.append(f"{where}: not as it was produced: {read}")
            elif (has is None) != (origin == cluster):
                self._faults.append(f"{where}: came back" if origin == cluster else f"{where}: has no flags")
            elif has is None:
                self.own[cluster][read.value] = Place(partition, read.offset)
                own.append(read)
            else:
                copies = self._copies[cluster][read.value]
                copies.append(has)
                producer = cluster, partition, read.value.rpartition(b"-")[0]
                latest = self._latest.get(producer, -1)
                if len(copies) == 1 and number < latest:
                    self._disordered[origin].append(f"{where}: behind number {latest}")
                self._latest[producer] = max(number, latest)
        return own

    def doubled(self) -> Iterator[tuple[str, bytes]]:
        """Copies that a cluster has more than once."""
        for cluster, copies in self._copies.items():
            yield from ((cluster, value) for value, each in copies.items() if len(each) > 1)

    def faults(self, in_order: Collection[str], lost: Mapping[str, Collection[bytes]] | None = None) -> list[str]:
        """What must not be, whatever was given twice.

        ``in_order``: clusters whose messages went one way all the time. ``lost``: clusters that are gone for ever, each
        with what it may have taken: that is where it was passed on to.
        """
        found = list(self._faults)
        lost = lost or {}
        clusters = [each for each in self._ways if each not in lost]
        for origin in in_order:
            found += _some(self._disordered[origin])
        for cluster in clusters:
            alien = [
                value
                for value in self._copies[cluster]
                if value not in lost.get(_origin(value), self.own[_origin(value)])
            ]
            found += _some(f"{value.decode()} at {cluster}: no cluster has committed it" for value in alien)
        for origin in clusters:
            others = [each for each in clusters if each != origin]
            chosen = [{cluster: way[cluster] for cluster in others} for way in self._ways[origin]]
            found += _some(self._faults_of(self.own[origin], others, chosen))
        return found

    def _faults_of(
        self, messages: Iterable[bytes], others: Sequence[str], chosen: Sequence[Mapping[str, int]]
    ) -> Iterator[str]:
        possible = {cluster: {way[cluster] for way in chosen} for cluster in others}
        for value in messages:
            copies = {cluster: self._copies[cluster].get(value, []) for cluster in others}
            if missing := [cluster for cluster, each in copies.items() if not each]:
                yield f"{value.decode()} is not at {', '.join(missing)}"
            elif all(len(each) == 1 for each in copies.values()):
                if {cluster: each[0] for cluster, each in copies.items()} not in chosen:
                    yield f"{value.decode()} has come by no way that there is: {copies}"
            elif not all(possible[cluster].issuperset(each) for cluster, each in copies.items()):
                yield f"{value.decode()} has copies that came by no way that there is: {copies}"

    def _is_as_produced(self, read: Read, partition: int, number: int) -> bool:
        assert read.value is not None
        beside = self._beside(read.value)
        return (
            partition == number % PARTITIONS
            and read.key == beside["key"]
            and read.timestamp == (TIMESTAMP_CREATE_TIME, beside["timestamp"])
            and [each for each in read.headers if each[0] != HEADER] == beside["headers"]
        )


def _origin(value: bytes) -> str:
    return value.partition(b"-")[0].decode()


def _number(value: bytes) -> int:
    return int(value.rpartition(b"-")[2])


def _some(faults: Iterable[str]) -> list[str]:
    found = list(faults)
    return found[:TOLD] + ([f"and {len(found) - TOLD} more"] if len(found) > TOLD else [])
