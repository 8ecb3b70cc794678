"""The tree's document as ``isthmus tree document -o json`` prints it, and what copy flags can be there.

Level *n* has bit *n*, counted from 1. The first distributor that passes a message on is that of the level at which its
cluster and the receiver's part; those that follow are of lower levels, each above the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

LEVELS_MAX: Final = 63
FILLED: Final = (1 << LEVELS_MAX) - 1
"""Flags of what a new cluster was filled with."""


class DocumentError(Exception):
    """The file is no tree's document; says what to do."""


class Above(NamedTuple):
    """A level above a cluster, and the clusters on its other side."""

    level: int
    beside: frozenset[str]


@dataclass(frozen=True)
class Tree:
    """What the proof needs to know of a tree."""

    topics: tuple[str, ...]
    """Prefixes."""
    header: str
    servers: Mapping[str, str]
    """By cluster."""
    above: Mapping[str, tuple[Above, ...]]
    """By cluster: the levels above it, the highest first."""

    def path(self, origin: str, cluster: str, flags: int) -> str | None:
        """By which levels a copy with these flags has come; None: it cannot have come so."""
        if flags == FILLED:
            return "filled"
        levels = [level for level in range(LEVELS_MAX, 0, -1) if flags & 1 << (level - 1)]
        parted = next((each.level for each in self.above[origin] if cluster in each.beside), None)
        on_the_way = [each.level for each in self.above[cluster]]
        if not levels or levels[0] != parted or not set(levels) <= set(on_the_way):
            return None
        return " ".join(f"level {level}" for level in levels)


def read_tree(path: Path) -> Tree:
    """Raises DocumentError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        above = {leaf: tuple(levels) for leaf, levels in _above(found["tree"])}
        servers = {name: str(each["bootstrap_servers"]) for name, each in found["clusters"].items()}
        tree = Tree(tuple(map(str, found["topics"])), str(found["header"]), servers, above)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise DocumentError(f"{path} is not what `isthmus tree document -o json` prints: {reason}") from None
    if set(servers) != set(above):
        raise DocumentError(f"{path} has clusters {sorted(servers)}, and a tree of {sorted(above)}")
    return tree


def _above(node: Any) -> Iterator[tuple[str, list[Above]]]:
    if isinstance(node, str):
        yield node, []
        return
    level, sides = int(node["level"]), [list(_above(side)) for side in node["sides"]]
    if len(sides) != 2 or not 0 < level <= LEVELS_MAX:
        raise ValueError(f"level {level} has {len(sides)} sides")
    one, two = sides
    for side, other in ((one, two), (two, one)):
        beside = frozenset(leaf for leaf, _ in other)
        for leaf, levels in side:
            yield leaf, [Above(level, beside), *levels]
