"""Partitions of which a target refuses something: each waits alone, for longer and longer, and is tried again.

What is refused may be anywhere in what was given together. So it is given in smaller batches where it was too large,
and one batch at a time from then on: all before what is refused is given, and the partition stands right there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from isthmus_control.model import Reason
from isthmus_plugins.cluster import Refusal, TopicPartition
from isthmus_plugins.distributor.reasons import TARGET_REFUSES_RECORDS
from isthmus_protocol.error_codes import MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE
from isthmus_protocol.record_headers import PAYLOAD_BYTES_MAX

TOO_LARGE: Final = frozenset({MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE})
HELD_S, HELD_MAX_S = 0.5, 30.0
"""For how long a partition waits: twice as long each time."""


class _Held(NamedTuple):
    until: float
    """When it is tried again, by the loop's clock; infinite: it is being tried."""
    for_s: float
    one_batch_before: int
    """What was refused is before this offset; up to there one batch is given at a time."""
    reason: Reason


class Holding(NamedTuple):
    """A partition waits."""

    reason: Reason
    is_news: bool
    """It was not waiting, or being tried again."""


class Refusals:
    """Of the target of one distributor."""

    def __init__(self) -> None:
        self._held: dict[TopicPartition, _Held] = {}
        self._payload_max: dict[TopicPartition, int] = {}
        """Where larger batches were refused."""

    def begin(self) -> None:
        """All partitions are tried at once, and nothing is known of what they are refused; of sizes it stays."""
        self._held.clear()

    @property
    def reasons(self) -> Mapping[TopicPartition, Reason]:
        """Why partitions stand still, also those that are just being tried again."""
        return {place: held.reason for place, held in self._held.items()}

    @property
    def next_try(self) -> float:
        """When a partition is tried again, by the loop's clock."""
        return min((held.until for held in self._held.values()), default=math.inf)

    def payload_max(self, place: TopicPartition) -> int:
        """Up to which size batches of a partition are joined."""
        return self._payload_max.get(place, PAYLOAD_BYTES_MAX)

    def one_batch(self, place: TopicPartition) -> bool:
        """Whether what the target refuses is looked for, batch by batch."""
        return place in self._held

    def hold(self, place: TopicPartition, refusal: Refusal, position: int, until: int, now: float) -> Holding | None:
        """Something from ``position`` to ``until`` is refused. The partition waits; None: smaller batches may go.

        ``now``: by the loop's clock.
        """
        error, records, size = refusal
        if error.error_code in TOO_LARGE and records > 1:
            self._payload_max[place] = min(self.payload_max(place), size) // 2
            return None
        before = self._held.get(place)
        for_s = HELD_S if before is None else min(2 * before.for_s, HELD_MAX_S)
        one_batch_before = until if before is None else max(until, before.one_batch_before)
        reason = Reason(
            TARGET_REFUSES_RECORDS, f"the target takes nothing from offset {position} on, and is asked again: {error}"
        )
        self._held[place] = _Held(now + for_s, for_s, one_batch_before, reason)
        return Holding(reason, before is None)

    def due(self, now: float) -> list[TopicPartition]:
        """The partitions to try again now."""
        found = [place for place, held in self._held.items() if held.until <= now]
        for place in found:
            self._held[place] = self._held[place]._replace(until=math.inf)
        return found

    def given(self, place: TopicPartition, position: int) -> None:
        """Everything before ``position`` was taken."""
        held = self._held.get(place)
        if held is None:
            return
        if position >= held.one_batch_before:
            del self._held[place]
        else:
            self._held[place] = held._replace(for_s=HELD_S / 2)
