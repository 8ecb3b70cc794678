"""Names of topics by their ids, read from the cluster where they are not known yet.

Requests name topics by ids that anybody can make up, any number of them, and all topics are read to know better. So one
read answers all who ask, and the next one begins a while later: whoever asks waits for one read, and costs no more than
its share of that, also where it has gone meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, Protocol

from isthmus.kafka.joined_requests import JoinedRequests
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import TopicInfo

PAUSE_S: Final = 0.2
"""Between the beginnings of two reads."""


class _Cluster(Protocol):
    async def topics(self) -> Mapping[str, TopicInfo]: ...

    def topic_name(self, topic_id: bytes) -> str | None: ...


class TopicNames:
    """Those of one cluster."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self._reads: JoinedRequests[None, None, None] = JoinedRequests()
        self._read_at = float("-inf")

    def known(self, topic_id: bytes) -> str | None:
        """The name of a topic, as last read. An id never changes its topic."""
        return self._cluster.topic_name(topic_id)

    async def of(self, topic_ids: Collection[bytes]) -> Mapping[bytes, str]:
        """The names of those topics that there are. Raises BrokerUnavailable where one is not known."""
        if self._unknown(topic_ids):
            await asyncio.sleep(self._read_at + PAUSE_S - monotonic())
        if self._unknown(topic_ids):
            await self._reads.ask({None: None}, self._read)
        return {each: name for each in topic_ids if (name := self.known(each)) is not None}

    def _unknown(self, topic_ids: Collection[bytes]) -> bool:
        return any(self.known(each) is None for each in topic_ids)

    async def _read(self, asked: Mapping[None, None]) -> Mapping[None, None]:
        self._read_at = monotonic()
        await self._cluster.topics()
        return asked
