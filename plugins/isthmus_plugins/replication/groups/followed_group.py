"""One group that follows: what its source wants, what its coordinator has, and so what there is to do. No I/O.

What cannot be done now is pending, with its reason:

====================================  ==================================================================================
``BEYOND_FOLLOWER_END``               the commit is ahead of the data, or its topic does not follow (yet)
``MEMBERS_SUBSCRIBED``                a deletion that the coordinator refuses while members are there
``TOPICS_DIFFER``                     the topic is attached at one end of the link alone, so nothing is done
``SOURCE_TRUNCATING``                 the source's topic is being truncated, so what groups have there is not pushed now
``TRUNCATING``                        the topic has records that go, so it is not known where its data ends
``TRANSACTIONS_ENDING``               transactions of this cluster's own may commit offsets of the group when they end
``COORDINATOR_NOT_AVAILABLE``         the group's coordinator moves, loads, or does not answer
``TRANSACTION_VERIFICATION_ENABLED``  the brokers verify transactions, so they take no commits in a group's place
``POSITION_NOT_KNOWN``                the source's newest commit cannot be read: what the coordinator has stays
``SOURCE_LOST_COMMITS``               the source lost what it had acked In-Sync: what the coordinator has stays for now
``TARGET_REFUSES_OFFSETS``            the coordinator answers with an error that does not pass by itself
====================================  ==================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.replication.link import calls

"""Topic and partition."""

BEYOND_FOLLOWER_END: Final = "BEYOND_FOLLOWER_END"
MEMBERS_SUBSCRIBED: Final = "MEMBERS_SUBSCRIBED"
COORDINATOR_NOT_AVAILABLE: Final = "COORDINATOR_NOT_AVAILABLE"
POSITION_NOT_KNOWN: Final = "POSITION_NOT_KNOWN"
TOPICS_DIFFER: Final = "TOPICS_DIFFER"
TARGET_REFUSES_OFFSETS: Final = "TARGET_REFUSES_OFFSETS"

COMPARE_INTERVAL_S: Final = 10.0
"""How often what coordinators have is read again although nothing happened: somebody else may have changed it."""
NEVER: Final = float("inf")
FIRST_RENEWAL_MAX_S: Final = 600.0
"""Nobody knows how old committed offsets are that were found: they are renewed within this time."""


class Pending(NamedTuple):
    """Why something is not done yet."""

    code: str
    message: str


STOPPED: Final = frozenset(
    {
        POSITION_NOT_KNOWN,
        TARGET_REFUSES_OFFSETS,
        ReasonCode.TRANSACTION_VERIFICATION_ENABLED,
        ReasonCode.SOURCE_LOST_COMMITS,
    }
)
"""Reasons that somebody must remove."""


class Plan(NamedTuple):
    """What is to be done for one group now."""

    commit: dict[TopicPartition, CommittedOffset]
    renew: dict[TopicPartition, CommittedOffset]
    """As the coordinator has it: committed again, so that it does not expire."""
    delete: set[TopicPartition]
    delete_group: bool

    @property
    def changes(self) -> dict[TopicPartition, CommittedOffset | None]:
        """What it would make of what the coordinator has."""
        return {**dict.fromkeys(self.delete), **self.renew, **self.commit}

    def __bool__(self) -> bool:
        return bool(self.commit or self.renew or self.delete or self.delete_group)


class FollowedGroup:
    """One group of this cluster: what its source wants, what the coordinator has of it."""

    def __init__(self, link: str, group: str, source_partition: int) -> None:
        self.link = link
        self.group = group
        self.source_partition = source_partition
        """Of the source's offsets topic."""
        self.wanted: dict[TopicPartition, CommittedOffset] = {}
        self._at: dict[TopicPartition, int] = {}
        """Where in the source's offsets topic that came to count."""
        self.differences: set[TopicPartition] = set()
        """Where the coordinator does not have what is wanted, but for those that are left as they are."""
        self.unknown: set[TopicPartition] = set()
        """Committed offsets whose newest commit at the source cannot be read."""
        self.silent: dict[TopicPartition, Pending] = {}
        """Committed offsets that are left as they are, whatever is pushed now; and why."""
        self.silent_by: object = None
        """What that was found by; None: the group has got or lost committed offsets since."""
        self.deleting = False
        """The source has no such group any more."""
        self.has: dict[TopicPartition, CommittedOffset] | None = None
        """In the link's topics. None: not read yet, or in doubt."""
        self._had: Mapping[TopicPartition, CommittedOffset] = {}
        """What it had when that was known last, while it is not known."""
        self._tried: dict[TopicPartition, CommittedOffset | None] = {}
        """What requests of unknown fate may have made of it."""
        self._lost: dict[TopicPartition, CommittedOffset] = {}
        """What the coordinator was found to have no more, and was not given again, nor what came after it."""
        self.has_others = False
        """Whether it has committed offsets in topics of its own."""
        self.unsure = True
        """Whether somebody's request of before may have left a committed offset that is ahead of the data by now."""
        self.read_at = 0.0
        """When all that is to be read (again)."""
        self.certain_from = 0.0
        """Until then somebody's request of before may be carried out, and put an older committed offset over a newer
        one."""
        self._own: Pending | None = None
        """Why transactions of this cluster's own may do so, however long that takes; None: they may not."""
        self.certain = False
        """Whether what the coordinator has was read after that."""
        self._source_has: dict[TopicPartition, tuple[CommittedOffset, bool]] = {}
        """By partition: what was wanted when the source was asked, and whether its log has the data up to there."""
        self.since: dict[TopicPartition, float] = {}
        """When what is wanted and not there came to be wanted."""
        self.renew_at: dict[TopicPartition, float] = {}
        self._first_renewal = NEVER
        """None of them is before this."""
        self.pending: dict[TopicPartition | None, Pending] = {}
        """By partition; None is the group itself."""
        self.retry_at = 0.0
        self.failures = 0
        self.busy = False

    @property
    def source(self) -> tuple[str, int]:
        """Where it is pushed from: the link, and the partition of the source's offsets topic."""
        return self.link, self.source_partition

    def want(self, place: TopicPartition, wanted: CommittedOffset | None, since: float, at: int = -1) -> None:
        """The source's committed offset is this now (None: there is none); ``at``: since where in its offsets topic."""
        if place in self.unknown or place in self.silent or (place in self.wanted) is not (wanted is not None):
            self.silent_by = None
        self.unknown.discard(place)
        if wanted != self.wanted.get(place):
            self._source_has.pop(place, None)
        if wanted is None:
            self.wanted.pop(place, None)
            self._at.pop(place, None)
        else:
            self.wanted[place], self._at[place] = wanted, at
            self.deleting = False
        self.since.setdefault(place, since)
        self.retry_at = 0.0
        self._compare(place)

    def not_known(self, place: TopicPartition) -> None:
        """The source's newest commit there cannot be read."""
        self.unknown.add(place)
        self.silent_by = None
        self._compare(place)

    def source_ends(self, place: TopicPartition, has_data: bool) -> None:
        """The source was asked: its log has the data up to what is wanted there, or it has less, and no more comes."""
        self._source_has[place] = self.wanted[place], has_data
        self.retry_at = 0.0

    def _has_source_data(self, place: TopicPartition) -> bool | None:
        """Whether the source's log reaches what is wanted there; None: it was not asked."""
        wanted, has_data = self._source_has.get(place, (None, False))
        return has_data if wanted is not None and wanted == self.wanted.get(place) else None

    def forget(self, place: TopicPartition) -> None:
        """It is not known any more what the source has there."""
        self.wanted.pop(place, None)
        self.unknown.discard(place)
        self.silent_by = None
        self._compare(place)

    def silence(self, places: Mapping[TopicPartition, Pending], by: object) -> None:
        """Leave these committed offsets as they are, and no others; ``by``: see :attr:`silent_by`."""
        self.silent_by = by
        if places != self.silent:
            self.silent = dict(places)
            self._compare_all()

    def put_back(self, before: int) -> dict[TopicPartition, CommittedOffset]:
        """What the coordinator has where the source has nothing, or something else that came to count before an offset:
        so it is where the source has lost what came after."""
        return {
            place: has
            for place, has in (self.has or {}).items()
            if place not in self.unknown
            and self.wanted.get(place) != has
            and (place not in self.wanted or self._at[place] < before)
        }

    def found(
        self,
        has: Mapping[TopicPartition, CommittedOffset],
        has_others: bool,
        now: float,
        renewal_s: float,
        asked_at: float | None = None,
    ) -> None:
        """What the coordinator has, read now: in the link's topics, and whether in others."""
        self._lost = self.missing_from(has)
        self._had, self._tried = {}, {}
        self.has, self.has_others = dict(has), has_others
        self.certain = self._own is None and (now if asked_at is None else asked_at) >= self.certain_from
        again = self.certain or self._own is not None  # when these have ended it is read in any case
        self.read_at = now + COMPARE_INTERVAL_S if again else max(now, self.certain_from)
        self.renew_at = {
            place: self.renew_at.get(place, now + random.uniform(0, min(renewal_s, FIRST_RENEWAL_MAX_S)))
            for place in has
        }
        self._first_renewal = min(self.renew_at.values(), default=NEVER)
        self.silent_by = None
        self._compare_all()
        for place in self.differences:
            self.since.setdefault(place, now)

    def committed(self, places: Mapping[TopicPartition, CommittedOffset], now: float, renewal_s: float) -> None:
        """The coordinator has taken these."""
        self._first_renewal = min(self._first_renewal, now + renewal_s)
        for place, committed in places.items():
            if committed != self.known.get(place):  # else it is what was left, renewed
                self._lost.pop(place, None)
            if self.has is not None:
                if place not in self.has:
                    self.silent_by = None
                self.has[place] = committed
            self.renew_at[place] = now + renewal_s
            self._compare(place)

    def deleted(self, places: Iterable[TopicPartition]) -> None:
        """The coordinator has none of these any more."""
        self.silent_by = None
        for place in places:
            if self.has is not None:
                self.has.pop(place, None)
            self.renew_at.pop(place, None)
            self._lost.pop(place, None)
            self._compare(place)

    def read_again(self, now: float) -> None:
        """What the coordinator has may not be what it had: a broker was away."""
        self.is_not_answered()
        self.read_at = now

    def missing_from(self, has: Mapping[TopicPartition, CommittedOffset]) -> dict[TopicPartition, CommittedOffset]:
        """What the coordinator, which has this, has lost of what it had, and what that was: it has neither that nor
        what came after it. What was lost before is missing until it is there again, however often it is read."""
        had = {**self.known, **self._lost}
        return {
            place: committed
            for place, committed in had.items()
            if (now := has.get(place)) not in (committed, self.wanted.get(place))
            and not (place in self._tried and self._tried[place] == now)
        }

    @property
    def known(self) -> Mapping[TopicPartition, CommittedOffset]:
        """What the coordinator had when that was known last."""
        return self._had if self.has is None else self.has

    @property
    def had_any(self) -> bool:
        """Whether the coordinator had some committed offset when that was known last, or lost what it had."""
        return bool(self.known or self._lost)

    def goes_on(self, before: FollowedGroup) -> None:
        """It is pushed anew: what the coordinator had is known."""
        self._had, self._tried, self._lost = before.known, before._tried, before._lost

    @property
    def lacks(self) -> bool:
        """Whether the coordinator has lost what it had, and was not given it again."""
        return not self.differences.isdisjoint(self._lost)

    def in_doubt(self, read_at: float, tried: Mapping[TopicPartition, CommittedOffset | None] | None = None) -> None:
        """A request may or may not have been carried out, or the log that it was made for is another one by now.

        ``tried``: what the request would have made of it.
        """
        self.is_not_answered()
        self._tried |= tried or {}
        self.unsure = True
        self.read_at = read_at
        self.doubt(read_at)

    def is_not_answered(self) -> None:
        """The coordinator does not say what it has."""
        if self.has is not None:
            self._had, self.has = self.has, None
        self.silent_by = None
        self._compare_all()

    def doubt(self, until: float) -> None:
        """A request of before may be carried out until then."""
        self.certain_from = max(self.certain_from, until)
        self.certain = False

    def await_own(self, why: Pending) -> None:
        """Transactions of this cluster's own may have committed offsets of it that count when they end."""
        self._own, self.certain = why, False

    @property
    def awaits_own(self) -> bool:
        """Whether it is still to be told that there are none."""
        return self._own is not None

    def own_ended(self, certain_from: float) -> None:
        """There are none, or what they committed counts from then on."""
        self._own = None
        self.doubt(certain_from)
        self.read_at = certain_from

    def _compare(self, place: TopicPartition) -> None:
        """See what there is to do for a committed offset that has changed. One that is as it should be waits for
        nothing."""
        left = place in self.unknown or place in self.silent
        if not left and self.wanted.get(place) != (self.has or {}).get(place):
            self.differences.add(place)
            return
        self.differences.discard(place)
        if self.has is not None:
            self.since.pop(place, None)
            if not left:
                self.pending.pop(place, None)

    def _compare_all(self) -> None:
        """The same of all of them."""
        waiting = {place for place in self.pending if place is not None}
        for place in {*self.wanted, *(self.has or ()), *self.differences, *self.since, *waiting}:
            self._compare(place)

    def has_as_wanted(self, place: TopicPartition) -> bool:
        """Whether the coordinator has, for good, a committed offset as the source's newest commit is, or there is
        none, or the source lost what it has."""
        if self.has is None or not self.certain or place in self.unknown:
            return False
        if self._is_lost_there(place):
            return True
        return place not in self.wanted or self.has.get(place) == self.wanted[place]

    @property
    def to_commit(self) -> list[TopicPartition]:
        """Partitions whose ends matter for the next plan."""
        return [place for place in self.differences if place in self.wanted]

    @property
    def idle(self) -> bool:
        """Whether the coordinator has what is wanted, and nothing that is not."""
        open_places = self.differences or self.unknown or self.silent
        return self.has is not None and not open_places and not self.pending and self._own is None

    @property
    def settled(self) -> bool:
        """Whether nothing is under way, or to be done, and it is certain what the coordinator has: acks may wait for
        that."""
        return self.idle and self.certain and not self.deleting and not self.busy

    @property
    def due_at(self) -> float:
        """When it is to be read or renewed although nothing happened."""
        return min(self.read_at, self._first_renewal)

    def to_renew(self, now: float) -> list[TopicPartition]:
        """Committed offsets that are to be renewed."""
        if now < self._first_renewal:
            return []
        self._first_renewal = min(self.renew_at.values(), default=NEVER)
        return [place for place, due in self.renew_at.items() if due <= now]

    def _stays(self, place: TopicPartition, objections: Mapping[str, Pending]) -> bool:
        """Whether the coordinator has what is wanted, in a log that is not about to be cut."""
        objection = objections.get(place[0])
        if objection is not None and objection.code == ReasonCode.TRUNCATING:
            return False
        has = self.has or {}
        return place in has and (has[place] == self.wanted.get(place) or self._is_lost_there(place))

    def _is_lost_there(self, place: TopicPartition) -> bool:
        """Whether the source lost what the coordinator has, and that stays."""
        why = self.silent.get(place)
        return why is not None and why.code == ReasonCode.SOURCE_LOST_COMMITS

    def waiting(self, now: float) -> calls.Waiting:
        """What is not there yet, and the gravest reason for it."""
        offsets = len(self.wanted) if self.has is None else len(self.differences | self.unknown | self.silent.keys())
        age_s = now - min(self.since.values()) if offsets and self.since else 0.0
        reasons = sorted(
            (*self.pending.values(), *([self._own] if self._own else [])),
            key=lambda pending: pending.code not in STOPPED,
        )
        code, message = reasons[0] if reasons else (None, None)
        return calls.Waiting(offsets, int(age_s * 1000), code, message)

    @property
    def to_check(self) -> list[TopicPartition]:
        """Committed offsets of the coordinator that may be ahead of the data."""
        return [place for place in self.has or () if place not in self.silent] if self.unsure else []

    def ahead_of_source(self, log_ends: Mapping[TopicPartition, int]) -> list[TopicPartition]:
        """Committed offsets that are as the source has them, ahead of the data, and maybe of the source's own: it is to
        be asked. ``log_ends``: of :attr:`to_check`."""
        return [
            place
            for place in self.to_check
            if place in log_ends
            and (self.has or {})[place] == self.wanted.get(place)
            and self.wanted[place].offset > log_ends[place]
            and self._has_source_data(place) is None
        ]

    def awaits_data(self, ends: Mapping[TopicPartition, int], before: float) -> list[TopicPartition]:
        """Commits that have waited for data since ``before``, or longer. ``ends``: as in :meth:`plan`."""
        return [
            place
            for place in self.to_commit
            if self.wanted[place].offset > ends.get(place, self.wanted[place].offset)
            and self._has_source_data(place) is not False
            and self.since.get(place, before) <= before
        ]

    def to_plan(self, now: float) -> set[TopicPartition]:
        """What a plan may be about."""
        return {*self.differences, *self.to_check, *self.to_renew(now)}

    def plan(
        self,
        ends: Mapping[TopicPartition, int],
        objections: Mapping[str, Pending],
        now: float,
        log_ends: Mapping[TopicPartition, int] = MappingProxyType({}),
        whole: bool = True,
    ) -> Plan:
        """What to do now; why the rest waits is noted as pending.

        ``ends``: high watermarks of :attr:`to_commit` and :attr:`to_check`. ``objections``: topics of :meth:`to_plan`
        that do not follow (now), and why. ``log_ends``: of :attr:`to_check`, where topics follow: what is
        beyond is moved into the data. ``whole``: what is not wanted is not there at the source, as far as it
        was pushed.
        """
        assert self.has is not None
        commit: dict[TopicPartition, CommittedOffset] = {}
        for place in self.unknown:
            message = f"the source's newest commit for {text_of(place)} cannot be read"
            self.pending[place] = Pending(POSITION_NOT_KNOWN, message)
        for place in self.to_commit:
            wanted, end = self.wanted[place], ends.get(place)
            if place[0] in objections:
                self.pending[place] = objections[place[0]]
            elif end is None:
                self.pending[place] = Pending(BEYOND_FOLLOWER_END, f"the end of {text_of(place)} cannot be read now")
            elif wanted.offset > end and self._has_source_data(place) is not False:
                message = f"{text_of(place)} ends at {end}, the group's committed offset is {wanted.offset}"
                self.pending[place] = Pending(BEYOND_FOLLOWER_END, message)
            else:
                commit[place] = wanted
        ahead = {
            place: CommittedOffset(ends[place], self.has[place].metadata)
            for place in self.to_check
            if place in self.wanted.keys() | self.unknown
            and place[0] not in objections
            and place in ends
            and self.has[place].offset > log_ends.get(place, self.has[place].offset)
            and (self.has[place] != self.wanted.get(place) or self._has_source_data(place))
        }
        unasked = self.ahead_of_source(log_ends)
        self.unsure = bool(unasked) or any(place not in log_ends or place not in ends for place in self.to_check)
        commit = {**ahead, **commit}
        renew = {
            place: self.has[place]
            for place in self.to_renew(now)
            if self._stays(place, objections) and place not in commit
        }
        for place, why in self.silent.items():
            self.pending[place] = why
        delete = {place for place in self.differences if place not in self.wanted} if whole else set()
        delete_group = whole and self.deleting and not self.has and not self.has_others
        return Plan(commit, renew, delete, delete_group)


def text_of(place: TopicPartition) -> str:
    return f"{place[0]}-{place[1]}"
