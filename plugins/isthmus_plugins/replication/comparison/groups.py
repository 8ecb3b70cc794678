"""Verification of group offsets: what the coordinators of both sides have, group by group.

Both sides are asked through the public protocol, so it does not matter which proxy fronts a coordinator. A source's
committed offset beyond the follower's data waits there and is counted, not compared. Groups commit while this runs:
what differs is looked at again, and a follower that is where the source was a moment before is not behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.links import BothOffsets, CommittedOffsets, GroupOnBothSides, GroupVerdict
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected, Peer

GROUPS_AT_ONCE: Final = 200
GROUPS_LISTED_MAX: Final = 200
"""In one listing of committed offsets; whoever wants another group names it."""
LOOKS: Final = 4
LOOK_AGAIN_S: Final = 1.0
"""Commits reach the follower within a second."""

Offsets = Mapping[TopicPartition, CommittedOffset]


class GroupVerification:
    """What this cluster's groups have committed, for both ends, and the comparison itself."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context

    # ---- the peer's calls ----

    async def on_linked_groups(
        self, connection: LinkConnection, question: calls.LinkedGroups
    ) -> calls.LinkedGroupsAnswer:
        """This cluster's groups in the namespaces of the link."""
        link = self._link(connection)
        groups = await self._context.cluster.groups()
        return calls.LinkedGroupsAnswer(tuple(sorted(name for name in groups if _counterpart(link, name))))

    async def on_committed(self, connection: LinkConnection, question: calls.Committed) -> calls.CommittedAnswer:
        """What some of these groups have committed."""
        link = self._link(connection)
        self._check(link, ResourceType.CONSUMER_GROUP, question.groups)
        found = await self._context.cluster.committed_offsets(question.groups)
        return calls.CommittedAnswer(
            {
                name: tuple(
                    calls.CommittedAt(*place, committed.offset, committed.metadata)
                    for place, committed in offsets.items()
                )
                for name, offsets in found.items()
            }
        )

    async def on_high_watermarks(
        self, connection: LinkConnection, question: calls.HighWatermarks
    ) -> calls.HighWatermarksAnswer:
        """The high watermarks of partitions."""
        link = self._link(connection)
        self._check(link, ResourceType.TOPIC, (topic for topic, _ in question.partitions))
        found = await self._context.cluster.high_watermarks(
            [(each.topic, each.partition) for each in question.partitions]
        )
        return calls.HighWatermarksAnswer(tuple(calls.PartitionEnd(*place, end) for place, end in found.items()))

    def _link(self, connection: LinkConnection) -> Link:
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            raise LinkRejected("LINK_NOT_FOUND", "there is no such link on this cluster")
        return link

    def _check(self, link: Link, kind: ResourceType, names: Iterable[str]) -> None:
        for name in names:
            if not any(each.type is kind and each.remote_name(name) is not None for each in link.mappings):
                raise LinkRejected("UNKNOWN_RESOURCE", f"{kind} {name} is in no namespace of this link here")

    # ---- comparing ----

    async def verify(self, link: Link, connection: Peer) -> list[GroupVerdict]:
        """Compare every group of the link's group namespaces. Raises LinkRejected, LinkLost, BrokerUnavailable."""
        verdicts = []
        for mapping, pairs in await self._linked_pairs(link, connection):
            ordered = sorted(pairs)
            for start in range(0, len(ordered), GROUPS_AT_ONCE):
                chunk = {name: pairs[name] for name in ordered[start : start + GROUPS_AT_ONCE]}
                verdicts += await _Comparison(self._context, link, connection, mapping.role is Role.LEADER).run(chunk)
        return verdicts

    async def committed(self, link: Link, connection: Peer, group: str | None) -> CommittedOffsets:
        """What groups (``group``: this one) have committed at both ends.

        Raises LinkRejected, LinkLost, BrokerUnavailable.
        """
        view = CommittedOffsets(link_name=link.name, groups=[])
        for mapping, linked in await self._linked_pairs(link, connection):
            pairs = {name: remote for name, remote in linked.items() if group in (None, name)}
            chosen = {name: pairs[name] for name in sorted(pairs)[: GROUPS_LISTED_MAX - len(view.groups)]}
            view.groups_left_off += len(pairs) - len(chosen)
            if chosen:
                comparison = _Comparison(self._context, link, connection, mapping.role is Role.LEADER)
                view.groups += await comparison.both(chosen)
        return view

    async def _linked_pairs(self, link: Link, connection: Peer) -> list[tuple[NamespaceMapping, dict[str, str]]]:
        """The groups that either end has in each group namespace of the link: local names and remote ones."""
        mappings = [each for each in link.mappings if each.type is ResourceType.CONSUMER_GROUP]
        if not mappings:
            return []
        here = await self._context.cluster.groups()
        there = (await connection.call(calls.LinkedGroups())).groups
        found = []
        for mapping in mappings:
            names = {name for name in here if mapping.remote_name(name) is not None}
            names |= {name for remote in there if (name := mapping.local_name(remote)) is not None}
            found.append((mapping, {name: mapping.remote_name(name) or "" for name in names}))
        return found


class _Comparison:
    """Some groups, here and there."""

    def __init__(self, context: PluginContext, link: Link, connection: Peer, leads: bool) -> None:
        self._context = context
        self._link = link
        self._connection = connection
        self._leads = leads

    async def run(self, pairs: Mapping[str, str]) -> list[GroupVerdict]:
        """``pairs``: local names and remote ones."""
        verdicts: dict[str, GroupVerdict] = {}
        left = dict(pairs)
        before: dict[str, Offsets | None] = {}
        for look in range(LOOKS):
            if look:
                await asyncio.sleep(LOOK_AGAIN_S)
            sources, followers = await self._committed(left)
            ends = await self._ends(sources, followers)
            for name, remote in list(left.items()):
                verdict = self._verdict(name, remote, sources[name], followers[name], before.get(name), ends)
                verdicts[name] = verdict
                if verdict.equal:
                    del left[name]
            if not left:
                break
            before = dict(sources)
        return [verdicts[name] for name in sorted(verdicts)]

    async def both(self, pairs: Mapping[str, str]) -> list[GroupOnBothSides]:
        """What these groups have committed in the link's topics; ``pairs`` as above."""
        sources, followers = await self._committed(pairs)
        listed = []
        for name in sorted(pairs):
            source, follower = sources[name], followers[name]
            each = GroupOnBothSides(group=name, remote_group=pairs[name])
            if source is None or follower is None:
                each.message = _no_coordinator(source)
            else:
                each.offsets = [
                    BothOffsets(
                        topic=place[0],
                        partition=place[1],
                        source_offset=_offset(source.get(place)),
                        follower_offset=_offset(follower.get(place)),
                    )
                    for place in sorted({*source, *follower})
                ]
            listed.append(each)
        return listed

    async def _committed(self, pairs: Mapping[str, str]) -> tuple[dict[str, Offsets | None], dict[str, Offsets | None]]:
        """By local group: the source's committed offsets and the follower's, in the source's topic names, of linked
        topics."""
        local = await self._context.cluster.committed_offsets(list(pairs))
        answer = (await self._connection.call(calls.Committed(tuple(pairs.values())))).groups
        ours: dict[str, Offsets | None] = {}
        theirs: dict[str, Offsets | None] = {}
        for name, remote in pairs.items():
            offsets = local.get(name)
            ours[name] = None if offsets is None else self._linked(offsets)
            said = answer.get(remote)
            theirs[name] = (
                None
                if said is None
                else {
                    (here, partition): CommittedOffset(offset, metadata)
                    for topic, partition, offset, metadata in said
                    if (here := self._local_topic(topic)) is not None
                }
            )
        return (ours, theirs) if self._leads else (theirs, ours)

    def _linked(self, offsets: Offsets) -> Offsets:
        return {place: committed for place, committed in offsets.items() if self._remote_topic(place[0]) is not None}

    def _remote_topic(self, topic: str) -> str | None:
        names = (each.remote_name(topic) for each in self._link.mappings if each.type is ResourceType.TOPIC)
        return next((name for name in names if name is not None), None)

    def _local_topic(self, topic: str) -> str | None:
        names = (each.local_name(topic) for each in self._link.mappings if each.type is ResourceType.TOPIC)
        return next((name for name in names if name is not None), None)

    async def _ends(
        self, sources: Mapping[str, Offsets | None], followers: Mapping[str, Offsets | None]
    ) -> dict[TopicPartition, int]:
        """The follower's high watermarks where a source's committed offset is not the follower's, by local topic
        names."""
        places = sorted(
            {
                place
                for name, offsets in sources.items()
                for place, committed in (offsets or {}).items()
                if (followers.get(name) or {}).get(place) != committed
            }
        )
        if not places:
            return {}
        if not self._leads:
            return dict(await self._context.cluster.high_watermarks(places))
        asked = tuple(
            calls.PartitionName(remote, partition)
            for topic, partition in places
            if (remote := self._remote_topic(topic)) is not None
        )
        answer = await self._connection.call(calls.HighWatermarks(asked))
        return {
            (topic, partition): end
            for remote, partition, end in answer.partitions
            if (topic := self._local_topic(remote)) is not None
        }

    def _verdict(
        self,
        name: str,
        remote: str,
        source: Offsets | None,
        follower: Offsets | None,
        before: Offsets | None,
        ends: Mapping[TopicPartition, int],
    ) -> GroupVerdict:
        verdict = GroupVerdict(group=name, remote_group=remote, equal=False, positions=0, waiting=0)
        if source is None or follower is None:
            verdict.difference = f"not compared: {_no_coordinator(source)}"
            return verdict
        for place in sorted({*source, *follower}):
            wanted, has = source.get(place), follower.get(place)
            if wanted == has or _on_the_way((before or {}).get(place), has, wanted):
                verdict.positions += 1
            elif wanted is not None and (place not in ends or wanted.offset > ends[place]):
                verdict.waiting += 1
            elif verdict.difference is None:
                where = f"{place[0]}-{place[1]}"
                verdict.difference = f"{where}: the source has {_said(wanted)}, the follower has {_said(has)}"
        verdict.equal = verdict.difference is None
        return verdict


def _on_the_way(before: CommittedOffset | None, has: CommittedOffset | None, wanted: CommittedOffset | None) -> bool:
    """Whether the follower is where the source was between the look before and this one."""
    if before is None or has is None or wanted is None or before == wanted:
        return False
    return min(before.offset, wanted.offset) <= has.offset <= max(before.offset, wanted.offset)


def _no_coordinator(source: Offsets | None) -> str:
    return f"the {'source' if source is None else 'follower'}'s coordinator is not there"


def _offset(committed: CommittedOffset | None) -> int | None:
    return None if committed is None else committed.offset


def _said(committed: CommittedOffset | None) -> str:
    if committed is None:
        return "none"
    return f"{committed.offset} with metadata {committed.metadata!r}" if committed.metadata else str(committed.offset)


def _counterpart(link: Link, group: str) -> bool:
    return any(
        each.type is ResourceType.CONSUMER_GROUP and each.remote_name(group) is not None for each in link.mappings
    )
