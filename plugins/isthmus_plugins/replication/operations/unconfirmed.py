"""What the follower of a link has not confirmed: asked of every proxy of the source, each says what it pushes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from isthmus_control.directions import pushed_topics
from isthmus_control.model import Link
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OperationError, PartitionStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.groups.feed import LedGroup
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import UNCONFIRMED
from isthmus_plugins.replication.link.peers import LinkPeers

ANSWER_S: Final = 10.0
"""A proxy of the source that does not answer within this time says nothing of its partitions."""
NOT_PUSHED: Final = "nothing of it was pushed over a connection that there is now"


class Unconfirmed:
    """``partitions``: what this proxy shows of a link's partitions."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        group_leader: GroupLeader,
        partitions: Callable[[Link], Sequence[PartitionStatus]],
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._group_leader = group_leader
        self._partitions = partitions

    async def asked(self, link: Link) -> list[calls.UnconfirmedAnswer]:
        """What the proxies of the source say that are connected; not those of versions before, or that do not answer.

        Raises OperationError with PEER_VERSION_UNSUPPORTED where nobody else is connected.
        """
        connections = self._peers.connections(link.name)
        knowing = [each for each in connections if UNCONFIRMED in each.peer_features]
        if connections and not knowing:
            older = ", ".join(str(each.peer.get("proxy")) for each in connections)
            raise OperationError(
                "PEER_VERSION_UNSUPPORTED",
                f"proxies of the source are of a version that does not say what is not confirmed: upgrade {older}",
            )
        answers = await asyncio.gather(*(self._ask(each) for each in knowing))
        return [each for each in answers if each is not None]

    async def _ask(self, connection: LinkConnection) -> calls.UnconfirmedAnswer | None:
        try:
            return await connection.call(calls.Unconfirmed(), ANSWER_S)
        except (LinkRejected, LinkLost, TimeoutError):
            return None  # what it pushes is not known then, which is told of each partition

    async def on_asked(self, connection: LinkConnection, question: calls.Unconfirmed) -> calls.UnconfirmedAnswer:
        """What this proxy pushes over a link, and the other cluster has not confirmed."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            raise LinkRejected("LINK_NOT_FOUND", "the link was deleted")
        try:
            return await self.of(link)
        except OperationError as error:
            raise LinkRejected(error.code, error.message) from error

    async def of(self, link: Link) -> calls.UnconfirmedAnswer:
        """The same. Raises OperationError.

        Logs' ends are read after what is confirmed was looked at: what comes meanwhile counts as lost.
        """
        led = [each for each in self._partitions(link) if each.role == "leader" and each.partition >= 0]
        groups = tuple(self._groups(link))
        try:
            topics = (await self._context.cluster.topics()).values()
            ends = await self._context.cluster.log_ends({(each.topic, each.partition) for each in led}) if led else {}
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        mappings = pushed_topics(link)
        return calls.UnconfirmedAnswer(
            topics={
                topic.name: len(topic.partitions)
                for topic in topics
                if any(mapping.remote_name(topic.name) is not None for mapping in mappings)
            },
            partitions=tuple(_partition(each, ends.get((each.topic, each.partition))) for each in led),
            groups=groups,
        )

    def _groups(self, link: Link) -> Iterator[calls.UnconfirmedGroup]:
        """Those of which the other cluster may lack something."""
        now = self._clock.monotonic()
        for group in self._group_leader.groups(link):
            said = _group(group, now)
            if said.positions != 0:
                yield said


def _partition(status: PartitionStatus, end: int | None) -> calls.UnconfirmedPartition:
    confirmed = 0 if status.follower_end is None and end == 0 else status.follower_end
    age_s = status.lag_seconds
    if end is not None and confirmed is not None and end > confirmed and not status.partition_mirror_lag:
        age_s = 0.0  # it came just now
    sync = status.sync
    return calls.UnconfirmedPartition(
        status.topic,
        status.partition,
        end,
        confirmed,
        None if age_s is None else round(age_s * 1000),
        sync is not None and sync.state == "In-Sync" and sync.any_of is None,
        status.message,
    )


def _group(group: LedGroup, now: float) -> calls.UnconfirmedGroup:
    if group.changed_at is None:
        return calls.UnconfirmedGroup(group.group, None if group.offsets else 0, None, group.problem or NOT_PUSHED)
    waiting = group.waiting
    ages_ms = [round((now - read) * 1000) for read in group.changed_at]
    if waiting is not None:
        ages_ms.append(waiting.age_ms)
    positions = len(group.changed_at) + (waiting.positions if waiting is not None else 0)
    message = group.problem or (waiting.message if waiting is not None else None)
    if group.problem is not None:
        return calls.UnconfirmedGroup(group.group, None, None, message)
    return calls.UnconfirmedGroup(group.group, positions, max(ages_ms, default=0), message)
