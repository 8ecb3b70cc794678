"""What links move, counted for each partition: batches and bytes that were sent, or appended."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from isthmus_control.model import Role


class Place(NamedTuple):
    """A partition of a link, by its local name."""

    link: str
    role: Role
    topic: str
    partition: int


class Counts:
    """So much, since the process started: at the leader as it was sent, at the follower as it was appended."""

    __slots__ = ("batches", "bytes")

    def __init__(self) -> None:
        self.batches = 0
        self.bytes = 0

    def add(self, batches: int, size: int) -> None:
        self.batches += batches
        self.bytes += size


def uncounted(batches: int, size: int) -> None:
    """Of a stream that nobody counts."""


class Traffic:
    """The counts of all partitions, and of links. A partition that is opened again goes on counting."""

    def __init__(self) -> None:
        self._counts: dict[Place, Counts] = {}
        self._gone: dict[tuple[str, Role], Counts] = {}
        """By link and role: of partitions that are counted no more."""

    def add(self, place: Place, batches: int, size: int) -> None:
        """So much was sent, or appended."""
        counts = self._counts.get(place)
        if counts is None:
            counts = self._counts[place] = Counts()
        counts.add(batches, size)

    def known(self, place: Place) -> Counts | None:
        """The same to be read; None: nothing of it was ever moved."""
        return self._counts.get(place)

    def keep(self, links: Collection[str], places: Collection[Place]) -> None:
        """Count by themselves only these partitions of these links from now on; others stay in the links' totals."""
        for place in self._counts.keys() - places:
            counts = self._counts.pop(place)
            if place.link in links:
                self._gone.setdefault(place[:2], Counts()).add(counts.batches, counts.bytes)
        for key in [key for key in self._gone if key[0] not in links]:
            del self._gone[key]

    def totals(self) -> dict[tuple[str, Role], Counts]:
        """By link and role."""
        found: dict[tuple[str, Role], Counts] = {}
        for key, counts in (*self._gone.items(), *((place[:2], counts) for place, counts in self._counts.items())):
            found.setdefault(key, Counts()).add(counts.batches, counts.bytes)
        return found
