"""What ``isthmus verify`` does: compares both sides of a link, every topic and group of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from isthmus_control.model import Link, NamespaceMapping
from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.links import VerifyReport
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.comparison import AT_ONCE, Comparison, Progress
from isthmus_plugins.replication.comparison.digests import Verification
from isthmus_plugins.replication.comparison.groups import GroupVerification
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.link.part import Part


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
        limit = asyncio.Semaphore(AT_ONCE)
        jobs = []
        for mapping, name, remote in pairs:
            remote_ends: tuple[calls.Ends, ...] = ()
            compacts = False
            if remote in there:
                try:
                    answer = await connection.call(calls.TopicLimits(remote))
                    remote_ends, compacts = answer.partitions, answer.compacts
                except LinkRejected:
                    pass  # deleted since then
            local = topics.get(name)
            for partition in range(max(len(remote_ends), 0 if local is None else len(local.partitions))):
                remote_end = remote_ends[partition] if partition < len(remote_ends) else None
                jobs.append(
                    Comparison(self._digests, connection, name, local, remote, partition, mapping, remote_end, compacts)
                )
        verdicts = await asyncio.gather(*(job.run(limit, counter) for job in jobs))
        groups = await self.groups.verify(link, connection)
        found = [verdict.equal for verdict in verdicts] + [verdict.equal for verdict in groups]
        return VerifyReport(
            link_name=link.name,
            equal=bool(found) and all(found),
            records=sum(verdict.records for verdict in verdicts),
            seconds=round(self._clock.monotonic() - started, 3),
            partitions=list(verdicts),
            groups=groups,
            message=None if found else "nothing was compared: the link's namespaces hold no topic and no group here",
        )


def _holds(mapping: NamespaceMapping, topic: TopicInfo) -> bool:
    """Whether a local topic is one of a mapping's: of Kafka's own, the offsets topic alone may be."""
    return mapping.remote_name(topic.name) is not None and (not topic.internal or mapping.offsets is not None)
