"""What a source lost that it had acked In-Sync: a power loss took the ends of logs, or a replica led that lacked them.

The target finds it, records it before anything is cut, and every proxy of both clusters tells it until an operator
acknowledges it (``docs/adr/0014``)::

    HELD --the operator says cut, or sets it--> CUTTING --cut, or nothing to cut--> CUT
      |                                            |
      +--------- the namespace is detached --------+--> KEPT

A loss is of one partition: of a topic that follows, or of the source's offsets topic, whose groups' committed offsets
went back. Of the latter there is one for each namespace of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from isthmus_control.model import ResourceType, contains
from isthmus_control.truncations import SalvageFile

TOLD_MAX: Final = 1_000
"""Losses that wait for nobody but whoever acknowledges them: of older ones only the number is kept."""
COMMITS_MAX: Final = 100
"""Of one loss, listed in the control state; the salvage file has them all."""


class LossState(StrEnum):
    """What became of what the target has more than its source."""

    HELD = "held"
    """It stays, and nothing follows into the partition, until the operator decides."""
    CUTTING = "cutting"
    CUT = "cut"
    KEPT = "kept"
    """It stays, and the partition follows no more."""


OPEN: Final = frozenset((LossState.HELD, LossState.CUTTING))


@dataclass(frozen=True, slots=True)
class LostCommit:
    """A group's committed offset that the target has, and what the source has in its place (None: nothing)."""

    group: str
    topic: str
    partition: int
    offset: int
    source_offset: int | None


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """What one partition's source lost: ``[from_offset, to_offset)`` of its log.

    ``number`` names it: where it was recorded first in the command log. ``namespace``: the local prefix of what
    follows. Of groups (``type``) ``topic`` is the source's offsets topic, without ``topic_id``, and the offsets are of
    its log. ``count``: records, markers among them, or committed offsets, which are of so many ``groups``; ``commits``
    are the first of them. ``found_by`` is a proxy's name.
    """

    number: int
    link: str
    type: ResourceType
    namespace: str
    topic: str
    topic_id: str
    partition: int
    from_offset: int
    to_offset: int
    count: int
    state: LossState
    found_ms: int
    found_by: str
    groups: int = 0
    commits: tuple[LostCommit, ...] = ()
    salvaged: SalvageFile | None = None
    acknowledged: bool = False

    @property
    def is_open(self) -> bool:
        """Whether something is still to be done, or decided, where it was lost."""
        return self.state in OPEN

    def holds(self, group: str) -> bool:
        """Whether a group is of the namespace."""
        return contains(ResourceType.CONSUMER_GROUP, self.namespace, group)

    @property
    def what(self) -> str:
        """What was lost, for people."""
        if self.type is ResourceType.TOPIC:
            return (
                f"the source lost {self.count} records of {self.topic}-{self.partition} that it had acked In-Sync, "
                f"offsets {self.from_offset} to {self.to_offset - 1}"
            )
        return (
            f"the source's offsets topic lost the end of partition {self.partition}, from offset {self.from_offset} "
            f"to {self.to_offset - 1}: {self.count} committed offsets of {self.groups} groups went back"
        )

    def describe(self) -> str:
        """What was lost, and what stands still for it, for people."""
        if self.state is not LossState.HELD:
            return self.what
        if self.type is ResourceType.TOPIC:
            done = f"`isthmus topic truncate {self.topic}` cuts it to the source's log, a failover keeps it"
        else:
            done = (
                "they stay here until the group commits again; "
                f"`isthmus link alter {self.link} --type consumer-group --local {self.namespace} --on-source-loss cut` "
                "puts them back, a failover keeps them"
            )
        return f"{self.what}: {done}"


def held_of_topics(losses: Iterable[SourceLoss]) -> Mapping[tuple[str, str], tuple[SourceLoss, ...]]:
    """What waits for the operator, by topic and its id."""
    found: dict[tuple[str, str], tuple[SourceLoss, ...]] = {}
    for loss in losses:
        if loss.state is LossState.HELD and loss.type is ResourceType.TOPIC:
            place = loss.topic, loss.topic_id
            found[place] = (*found.get(place, ()), loss)
    return found
