"""Consumer groups of a cluster in memory: a coordinator as a plugin sees it, with lost and late requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, Refused, TopicPartition

LATE_MAX_S: Final = 1.9
SUBSCRIBED: Final = Refused(86, "GROUP_SUBSCRIBED_TO_TOPIC")
HAS_MEMBERS: Final = Refused(25, "UNKNOWN_MEMBER_ID")
BROKER_DEFAULTS: Final = {"offsets.retention.minutes": "10080", "producer.id.expiration.ms": "86400000"}
RETENTION_MS: Final = 10080 * 60_000


class FakeGroups:
    """What groups have committed. ``coordinator_trouble``: how likely a request to a coordinator meets some."""

    def __init__(self, rng: random.Random) -> None:
        self._groups_random = rng
        self.coordinator_trouble = 0.0
        self.offsets: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self.brokers_changed_at = float("-inf")
        self._older: dict[tuple[str, TopicPartition], list[CommittedOffset]] = {}
        """What groups had committed before, the latest last."""
        self.subscriptions: dict[str, set[str]] = {}
        """Groups with members, and the topics that these subscribe to."""
        self.renewed: list[tuple[str, TopicPartition, int | None]] = []
        """Every commit: group, partition, retention."""
        self.on_commit: Callable[[str, TopicPartition, CommittedOffset], None] = lambda group, place, committed: None

    async def _coordinate(self, change: Callable[[], None] | None = None) -> None:
        """One request to a coordinator that makes a change; it may be lost, or land late."""
        rng = self._groups_random
        await asyncio.sleep(rng.uniform(0.0005, 0.005))
        if rng.random() >= self.coordinator_trouble:
            if change is not None:
                change()
            return
        fate = rng.choice(("lost", "unanswered", "late"))
        if change is not None and fate == "unanswered":
            change()
        elif change is not None and fate == "late":
            asyncio.get_running_loop().call_later(rng.uniform(0.0, LATE_MAX_S), change)
        raise BrokerUnavailable(f"the coordinator does not answer ({fate})")

    def lose_commits(self, lost: Callable[[], int]) -> None:
        """The coordinator's broker is restarted after a power loss: the last commits are gone that were not flushed.
        ``lost``: how many of a group in a place."""
        self.brokers_changed_at = asyncio.get_running_loop().time()
        for (group, place), older in self._older.items():
            for _ in range(min(lost(), len(older))):
                committed = older.pop()
                if place in self.offsets.get(group, {}):
                    self.offsets[group][place] = committed

    async def groups(self) -> Collection[str]:
        await self._coordinate()
        return self.offsets.keys() | self.subscriptions.keys()

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
        await self._coordinate()
        return {group: dict(self.offsets.get(group, {})) for group in groups}

    async def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], retention_ms: int | None = None
    ) -> Mapping[TopicPartition, Refused]:
        if retention_ms is not None and group in self.subscriptions:
            await self._coordinate()
            return dict.fromkeys(offsets, HAS_MEMBERS)

        def change() -> None:
            for place, committed in offsets.items():
                before = self.offsets.get(group, {}).get(place)
                if before is not None:
                    self._older.setdefault((group, place), []).append(before)
                self.on_commit(group, place, committed)
                self.renewed.append((group, place, retention_ms))
            self.offsets.setdefault(group, {}).update(offsets)

        await self._coordinate(change)
        return {}

    async def delete_offsets(
        self, group: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, Refused]:
        subscribed = self.subscriptions.get(group, set())

        def change() -> None:
            for place in partitions:
                if place[0] not in subscribed:
                    self.offsets.get(group, {}).pop(place, None)

        await self._coordinate(change)
        return {place: SUBSCRIBED for place in partitions if place[0] in subscribed}

    async def delete_group(self, group: str) -> None:
        if group not in self.offsets and group not in self.subscriptions:
            raise KafkaRefused(69, "GROUP_ID_NOT_FOUND", group)
        if group in self.subscriptions:
            raise KafkaRefused(68, "NON_EMPTY_GROUP", group)
        await self._coordinate(lambda: self.offsets.pop(group, None) and None)
