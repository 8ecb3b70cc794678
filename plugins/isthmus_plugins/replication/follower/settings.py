"""Gives follower topics the settings that their source has, but for overrides, and decides which are compacted here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from isthmus_control.commands import CompactFollowerTopic, SetFollowerTopic
from isthmus_control.model import CONTROL_TOPIC, FollowerTopic, OffsetsCopy, Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.logs import topic_settings

log = logging.getLogger("isthmus_plugins.replication")


class Found(NamedTuple):
    """What was found of local topics whose settings the source has sent. By topic."""

    effective: Mapping[str, Mapping[str, str | None]]
    """The settings that they have; topics whose settings the brokers do not show are left out."""
    filled_since: Mapping[str, int]
    """Topics that have all that the source had when they were not compacted here: with what stands for that time."""


class FollowerSettings:
    """The settings of all follower topics, and what is amiss with them."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self.refused: dict[str, Reason] = {}
        """By topic: why it does not have the source's settings."""
        self.waiting: dict[str, Reason] = {}
        """By topic: what it will have of the source's settings by itself, and when."""
        self._raised: dict[str, dict[str, str]] = {}
        """By topic: the limits of batches that it needs to be larger than its source's."""
        self._lacks: dict[str, frozenset[str]] = {}
        """By topic: the settings that its brokers refuse."""

    def overrides(self, local: str) -> Mapping[str, str]:
        """The settings that a topic has instead of its source's because it follows."""
        return self._overrides(local, {}) if self._following(local) is not None else {}

    def reason(self, local: str) -> Reason | None:
        """Why a topic does not have its source's settings, if it is known not to."""
        if self._following(local) is None:
            return None
        return self.refused.get(local) or self.waiting.get(local)

    def raised(self, local: str, limits: Mapping[str, str]) -> None:
        """A topic has larger limits than its source now, since it has to take a batch that is larger than these."""
        self._raised[local] = {**self._raised.get(local, {}), **limits}

    def made(self, local: str) -> None:
        """A topic is being made: nothing is amiss with it, and it needs nothing more than its source has now."""
        self.has_without(local, {})
        self._raised.pop(local, None)

    def has_without(self, local: str, refused: Mapping[str, KafkaRefused]) -> Reason | None:
        """A topic has the source's settings, but for those that its brokers refuse, if any; why it lacks these."""
        self._lacks[local] = frozenset(refused)
        if not refused:
            self.refused.pop(local, None)
            del self._lacks[local]
            return None
        reason = self.refused[local] = reasons.settings_refused(local, refused)
        return reason

    def to_record(self, local: str, source: Mapping[str, str]) -> dict[str, str]:
        """What the control log gets to know of the source's settings: of limits of batches, those that it has taken."""
        lacks = self._lacks.get(local, frozenset())
        return {
            name: value
            for name, value in topic_settings.overridden(source).items()
            if name not in lacks or name not in topic_settings.LIMITS
        }

    def filling(self, local: str) -> int | None:
        """What stands for the time since when a topic is not compacted here; None: it is, or never will be."""
        record = self._following(local)
        if record is None or record.compacts or self._copy(local) is not None:
            return None
        return record.compacts_since_offset

    async def wanted(self, local: str, source: Mapping[str, str], replication_factor: int) -> dict[str, str]:
        """The settings to give a follower topic so that its effective configuration is the source's, with overrides."""
        defaults = await self._context.cluster.topic_configs(CONTROL_TOPIC)
        return topic_settings.wanted(source, defaults, replication_factor, self._overrides(local, source))

    async def read(
        self, link_name: str, requests: Sequence[calls.WantedTopic], topics: Mapping[str, TopicInfo]
    ) -> Found:
        """Read what :meth:`follow` goes by, of all topics at once. Raises BrokerUnavailable, KafkaRefused."""
        effective = await self._effective(link_name, requests, topics)
        return Found(effective, await self._filled_since(link_name, requests, topics))

    async def follow(self, source: Mapping[str, str], existing: TopicInfo, found: Found) -> Reason | None:
        """Give a follower topic the settings ``source``; why it cannot have them, if it cannot.

        Raises BrokerUnavailable, KafkaRefused.
        """
        local = existing.name
        effective = found.effective.get(local)
        if effective is None:
            return self._unreadable(local)
        await self._decide_compaction(local, source, found.filled_since.get(local))
        self._keep_raised(local, source, effective)
        refused = await self._alter(source, existing, effective)
        await self._record(local, source)
        return refused

    async def _effective(
        self, link_name: str, requests: Sequence[calls.WantedTopic], topics: Mapping[str, TopicInfo]
    ) -> Mapping[str, Mapping[str, str | None]]:
        """The settings of those local topics that exist and for which the source sent its own."""
        lookup = self._context.control.state.lookup
        answered = [
            counterpart.local_name
            for wanted in requests
            if wanted.configs is not None
            and (counterpart := lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, wanted.topic))
            and counterpart.local_name in topics
        ]
        found: dict[str, Mapping[str, str | None]] = {}
        for start in range(0, len(answered), topic_settings.DESCRIBED_AT_ONCE):
            some = answered[start : start + topic_settings.DESCRIBED_AT_ONCE]
            _, described = await self._context.cluster.effective_configs(some)
            found |= described or {}
        return found

    def _unreadable(self, local: str) -> Reason:
        """Note that the brokers do not show a topic's settings."""
        reason = self.refused[local] = Reason(
            ReasonCode.TARGET_REFUSES_SETTINGS,
            f"the settings of {local} cannot be read (the proxy's own identity needs ALLOW DescribeConfigs on topic "
            f"{local}): they are not followed",
        )
        return reason

    async def _filled_since(
        self, link_name: str, requests: Sequence[calls.WantedTopic], topics: Mapping[str, TopicInfo]
    ) -> Mapping[str, int]:
        """Local topics that have all that the source had when they were not compacted here: with that time.

        The source's ends were read after it was known to be compacted: beyond them every record has a key.
        """
        lookup = self._context.control.state.lookup
        ends: dict[TopicPartition, int] = {}
        since: dict[str, int] = {}
        for wanted in requests:
            to_fill = wanted.to_fill
            if to_fill is None:
                continue
            counterpart = lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, wanted.topic)
            info = None if counterpart is None else topics.get(counterpart.local_name)
            if info is not None and len(to_fill.ends) == len(info.partitions):
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
        record = self._following(local)
        if record is None or self._copy(local) is not None:
            return
        compacts = topic_settings.is_compacted(source)
        if record.compacts != compacts and (not compacts or filled_since == record.compacts_since_offset):
            body = CompactFollowerTopic(local, record.topic_id or "", compacts, record.compacts_since_offset)
            if not isinstance(await self._context.control.append(body), Rejected):
                log.info("follower topic compaction", extra={"topic": local, "compacts": compacts})
        record = self._context.control.state.follower_topics.get(local)
        if record is not None and compacts and not record.compacts and record.cleaned:
            self.waiting[local] = Reason(
                ReasonCode.NOT_COMPACTED_YET,
                f"the source's {record.source_topic} is compacted, and {local} again once it has what the source has "
                "now: brokers refuse records without a key in a compacted topic",
            )
        else:
            self.waiting.pop(local, None)

    def _keep_raised(self, local: str, source: Mapping[str, str], effective: Mapping[str, str | None]) -> None:
        """Leave limits of batches that are larger than the source's: they were raised here, elsewhere, or before.

        Unless the source's are not those that were recorded: what it has now comes first.
        """
        record = self._following(local)
        known = {} if record is None else record.settings
        same = {name for name in topic_settings.LIMITS if name in source and known.get(name) == source[name]}
        raised = {name: value for name, value in self._raised.pop(local, {}).items() if name in same}
        larger = {name: value for name in same if (value := effective.get(name)) and int(value) > int(source[name])}
        if raised or larger:
            self._raised[local] = raised | larger

    async def _alter(
        self, source: Mapping[str, str], existing: TopicInfo, effective: Mapping[str, str | None]
    ) -> Reason | None:
        """Give a follower topic the settings that its source has now; why the brokers refuse, if they do."""
        local, factor = existing.name, existing.replication_factor
        if topic_settings.follows(effective, source, factor, self._overrides(local, source)):
            return self.has_without(local, {})
        own = await self._context.cluster.topic_configs(local)
        changes = topic_settings.changes(own, await self.wanted(local, source, factor))
        truncation = self._context.control.state.truncations.get(local)
        if truncation is not None and not truncation.follows:  # it is frozen, or not there, and gets them back
            return None
        refused = await setting_changes.change(self._context.cluster, local, changes)
        if made := sorted(changes.keys() - refused.keys()):
            log.info("follower topic configured", extra={"topic": local, "settings": made})
        return self.has_without(local, refused)  # its records can follow all the same

    async def _record(self, local: str, source: Mapping[str, str]) -> None:
        """Have the control log know what a topic gets back when it follows no more, also when its source is gone."""
        record, settings = self._following(local), self.to_record(local, source)
        if record is None or record.settings == settings:
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
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):  # it is being truncated, say: with the next change, or connection
            log.warning("settings not recorded", extra={"topic": local, "detail": outcome.message})

    def _overrides(self, local: str, source: Mapping[str, str]) -> Mapping[str, str]:
        copy = self._copy(local)
        if copy is not None:
            return topic_settings.offsets_overrides(copy, source)
        record = self._following(local)
        raised = self._raised.get(local, {})
        larger = {name: value for name, value in raised.items() if int(value) > int(source.get(name, "0"))}
        return {**topic_settings.overrides(record is not None and record.compacts), **larger}

    def _following(self, local: str) -> FollowerTopic | None:
        """What the control log has of a topic that follows."""
        record = self._context.control.state.follower_topics.get(local)
        return record if record is not None and record.state is TopicState.FOLLOWING else None

    def _copy(self, local: str) -> OffsetsCopy | None:
        """How an offsets topic is copied, if the topic is such a copy."""
        counterpart = self._context.control.state.lookup.following(ResourceType.TOPIC, local)
        return counterpart.mapping.offsets if counterpart is not None else None
