"""The follower's topics: made for a link, adopted, or refused; always with the intent recorded first.

A topic that exists and holds other records is never written: it is refused, with the reason, until provenance shows
that its records are the source's, or the operator has agreed to lose them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from isthmus_control.commands import (
    CloseProvenance,
    CompactFollowerTopic,
    ForgetFollowerTopic,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
)
from isthmus_control.model import (
    INTERNAL_PREFIX,
    FollowerTopic,
    NamespaceMapping,
    OffsetsCopy,
    ProvenanceRange,
    Reason,
    ResourceType,
    Role,
    TopicState,
)
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession, succession
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import TopicPlan
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs import topic_settings

log = logging.getLogger("isthmus_plugins.replication")

CONTROL_TOPIC: Final = INTERNAL_PREFIX + "control"
LEADERS_WAIT_S: Final = 2.0
"""How long a new topic's leaders are waited for before the leader end is told that there are none yet."""
SETTLE_S: Final = 0.2
SETTLE_TRIES: Final = 25
CLOSED_AT_ONCE: Final = 10_000
"""Partitions in one command: some 150 bytes each."""


SourceTopic: TypeAlias = calls.LedTopic | calls.WantedTopic
"""A topic of the source, as it says itself."""


class Refusal(Exception):
    """A topic cannot follow (yet). ``code`` is a constant, the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FollowerTopics(Part):
    """What this cluster's topics in follower namespaces are and become."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._led: dict[str, frozenset[str]] = {}
        """By link: the source's topics, as the leader end last said."""
        self.refused: dict[str, Reason] = {}
        """By topic: why it does not go on with the source's, as of the leader end's last call."""
        self.succeeded: dict[str, Succession] = {}
        """By topic: which topic of the source succeeded the one that it follows, as of the leader end's last call."""
        self.settings_refused: dict[str, Reason] = {}
        """By topic: why it does not have the source's settings."""
        self.settings_waiting: dict[str, Reason] = {}
        """By topic: what it will have of the source's settings by itself, and when."""

    # ---- the leader end's call ----

    def answers(self) -> Sequence[Answering]:
        return (calls.PrepareTopics.by(self.prepare_topics),)

    async def prepare_topics(
        self, connection: LinkConnection, question: calls.PrepareTopics
    ) -> calls.PrepareTopicsAnswer:
        """Make or adopt a local topic for each of the source's; say which are ready, and who leads their partitions."""
        async with self._lock:
            topics = await self._context.cluster.topics()
            await self._sources_seen(connection.link_name, frozenset(question.all), topics)
            self._sources_truncating(connection.link_name, question.truncating)
            answers: dict[str, calls.PreparedTopic] = {}
            ready: dict[str, str] = {}
            changed = False
            effective = await self._effective(connection.link_name, question.topics, topics)
            filled = await self._filled(connection.link_name, question.topics, topics)
            for wanted in question.topics:
                name = wanted.topic
                try:
                    local, created = await self._prepare(connection.link_name, wanted, topics)
                    refused = None
                    if (configs := wanted.configs) is not None and local in topics:
                        if (settings := effective.get(local)) is None:
                            refused = self._unreadable(local)
                        else:
                            await self._decide_compaction(local, configs, filled.get(local))
                            refused = await self._follow_configs(configs, topics[local], settings)
                            await self._record_settings(local, configs)
                except Refusal as refusal:
                    self._refused(connection.link_name, name, refusal)
                    answers[name] = calls.PreparedTopic(False, None, refusal.code, str(refusal))
                except KafkaRefused as error:
                    message = f"the target refuses the topic: {error}"
                    answers[name] = calls.PreparedTopic(False, None, ReasonCode.TARGET_TOPIC_NOT_CREATED, message)
                except BrokerUnavailable as error:
                    answers[name] = calls.PreparedTopic(False, None, reasons.BROKER_UNAVAILABLE, str(error))
                else:
                    self.refused.pop(local, None)
                    made = calls.ReadyTopic(local, self._filling(local))
                    amiss = (None, None) if refused is None else (refused.code, refused.message)
                    answers[name] = calls.PreparedTopic(True, made, *amiss)
                    ready[name] = local
                    changed = changed or created
            if changed:
                topics = await self._topics_with_leaders(list(ready.values()))
            for name, local in ready.items():
                info = topics.get(local)
                leaders = tuple(partition.leader for partition in info.partitions) if info else ()
                answers[name] = replace(answers[name], leaders=leaders)
            return calls.PrepareTopicsAnswer(answers)

    def _sources_truncating(self, link_name: str, source_topics: Sequence[str]) -> None:
        """Show why topics wait whose source's topic is not whole, or not even there, for now."""
        for name in source_topics:
            counterpart = self._context.control.state.lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, name)
            if counterpart is not None:
                local = counterpart.local_name
                message = reasons.source_truncating(name, local)
                self.refused[local] = Reason(ReasonCode.SOURCE_TRUNCATING, message)

    def _refused(self, link_name: str, source_topic: str, refusal: Refusal) -> None:
        lookup = self._context.control.state.lookup
        counterpart = lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, source_topic)
        if counterpart is not None:
            self.refused[counterpart.local_name] = Reason(refusal.code, str(refusal))

    async def _effective(
        self, link_name: str, requests: Sequence[calls.WantedTopic], topics: Mapping[str, TopicInfo]
    ) -> Mapping[str, Mapping[str, str | None]]:
        """The settings of those local topics that exist and for which the source told its own."""
        lookup = self._context.control.state.lookup
        told = [
            counterpart.local_name
            for wanted in requests
            if wanted.configs is not None
            and (counterpart := lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, wanted.topic))
            and counterpart.local_name in topics
        ]
        found: dict[str, Mapping[str, str | None]] = {}
        for start in range(0, len(told), topic_settings.DESCRIBED_AT_ONCE):
            some = told[start : start + topic_settings.DESCRIBED_AT_ONCE]
            _, described = await self._context.cluster.effective_configs(some)
            found |= described or {}
        return found

    def _unreadable(self, local: str) -> Reason:
        """Note that the brokers do not tell a topic's settings."""
        reason = self.settings_refused[local] = Reason(
            ReasonCode.TARGET_REFUSES_SETTINGS,
            f"the settings of {local} cannot be read (the proxy's own identity needs ALLOW DescribeConfigs on topic "
            f"{local}): they are not followed",
        )
        return reason

    # ---- compaction ----

    def _filling(self, local: str) -> int | None:
        """What stands for the time since when a topic is not compacted here; None: it is, or never will be."""
        record = self._context.control.state.follower_topics.get(local)
        following = record is not None and record.state is TopicState.FOLLOWING
        if record is None or not following or record.compacts or self._copy(local) is not None:
            return None
        return record.compacts_since_offset

    async def _filled(
        self, link_name: str, requests: Sequence[calls.WantedTopic], topics: Mapping[str, TopicInfo]
    ) -> Mapping[str, int]:
        """Local topics that have all that the source had when they were not compacted here: with that time.

        The source's ends were read after it was known to be compacted: beyond them every record has a key.
        """
        lookup = self._context.control.state.lookup
        ends: dict[tuple[str, int], int] = {}
        since: dict[str, int] = {}
        for wanted in requests:
            counterpart = lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, wanted.topic)
            info = None if counterpart is None else topics.get(counterpart.local_name)
            to_fill = wanted.to_fill
            if info is not None and to_fill is not None and len(to_fill.ends) == len(info.partitions):
                since[info.name] = to_fill.since
                ends |= {(info.name, partition): end for partition, end in enumerate(to_fill.ends)}
        if not ends:
            return {}
        try:
            here = await self._context.cluster.log_ends(list(ends))
        except BrokerUnavailable:
            return {}
        lacking = {topic for (topic, partition), end in ends.items() if here.get((topic, partition), -1) < end}
        return {topic: offset for topic, offset in since.items() if topic not in lacking}

    async def _decide_compaction(self, local: str, source: Mapping[str, str], filled_since: int | None) -> None:
        """Record that a topic is compacted here from now on, or is not any more: as its source, once it was filled.

        A topic that was only just made compacted may have records without a key, which a compacted one refuses; and
        those before the source's start are filled with what is deleted after. What has been decided stands in the
        control log, and the topic's settings come after it.
        """
        record = self._context.control.state.follower_topics.get(local)
        if record is None or record.state is not TopicState.FOLLOWING or self._copy(local) is not None:
            return
        compacts = topic_settings.is_compacted(source)
        if record.compacts != compacts and (not compacts or filled_since == record.compacts_since_offset):
            body = CompactFollowerTopic(local, record.topic_id or "", compacts, record.compacts_since_offset)
            if not isinstance(await self._context.control.append(body), Rejected):
                log.info("follower topic compaction", extra={"topic": local, "compacts": compacts})
        record = self._context.control.state.follower_topics.get(local)
        if record is not None and compacts and not record.compacts and record.cleaned:
            self.settings_waiting[local] = Reason(
                ReasonCode.NOT_COMPACTED_YET,
                f"the source's {record.source_topic} is compacted, and {local} again once it has what the source has "
                "now: brokers refuse records without a key in a compacted topic",
            )
        else:
            self.settings_waiting.pop(local, None)

    async def _follow_configs(
        self, source: Mapping[str, str], existing: TopicInfo, effective: Mapping[str, str | None]
    ) -> Reason | None:
        """Give a follower topic the settings that its source has now; why the brokers refuse, if they do."""
        local, factor = existing.name, existing.replication_factor
        if topic_settings.follows(effective, source, factor, self._overrides(local, source)):
            self.settings_refused.pop(local, None)
            return None
        own = await self._context.cluster.topic_configs(local)
        changes = topic_settings.changes(own, await self._configs(local, source, factor))
        truncation = self._context.control.state.truncations.get(local)
        if truncation is not None and not truncation.follows:  # it is frozen, or not there, and gets them back
            return None
        try:
            await self._context.cluster.alter_topic_configs(local, changes)
        except KafkaRefused as error:
            # Its records can follow all the same.
            why = reasons.refused(error, "AlterConfigs", f"topic {local}")
            reason = Reason(
                ReasonCode.TARGET_REFUSES_SETTINGS,
                f"the target refuses settings of {local} ({', '.join(sorted(changes))}): {why}",
            )
            self.settings_refused[local] = reason
            return reason
        self.settings_refused.pop(local, None)
        log.info("follower topic configured", extra={"topic": local, "settings": sorted(changes)})
        return None

    async def _record_settings(self, local: str, source: Mapping[str, str]) -> None:
        """Have the control log know what a topic gets back when it follows no more, also when its source is gone."""
        record = self._context.control.state.follower_topics.get(local)
        settings = topic_settings.overridden(source)
        if record is None or record.state is not TopicState.FOLLOWING or record.settings == settings:
            return
        body = SetFollowerTopic(
            record.link,
            local,
            record.source_topic,
            record.source_topic_id,
            record.state,
            record.topic_id,
            settings=settings,
        )
        try:
            await self._append(body)
        except Refusal as refusal:  # it is being truncated, say: with the next change, or connection
            log.warning("settings not recorded", extra={"topic": local, "detail": str(refusal)})

    def overrides(self, local: str) -> Mapping[str, str]:
        """The settings that a topic has instead of its source's because it follows."""
        record = self._context.control.state.follower_topics.get(local)
        return self._overrides(local, {}) if record is not None and record.state is TopicState.FOLLOWING else {}

    def _overrides(self, local: str, source: Mapping[str, str]) -> Mapping[str, str]:
        copy = self._copy(local)
        if copy is not None:
            return topic_settings.offsets_overrides(copy, source)
        record = self._context.control.state.follower_topics.get(local)
        following = record is not None and record.state is TopicState.FOLLOWING
        return topic_settings.overrides(record is not None and following and record.compacts)

    def _copy(self, local: str) -> OffsetsCopy | None:
        """How an offsets topic is copied, if the topic is such a copy."""
        counterpart = self._context.control.state.lookup.following(ResourceType.TOPIC, local)
        return counterpart.mapping.offsets if counterpart is not None else None

    def source_is_gone(self, record: FollowerTopic) -> bool:
        """Whether the source has no such topic (any more), as far as it has told."""
        return record.link in self._led and record.source_topic not in self._led[record.link]

    async def _sources_seen(self, link_name: str, led: frozenset[str], topics: Mapping[str, TopicInfo]) -> None:
        """Note what the source has, and forget topics that neither side has any more."""
        self._led[link_name] = led
        for record in list(self._context.control.state.follower_topics.values()):
            followed = record.link == link_name and record.state in (TopicState.FOLLOWING, TopicState.REFUSED)
            truncating = record.topic in self._context.control.state.truncations
            if followed and not truncating and record.source_topic not in led and record.topic not in topics:
                log.info("follower topic forgotten", extra={"link": link_name, "topic": record.topic})
                await self._append(ForgetFollowerTopic(link_name, record.topic))

    async def _topics_with_leaders(self, names: list[str]) -> Mapping[str, TopicInfo]:
        """All topics, once those of ``names`` have leaders: a new one takes a moment to have them everywhere."""
        deadline = asyncio.get_running_loop().time() + LEADERS_WAIT_S
        delay = 0.02
        while True:
            topics = await self._context.cluster.topics()
            led = all(
                name in topics and all(partition.leader >= 0 for partition in topics[name].partitions) for name in names
            )
            if led or asyncio.get_running_loop().time() > deadline:
                return topics
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.2)

    async def _prepare(
        self, link_name: str, wanted: calls.WantedTopic, topics: Mapping[str, TopicInfo]
    ) -> tuple[str, bool]:
        """One topic: (its local name, whether topics changed). Raises Refusal, KafkaRefused, BrokerUnavailable."""
        state = self._context.control.state
        source_topic = wanted.topic
        counterpart = state.lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, source_topic)
        if counterpart is None:
            raise Refusal(
                reasons.NOT_FOLLOWING, f"no namespace of this cluster follows {source_topic} over {link_name}"
            )
        local = counterpart.local_name
        partitions = wanted.partitions
        record = state.follower_topics.get(local)
        existing = topics.get(local)
        if record is not None and record.state is TopicState.FOLLOWING and record.link == link_name:
            self._check_source(record, wanted, existing)
            return local, await self._check_following(record, partitions, existing)
        if existing is not None and record is not None and _to_be_lost(record, link_name, existing):
            log.warning("follower topic recreated", extra={"link": link_name, "topic": local})
            await self._lose(existing)
            existing = None
        if existing is not None:
            await self._adopt_or_refuse(link_name, counterpart.mapping, record, wanted, local, existing)
            return local, True
        await self._create(link_name, wanted, local)
        return local, True

    def _check_source(self, record: FollowerTopic, wanted: calls.WantedTopic, existing: TopicInfo | None) -> None:
        """Raise Refusal unless the source's topic is the one that is followed, and this one is whole.

        Where the source states that its present topic succeeded the one that is followed, that is noted: a truncation
        makes this topic follow the present one.
        """
        truncation = self._context.control.state.truncations.get(record.topic)
        if truncation is not None and not truncation.follows:
            raise Refusal(ReasonCode.TRUNCATING, truncation.describe())
        source_id = wanted.topic_id
        self.succeeded.pop(record.topic, None)
        if record.source_topic_id == source_id:
            return
        found = succession(_chain(wanted), record.source_topic_id, source_id)
        if found is not None and _is(record, existing):
            self.succeeded[record.topic] = found
            raise Refusal(ReasonCode.SOURCE_TRUNCATED, reasons.source_truncated(record.source_topic, found))
        if found is not None:
            return  # what is the matter with the topic here comes first
        raise Refusal(
            ReasonCode.SOURCE_TOPIC_ID_CHANGED,
            f"the source's {record.source_topic} was deleted and created again; {record.topic} keeps the old one's "
            f"records: `isthmus topic recreate {record.topic}` loses them and follows the new one",
        )

    async def _check_following(self, record: FollowerTopic, partitions: int, existing: TopicInfo | None) -> bool:
        seen = existing
        if not _is(record, existing):  # another proxy of this cluster may have made it since the topics were read
            existing = await self._context.cluster.topic(record.topic)
        if existing is None or not _is(record, existing):
            raise Refusal(
                ReasonCode.TARGET_TOPIC_MAY_BE_DELETED if existing is None else ReasonCode.TARGET_TOPIC_ID_CHANGED,
                f"{record.topic} was deleted here behind the link's back: `isthmus topic recreate {record.topic}` "
                "follows the source's from its start",
            )
        there = len(existing.partitions)
        if there > partitions:
            raise Refusal(
                ReasonCode.SOURCE_PARTITIONS_DECREASED,
                f"{record.topic} has {there} partitions here, the source's {record.source_topic} has {partitions}",
            )
        if there < partitions:
            await self._context.cluster.create_partitions(record.topic, partitions)
        # A proxy that was killed in the middle may have left partitions whose provenance was never opened.
        history = self._context.control.state.histories.get(record.topic)
        known = history.partitions if history is not None and history.topic_id == record.topic_id else {}
        unopened = [p for p in range(partitions) if not known.get(p) or known[p][-1].end_offset is not None]
        if unopened:
            ends = {p: await self._context.cluster.log_end(record.topic, p) if p < there else 0 for p in unopened}
            await self._open_provenance(record.link, record.topic, existing.topic_id, ends)
        return there < partitions or existing is not seen

    async def _create(self, link_name: str, wanted: calls.WantedTopic, local: str) -> None:
        await self._record(link_name, wanted, local, TopicState.CREATING)
        cluster = self._context.cluster
        factor = min(wanted.replication_factor, await cluster.broker_count())
        topic_id = await cluster.create_topic(
            local, wanted.partitions, factor, await self._configs(local, wanted.configs or {}, factor)
        )
        log.info("follower topic created", extra={"link": link_name, "topic": local, "partitions": wanted.partitions})
        await self._record(link_name, wanted, local, TopicState.FOLLOWING, topic_id)
        await self._open_provenance(link_name, local, topic_id, dict.fromkeys(range(wanted.partitions), 0))

    async def _lose(self, agreed: TopicInfo) -> None:
        """Delete the topic that the operator agreed to lose, and not one that has its name by now."""
        now = await self._context.cluster.topic(agreed.name)
        if now is not None and now.topic_id == agreed.topic_id:
            await self._context.cluster.delete_topic(agreed.name)

    async def _adopt_or_refuse(
        self,
        link_name: str,
        mapping: NamespaceMapping,
        record: FollowerTopic | None,
        wanted: calls.WantedTopic,
        local: str,
        existing: TopicInfo,
    ) -> None:
        plan, ends = await self.plan(mapping, wanted, local, existing)
        now = self._context.control.state.follower_topics.get(local)
        if now is not None and now.state is TopicState.FOLLOWING and now.link == link_name:
            return  # another proxy of this cluster was faster
        if plan.action == "refuse":
            reason = Reason(ReasonCode.TARGET_TOPIC_NOT_EMPTY, plan.reason or "")
            if record is None or record.state is not TopicState.REFUSED or record.reason != reason:
                await self._record(link_name, wanted, local, TopicState.REFUSED, existing.topic_id, reason)
            raise Refusal(reason.code, reason.message)
        cluster = self._context.cluster
        if plan.action == "truncate":
            log.warning(
                "follower topic emptied", extra={"link": link_name, "topic": local, "records_lost": plan.records_lost}
            )
            await self._record(link_name, wanted, local, TopicState.CREATING)
            await self._lose(existing)
            await self._create(link_name, wanted, local)
            return
        partitions = wanted.partitions
        if len(existing.partitions) < partitions:
            await cluster.create_partitions(local, partitions)
            ends |= dict.fromkeys(range(len(existing.partitions), partitions), 0)
        configs = await self._configs(local, wanted.configs or {}, existing.replication_factor)
        await cluster.alter_topic_configs(local, topic_settings.changes(await cluster.topic_configs(local), configs))
        await self._record(link_name, wanted, local, TopicState.FOLLOWING, existing.topic_id)
        await self._open_provenance(link_name, local, existing.topic_id, ends)

    async def plan(
        self,
        mapping: NamespaceMapping,
        wanted: SourceTopic,
        local: str,
        existing: TopicInfo | None,
        truncate: bool = False,
    ) -> tuple[TopicPlan, dict[int, int]]:
        """What attaching does with one topic, and the log ends of its partitions. Changes nothing.

        ``truncate``: as if the operator had agreed to lose what the topic holds.
        """
        source = wanted.topic
        if existing is None:
            return TopicPlan(topic=local, source_topic=source, action="create"), {}
        cluster = self._context.cluster
        partitions = range(len(existing.partitions))
        ends = dict(
            zip(partitions, await asyncio.gather(*(cluster.log_end(local, p) for p in partitions)), strict=True)
        )
        starts = await asyncio.gather(*(cluster.log_start(local, p) for p in partitions))
        records = sum(ends.values()) - sum(starts)
        too_many = len(existing.partitions) > wanted.partitions
        if not too_many and (not any(ends.values()) or self._provenance_matches(local, existing, wanted, ends)):
            return TopicPlan(topic=local, source_topic=source, action="follow"), ends
        topic_id = str(uuid.UUID(bytes=existing.topic_id))
        if truncate or topic_id in mapping.truncate_topic_ids:
            return (
                TopicPlan(topic=local, source_topic=source, action="truncate", topic_id=topic_id, records_lost=records),
                ends,
            )
        what = (
            f"has {len(existing.partitions)} partitions, the source's topic {wanted.partitions}"
            if too_many
            else f"holds {records} records that are not known to be the source's"
        )
        return (
            TopicPlan(
                topic=local,
                source_topic=source,
                action="refuse",
                topic_id=topic_id,
                records_lost=records,
                reason=f"{local} exists and {what}: attach again with --truncate-target, or `isthmus topic recreate "
                f"{local}`, to lose them",
            ),
            ends,
        )

    def _provenance_matches(
        self, local: str, existing: TopicInfo, wanted: SourceTopic, ends: Mapping[int, int]
    ) -> bool:
        """Whether all that the topic holds came from the same topic of the source, and nothing was written since.

        What came from a topic that the source's one succeeded counts where the source has it still.
        """
        history = self._context.control.state.histories.get(local)
        if history is None or history.topic_id != str(uuid.UUID(bytes=existing.topic_id)):
            return False
        for partition, end in ends.items():
            ranges = history.partitions.get(partition, ())
            if not ranges and not end:
                continue
            if not ranges or not all(_has(wanted, partition, known, end) for known in ranges):
                return False
            if ranges[-1].end_offset is not None and ranges[-1].end_offset != end:
                return False
        return True

    # ---- detaching ----

    async def detached(self, link_name: str, mapping: NamespaceMapping) -> None:
        """Record where the topics of a mapping that is detached stopped to follow. Their streams have ended.

        Raises BrokerUnavailable if that is not known of all of them.
        """
        topics = await self._context.cluster.topics()
        await self.close_provenance(
            (record, topics[record.topic])
            for record in self._context.control.state.follower_topics.values()
            if record.link == link_name and mapping.remote_name(record.topic) is not None and record.topic in topics
        )

    async def close_provenance(self, stopped: Iterable[tuple[FollowerTopic, TopicInfo]]) -> None:
        """Record where topics stopped to follow. Their streams have ended.

        Raises BrokerUnavailable if that is not known of all of them.
        """
        ids: dict[tuple[str, int], str] = {}
        for record, existing in stopped:
            history = self._context.control.state.histories.get(record.topic)
            if history is not None and history.topic_id == str(uuid.UUID(bytes=existing.topic_id)):
                for partition in history.partitions:
                    if history.open_range(partition) is not None:
                        ids[record.topic, partition] = history.topic_id
        ends = await self._settled_ends(ids.keys())
        closed = [PartitionOffset(topic, ids[topic, partition], partition, end) for (topic, partition), end in ends]
        for first in range(0, len(closed), CLOSED_AT_ONCE):
            await self._append(CloseProvenance(tuple(closed[first : first + CLOSED_AT_ONCE])))
        if missing := ids.keys() - dict(ends).keys():
            topic, partition = min(missing)
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise BrokerUnavailable(f"the log ends of {topic}-{partition}{more} cannot be read, or still move")

    async def _settled_ends(self, places: Collection[tuple[str, int]]) -> list[tuple[tuple[str, int], int]]:
        """Log ends that stay: another proxy's last append may be in the broker's hands when its stream ends.

        Those that are not read, or still move after some seconds, are left out.
        """
        settled: list[tuple[tuple[str, int], int]] = []
        left = set(places)
        before: Mapping[tuple[str, int], int] = {}
        for _ in range(SETTLE_TRIES):
            if not left:
                break
            ends = await self._context.cluster.log_ends(left)
            found = [(place, end) for place, end in ends.items() if before.get(place) == end]
            settled += found
            left -= dict(found).keys()
            before = ends
            if left:
                await asyncio.sleep(SETTLE_S)
        return settled

    # ---- records of the control log ----

    async def _configs(self, local: str, source: Mapping[str, str], replication_factor: int) -> dict[str, str]:
        """The settings to give a follower topic so that its effective configuration is the source's, with overrides."""
        defaults = await self._context.cluster.topic_configs(CONTROL_TOPIC)
        return topic_settings.wanted(source, defaults, replication_factor, self._overrides(local, source))

    async def _record(
        self,
        link_name: str,
        wanted: calls.WantedTopic,
        local: str,
        topic_state: TopicState,
        topic_id: bytes | None = None,
        reason: Reason | None = None,
    ) -> None:
        await self._append(
            SetFollowerTopic(
                link_name,
                local,
                wanted.topic,
                wanted.topic_id,
                topic_state,
                None if topic_id is None else str(uuid.UUID(bytes=topic_id)),
                reason,
                topic_settings.overridden(wanted.configs or {}),
            )
        )

    async def _open_provenance(self, link_name: str, local: str, topic_id: bytes, offsets: Mapping[int, int]) -> None:
        text = str(uuid.UUID(bytes=topic_id))
        await self._append(
            OpenProvenance(
                link_name,
                tuple(PartitionOffset(local, text, partition, offset) for partition, offset in offsets.items()),
            )
        )

    async def _append(self, body: SetFollowerTopic | ForgetFollowerTopic | OpenProvenance | CloseProvenance) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            raise Refusal(outcome.code.value.upper().replace("-", "_"), outcome.message)


def _is(record: FollowerTopic, existing: TopicInfo | None) -> bool:
    """Whether a local topic is the one that was recorded, and no other of its name."""
    return existing is not None and str(uuid.UUID(bytes=existing.topic_id)) == record.topic_id


def _chain(wanted: SourceTopic) -> list[Succession]:
    """Which topics the source's one succeeded, oldest first, as the source states it; a peer of before does not."""
    return [Succession(*each) for each in wanted.predecessors or ()]


def _has(wanted: SourceTopic, partition: int, known: ProvenanceRange, end: int) -> bool:
    """Whether the source's topic has what a range of a follower's partition came from."""
    source_id = wanted.topic_id
    if known.source_topic_id == source_id:
        return True
    found = succession(_chain(wanted), known.source_topic_id, source_id)
    to = end if known.end_offset is None else known.end_offset
    return found is not None and partition < len(found.offsets) and to <= found.offsets[partition]


def _to_be_lost(record: FollowerTopic, link_name: str, existing: TopicInfo) -> bool:
    """Whether the operator agreed to lose this very topic for one that follows."""
    return (
        record.link == link_name
        and record.state is TopicState.CREATING
        and record.topic_id == str(uuid.UUID(bytes=existing.topic_id))
    )
