"""The truncation of a follower topic: what is recorded of it, and the order of its steps.

A log's end can only be cut by making its topic anew, so a truncation is about a whole topic: what it holds beyond the
source's log goes to salvage files, what both logs share goes to a spool topic of the same cluster, the topic is
deleted, made again, refilled from the spool. A phase names what is being done *next*, and is recorded before that
begins; each can be done again from its beginning, by any proxy, until the next one is recorded::

    COMPARING -> SALVAGING -> SPOOLING -> RECREATING -> REFILLING -> RESTORING -> CLEANING -> DONE
      ^   |         |  |         |         |  ^             |  |         ^
      |   |         |  |         |         |  +-------------+  |         |  the refilled log is not what was spooled
      +---|---------+--|---------|---------+  |                |         |  somebody wrote although it is frozen,
          |            |         |            |                |         |  another replica leads, or the spool is lost
          |            |         |            |                |         |  and the old topic there
          |            |         |            +-- CATCHING_UP <+ --------+  the spool is lost: the link refills it
          +------------+---------+-> CANCELLING -> DONE        nothing to cut, or it follows no more

One proxy, the *owner*, carries it out; who finds that the owner's lease is gone takes over. Commands name their owner,
so what a process decides that slept through its own end is rejected.

The new topic *succeeds* the old one, up to the cut: so a third cluster, which followed the old one, learns it. There it
begins a truncation as well, whose ``source`` is the succession: the topic there is cut to correspond with the new one,
and follows that from then on, also where nothing had to be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from isthmus_control.model import INTERNAL_PREFIX, Reason

SPOOL_PREFIX = INTERNAL_PREFIX + "spool_"
"""Topics that hold what is put back into a topic that is truncated, followed by its old topic id and the attempt."""
PAST_TRUNCATIONS_MAX = 100
ELECTIONS_MAX = 1_000
"""So many leaders a partition may get between the begin of its truncation and the end of the old topic."""
MOVED_OFFSETS_MAX = 1_000
"""Of one truncation, listed in the control state; the log has them all."""
SUCCESSIONS_MAX = 100
"""Of one topic. A follower that slept through more of them is refused."""


class TruncationPhase(StrEnum):
    """What is done next."""

    COMPARING = "comparing"
    """Nobody writes any more; up to where are both logs the same?"""
    SALVAGING = "salvaging"
    """What is beyond goes to files."""
    SPOOLING = "spooling"
    """What is before, and the committed offsets of groups, go to the spool. From here on clients wait."""
    RECREATING = "recreating"
    REFILLING = "refilling"
    CATCHING_UP = "catching-up"
    """The spool is lost: what it held comes from the source again."""
    RESTORING = "restoring"
    """Groups get their committed offsets back."""
    CLEANING = "cleaning"
    """The topic is whole; the spool goes."""
    CANCELLING = "cancelling"
    """It stays as it is and may be written again."""
    DONE = "done"


_P = TruncationPhase
TRUNCATION_TRANSITIONS: Mapping[TruncationPhase, frozenset[TruncationPhase]] = MappingProxyType(
    {
        _P.COMPARING: frozenset((_P.SALVAGING, _P.CANCELLING)),
        _P.SALVAGING: frozenset((_P.SPOOLING, _P.COMPARING, _P.CANCELLING)),
        _P.SPOOLING: frozenset((_P.RECREATING, _P.COMPARING, _P.CANCELLING)),
        _P.RECREATING: frozenset((_P.REFILLING, _P.COMPARING)),
        _P.REFILLING: frozenset((_P.RESTORING, _P.RECREATING, _P.CATCHING_UP)),
        _P.CATCHING_UP: frozenset((_P.RESTORING, _P.RECREATING)),
        _P.RESTORING: frozenset((_P.CLEANING,)),
        _P.CLEANING: frozenset((_P.DONE,)),
        _P.CANCELLING: frozenset((_P.DONE,)),
        _P.DONE: frozenset(),
    }
)
WITHHELD = frozenset((_P.SPOOLING, _P.RECREATING, _P.REFILLING, _P.CATCHING_UP, _P.RESTORING, _P.CLEANING))
"""Phases in which clients of the topic wait."""
CANCELLABLE = frozenset((_P.COMPARING, _P.SALVAGING, _P.SPOOLING))
"""Phases in which the old topic is still there, whole."""


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition as it was last shown to clients."""

    leader: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class PartitionCut:
    """Where the log of a partition was cut: ``[log_start, offset)`` stays, ``[offset, log_end)`` goes.

    ``offset`` is the beginning of the batch in which the first difference stands.
    """

    partition: int
    log_start: int
    offset: int
    log_end: int

    @property
    def records(self) -> int:
        """Offsets that are cut."""
        return self.log_end - self.offset


@dataclass(frozen=True, slots=True)
class SalvageFile:
    """Where the records of a partition went: ``path`` on the machine of ``proxy``."""

    partition: int
    proxy: str
    path: str
    records: int


@dataclass(frozen=True, slots=True)
class MovedOffset:
    """A group's committed offset that was beyond the cut and was moved to it."""

    group: str
    partition: int
    offset: int
    moved_to: int


@dataclass(frozen=True, slots=True)
class Succession:
    """A topic was made anew: ``[0, offsets[p])`` of each partition p holds in ``successor`` what it held in ``former``.

    Both are topic ids (UUIDs as text).
    """

    former: str
    successor: str
    offsets: tuple[int, ...]

    def then(self, later: Succession) -> Succession:
        """Both, one after the other: of the partitions that the former one had, later ones may have more."""
        offsets = tuple(min(pair) for pair in zip(self.offsets, later.offsets, strict=False))
        return Succession(self.former, later.successor, offsets)


def succession(chain: Sequence[Succession], former: str, successor: str) -> Succession | None:
    """What a chain, oldest first, says of these two topics; None if it does not lead from one to the other."""
    found: Succession | None = None
    for each in reversed(chain):
        if each.successor != (successor if found is None else found.former):
            return None
        found = each if found is None else each.then(found)
        if found.former == former:
            return found
    return None


@dataclass(frozen=True, slots=True)
class TopicLayout:
    """What a topic is made anew with. ``groups``: so many have committed offsets in it, which the spool holds."""

    replication_factor: int
    configs: Mapping[str, str]
    groups: int


@dataclass(frozen=True, slots=True)
class EpochShift:
    """By how much the leader epochs of a topic that was made anew are raised, so that clients see them rise."""

    topic_id: str
    by: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """One truncation of a follower topic.

    ``topic_id`` is the old topic's (UUID as text), ``new_topic_id`` that of the one made in its place.
    ``owner`` is an incarnation, ``proxy`` its name. ``message_bytes_max`` is the topic's own ``max.message.bytes``
    before it was frozen (None: it had none). ``epochs_shifted_by`` is how its epochs were shown to clients. ``trouble``
    says why the phase does not end. ``attempt`` names the spool that is whole: each attempt to fill one has its own, so
    that nobody who slept through the loss of the truncation touches what the next owner made. ``source``: the source's
    topic succeeded the one that was followed. ``positions_lost``: the spool was lost with the committed offsets of
    groups.
    ``given_up``: the operator has what is there while it catches up taken for all there is. ``compared_at``: who led
    the partitions when the logs were compared: each replica of a compacted log is cleaned by itself.
    ``refills_failed``: how often the new topic did not become what was spooled, the last time because of
    ``refill_failure``. ``stuck``: why the source refills the topic no further while it catches up, as the proxy says to
    which that happened.
    """

    link: str
    topic: str
    topic_id: str
    reason: Reason
    partitions: tuple[PartitionView, ...]
    message_bytes_max: str | None
    proxy: str
    owner: str
    began_ms: int
    phase: TruncationPhase
    phase_ms: int
    trouble: Reason | None = None
    cuts: tuple[PartitionCut, ...] = ()
    salvaged: tuple[SalvageFile, ...] = ()
    new_topic_id: str | None = None
    moved: tuple[MovedOffset, ...] = ()
    moved_count: int = 0
    epochs_shifted_by: int = 0
    attempt: str | None = None
    source: Succession | None = None
    layout: TopicLayout | None = None
    positions_lost: bool = False
    given_up: bool = False
    compared_at: tuple[PartitionView, ...] = ()
    refills_failed: int = 0
    refill_failure: str | None = None
    stuck: Reason | None = None

    def spool(self, attempt: str | None) -> str:
        """The name of an attempt's spool topic."""
        return SPOOL_PREFIX + self.topic_id + ("" if attempt is None else f"_{attempt}")

    def is_spool(self, topic: str) -> bool:
        """Whether a topic is the spool of one of its attempts."""
        return topic.startswith(SPOOL_PREFIX + self.topic_id)

    @property
    def records(self) -> int:
        """Offsets that are cut, of all partitions."""
        return sum(cut.records for cut in self.cuts)

    @property
    def withheld(self) -> bool:
        """Whether every proxy answers clients of the topic "try again": not while the old one waits for somebody."""
        return self.phase in WITHHELD and (self.phase not in CANCELLABLE or self.trouble is None)

    @property
    def follows(self) -> bool:
        """Whether the topic follows the source although it is not whole yet."""
        return self.phase is TruncationPhase.CATCHING_UP

    def describe(self) -> str:
        """What is being done, and what keeps it, for people."""
        trouble = f"; {self.trouble.message}" if self.trouble is not None else ""
        if self.refills_failed:
            trouble += f"; refilled {self.refills_failed} times in vain, the last time because {self.refill_failure}"
        return f"{self.topic} is being truncated ({self.phase} on proxy {self.proxy}): {self.reason.message}{trouble}"

    def shown_epoch(self, partition: int) -> int:
        """The leader epoch that clients are shown meanwhile: above all that they were shown before."""
        return self.partitions[partition].leader_epoch + self.epochs_shifted_by + ELECTIONS_MAX

    @property
    def epoch_shift(self) -> EpochShift | None:
        """How the epochs of the topic that is made are shown: above :meth:`shown_epoch`."""
        if self.new_topic_id is None:
            return None
        highest = max(self.shown_epoch(partition) for partition in range(len(self.partitions)))
        return EpochShift(self.new_topic_id, highest + 1)

    @property
    def succession(self) -> Succession | None:
        """The topic that was made succeeds the old one."""
        if self.new_topic_id is None:
            return None
        return Succession(self.topic_id, self.new_topic_id, tuple(cut.offset for cut in self.cuts))

    def cut(self, partition: int) -> PartitionCut | None:
        return next((cut for cut in self.cuts if cut.partition == partition), None)

    def salvage_file(self, partition: int) -> SalvageFile | None:
        return next((file for file in self.salvaged if file.partition == partition), None)
