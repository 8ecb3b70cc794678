"""How far a partition of a synchronous link is on its way into In-Sync, or out of it, as one proxy knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from isthmus_control.model import SyncRecord

NOT_READ: Final = -1
"""In place of a log's end that is being read."""


@dataclass(slots=True)
class Progress:
    """What this proxy knows of a partition that it pushes over a synchronous link."""

    seen_at: float
    """Since when this proxy pushes it: the one before it may have granted a lease just before."""
    epoch: int
    """The source's leader epoch then. Under another one, another proxy may have pushed it, and have granted leases."""
    topic_id: str = ""
    """Of the topic that joined last."""
    joining: int | None = None
    """Where the record In-Sync that is in force stands in the control log; None without one."""
    joined_at: float = 0.0
    held_at: float | None = None
    """Since when every proxy holds acks."""
    join_end: int | None = None
    """The log's end when every proxy held acks."""
    floor: int | None = None
    """From where on this proxy knows of every decision to commit in it; None: not yet."""
    suspended: bool = False
    """Transactions went on without it: until it joins again nobody knows of all decisions, nor does a marker wait."""
    level: bool = False
    level_epoch: int = -1
    """The source's leader epoch at which it was level."""
    in_sync: bool = False
    why: str | None = None
    """It leaves, for this. What was begun is carried through: a record may have been made whose answer was lost."""
    lost_at: float | None = None
    """Since when there is no stream."""
    confirmed: int = 0
    granted_at: float = float("-inf")
    counted_at: float = float("-inf")
    """When another link was granted a lease that counts on this one."""
    out_since: float | None = None
    """Since when it is Out-Of-Sync, for this process; until it is in sync."""
    probe: tuple[int, float] | None = None
    """An offset that was acked without it, and since when it lacks that."""
    retry_at: float = float("-inf")
    late: bool = False
    """It lacks something for so long that it may leave soon; as of the last look."""
    failed: str | None = None
    """Why it did not get In-Sync when it tried last."""

    @property
    def promised_at(self) -> float:
        """When it was last said that it has something."""
        return max(self.granted_at, self.counted_at, self.seen_at)

    def leader_moved(self, epoch: int, now: float) -> None:
        """The source's leader epoch is this one, -1 for not known: another proxy may have pushed it until now."""
        if epoch not in (-1, self.epoch):
            self.epoch, self.seen_at = epoch, now

    def leaves(self) -> None:
        """It is recorded In-Sync no more, or means something else: no lease is granted until it joins again."""
        self.joining, self.in_sync, self.level = None, False, False

    def joins(self, record: SyncRecord, now: float) -> None:
        """It is recorded In-Sync."""
        self.joining, self.joined_at = record.at_offset, now
        self.level, self.in_sync, self.why = False, False, None
        self.join_end, self.held_at = None, None
        if self.suspended or record.topic_id != self.topic_id:
            self.floor, self.suspended = None, False
        self.topic_id = record.topic_id

    def late_since(self, confirmed: int, acked: int, now: float) -> float | None:
        """Since when it lacks what was acked without it; no earlier than when it was last found."""
        if self.probe is not None and confirmed >= self.probe[0]:
            self.probe = None
        if self.probe is None and confirmed < acked:
            self.probe = acked, now
        return None if self.probe is None else self.probe[1]
