"""Where the logs of led partitions ended when that was read last, as a target was asked to make their topics.

Whoever follows one that had nothing lacks nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.process import PluginContext

KNOWN_S: Final = 3.0
"""How long that is said of a partition: a new topic is made on the target and followed within a second."""


class RecentEnds:
    """Of this cluster, as far as it was asked."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._known: dict[tuple[bytes, int], tuple[int, float]] = {}
        """By topic id and partition: where its log ended, and when that was asked (monotonic seconds)."""

    async def read(self, topics: Iterable[TopicInfo]) -> None:
        """Ask for all partitions of some topics; what cannot be read now is not known. Raises BrokerUnavailable."""
        now = self._clock.monotonic()
        self._known = {place: known for place, known in self._known.items() if now - known[1] < KNOWN_S}
        places = {
            (topic.name, each): (topic.topic_id, each) for topic in topics for each in range(len(topic.partitions))
        }
        ends = await self._context.cluster.log_ends(places) if places else {}
        self._known |= {places[place]: (end, now) for place, end in ends.items()}

    def end(self, topic_id: bytes, partition: int) -> int | None:
        """Where a partition's log ended just now; None: that was not read lately."""
        end, read_at = self._known.get((topic_id, partition), (None, float("-inf")))
        return end if self._clock.monotonic() - read_at < KNOWN_S else None

    def is_empty(self, topic_id: bytes, partition: int) -> bool | None:
        """Whether a partition was empty just now; None: that was not read lately."""
        end = self.end(topic_id, partition)
        return None if end is None else end == 0
