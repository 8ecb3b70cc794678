"""Which attachments of two namespaces refuse each other because their prefixes overlap.

In words, for people who plan; :mod:`isthmus_control.rules.links` decides, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from isthmus_control.model import overlap


class Roles(StrEnum):
    """Of the two namespaces."""

    FOLLOW = "both follow"
    LEAD = "both lead"
    EITHER = "one follows, one leads"


class Links(StrEnum):
    """Over which the two are attached."""

    ONE = "one link"
    ONE_CLUSTER = "two links to one cluster, where the prefixes overlap, too"
    ANY = "any links"


class Clash(NamedTuple):
    """What is refused, and why."""

    roles: Roles
    links: Links
    reason: str


CLASHES: Final = (
    Clash(Roles.FOLLOW, Links.ANY, "a name follows one link at most"),
    Clash(Roles.LEAD, Links.ONE, "a name would have two counterparts"),
    Clash(Roles.LEAD, Links.ONE_CLUSTER, "two namespaces would meet there"),
    Clash(Roles.EITHER, Links.ONE, "what comes from there would go back"),
    Clash(Roles.EITHER, Links.ONE_CLUSTER, "what comes from there would go back"),
)
"""Of two namespaces of one type that overlap. What is not listed stands beside each other: overlapping namespaces
that both lead over links to several clusters, one that is attached and one that is not, reserved ones."""


class Relation(StrEnum):
    """Which names two prefixes share."""

    NONE = "none"
    SAME = "same"
    HOLDS = "holds"
    """The first one's namespace has all names of the second one's."""
    HELD = "held"
    """The second one's has all of the first one's."""


def relation(first: str, second: str) -> Relation:
    """Of two namespaces of one type."""
    if first == second:
        return Relation.SAME
    if not overlap(first, second):
        return Relation.NONE
    return Relation.HOLDS if second.startswith(first) else Relation.HELD
