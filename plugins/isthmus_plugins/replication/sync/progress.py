"""How far a partition of a synchronous link is on its way into In-Sync, or out of it, as one proxy knows it.

The phase says what acks of the partition wait for (docs/adr/0006)::

    OUT ─recorded─► JOINING ─asked─► ASKING ─read─► CATCHING_UP ─level─► LEVEL ─reached─► IN_SYNC ─lost─► LEAVING
                     ▲  ▲              │                                                    │
                     │  └───not read───┘                                                    │
                     └───────────────────────────led elsewhere──────────────────────────────┘

    JOINING, ASKING, CATCHING_UP, LEVEL ─lost─► GIVING_UP;  GIVING_UP ─reached─► LEAVING ─led elsewhere─► GIVING_UP
    from everywhere: ─recorded─► JOINING, ─ended─► OUT

``TRANSITIONS`` is the whole machine: what is not in it raises :class:`ImpossibleTransition`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from isthmus_control.model import SyncRecord

NOT_READ: Final = -1
"""In place of a log's end that is being read."""


class Phase(Enum):
    """What acks of a partition wait for."""

    OUT = "out"
    """No record In-Sync is in force: acks go without the other side, or not at all, as the namespace asks."""
    JOINING = "joining"
    """It is recorded In-Sync, which makes every proxy hold acks. From where on they all do is to be asked."""
    ASKING = "asking"
    """All proxies are waited for, then the log's end is read."""
    CATCHING_UP = "catching up"
    """Every proxy holds acks, and the other side lacks something from before that."""
    LEVEL = "level"
    """The other side has all from before. That this was reached is to be recorded."""
    IN_SYNC = "in sync"
    """Every ack means that both sides have it, and leases say so."""
    GIVING_UP = "giving up"
    """It did not get there. What was begun is carried through: a record may have been made whose answer was lost."""
    LEAVING = "leaving"
    """It was In-Sync. No lease is granted any more; it is recorded Out-Of-Sync when the last one has run out."""


class Event(Enum):
    """What moves a partition from one phase to another."""

    RECORDED = "recorded"
    """A record In-Sync is in force, which was not, or is another one."""
    ASKED = "asked"
    READ = "read"
    UNREAD = "not read"
    LEVEL = "level"
    REACHED = "reached"
    LED_ELSEWHERE = "led elsewhere"
    """Another process may have acked without it, under another leader epoch."""
    LOST = "lost"
    ENDED = "ended"
    """The record is none any more, or means something else."""


_P, _E = Phase, Event

TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        **{(phase, _E.RECORDED): _P.JOINING for phase in Phase},
        **{(phase, _E.ENDED): _P.OUT for phase in Phase},
        (_P.JOINING, _E.ASKED): _P.ASKING,
        (_P.ASKING, _E.READ): _P.CATCHING_UP,
        (_P.ASKING, _E.UNREAD): _P.JOINING,
        (_P.CATCHING_UP, _E.LEVEL): _P.LEVEL,
        (_P.LEVEL, _E.LEVEL): _P.LEVEL,
        (_P.LEVEL, _E.REACHED): _P.IN_SYNC,
        (_P.IN_SYNC, _E.LED_ELSEWHERE): _P.JOINING,
        (_P.IN_SYNC, _E.LOST): _P.LEAVING,
        (_P.LEAVING, _E.LOST): _P.LEAVING,
        (_P.LEAVING, _E.LED_ELSEWHERE): _P.GIVING_UP,
        **{(phase, _E.LOST): _P.GIVING_UP for phase in (_P.JOINING, _P.ASKING, _P.CATCHING_UP, _P.LEVEL, _P.GIVING_UP)},
        # What is under way for it when it gives up may come to its end.
        **{(_P.GIVING_UP, event): _P.GIVING_UP for event in (_E.ASKED, _E.READ, _E.UNREAD, _E.LEVEL)},
        (_P.GIVING_UP, _E.REACHED): _P.LEAVING,
    }
)


class ImpossibleTransition(Exception):
    """The event cannot happen in this phase: whoever drives the machine is wrong about the phase."""


@dataclass(slots=True)
class Progress:
    """What this proxy knows of a partition that it pushes over a synchronous link."""

    seen_at: float
    """Since when this proxy pushes it: the one before it may have granted a lease just before."""
    epoch: int
    """The source's leader epoch then. Under another one, another proxy may have pushed it, and have granted leases."""
    phase: Phase = Phase.OUT
    led_id: bytes | None = None
    """Of the topic that this proxy pushes; None: it is not known yet."""
    topic_id: str = ""
    """Of the topic that joined last."""
    joining: int | None = None
    """Where the record In-Sync that is in force stands in the control log; None without one."""
    joined_at: float = 0.0
    held_at: float | None = None
    """Since when every proxy holds acks."""
    join_end: int | None = None
    """The log's end when every proxy held acks; NOT_READ while it is being read, None before."""
    floor: int | None = None
    """From where on this proxy knows of every decision to commit in it; None: not yet."""
    suspended: bool = False
    """Transactions went on without it: until it joins again nobody knows of all decisions, nor does a marker wait."""
    level_epoch: int = -1
    """The source's leader epoch at which it was level."""
    from_first: bool = False
    """Acks have been held since its first record, though In-Sync is not reached yet."""
    is_new: bool = False
    """This process recorded that: it has seen every decision to commit in it."""
    why: str | None = None
    """What it leaves, or gives up, for."""
    lost_at: float | None = None
    """Since when there is no stream."""
    confirmed: int = 0
    """The furthest that the other side has confirmed since it was level."""
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
    def was_granted(self) -> bool:
        """Whether the other side was ever told, for as long as a lease runs, that it has something."""
        return self.granted_at > float("-inf")

    @property
    def promised_at(self) -> float:
        """When it was last said that it has something."""
        return max(self.granted_at, self.counted_at, self.seen_at)

    def leader_moved(self, epoch: int, now: float) -> None:
        """The source's leader epoch is this one, -1 for not known: another proxy may have pushed it until now."""
        if epoch not in (-1, self.epoch):
            self.epoch, self.seen_at = epoch, now

    @property
    def was_in_sync(self) -> bool:
        """Whether leases may say that it is In-Sync: it is, or has not left yet."""
        return self.phase in (Phase.IN_SYNC, Phase.LEAVING)

    @property
    def is_level(self) -> bool:
        """Whether the other side has had all that was acked, and is to have it still."""
        return self.phase in (Phase.LEVEL, Phase.IN_SYNC, Phase.LEAVING)

    @property
    def asks(self) -> bool:
        """Whether the log's end from which on acks are held is to be asked for."""
        return self.phase is not Phase.OUT and self.join_end is None

    def _move(self, event: Event) -> None:
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            raise ImpossibleTransition(f"a partition that is {self.phase.value} cannot see {event.value!r}")
        self.phase = after

    def leaves(self) -> None:
        """It is recorded In-Sync no more, or means something else: no lease is granted until it joins again."""
        self._move(Event.ENDED)
        self.from_first = self.is_new = False
        self.joining = self.join_end = self.held_at = self.why = None

    def joins(self, record: SyncRecord, now: float) -> None:
        """It is recorded In-Sync."""
        self._move(Event.RECORDED)
        self.joining, self.joined_at, self.why = record.at_offset, now, None
        self.join_end, self.held_at = None, None
        if self.suspended or record.topic_id != self.topic_id:
            self.floor, self.suspended = 0 if self.is_new and record.from_first else None, False
        self.topic_id, self.from_first, self.is_new = record.topic_id, record.from_first, False

    def asked(self) -> None:
        """All proxies are waited for, and the log's end is read then."""
        self._move(Event.ASKED)
        self.join_end = NOT_READ

    def read(self, end: int | None, now: float) -> None:
        """Every proxy holds acks, and the log ended at ``end``; None: that could not be read."""
        self._move(Event.UNREAD if end is None else Event.READ)
        self.join_end, self.held_at = end, None if end is None else now
        if self.floor is None:
            self.floor = end

    def has(self, acked: int, leader_epoch: int) -> None:
        """The other side has all before ``acked``, which it may need to be level."""
        if self.phase is Phase.OUT or self.join_end in (None, NOT_READ) or acked < (self.join_end or 0):
            return
        self._move(Event.LEVEL)
        self.confirmed, self.level_epoch = acked, leader_epoch

    def awaits_reached(self, record: SyncRecord) -> bool:
        """Whether it is to be recorded of what joined by this record that it was level."""
        return self.joining == record.at_offset and self.phase in (Phase.LEVEL, Phase.GIVING_UP)

    def reached(self, at_offset: int) -> None:
        """It is recorded, at this offset of the control log, that it was level."""
        self._move(Event.REACHED)
        self.from_first = False
        self.joining, self.failed = at_offset, None
        self.out_since, self.probe = None, None

    def led_elsewhere(self, now: float) -> None:
        """Acks of another process may have gone without it: it has to get level once more."""
        self._move(Event.LED_ELSEWHERE)
        self.joined_at, self.join_end, self.held_at = now, None, None

    def lost(self, why: str) -> None:
        """It leaves, or gives up."""
        self._move(Event.LOST)
        self.why = why

    def late_since(self, confirmed: int, acked: int, now: float) -> float | None:
        """Since when it lacks what was acked without it; no earlier than when it was last found."""
        if self.probe is not None and confirmed >= self.probe[0]:
            self.probe = None
        if self.probe is None and confirmed < acked:
            self.probe = acked, now
        return None if self.probe is None else self.probe[1]
