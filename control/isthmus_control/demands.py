"""What a topic namespace asks of the synchronous links that lead it, beyond what every synchronous link promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Consistency(StrEnum):
    """What producers without transactions meet while a partition is Out-Of-Sync."""

    AVAILABLE = "available"
    STRICT = "strict"


class Visibility(StrEnum):
    """What consumers of the source see."""

    LOCAL = "local"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class Demands:
    """``consistency``: strict has plain producers wait as well while a partition is Out-Of-Sync. ``visibility``:
    confirmed shows consumers of the source nothing for which an ack still waits.
    """

    consistency: Consistency = Consistency.AVAILABLE
    visibility: Visibility = Visibility.LOCAL

    @property
    def strict(self) -> bool:
        return self.consistency is Consistency.STRICT

    @property
    def confirmed(self) -> bool:
        return self.visibility is Visibility.CONFIRMED


NONE = Demands()


def combined(demands: Iterable[Demands]) -> Demands:
    """What a topic is given that several namespaces hold: the most that one of them asks."""
    found = NONE
    for each in demands:
        found = Demands(
            each.consistency if each.strict else found.consistency,
            each.visibility if each.confirmed else found.visibility,
        )
    return found
