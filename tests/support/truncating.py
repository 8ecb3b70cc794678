"""What tests of truncations share: clusters whose topics are made anew, topics of which that is recorded, salvage."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from isthmus_control.commands import (
    AdvanceTruncation,
    BeginTruncation,
    Body,
    ClaimBrokers,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
    TakeOverTruncation,
)
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim, Reason, TopicState
from isthmus_control.outcome import Accepted
from isthmus_control.truncations import PartitionCut, PartitionView, SalvageFile, Truncation, TruncationPhase
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage
from support.fake_cluster import FakeCluster, FakeContext
from support.replicas import LINK, Replicas

TOPIC: Final = "remote-t"
SOURCE: Final = "local-t"
SOURCE_ID: Final = str(uuid.UUID(int=9, version=4))
OTHER: Final = str(uuid.UUID(int=10, version=4))
"""Another process of the same cluster."""
_P = TruncationPhase


class TruncatedCluster(FakeCluster):
    """A cluster whose topics can be deleted by id, with the positions that groups have in them."""

    async def delete_topic_id(self, topic_id: bytes) -> None:
        await self._request()
        for name in [name for name, topic in self.found.items() if topic.topic_id == topic_id]:
            del self.found[name]
            for positions in self.offsets.values():
                for place in [place for place in positions if place[0] == name]:
                    del positions[place]


class FollowedTopic:
    """A topic of B that follows, as cluster and control log have it, and what the control log has of its truncation.

    Each partition holds the source's records up to :data:`COMMON`, and some of nobody knows whom up to ``END``.
    """

    COMMON: Final = 10
    END: Final = 13

    def __init__(self, partitions: int = 1) -> None:
        replicas = Replicas(random.Random(4), 1)
        self.control = replicas.controls["B"]
        self.cluster = TruncatedCluster(random.Random(4), (1,))
        self.topic = self.cluster.add_topic(TOPIC, partitions)
        for partition in self.topic.partitions:
            partition.write_values(*[b"the source's"] * self.COMMON)
            partition.write_values(*[b"rogue"] * (self.END - self.COMMON))
        self.cuts = tuple(PartitionCut(each, 0, self.COMMON, self.END) for each in range(partitions))
        self.topic_id = str(uuid.UUID(bytes=self.topic.topic_id))
        self.apply(SetFollowerTopic(LINK, TOPIC, SOURCE, SOURCE_ID, TopicState.FOLLOWING, self.topic_id))
        at = tuple(PartitionOffset(TOPIC, self.topic_id, each, 0) for each in range(partitions))
        self.apply(OpenProvenance(LINK, at))

    def apply(self, body: Body) -> None:
        outcome = self.control.apply(body)
        assert isinstance(outcome, Accepted), outcome

    def context(self, name: str = "p") -> Any:
        """A process of the cluster."""
        return FakeContext(self.cluster, self.control, name)

    def claim(self, name: str, incarnation: str, broker: int) -> None:
        """A process has a lease from now on."""
        claims = (BrokerClaim(broker, "127.0.0.1", 9),)
        self.apply(ClaimBrokers(name, incarnation, claims, False, None, 10_000, with_known_level("0"), -1))

    def begin(self, owner: str, proxy: str = "p") -> Truncation:
        """Its truncation begins."""
        why = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote")
        views = tuple(PartitionView(1, 0) for _ in self.cuts)
        self.apply(BeginTruncation(LINK, TOPIC, self.topic_id, why, views, None, proxy, owner))
        return self.now

    @property
    def now(self) -> Truncation:
        return self.control.state.truncations[TOPIC]

    def take_over(self, owner: str = OTHER) -> None:
        """Another process goes on with it."""
        self.apply(TakeOverTruncation(TOPIC, self.topic_id, "q", owner))

    def at(self, phase: TruncationPhase) -> Truncation:
        """It goes there on the straight way; the cluster stays as it is."""
        safe = tuple(SalvageFile(cut.partition, "p", "/salvage/x", cut.records) for cut in self.cuts)
        straight: tuple[tuple[TruncationPhase, dict[str, Any]], ...] = (
            (_P.SALVAGING, {"cuts": self.cuts, "compared_at": self.now.partitions}),
            (_P.SPOOLING, {"salvaged": safe}),
            (_P.RECREATING, {"attempt": "1"}),
            (_P.REFILLING, {"new_topic_id": OTHER}),
            (_P.RESTORING, {}),
            (_P.CLEANING, {}),
        )
        for step, found in straight:
            if self.now.phase is not phase:
                self.apply(AdvanceTruncation(TOPIC, self.topic_id, self.now.owner, step, **found))
        assert self.now.phase is phase
        return self.now


def salvaged(directory: Path) -> list[bytes | None]:
    """The values in a proxy's salvage files."""
    found = []
    for path in sorted(directory.glob("salvage/*.salvage")):
        salvage = read_salvage(path.read_bytes())
        found += [record.value for batch, _ in salvage.batches() for record in decode_records(batch)]
    return found


async def _inline(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """In the place of ``asyncio.to_thread``: threads know nothing of simulated time."""
    return function(*arguments, **more)


def simulate_truncations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have truncations run on the simulated loop's clock."""
    monkeypatch.setattr(asyncio, "to_thread", _inline)
