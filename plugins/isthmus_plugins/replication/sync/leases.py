"""The follower end's leases of what is In-Sync: what it may say of the source without hearing from it.

The follower asks, and counts a lease from when it asked: so it ends no later than the leader end takes it to end, which
counts from when it answered, whatever happens on the way. A lease that has run out is recorded in the control log,
once: that it was In-Sync until then stays true, whatever becomes of this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import ValidationError

from isthmus_control.clock import Register
from isthmus_control.commands import OffsetsClaim, PartitionClaim, RecordClaims
from isthmus_control.control_state import ControlState
from isthmus_control.model import PLAIN_TERMS, AckTerms, Claim, LinkMode, ResourceType, Role
from isthmus_control.outcome import Rejected
from isthmus_control.rules.claims import supersedes
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import INVALID_ANSWER, LinkLost, LinkRejected, Peer
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.sync.group_leases import GroupLease, GroupLeases
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

ASK_INTERVAL_S: Final = 0.4
ASK_TIMEOUT_S: Final = 1.5
RECORD_AFTER_S: Final = 1.0
"""A lease that is renewed so soon after it ran out is not recorded."""
RECORD_INTERVAL_S: Final = 10.0
"""A connection that comes and goes fills no control log."""
RECORDED_AT_ONCE: Final = 5_000


@dataclass(slots=True)
class Lease:
    """What is known of a partition that follows: of its topic with this id."""

    topic_id: str
    link: str
    since: float = float("-inf")
    """Monotonic seconds: since when there was one at any time, by which all that is acked is here."""
    until: float = float("-inf")
    """Monotonic seconds. What is over is kept: until then it was In-Sync."""
    until_ms: int = 0
    """The same moment of this machine's wall clock, for people."""
    end: int = 0
    """Where the log ended when the lease came."""
    terms: AckTerms = PLAIN_TERMS
    """What acks mean until then, if it is not: all is here."""
    reported: SyncStatus | None = None
    """What the source said of it when it granted no lease."""
    reported_at: float = float("-inf")


class SyncLeases(Part):
    """Until when each partition that follows here is known to be In-Sync."""

    def __init__(
        self,
        context: PluginContext,
        follower_end: FollowerEnd,
        group_follower: GroupFollower,
        store: TransactionStore,
        reached: Callable[[str, list[tuple[str, str, int]]], None],
    ) -> None:
        """``reached`` gets a link's partitions that are In-Sync: (topic, topic id, partition)."""
        self._context = context
        self._clock = context.clock
        self._follower_end = follower_end
        self._group_follower = group_follower
        self._store = store
        self._reached = reached
        self._tasks = Tasks("sync-leases", context.supervision)
        self._odd = rare_lines(log, "lease not understood")
        self._links: frozenset[str] = frozenset()
        """Synchronous ones over which topics follow."""
        self._followed = asyncio.Event()
        self._asking: set[Peer] = set()
        self._leases: dict[TopicPartition, Lease] = {}
        self.groups = GroupLeases(context)
        self._record_from = float("-inf")
        self._recording = False

    def start(self) -> None:
        self._tasks.keep("ask", self._ask_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        self.groups.control_changed(state)
        self._links = frozenset(
            link.name
            for link in state.links.values()
            if link.mode is LinkMode.SYNCHRONOUS and link.pairs(Role.FOLLOWER, ResourceType.TOPIC)
        )
        if self._links and not self._followed.is_set():
            self._followed.set()
            self._store.needed()

    # ---- what others ask ----

    def in_sync(self, topic: str, partition: int) -> bool:
        lease = self._leases.get((topic, partition))
        runs = lease is not None and self._clock.monotonic() < lease.until
        return runs and not self.lacks(topic, partition)

    def has_all_since(self, topic: str, topic_id: str, partition: int) -> float | None:
        """Since when, without a gap, it is known that all that the source acked is here; None: it is not known now."""
        lease = self.lease(topic, topic_id, partition)
        if lease is None or lease.terms.links or not self.in_sync(topic, partition):
            return None
        return lease.since

    def lacks(self, topic: str, partition: int) -> bool:
        """Whether what was acked may be here no more: the target lost the end of the log, which is copied again."""
        return self._follower_end.lacks(topic, partition)

    def lease(self, topic: str, topic_id: str | None, partition: int) -> Lease | None:
        """What this process knows of a partition; None: nothing, or of another topic of that name."""
        lease = self._leases.get((topic, partition))
        return lease if lease is not None and lease.topic_id == topic_id else None

    def claim(self, topic: str, topic_id: str | None, partition: int) -> Claim | None:
        """The latest that is known by this process, or recorded by any of the cluster."""
        recorded = self._context.control.state.claim(topic, topic_id, partition)
        lease = self.lease(topic, topic_id, partition)
        known_ms = None if recorded is None else recorded.until_ms
        if (
            lease is None
            or not lease.until_ms
            or not supersedes(lease.until_ms, known_ms, int(self._clock.time() * 1000))
        ):
            return recorded
        return Claim(lease.topic_id, lease.until_ms, self._end((topic, partition), lease), lease.terms)

    def _end(self, place: TopicPartition, lease: Lease) -> int:
        """Where the log has to end for what was acked until a lease ran out: a power loss takes ends of logs."""
        return max(lease.end, self._follower_end.confirmed(place[0], lease.topic_id, place[1]))

    def committed_groups(self, link_name: str) -> Iterable[str]:
        """Groups that had committed offsets, as far as this process knows: the coordinator may have lost them whole."""
        return self._group_follower.committed(link_name)

    def lost_offsets(self, link_name: str, group: str, has: Mapping[TopicPartition, CommittedOffset]) -> bool:
        """Whether a group's coordinator, which has this, has lost what was confirmed, as far as this process knows."""
        return self._group_follower.lost(link_name, group, has)

    # ---- asking ----

    async def _ask_for_ever(self) -> None:
        while True:
            if not self._links and not any(self._due(float("inf"))):
                self._followed.clear()
                await self._followed.wait()
            streams: dict[Peer, dict[int, FollowerStream]] = {}
            for stream in self._follower_end.streams():
                if stream.link_name in self._links and not stream.closed and not stream.connection.lost:
                    if not stream.knows_position:
                        self._follower_end.read_again(stream)
                    streams.setdefault(stream.connection, {})[stream.stream_id] = stream
            groups: dict[Peer, dict[int, int]] = {}
            for connection, partition, partitions in self._group_follower.confirmations.confirmed_over():
                if connection.link_name in self._links and not connection.lost:
                    groups.setdefault(connection, {})[partition] = partitions
            for peer in streams.keys() | groups.keys():
                if peer not in self._asking:
                    self._asking.add(peer)
                    self._tasks.start("lease", self._ask(peer, streams.get(peer, {}), groups.get(peer, {})))
            now = self._clock.monotonic()
            if not self._recording and any(due := self._due(now - RECORD_AFTER_S)) and now > self._record_from:
                self._recording = True
                self._tasks.start("record", self._record(*due))
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _ask(self, connection: Peer, streams: Mapping[int, FollowerStream], groups: Mapping[int, int]) -> None:
        """``groups``: partitions of the source's offsets topic, and how many it has."""
        asked_at, asked_ms = self._clock.monotonic(), int(self._clock.time() * 1000)
        mode = self._mode(connection.link_name)
        reached = []
        try:
            answer = await connection.call(calls.SyncLease(tuple(streams), tuple(groups)), ASK_TIMEOUT_S)
            if not self._store.is_whole():  # a failover would not know what the source decided
                return
            until, until_ms = asked_at + answer.lease_ms / 1000, asked_ms + answer.lease_ms
            for stream_id in (*answer.in_sync, *answer.in_sync_any):
                stream = streams.get(stream_id)
                if stream is not None and stream.knows_position and not self.lacks(*stream.place):
                    reached.append((stream.topic, stream.topic_id, stream.partition))
                    lease = self._lease_of(stream)
                    if until > lease.until:
                        now = self._clock.monotonic()
                        if now > lease.until or lease.terms.links:
                            lease.since = now
                        lease.terms = answer.terms.get(stream_id, PLAIN_TERMS)
                        lease.until, lease.until_ms = until, until_ms
                        lease.end = stream.follower_log.end
            if mode == self._mode(connection.link_name):  # else it may have been said of another time
                self._reached(connection.link_name, reached)
            furthest = self._group_follower.losses.furthest
            granted = {
                each: GroupLease(
                    until,
                    until_ms,
                    groups[each],
                    answer.group_terms.get(each, {}),
                    *furthest((connection.link_name, each)),
                )
                for each in (*answer.groups_in_sync, *answer.groups_in_sync_any)
                if each in groups and self._group_follower.knows(connection.link_name, each)
            }
            self.groups.granted(connection.link_name, granted, answer.groups_of)
            for stream_id, said in answer.states.items():
                if (stream := streams.get(stream_id)) is not None:
                    lease = self._lease_of(stream)
                    told = asdict(said) | {"from_first": bool(said.from_first)}
                    lease.reported = SyncStatus.model_validate(told)
                    lease.reported_at = asked_at if said.from_first else self._clock.monotonic()
        except (LinkLost, TimeoutError):
            pass  # then it is not known to be In-Sync any longer
        except (LinkRejected, ValidationError) as error:
            if not isinstance(error, LinkRejected) or error.code == INVALID_ANSWER:
                link_name = connection.link_name
                self._odd.one(link_name, {"link": link_name, "detail": str(error)})
        finally:
            self._asking.discard(connection)

    def _mode(self, link_name: str) -> Register[LinkMode] | None:
        """A link's mode, and when it was set."""
        link = self._context.control.state.links.get(link_name)
        return link.settings.mode if link is not None else None

    def _lease_of(self, stream: FollowerStream) -> Lease:
        lease = self.lease(stream.topic, stream.topic_id, stream.partition)
        if lease is None:
            lease = self._leases[stream.place] = Lease(stream.topic_id, stream.link_name)
        return lease

    # ---- recording ----

    def _due(self, over: float) -> tuple[list[tuple[TopicPartition, Lease]], dict[str, list[OffsetsClaim]]]:
        """Leases that run out before ``over`` (monotonic seconds) and are not recorded; those of groups by link."""
        state, now_ms = self._context.control.state, int(self._clock.time() * 1000)
        due = []
        for place, lease in list(self._leases.items()):
            topic = state.follower_topics.get(place[0])
            follows = topic is not None and topic.topic_id == lease.topic_id and topic.link == lease.link
            if not follows or lease.link not in state.links:
                del self._leases[place]  # it follows no more
            elif lease.until_ms and lease.until < over:
                known = state.claim(place[0], lease.topic_id, place[1])
                if supersedes(lease.until_ms, None if known is None else known.until_ms, now_ms):
                    due.append((place, lease))
        return due, self.groups.due(over)

    async def _record(
        self, due: Iterable[tuple[TopicPartition, Lease]], groups: Mapping[str, Sequence[OffsetsClaim]]
    ) -> None:
        self._record_from = self._clock.monotonic() + RECORD_INTERVAL_S
        entries: dict[str, list[PartitionClaim]] = {}
        for (topic, partition), lease in due:
            end = self._end((topic, partition), lease)
            claim = PartitionClaim(topic, lease.topic_id, partition, lease.until_ms, end, lease.terms)
            entries.setdefault(lease.link, []).append(claim)
        try:
            for name in entries.keys() | groups.keys():
                claims, of_groups = entries.get(name, []), tuple(groups.get(name, ()))
                link = self._context.control.state.links.get(name)
                if link is None:
                    continue
                for first in range(0, max(1, len(claims)), RECORDED_AT_ONCE):
                    some = tuple(claims[first : first + RECORDED_AT_ONCE])
                    groups_now = of_groups if first == 0 else ()
                    outcome = await self._context.control.append(RecordClaims(name, link.link_id, some, groups_now))
                    if isinstance(outcome, Rejected):
                        log.warning("leases not recorded", extra={"link": name, "detail": outcome.message})
        except BrokerUnavailable as error:
            log.warning("leases not recorded", extra={"detail": str(error)})
        finally:
            self._recording = False
