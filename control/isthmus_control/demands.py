"""What a namespace of topics or groups asks of the synchronous links that lead it, beyond what each promises."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Consistency(StrEnum):
    """What producers without transactions meet while a partition is Out-Of-Sync."""

    AVAILABLE = "available"
    STRICT = "strict"


class Visibility(StrEnum):
    """What consumers of the source see."""

    LOCAL = "local"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class Confirm:
    """Which links an ack waits for: ``count`` of ``links`` and each that is not among them; :data:`ALL`: each.

    ``links`` are names, in their order.
    """

    count: int = 0
    links: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.links)

    def __str__(self) -> str:
        return f"ANY {self.count} ({', '.join(self.links)})" if self.links else "ALL"

    @classmethod
    def parse(cls, text: str) -> Confirm:
        """``ALL``, or ``ANY k (link, ...)``. Raises ValueError."""
        if text.strip().upper() == "ALL":
            return ALL
        found = re.fullmatch(r"\s*ANY\s+(\d{1,3})\s*\(([^()]*)\)\s*", text, re.IGNORECASE)
        names = [each.strip() for each in found[2].split(",")] if found else []
        if found is None or not all(names):
            raise ValueError(f"{text!r} is neither ALL nor like 'ANY 1 (link-b, link-c)'")
        return cls(int(found[1]), tuple(sorted(names)))


ALL: Final = Confirm()
NEVER: Final = 0
"""In place of a time."""


@dataclass(frozen=True, slots=True)
class Demands:
    """``consistency``: strict has plain producers wait as well while a partition is Out-Of-Sync. ``visibility``:
    confirmed shows consumers of the source nothing for which an ack still waits (topics alone). ``degrade_after_ms``:
    acks that wait for a partition that is Out-Of-Sync for longer go without it. ``confirm``: which links acks wait for.

    Of groups, commits outside of transactions are what plain producers write.
    """

    consistency: Consistency = Consistency.AVAILABLE
    visibility: Visibility = Visibility.LOCAL
    degrade_after_ms: int = NEVER
    confirm: Confirm = ALL

    @property
    def strict(self) -> bool:
        return self.consistency is Consistency.STRICT

    @property
    def confirmed(self) -> bool:
        return self.visibility is Visibility.CONFIRMED


NONE = Demands()


def combined(demands: Iterable[Demands]) -> Demands:
    """What a topic or group is given that several namespaces hold: the most that one of them asks.

    So acks go without a link only where all of them say so: after the longest time, by the same set of links.
    """
    found = list(demands)
    if not found:
        return NONE
    times, confirms = [each.degrade_after_ms for each in found], {each.confirm for each in found}
    return Demands(
        Consistency.STRICT if any(each.strict for each in found) else Consistency.AVAILABLE,
        Visibility.CONFIRMED if any(each.confirmed for each in found) else Visibility.LOCAL,
        NEVER if NEVER in times else max(times),
        confirms.pop() if len(confirms) == 1 else ALL,
    )
