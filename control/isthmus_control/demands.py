"""What a topic namespace asks of the synchronous links that lead it, beyond what every synchronous link promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Consistency(StrEnum):
    """What producers without transactions meet while a partition is Out-Of-Sync."""

    AVAILABLE = "available"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Demands:
    """``consistency``: strict has plain producers wait as well while a partition is Out-Of-Sync."""

    consistency: Consistency = Consistency.AVAILABLE

    @property
    def strict(self) -> bool:
        return self.consistency is Consistency.STRICT


NONE = Demands()


def combined(demands: Iterable[Demands]) -> Demands:
    """What a topic is given that several namespaces hold: the most that one of them asks."""
    return Demands(max((each.consistency for each in demands), key=list(Consistency).index, default=NONE.consistency))
