"""What a tree comes to: the distributors of each cluster, with bits, masks and targets, for operators to read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from isthmus_plugins.distribution.copy_flags import bit, digits, mask
from isthmus_plugins.distribution.targets import Targets, target_of
from isthmus_plugins.distribution.tree import Node, Tree

DIGITS_MIN = 4


class Distributor(NamedTuple):
    """Reads on one leaf, for one level above it."""

    leaf: str
    level: int
    target: str
    others: tuple[str, ...]
    """More leaves that could be the target."""

    @property
    def bit(self) -> int:
        return bit(self.level)

    @property
    def mask(self) -> int:
        return mask(self.level)


def plan(tree: Tree, targets: Targets) -> list[Distributor]:
    """The distributors of all clusters, the lowest level of each first."""
    found = []
    for leaf in tree.leaves:
        for above in tree.above(leaf):
            target = target_of(tree, leaf, above.level, targets)
            assert target is not None  # each side has a leaf
            others = tuple(each for each in above.beside if each != target)
            found.append(Distributor(leaf, above.level, target, others))
    return found


def as_text(tree: Tree, distributors: Collection[Distributor]) -> str:
    """The plan, for people."""
    width = max(DIGITS_MIN, tree.root.level)
    head = f"tree version {tree.version}: {len(tree.leaves)} clusters, header {tree.header}"
    rows = [("CLUSTER", "LEVEL", "BIT", "MASK", "TARGET", "OR")]
    rows += [
        (
            each.leaf,
            str(each.level),
            digits(each.bit, width),
            digits(each.mask, width),
            each.target,
            " ".join(each.others),
        )
        for each in distributors
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, "", *_drawn(tree.root, width), "", *table]) + "\n"


def _drawn(node: Node, width: int, first: str = "", rest: str = "") -> Iterator[str]:
    if isinstance(node, str):
        yield f"{first}{node}"
        return
    yield f"{first}level {node.level}  mask {digits(mask(node.level), width)}"
    above, last = node.sides
    yield from _drawn(above, width, f"{rest}├─ ", f"{rest}│  ")
    yield from _drawn(last, width, f"{rest}└─ ", f"{rest}   ")


def as_json(tree: Tree, distributors: Collection[Distributor]) -> dict[str, Any]:
    """The plan, for programs."""
    return {
        "version": tree.version,
        "header": tree.header,
        "clusters": [
            {
                "name": leaf,
                "distributors": [
                    {
                        "level": each.level,
                        "bit": each.bit,
                        "mask": each.mask,
                        "target": each.target,
                        "other_targets": list(each.others),
                    }
                    for each in distributors
                    if each.leaf == leaf
                ],
            }
            for leaf in tree.leaves
        ],
    }
