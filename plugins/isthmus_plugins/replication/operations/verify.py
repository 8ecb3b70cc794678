"""What ``isthmus verify`` does: compares both sides of a link, every topic and group of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from isthmus_control.model import Link, NamespaceMapping
from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.links import PartitionVerdict, VerifyReport
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.comparison import AT_ONCE, Comparison, Progress
from isthmus_plugins.replication.comparison.digests import UNKNOWN_TOPIC, Verification
from isthmus_plugins.replication.comparison.groups import GroupVerification
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part

TOPICS_AT_ONCE: Final = 200
"""Topics of which both sides are looked at; what that asks of brokers goes together."""
LIMITS_TIMEOUT_S: Final = 60.0


class _Limits(NamedTuple):
    """What the other cluster says of a topic."""

    ends: tuple[calls.Ends, ...]
    compacts: bool
    unread: str | None
    """Why it says nothing."""


NOT_THERE: Final = _Limits((), False, None)


class LinkVerification(Part):
    """Compares whole links, and answers the peer that does."""

    def __init__(self, context: PluginContext, digests: Verification) -> None:
        self._context = context
        self._clock = context.clock
        self._digests = digests
        self.groups = GroupVerification(context)

    def answers(self) -> Sequence[Answering]:
        return (
            calls.LinkedTopics.by(self.on_linked_topics),
            calls.LinkedGroups.by(self.groups.on_linked_groups),
            calls.Committed.by(self.groups.on_committed),
            calls.HighWatermarks.by(self.groups.on_high_watermarks),
        )

    async def on_linked_topics(
        self, connection: LinkConnection, question: calls.LinkedTopics
    ) -> calls.LinkedTopicsAnswer:
        """This cluster's topics in the namespaces of the link."""
        link = self._context.control.state.links.get(connection.link_name)
        topics = await self._context.cluster.topics()
        mappings = link.topic_mappings if link is not None else ()
        return calls.LinkedTopicsAnswer(
            {
                topic.name: len(topic.partitions)
                for topic in topics.values()
                if any(_holds(mapping, topic) for mapping in mappings)
            }
        )

    async def verify(
        self, link: Link, connection: LinkConnection, progress: Callable[[int, int], None]
    ) -> VerifyReport:
        """Compare every partition of the link's topic namespaces, up to a snapshot of the smaller end."""
        started = self._clock.monotonic()
        topics = await self._context.cluster.topics()
        there = (await connection.call(calls.LinkedTopics())).topics
        pairs: list[tuple[NamespaceMapping, str, str]] = []
        for mapping in link.topic_mappings:
            names = {name for name, topic in topics.items() if _holds(mapping, topic)}
            names |= {name for remote in there if (name := mapping.local_name(remote)) is not None}
            pairs += [(mapping, name, mapping.remote_name(name) or "") for name in sorted(names)]
        counter = Progress(progress)
        counter.expect(sum(max(there.get(remote, 0), _partitions(topics.get(name))) for _, name, remote in pairs))
        looked_at, compared = asyncio.Semaphore(TOPICS_AT_ONCE), asyncio.Semaphore(AT_ONCE)

        async def verdicts_of(mapping: NamespaceMapping, name: str, remote: str) -> list[PartitionVerdict]:
            async with looked_at:
                said = await self._limits(connection, remote) if remote in there else NOT_THERE
                local = topics.get(name)
                count = max(len(said.ends), _partitions(local), 0 if said.unread is None else there[remote])
                jobs = [
                    Comparison(
                        self._digests,
                        connection,
                        name,
                        local,
                        remote,
                        partition,
                        mapping,
                        end,
                        said.compacts,
                        said.unread,
                    )
                    for partition, end in enumerate([*said.ends, *[None] * (count - len(said.ends))])
                ]
                return await asyncio.gather(*(job.run(compared, counter) for job in jobs))

        found_of = await asyncio.gather(*(verdicts_of(*pair) for pair in pairs))
        verdicts = [verdict for some in found_of for verdict in some]
        groups = await self.groups.verify(link, connection)
        found = [verdict.equal for verdict in verdicts] + [verdict.equal for verdict in groups]
        return VerifyReport(
            link_name=link.name,
            equal=bool(found) and all(found),
            records=sum(verdict.records for verdict in verdicts),
            seconds=round(self._clock.monotonic() - started, 3),
            partitions=verdicts,
            groups=groups,
            message=None if found else "nothing was compared: the link's namespaces hold no topic and no group here",
        )

    async def _limits(self, connection: LinkConnection, remote: str) -> _Limits:
        """Of a topic there, which may be gone by now."""
        try:
            answer = await connection.call(calls.TopicLimits(remote), LIMITS_TIMEOUT_S)
        except (LinkRejected, LinkLost, TimeoutError) as error:
            if isinstance(error, LinkRejected) and error.code == UNKNOWN_TOPIC:
                return NOT_THERE
            return _Limits((), False, str(error) or "the other cluster did not answer in time")
        return _Limits(answer.partitions, answer.compacts, None)


def _partitions(topic: TopicInfo | None) -> int:
    return 0 if topic is None else len(topic.partitions)


def _holds(mapping: NamespaceMapping, topic: TopicInfo) -> bool:
    """Whether a local topic is one of a mapping's: of Kafka's own, the offsets topic alone may be."""
    return mapping.remote_name(topic.name) is not None and (not topic.internal or mapping.offsets is not None)
