"""Sets groups to where they are to go on here, as other clusters have said (document 000's offset committer).

A commit is refused by the coordinator where the group has members: nobody reads from under them. So is none made here
where the group went on by itself. What is not set waits, with its reason.

A time is of one partition. Who told it may not have known of partitions that were added somewhere: since then messages
go by their keys, and one that is older, and unread, comes to any partition, behind all that is there. So by such a time
no group is set on.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, Refused, TopicPartition
from isthmus_plugins.distribution.group_times import GroupTime, Spread, knows, unmarked, was_last_here
from isthmus_plugins.distribution.times import NotSet, position_at
from isthmus_plugins.distributor import reasons
from isthmus_plugins.distributor.followed import Commits, TimedLog, Times, Timestamps
from isthmus_plugins.distributor.later import Found, Later
from isthmus_plugins.distributor.places import committed_of_all
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.error_codes import ILLEGAL_GENERATION, STALE_MEMBER_EPOCH, UNKNOWN_MEMBER_ID
from isthmus_protocol.offsets_log import OffsetKey

log = logging.getLogger("isthmus_plugins.distributor")

GROUPS_AT_ONCE: Final = 16
RETRY_S: Final = 3.0
KEPT_AGAIN_S: Final = 3_600.0
"""What is set is committed again: brokers forget the offsets of groups without members, after a week."""
AS_BROKERS_DO: Final = -1
"""How long committed offsets are kept."""
EARLIEST: Final = -2
"""In the place of a time: where the log begins."""
_HAS_MEMBERS: Final = frozenset((UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION, STALE_MEMBER_EPOCH))
TOLD_BEFORE: Final = Reason(
    reasons.PARTITIONS_ADDED,
    "its time was told before it was known which messages of the topic went by their keys: it is set when that is told "
    "anew",
)
_REASONS: Final = {NotSet.NOT_REACHED: reasons.NOT_REACHED, NotSet.WENT_ON: reasons.WENT_ON}


class There(NamedTuple):
    """Where a log here has the first message that is later than what was said."""

    later: Found
    start: int
    """Where the log begins."""
    log: tuple[bytes, int]
    """The topic's id, and the leader epoch: others may stand at its offsets when one of them is another."""


FirstLater: TypeAlias = Mapping[TopicPartition, There | Reason]
"""Of a group; or why that is not known now."""


class State(NamedTuple):
    """What has become of a time that another cluster said."""

    said: GroupTime
    reason: Reason | None
    """None: it is set, or the group's last commit was here."""
    again_at: float
    """Monotonic seconds: when to look again, whatever is said."""
    position: int | None = None
    """Where it was set."""
    log: tuple[bytes, int] | None = None
    """In which one, as :class:`There` has it."""


class OffsetCommitter:
    """Of this cluster."""

    def __init__(
        self,
        context: PluginContext,
        commits: Commits,
        times: Times,
        timestamps: Timestamps,
        later: Later,
        spreads: Callable[[Collection[str]], Awaitable[Mapping[str, Spread]]],
    ) -> None:
        """``spreads(topics)``: what may have gone by its key of each by now. Raises BrokerUnavailable, KafkaRefused."""
        self._context = context
        self._cluster = context.cluster
        self._later = later
        self._clock = context.clock
        self._commits = commits
        self._times = times
        self._timestamps = timestamps
        self._spreads = spreads
        self.states: dict[OffsetKey, State] = {}
        self.set = 0
        """Offsets that were committed, but for those that were committed again."""

    @property
    def waiting(self) -> Iterator[tuple[OffsetKey, GroupTime, Reason]]:
        """What is not set, and why."""
        return ((key, each.said, each.reason) for key, each in self.states.items() if each.reason is not None)

    async def tick(self) -> None:
        """Set what is new, and look again at what waits."""
        if not (self._commits.loaded and self._times.loaded):
            return
        now = self._clock.monotonic()
        said = self._said()
        self.states = {key: state for key, state in self.states.items() if key in said}
        due: dict[str, dict[OffsetKey, GroupTime]] = defaultdict(dict)
        for key, each in said.items():
            state = self.states.get(key)
            if state is None or state.said != each or now >= state.again_at or self._is_gone(key, state):
                due[key.group][key] = each
        await self._set(due)

    async def go_back(self, group: str) -> Sequence[OffsetKey]:
        """Set a group to where other clusters say, also where it went on here; which partitions they say it of.

        Raises BrokerUnavailable where not all of what they say was read.
        """
        if not (self._commits.loaded and self._times.loaded and self._timestamps.logs):
            raise BrokerUnavailable("what groups have read here, and at other clusters, was not all read yet")
        said = {key: each for key, each in self._said().items() if key.group == group}
        await self._set({group: said}, may_go_back=True)
        return list(said)

    def _said(self) -> dict[OffsetKey, GroupTime]:
        """What other clusters say of groups, of what is distributed."""
        return {
            key: each
            for key, each in self._times.latest.items()
            if each.flags and self._commits.follows(key.group) and (key.topic, key.partition) in self._timestamps.logs
        }

    def _is_gone(self, key: OffsetKey, state: State) -> bool:
        """Whether what stood where a group was set may be gone: it would go on wherever its client resets to.

        Retention took it, or the topic was made anew, or the log may have lost its end with its leader.
        """
        one = self._timestamps.logs.get((key.topic, key.partition))
        if one is None or state.position is None:
            return False
        return state.position < one.start or state.log != _log(one)

    async def _set(self, due: Mapping[str, Mapping[OffsetKey, GroupTime]], may_go_back: bool = False) -> None:
        """Set groups, by name. What may have gone by its key is asked for once, of all their topics.

        That is after the logs were looked at: what has come before by its key is of partitions that are there by now.
        """
        looked = await some_at_once(GROUPS_AT_ONCE, self._first_later, due.values())
        topics = {
            topic
            for each in looked
            for (topic, _), there in each.items()
            if isinstance(there, There) and there.later.offset is not None
        }
        try:
            spreads = await self._spreads(topics) if topics else {}
        except (BrokerUnavailable, KafkaRefused) as error:
            for said in due.values():
                self.states |= self._waits(said, _unavailable(error))
            return

        async def set_one(group: str, said: Mapping[OffsetKey, GroupTime], first_later: FirstLater) -> None:
            try:
                states = await self._set_one(group, said, first_later, spreads, may_go_back)
            except (BrokerUnavailable, KafkaRefused) as error:
                states = self._waits(said, _unavailable(error))
            self.states |= states

        await some_at_once(GROUPS_AT_ONCE, lambda each: set_one(*each), zip(due, due.values(), looked, strict=True))

    def _waits(self, said: Mapping[OffsetKey, GroupTime], reason: Reason) -> dict[OffsetKey, State]:
        again_at = self._clock.monotonic() + RETRY_S
        return {key: State(each, reason, again_at) for key, each in said.items()}

    async def _set_one(
        self,
        group: str,
        said: Mapping[OffsetKey, GroupTime],
        first_later: FirstLater,
        spreads: Mapping[str, Spread],
        may_go_back: bool,
    ) -> dict[OffsetKey, State]:
        """What becomes of what is said of a group, which may have gone on while logs were looked at.

        Raises BrokerUnavailable, KafkaRefused.
        """
        has = (await committed_of_all(self._cluster, [group], stable=True))[group]
        own = self._commits.own(group)
        now = self._clock.monotonic()
        states: dict[OffsetKey, State] = {}
        wanted: dict[TopicPartition, CommittedOffset] = {}
        for key, each in said.items():
            place = key.topic, key.partition
            committed = has.get(place)
            is_own = committed is not None and committed.offset >= 0 and not unmarked(committed.metadata)[0]
            itself = committed if is_own else None
            if itself is not None and not may_go_back:
                known = own.get(key)
                if known is None or (known.offset, known.metadata) != itself:
                    why = "when the group has committed here is not known now"
                    states |= self._waits({key: each}, _unavailable(why))
                    continue
                if was_last_here(known.committed_ms, each):
                    states[key] = State(each, None, now + KEPT_AGAIN_S)
                    continue
            there = first_later[place]
            if isinstance(there, Reason):
                states |= self._waits({key: each}, there)
                continue
            later = there.later
            own_offset = None if itself is None else itself.offset
            position = position_at(later.offset, there.start, own_offset, may_go_back=may_go_back)
            if isinstance(position, NotSet):
                states |= self._waits({key: each}, Reason(_REASONS[position], position.value))
                continue
            if key.topic not in spreads or not knows(each, spreads[key.topic]):
                if committed is None or committed.offset < 0:
                    states |= self._waits({key: each}, TOLD_BEFORE)
                    continue
                position = min(position, max(committed.offset, there.start))
            new = CommittedOffset(position, each.marked())
            state = self.states.get(key)
            is_kept_again = state is not None and state.said == each and state.reason is None
            states[key] = State(each, None, now + (0 if later.is_far else KEPT_AGAIN_S), position, there.log)
            if committed != new or is_kept_again:
                wanted[place] = new
        if wanted:
            check_lease(self._context)  # what was paused sets nothing back that has gone on since
            refused = await self._cluster.commit_offsets(group, wanted, AS_BROKERS_DO)
            for place, new in wanted.items():
                key = OffsetKey(group, *place)
                if place in refused:
                    states |= self._waits({key: said[key]}, _reason(refused[place]))
                else:
                    self.set += has.get(place) != new
        return states

    async def _first_later(self, said: Mapping[OffsetKey, GroupTime]) -> FirstLater:
        """Where logs here have the first message that is later than what was said of a group."""
        try:
            return await self._look(said)
        except (BrokerUnavailable, KafkaRefused) as error:
            reason = _unavailable(error)
            return {(key.topic, key.partition): reason for key in said}

    async def _look(self, said: Mapping[OffsetKey, GroupTime]) -> FirstLater:
        """Raises BrokerUnavailable, KafkaRefused."""
        times = {(key.topic, key.partition): each.time + 1 for key, each in said.items()}
        starts = await self._cluster.offsets_for_times(dict.fromkeys(times, EARLIEST))
        # What is negative asks for something else. Messages without a timestamp (-1) are earlier than all others.
        asked = {place: time for place, time in times.items() if time > 0}
        found = await self._cluster.offsets_for_times(asked) if asked else {}
        first_later: dict[TopicPartition, There | Reason] = {}
        for place, time in times.items():
            one = self._timestamps.logs.get(place)
            if place not in starts or (time > 0 and place not in found) or one is None:
                why = "the log here cannot be asked for times now"
                first_later[place] = _unavailable(why)
                continue
            log, start = _log(one), starts[place][0]
            later = Found(start)
            if time > 0:
                offset, _ = found[place]
                try:
                    later = Found(None) if offset < 0 else await self._later.first(place, one, time - 1, offset)
                except (BrokerUnavailable, KafkaRefused) as error:  # no other log waits for this one
                    first_later[place] = _unavailable(error)
                    continue
            first_later[place] = There(later, start, log)
        return first_later


def _log(one: TimedLog) -> tuple[bytes, int]:
    """As :class:`There` has it."""
    return one.topic_id, one.leader_epoch


def _reason(refused: Refused) -> Reason:
    if refused.error_code in _HAS_MEMBERS:
        return Reason(reasons.MEMBERS, "the group has members here")
    return Reason(reasons.COMMIT_REFUSED, f"the coordinator refuses the commit: {refused.error_name}")


def _unavailable(why: BrokerUnavailable | KafkaRefused | str) -> Reason:
    return Reason(reasons.COMMIT_UNAVAILABLE, str(why))
