"""Committed offsets of groups that a truncation moves: Kafka deletes them with the topic, and the new one gets them.

A follower's truncation reads them, commits them as they are before anything is deleted, which shows whether they can be
restored, and restores them in the new topic, no further than the cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, TypeAlias

from isthmus_control.states import ReasonCode
from isthmus_control.truncations import MovedOffset, Truncation
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.truncation.ownership import HeldUp, Ownership
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    ILLEGAL_GENERATION,
    NOT_COORDINATOR,
    UNKNOWN_MEMBER_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)

log = logging.getLogger("isthmus_plugins.replication")

DROP_S: Final = 1.0
"""A coordinator drops the offsets of a deleted topic when it hears of that, maybe after the new one is there."""
NO_EXPIRY_OF_ITS_OWN: Final = -1
NOT_A_MEMBER: Final = frozenset({ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID})
"""The group has members."""
PASSING: Final = frozenset({COORDINATOR_LOAD_IN_PROGRESS, NOT_COORDINATOR, UNKNOWN_TOPIC_OR_PARTITION})
"""The coordinator moves, or has not heard yet that the topic was made anew.

COORDINATOR_NOT_AVAILABLE is not among them: so answers one that verifies transactions, for good.
"""

OffsetsOfGroups: TypeAlias = Mapping[str, Mapping[int, tuple[int, str]]]
"""By group and partition: (offset, metadata)."""


class GroupOffsets:
    """What groups have committed in the topic of a truncation."""

    def __init__(self, context: PluginContext, ownership: Ownership) -> None:
        self._context = context
        self._ownership = ownership

    async def read(self, topic: str) -> dict[str, dict[int, tuple[int, str]]]:
        """What groups have committed for a topic. Raises BrokerUnavailable."""
        cluster = self._context.cluster
        groups = await cluster.groups()
        committed = await cluster.committed_offsets(groups)
        missing = sorted(set(groups) - committed.keys())
        if missing:
            raise BrokerUnavailable(
                f"the committed offsets of {len(missing)} groups cannot be read now, of {missing[0]} first"
            )
        return {
            group: found
            for group, offsets in committed.items()
            if (
                found := {
                    place[1]: (each.offset, each.metadata) for place, each in offsets.items() if place[0] == topic
                }
            )
        }

    async def commit(self, truncation: Truncation, offsets: OffsetsOfGroups) -> None:
        """Commit in the groups' place. Raises HeldUp, NotOwner, BrokerUnavailable."""
        cluster = self._context.cluster
        for group, by_partition in sorted(offsets.items()):
            # For each, since who slept meanwhile would put it back where the next owner has moved it.
            await self._ownership.confirm(truncation)
            wanted = {
                (truncation.topic, partition): CommittedOffset(offset, metadata)
                for partition, (offset, metadata) in by_partition.items()
            }
            refused = await cluster.commit_offsets(group, wanted, NO_EXPIRY_OF_ITS_OWN)
            if any(answer.error_code in NOT_A_MEMBER for answer in refused.values()):
                refused = await cluster.commit_offsets(group, wanted)
            for (_, partition), answer in refused.items():
                if answer.error_code in PASSING:
                    raise BrokerUnavailable(f"the coordinator of group {group} answers {answer.error_name}")
                raise HeldUp(
                    ReasonCode.POSITIONS_NOT_RESTORED,
                    f"the committed offset of group {group} in partition {partition} cannot be kept "
                    f"({answer.error_name}): a "
                    "group with members takes it only with transaction.partition.verification.enable=false (attach "
                    "with --disable-transaction-verification), or stop its members",
                )

    async def restore(self, truncation: Truncation, before: OffsetsOfGroups) -> list[MovedOffset]:
        """Give groups what they had committed, where the new topic has it; what was beyond the cut is moved there.

        Raises HeldUp, NotOwner, BrokerUnavailable.
        """
        moved: list[MovedOffset] = []
        wanted: dict[str, dict[int, tuple[int, str]]] = {}
        for group, offsets in sorted(before.items()):
            for partition, (offset, metadata) in sorted(offsets.items()):
                cut = truncation.cut(partition)
                end = offset if cut is None else min(offset, cut.offset)
                wanted.setdefault(group, {})[partition] = (end, metadata)
                if end < offset:
                    moved.append(MovedOffset(group, partition, offset, end))
        while True:
            if wanted:
                # A coordinator that has not heard yet of the deletion still has what it is about to drop.
                await asyncio.sleep(DROP_S)
            missing = await self._missing(truncation, wanted)
            if not missing:
                break
            await self.commit(truncation, missing)
        for each in moved:
            log.warning(
                "group position moved to the cut",
                extra={
                    "topic": truncation.topic,
                    "partition": each.partition,
                    "group": each.group,
                    "offset": each.offset,
                    "moved_to": each.moved_to,
                },
            )
        return moved

    async def _missing(self, truncation: Truncation, wanted: OffsetsOfGroups) -> OffsetsOfGroups:
        """What groups lack of that. An offset that is there is theirs, or was committed since.

        Nothing is committed meanwhile that is beyond the cut: clients wait, and so does what follows another cluster.
        """
        there = await self.read(truncation.topic)
        missing = {
            group: {partition: each for partition, each in offsets.items() if partition not in there.get(group, {})}
            for group, offsets in wanted.items()
        }
        # A commit that was under way when the topic was deleted is one into another log: beyond the cut is nothing.
        for group, found in there.items():
            for partition, (offset, metadata) in found.items():
                cut = truncation.cut(partition)
                if cut is not None and offset > cut.offset:
                    moved = wanted.get(group, {}).get(partition, (cut.offset, metadata))
                    missing.setdefault(group, {})[partition] = moved
        return {group: offsets for group, offsets in missing.items() if offsets}
