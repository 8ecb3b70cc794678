"""A tree of clusters: its leaves are clusters, and each subtree has a level and two sides.

Levels get lower on the way from the root to a leaf, so each leaf knows the others by the level at which they part. That
alone is what copy flags say: a tree may change as long as leaves that stay part where they did (:func:`change`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from isthmus_plugins.distribution.copy_flags import HEADER_NAME


class TreeError(ValueError):
    """A tree cannot be, or cannot follow another. ``problems`` has at least one; each says what to do."""

    def __init__(self, problems: Collection[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Subtree(NamedTuple):
    level: int
    sides: tuple[Node, Node]


Node: TypeAlias = Subtree | str
"""A subtree, or the name of a cluster."""


def leaves(node: Node) -> tuple[str, ...]:
    if isinstance(node, str):
        return (node,)
    return (*leaves(node.sides[0]), *leaves(node.sides[1]))


class Above(NamedTuple):
    """One level above a leaf."""

    level: int
    beside: tuple[str, ...]
    """The leaves on the other side, of which any may be the target."""
    own: tuple[str, ...]
    """Those on the leaf's own side, itself included."""


@dataclass(frozen=True)
class Tree:
    """A version of a tree."""

    version: int
    root: Subtree
    header: str = HEADER_NAME

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        return leaves(self.root)

    @cached_property
    def _above(self) -> dict[str, tuple[Above, ...]]:
        return {leaf: tuple(above) for leaf, above in _paths(self.root)}

    def above(self, leaf: str) -> tuple[Above, ...]:
        """The levels above a leaf, the lowest first: it has a distributor for each."""
        return self._above[leaf]

    def level_between(self, one: str, other: str) -> int:
        """The level at which two leaves part; 0 for a leaf and itself."""
        return next((above.level for above in self.above(one) if other in above.beside), 0)


def _paths(node: Node) -> Iterator[tuple[str, list[Above]]]:
    if isinstance(node, str):
        yield node, []
        return
    sides = [leaves(side) for side in node.sides]
    for number, side in enumerate(node.sides):
        for leaf, above in _paths(side):
            above.append(Above(node.level, sides[1 - number], sides[number]))
            yield leaf, above


class Added(NamedTuple):
    """A leaf that has come to the tree, and may not have all yet."""

    by: str
    """The leaf beside it, which fills it."""
    version: int
    """The one in which it came."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the next version of a tree changes."""

    added: dict[str, str]
    """New leaves, each with the one beside it, which fills it."""
    removed: tuple[str, ...]


def change(before: Tree, after: Tree, filling: Collection[str] = ()) -> Change:
    """What becomes of a tree. ``filling``: leaves that do not have all yet.

    Copies are under way while a tree changes, and mean what their flags say. So leaves that stay part at the level at
    which they did. A leaf that comes stands beside one that was there and has all: whatever enters that subtree enters
    it there, so this one can fill the other and leave nothing out. Raises TreeError.
    """
    problems = []
    if after.version != before.version + 1:
        problems.append(
            f"version {after.version} cannot follow {before.version}: write `version: {before.version + 1}`"
        )
    if after.header != before.header:
        problems.append(f"the header is {before.header!r} in version {before.version}: it stays, copies have it")
    added = [leaf for leaf in after.leaves if leaf not in before.leaves]
    removed = tuple(leaf for leaf in before.leaves if leaf not in after.leaves)
    if added and removed:
        problems.append(
            f"it adds {', '.join(added)} and takes out {', '.join(removed)}: do that in two versions, one by one"
        )
    stay = [leaf for leaf in before.leaves if leaf in after.leaves]
    problems += _moved(before, after, stay)
    sponsors = {}
    for leaf in added:
        (beside, *more) = after.above(leaf)[0].beside
        if more or beside in added:
            problems.append(f"{leaf} is new: put it beside one cluster that is in version {before.version}, as a pair")
        elif beside in filling:
            problems.append(f"{leaf} is to be filled by {beside}, which is being filled itself: wait until it has all")
        sponsors[leaf] = beside
    if problems:
        raise TreeError(problems)
    return Change(sponsors, removed)


def _moved(before: Tree, after: Tree, stay: list[str]) -> Iterator[str]:
    """Pairs of leaves that would part elsewhere, one for each level."""
    said = set()
    for number, one in enumerate(stay):
        for other in stay[:number]:
            was, now = before.level_between(one, other), after.level_between(one, other)
            if was != now and (was, now) not in said:
                said.add((was, now))
                yield (
                    f"{other} and {one} part at level {was} and would part at {now}, so copies that are under way "
                    f"would be lost or doubled: leave them where they are, and write `level: {was}` at their subtree"
                )
