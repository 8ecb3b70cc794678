"""Which leaf a distributor writes to: the one that was chosen, the one that it is, or one by turns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from isthmus_plugins.distribution.tree import Tree

Targets: TypeAlias = Mapping[tuple[str, int], str]
"""By leaf and level: the target that was chosen."""


def wrong_targets(tree: Tree, targets: Targets) -> Iterator[str]:
    """What is wrong with targets that were chosen."""
    for (leaf, level), target in targets.items():
        if leaf not in tree.leaves:
            yield f"targets.{leaf}: there is no such cluster in the tree; it has {', '.join(tree.leaves)}"
            continue
        above = {each.level: each.beside for each in tree.above(leaf)}
        if level not in above:
            yield f"targets.{leaf}: it has no level {level}; it has {', '.join(map(str, above))}"
        elif target not in above[level]:
            yield (
                f"targets.{leaf}.{level}: {target} is not on the other side of level {level}; choose "
                f"{' or '.join(above[level])}"
            )


def target_of(
    tree: Tree,
    leaf: str,
    level: int,
    chosen: Targets,
    *,
    current: str | None = None,
    unusable: Collection[str] = (),
) -> str | None:
    """Where a distributor is to write. ``current``: where it does; it stays if nobody has chosen another.

    By default the leaves of one side go to those of the other in turn, so that each gets as much. ``unusable``: leaves
    that do not have all yet, or are to be taken out; None where that are all. A leaf that is alone on its side is the
    target whatever it is: it is filled that way.
    """
    (above,) = (above for above in tree.above(leaf) if above.level == level)
    if len(above.beside) == 1:
        return above.beside[0]
    usable = [each for each in above.beside if each not in unusable]
    for wanted in (chosen.get((leaf, level)), current):
        if wanted in usable:
            return wanted
    return usable[above.own.index(leaf) % len(usable)] if usable else None
