"""Takes what leader ends push of the source's groups: which follow, what each is to have, and what is left as it is.

Each partition of a source's offsets topic is pushed by one leader end at a time, first whole, and then what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from isthmus_control.lookup import Lookup
from isthmus_control.model import ResourceType
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.groups.confirmations import Confirmations
from isthmus_plugins.replication.groups.followed_group import (
    COMPARE_INTERVAL_S,
    TOPICS_DIFFER,
    FollowedGroup,
    Pending,
)
from isthmus_plugins.replication.groups.open_losses import OpenLosses, SourcePartition
from isthmus_plugins.replication.in_doubt.pending_offsets import PendingOffset
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_protocol.offsets_log import partition_of

LOST_REQUEST_MARGIN_S: Final = 2.0
"""A request whose connection broke may still be carried out for this time: what the coordinator has is read again."""


class _Feed(NamedTuple):
    """Who pushes one partition of a source's offsets topic."""

    connection: LinkConnection
    epoch: int
    """The source's leader epoch: a leader end that was overtaken sends an older one."""
    partitions: int
    """Of the source's offsets topic."""
    topics: frozenset[str] | None
    """The topic namespaces whose committed offsets it pushes, as they are called here; None: it does not say."""
    held_back: frozenset[str]
    """Topics whose committed offsets it does not push for now."""


class Intake:
    """All groups that follow and are pushed to this proxy, and who pushes them."""

    def __init__(
        self,
        context: PluginContext,
        confirmations: Confirmations,
        losses: OpenLosses,
        touched: Callable[[FollowedGroup], None],
        wake: Callable[[], None],
    ) -> None:
        """``touched`` is called when there may be something to do for a group, ``wake`` when that is to be looked for;
        not where :meth:`take` returns the groups.
        """
        self._context = context
        self._clock = context.clock
        self._confirmations = confirmations
        self._losses = losses
        self._touched = touched
        self._wake = wake
        self._feeds: dict[SourcePartition, _Feed] = {}
        self._groups: dict[tuple[str, str], FollowedGroup] = {}
        """By link and local group."""
        self._left: dict[tuple[str, str], FollowedGroup] = {}
        """Groups that nobody pushes now, for what their coordinators had."""
        self._unfinished: dict[SourcePartition, set[tuple[str, TopicPartition]]] = {}
        """Committed offsets named so far by a leader end that is pushing a whole partition."""
        self._certain_from: dict[SourcePartition, float] = {}
        """From when on no request of a proxy that was pushed to before is carried out any more."""
        self.strays_at = 0.0
        """When :meth:`find_strays` is due."""

    # ---- which groups follow ----

    @property
    def has_feeds(self) -> bool:
        """Whether any leader end pushes groups."""
        return bool(self._feeds)

    def sources(self) -> Iterator[SourcePartition]:
        """The partitions of sources' offsets topics that are pushed."""
        return iter(self._feeds)

    def groups(self) -> Iterator[FollowedGroup]:
        return iter(self._groups.values())

    def groups_of(self, link_name: str) -> Iterator[FollowedGroup]:
        """The groups that follow over a link, sorted."""
        return (group for (link, _), group in sorted(self._groups.items()) if link == link_name)

    def fed_over(self, connection: LinkConnection) -> Iterator[FollowedGroup]:
        """The groups that are pushed over a connection."""
        mine = {key for key, feed in self._feeds.items() if feed.connection is connection}
        return (group for group in self._groups.values() if group.source in mine)

    def connection_of(self, group: FollowedGroup) -> LinkConnection | None:
        """Over which a group is pushed."""
        feed = self._feeds.get(group.source)
        return None if feed is None else feed.connection

    def group(self, link_name: str, name: str) -> FollowedGroup | None:
        """A group as it is pushed now: one that was dropped and is pushed again is another one."""
        return self._groups.get((link_name, name))

    def latest(self, link_name: str, name: str) -> FollowedGroup | None:
        """A group as it is pushed now, or was pushed last."""
        return self._groups.get((link_name, name)) or self._left.get((link_name, name))

    def every_latest(self) -> Iterator[FollowedGroup]:
        """All of them: see :meth:`latest`."""
        return iter({**self._left, **self._groups}.values())

    def forget(self, group: FollowedGroup) -> None:
        """Nothing of a group is the link's any more; one that was pushed anew meanwhile is another one, and stays."""
        if self._groups.get((group.link, group.group)) is group:
            del self._groups[group.link, group.group]

    def is_whole(self, group: FollowedGroup) -> bool:
        """Whether all that the source has of a group was pushed."""
        return group.source not in self._unfinished

    def whole(self, keys: Iterable[SourcePartition]) -> dict[SourcePartition, list[FollowedGroup]]:
        """Of these partitions those that were pushed whole, if what coordinators have of all of their groups is known
        since; with the groups, those among them that the source does not have any more."""
        now = self._clock.monotonic()
        if self.strays_at <= now:
            return {}
        found: dict[SourcePartition, list[FollowedGroup]] = {
            key: [] for key in keys if key in self._feeds and key not in self._unfinished
        }
        for group in self._groups.values():
            groups = found.get(group.source)
            if groups is None:
                continue
            if group.has is not None and group.certain and group.read_at > now:
                groups.append(group)
            else:
                del found[group.source]
        return found

    # ---- what is pushed ----

    def take(
        self, connection: LinkConnection, partitions: int, topics: frozenset[str] | None, part: calls.OffsetsPart
    ) -> Sequence[FollowedGroup]:
        """Take a part of a partition; the groups for which something may be begun at once.

        ``partitions``: of the source's offsets topic. ``topics``: the topic namespaces that are pushed. Raises
        LinkRejected: the leader end was overtaken, has not pushed the partition whole, or groups do not follow.
        """
        link_name, now = connection.link_name, self._clock.monotonic()
        key, epoch, whole = (link_name, part.partition), part.epoch, part.whole
        feed = self._feeds.get(key)
        if feed is not None and feed.epoch > epoch:
            raise LinkRejected("STALE_EPOCH", f"partition {key[1]} of the offsets topic is led in epoch {feed.epoch}")
        if whole is not None and whole.begin:
            self._feeds[key] = _Feed(connection, epoch, partitions, topics, frozenset(whole.held_back))
            self._unfinished[key] = set()
            self._confirmations.end(key)
            if whole.confirm:
                self._confirmations.begin(key, connection, epoch, partitions)
            if feed is None or feed.connection is not connection:
                # Another proxy may have been pushed to before, and its last request be carried out late.
                self._certain_from[key] = now + LOST_REQUEST_MARGIN_S
        elif feed is None or (feed.connection, feed.epoch) != (connection, epoch):
            raise LinkRejected("NOT_TOLD_WHOLE", f"partition {key[1]} of the offsets topic was not told from its start")
        named_now: set[tuple[str, TopicPartition]] = set()
        waited: list[tuple[str, TopicPartition]] = []
        if whole is not None and whole.begin:
            self._losses.told(key, whole.lost)
        for name, topic, partition, offset, metadata, age_ms, at in part.positions:
            self._check(link_name, name)
            group = self._groups.get((link_name, name))
            if group is None:
                group = self._groups[link_name, name] = FollowedGroup(link_name, name, key[1])
                if (before := self._left.pop((link_name, name), None)) is not None:
                    group.goes_on(before)
                group.doubt(self._certain_from[key])
            self._touched(group)
            place = topic, partition
            named_now.add((name, place))
            if offset is not None:  # a committed offset too many is no commit that is missing
                waited.append((name, place))
            if offset == calls.NOT_KNOWN:
                group.not_known(place)
            else:
                wanted = None if offset is None else CommittedOffset(calls.as_meant(offset), metadata)
                group.want(place, wanted, now - age_ms / 1000, at)
            if self._losses.before(group) is not None:
                group.silent_by = None
        for name in part.gone or ():
            group = self._groups.get((link_name, name))
            if group is not None:
                group.deleting = True
                self._touched(group)
                self._wake()
        if key in self._confirmations:
            upto = part.upto or calls.Upto(None)
            pending = [PendingOffset.of(each) for each in upto.pending]
            for each in pending:
                self._check(link_name, each.group)
            self._confirmations.received(key, upto, pending, waited)
            for name in {name for name, _ in named_now}:
                self._confirmations.resolve(self._groups[link_name, name])
        if key in self._unfinished:
            self._take_whole(key, named_now, whole is not None and whole.end, now)
            self._wake()
            return ()
        return [self._groups[link_name, name] for name in dict.fromkeys(name for name, _ in named_now)]

    def _check(self, link_name: str, group: str) -> None:
        """Raises LinkRejected for a group that does not follow over the link."""
        counterpart = self._context.control.state.lookup.following(ResourceType.CONSUMER_GROUP, group)
        if counterpart is None or counterpart.link.name != link_name:
            what = f"{ResourceType.CONSUMER_GROUP} {group} does not follow over this link"
            raise LinkRejected(reasons.NOT_FOLLOWING, what)

    def _take_whole(
        self, key: SourcePartition, named_now: set[tuple[str, TopicPartition]], end: bool, now: float
    ) -> None:
        """Committed offsets of a partition that is pushed whole: what was not named when it ends is not there any
        more."""
        named = self._unfinished[key]
        named |= named_now
        if not end:
            return
        del self._unfinished[key]
        for group in self._groups.values():
            if group.source == key:
                for place in {*group.wanted, *group.unknown}:
                    if (group.group, place) not in named:
                        if self._silence(group, place[0]) is None:
                            group.want(place, None, now)
                        else:
                            group.forget(place)
                group.deleting = not group.wanted and not group.unknown
                group.read_at = now
                self._touched(group)
        self.strays_at = now

    def end(self, connection: LinkConnection, partitions: set[int] | None) -> None:
        """No more is pushed of these partitions over a connection (None: of any): their groups follow no more."""
        for key, feed in list(self._feeds.items()):
            if feed.connection is connection and (partitions is None or key[1] in partitions):
                del self._feeds[key]
                self._unfinished.pop(key, None)
                self._confirmations.end(key)
                self._losses.told(key, None)
                self._certain_from.pop(key, None)
                for name, group in list(self._groups.items()):
                    if group.source == key:
                        self._left[name] = self._groups.pop(name)

    # ---- what is not pushed ----

    def lookup_changed(self, lookup: Lookup) -> None:
        """Forget groups that follow no more; have the others read again, since other topics may be the link's now."""
        for group in list(self.every_latest()):
            key = group.link, group.group
            counterpart = lookup.following(ResourceType.CONSUMER_GROUP, group.group)
            if counterpart is None or counterpart.link.name != group.link:
                self._groups.pop(key, None)
                self._left.pop(key, None)
            elif key in self._groups:
                group.read_at = 0.0
                self._touched(group)

    def note_silence(self, group: FollowedGroup) -> None:
        """Have a group's committed offsets left as they are in topics that one end alone has, or that are held back.

        And those that the source lost, until that is dealt with.
        """
        before = self._losses.before(group)
        by = self._context.control.state.lookup, self._feeds.get(group.source), before, self._losses.trouble
        if group.silent_by == by:
            return
        places = {*group.wanted, *group.unknown, *(group.has or ())}
        found = {topic: self._silence(group, topic) for topic in {topic for topic, _ in places}}
        lost = {} if before is None else dict.fromkeys(group.put_back(before), self._losses.why)
        group.silence(lost | {place: why for place in places if (why := found[place[0]]) is not None}, by)
        if lost:
            self._confirmations.resolve(group)
            self._confirmations.report([group.source])

    def _silence(self, group: FollowedGroup, topic: str) -> Pending | None:
        """Why a group's committed offsets in a topic are left as they are, whatever is pushed; None: they are not.

        One end may have attached or detached topics and the other not, or not yet: what is not pushed then may still
        be committed there.
        """
        following = self._context.control.state.lookup.following(ResourceType.TOPIC, topic)
        feed = self._feeds.get(group.source)
        if following is None or following.link.name != group.link:
            return Pending(
                TOPICS_DIFFER, f"{topic} is told of by the source, and does not follow over link {group.link}"
            )
        if feed is not None and feed.topics is not None and following.mapping.local_prefix not in feed.topics:
            return Pending(TOPICS_DIFFER, f"{topic} follows over link {group.link}, and the source does not lead it")
        if feed is not None and topic in feed.held_back:
            return Pending(ReasonCode.SOURCE_TRUNCATING, f"{topic} is being truncated at the source")
        return None

    async def find_strays(self) -> None:
        """Groups here that the source does not have, as far as it was pushed: what they have in its topics is to go."""
        self.strays_at = self._clock.monotonic() + COMPARE_INTERVAL_S
        lookup = self._context.control.state.lookup
        for name in await self._context.cluster.groups():
            counterpart = lookup.following(ResourceType.CONSUMER_GROUP, name)
            if counterpart is None or (counterpart.link.name, name) in self._groups:
                continue
            link_name = counterpart.link.name
            feed = next((feed for (link, _), feed in self._feeds.items() if link == link_name), None)
            if feed is None:
                continue
            partition = partition_of(counterpart.remote_name, feed.partitions)
            if (link_name, partition) in self._feeds and (link_name, partition) not in self._unfinished:
                stray = self._groups[link_name, name] = FollowedGroup(link_name, name, partition)
                self._touched(stray)
