"""The tree's document as ``isthmus tree document -o json`` prints it, and what copy flags can be there.

Level *n* has bit *n*, counted from 1. The first distributor that passes a message on is that of the level at which its
cluster and the receiver's part; those that follow are of lower levels, each above the receiver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

LEVELS_MAX: Final = 63
FILLED: Final = (1 << LEVELS_MAX) - 1
"""Flags of what a new cluster was filled with."""


class DocumentError(Exception):
    """The file is no tree's document; says what to do."""


class Name(NamedTuple):
    """What topics are called at a cluster."""

    expression: str
    """A regular expression, of Python and Java, with a group for each field."""
    fields: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> Name:
        """As ``names`` of the document has it: fields in braces between constants."""
        constant, *parts = re.split(r"\{([a-z][a-z0-9_]*)\}", pattern)
        expression = "^(?!__)" + re.escape(constant)
        for each, behind in zip(parts[::2], parts[1::2], strict=True):
            expression += f"({'[A-Za-z0-9._-]+' if each == 'topic' else '[A-Za-z0-9]+'}){re.escape(behind)}"
        return cls(expression + "$", tuple(parts[::2]))

    @property
    def shared(self) -> list[tuple[str, int]]:
        """Of what is the same at all clusters: texts, and behind each the number of the group that follows."""
        groups = sorted(enumerate(self.fields, 1), key=lambda each: each[1])
        return [(f"{'/' if number else ''}{each}=", group) for number, (group, each) in enumerate(groups)]

    def shared_name(self, topic: str) -> str | None:
        """What a topic is called in the proof; None: it is none of the tree's."""
        found = re.match(self.expression, topic)
        return None if found is None else "".join(text + found[group] for text, group in self.shared)


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
    names: Mapping[str, Name] = field(default_factory=dict)
    """By cluster; empty: topics are called the same everywhere."""

    def shared_name(self, cluster: str, topic: str) -> str | None:
        """What all clusters' copies of a topic have in common; None: it is none of the tree's."""
        return self.names[cluster].shared_name(topic) if self.names else topic

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
        names = {name: Name.of(each) for name, each in found.get("names", {}).items()}
        tree = Tree(tuple(map(str, found["topics"])), str(found["header"]), servers, above, names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise DocumentError(f"{path} is not what `isthmus tree document -o json` prints: {reason}") from None
    if set(servers) != set(above):
        raise DocumentError(f"{path} has clusters {sorted(servers)}, and a tree of {sorted(above)}")
    if names and set(names) != set(servers):
        raise DocumentError(f"{path} has clusters {sorted(servers)}, and names of {sorted(names)}")
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
