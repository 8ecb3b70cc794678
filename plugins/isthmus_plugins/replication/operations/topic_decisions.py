"""What an operator decides about a follower topic that cannot go on: forget it, delete it, or start over.

A follower keeps its records whatever happens to the source's topic. Where that was deleted, or another one has its name
now, or somebody deleted the follower's own, nothing is lost and nothing goes on until the operator says what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from isthmus_control.commands import (
    Body,
    ForgetFollowerTopic,
    GiveUpTruncation,
    RecreateFollowerTopic,
    ReleaseSourceLosses,
)
from isthmus_control.model import FollowerTopic, ResourceType, TopicState
from isthmus_control.origins import Ended
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import OperationError, TopicDecision
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.follower.topic_plans import Refusal
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.operations.commands import Call

Fate = Literal["deleted", "created again", "unchanged", "not reached"]


class TopicDecisions:
    """``call`` asks the other cluster of a link, ``append`` records a command; both raise OperationError."""

    def __init__(
        self,
        context: PluginContext,
        follower_topics: FollowerTopics,
        call: Call,
        append: Callable[[Body], Awaitable[None]],
    ) -> None:
        self._context = context
        self._follower_topics = follower_topics
        self._call = call
        self._append = append

    async def forget(self, topic: str, delete: bool, dry_run: bool) -> TopicDecision:
        """Stop following a topic whose source is gone; keep its records, or ``delete`` them."""
        record = self._record(topic)
        fate = await self._fate(record)
        if fate == "unchanged":
            raise OperationError(
                "CONFLICT",
                f"{record.source_topic} is there at the source, and {topic} would follow it again: detach the "
                "namespace to stop that",
                409,
            )
        try:
            existing = (await self._context.cluster.topics()).get(topic)
            ours = existing if existing is not None and existing.id_text == record.topic_id else None
            records = await self._records(ours)
            decision = _decision(
                record,
                fate,
                "delete" if delete else "forget",
                dry_run,
                records if delete else 0,
                f"{topic} and its {records} records are deleted"
                if delete
                else f"{topic} keeps its {records} records, follows nothing, and stays reserved with its namespace",
            )
            if not dry_run:
                if ours is not None and record.state is TopicState.FOLLOWING:
                    await self._follower_topics.close_provenance([(record, ours)], Ended.SOURCE_GONE)
                if ours is not None and delete:
                    self._check_unchanged(record)
                    check_lease(self._context)
                    await self._context.cluster.delete_topic_id(ours.topic_id)
                await self._append(ForgetFollowerTopic(record.link, topic))
        except (BrokerUnavailable, KafkaRefused, Refusal) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        return decision

    async def recreate(self, topic: str, dry_run: bool) -> TopicDecision:
        """Lose a topic that cannot go on, and follow its source's present one from the start."""
        record = self._record(topic)
        fate = await self._fate(record)
        if fate == "deleted":
            raise OperationError(
                "CONFLICT",
                f"the source has no {record.source_topic} that could be followed: `isthmus topic forget {topic}` ends "
                "following, and keeps the records here or deletes them",
                409,
            )
        try:
            existing = (await self._context.cluster.topics()).get(topic)
            goes_on = (
                record.state is TopicState.FOLLOWING and existing is not None and existing.id_text == record.topic_id
            )
            # A copy of an offsets topic gets the form chosen now, a compacted topic loses keys deleted at the source.
            if fate == "unchanged" and goes_on and not (record.cleaned or self._is_offsets_copy(topic)):
                raise OperationError(
                    "CONFLICT", f"{topic} follows {record.source_topic} as it is: there is no need to lose it", 409
                )
            records = await self._records(existing)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        if not dry_run:
            lost = None if existing is None else existing.id_text
            await self._append(RecreateFollowerTopic(record.link, topic, lost))
        message = f"{topic} loses its {records} records and follows {record.source_topic} from its start"
        return _decision(record, fate, "recreate", dry_run, records, message)

    async def give_up(self, topic: str, dry_run: bool) -> TopicDecision:
        """End the truncation of a topic whose local copy is lost and whose source does not give it back."""
        record, truncation = self._record(topic), self._context.control.state.truncations.get(topic)
        if truncation is None or not truncation.follows:
            raise OperationError("CONFLICT", f"{topic} lacks nothing that could be given up", 409)
        try:
            fate: Fate = await self._fate(record)
        except OperationError:
            fate = "not reached"
        try:
            ends = await self._context.cluster.log_ends([(topic, cut.partition) for cut in truncation.cuts])
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        lost = sum(max(0, cut.offset - ends.get((topic, cut.partition), 0)) for cut in truncation.cuts)
        if not dry_run:
            await self._append(GiveUpTruncation(topic, truncation.topic_id))
        message = (
            f"{topic} ends where it does now, without {lost} offsets that it had; committed offsets beyond move there"
        )
        return _decision(record, fate, "give up", dry_run, lost, message)

    async def truncate(self, topic: str, dry_run: bool) -> TopicDecision:
        """Cut a topic to its source's log, which lost what it had acked In-Sync."""
        record = self._record(topic)
        held = self._context.control.state.held_losses.get((topic, record.topic_id or ""), ())
        if not held:
            raise OperationError("CONFLICT", f"nothing of {topic} is held: what its source lost is cut by itself", 409)
        fate = await self._fate(record)
        if not dry_run:
            await self._append(ReleaseSourceLosses(topic, held[0].topic_id))
        message = f"{topic} is cut to its source's log, what goes is salvaged: {'; '.join(loss.what for loss in held)}"
        return _decision(record, fate, "truncate", dry_run, sum(loss.count for loss in held), message)

    def _is_offsets_copy(self, topic: str) -> bool:
        """Whether it is a copy of the source's offsets topic: made anew, all of it has the form chosen now."""
        counterpart = self._context.control.state.lookup.following(ResourceType.TOPIC, topic)
        return counterpart is not None and counterpart.mapping.offsets is not None

    def _record(self, topic: str) -> FollowerTopic:
        record = self._context.control.state.follower_topics.get(topic)
        if record is None or record.state is TopicState.DETACHED:
            raise OperationError("NOT_FOUND", f"topic {topic!r} follows no link here", 404)
        return record

    def _check_unchanged(self, record: FollowerTopic) -> None:
        """Raise OperationError where a topic is not any more what it was when the operator decided about it."""
        state = self._context.control.state
        cut_or_promoted = record.topic in state.truncations or state.is_promoted(record.topic)
        if state.follower_topics.get(record.topic) != record or cut_or_promoted:
            raise OperationError(
                "CONFLICT", f"{record.topic} became another one meanwhile, or is promoted or truncated: look again", 409
            )

    async def _fate(self, record: FollowerTopic) -> Fate:
        """What became of the source's topic. Raises OperationError where the source cannot be asked."""
        counterpart = self._context.control.state.lookup.following(ResourceType.TOPIC, record.topic)
        if counterpart is None:
            raise OperationError("NOT_FOUND", f"topic {record.topic!r} is in no namespace that follows", 404)
        answer = await self._call(record.link, calls.LedTopics(counterpart.mapping.remote_prefix))
        if record.source_topic in answer.truncating:
            raise OperationError("CONFLICT", reasons.source_truncating(record.source_topic, record.topic), 409)
        found = next((each for each in answer.topics if each.topic == record.source_topic), None)
        if found is None:
            return "deleted"
        return "unchanged" if found.topic_id == record.source_topic_id else "created again"

    async def _records(self, topic: TopicInfo | None) -> int:
        if topic is None:
            return 0
        cluster, partitions = self._context.cluster, range(len(topic.partitions))
        ends = await asyncio.gather(*(cluster.log_end(topic.name, partition) for partition in partitions))
        starts = await asyncio.gather(*(cluster.log_start(topic.name, partition) for partition in partitions))
        return sum(ends) - sum(starts)


def _decision(
    record: FollowerTopic,
    fate: Fate,
    action: Literal["forget", "delete", "recreate", "give up", "truncate"],
    dry_run: bool,
    records_lost: int,
    message: str,
) -> TopicDecision:
    return TopicDecision(
        topic=record.topic,
        link_name=record.link,
        source_topic=record.source_topic,
        source=fate,
        action=action,
        dry_run=dry_run,
        records_lost=records_lost,
        message=message,
    )
