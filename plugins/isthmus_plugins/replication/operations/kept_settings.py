"""Settings that topics which followed once still have as a follower does: the brokers refused what the source had.

That is read from the topics themselves, again and again: whoever sets another value has decided, and nothing is told
any more. What is recorded of a topic that follows no more says what its source had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from isthmus_control.model import FollowerTopic, Reason, TopicState
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 10.0


class KeptSettings:
    """Of the topics of this cluster that were promoted."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("kept-settings", context.supervision)
        self._found: Mapping[str, Mapping[str, str]] = {}
        """By topic: the settings that it has as a follower, by name."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def of(self, link_name: str) -> list[str]:
        """What is to be said of topics that followed over a link."""
        records = self._context.control.state.follower_topics
        return [
            reason.message
            for topic in sorted(self._found)
            if topic in records and records[topic].link == link_name and (reason := self.reason(topic)) is not None
        ]

    def reason(self, topic: str) -> Reason | None:
        """What is to be said of a topic, if anything is."""
        record, kept = self._context.control.state.follower_topics.get(topic), self._found.get(topic)
        if record is None or not kept or not self._is_promoted(record):
            return None
        values = ", ".join(f"{name}={value} (its source: {record.settings.get(name)})" for name, value in kept.items())
        return Reason(
            ReasonCode.TARGET_REFUSES_SETTINGS,
            f"{topic} has as a follower still, since the brokers refused what its source had: {values}. Set what it is "
            "to have",
        )

    async def look(self) -> None:
        """Read what promoted topics have. Raises BrokerUnavailable, KafkaRefused."""
        records = self._context.control.state.follower_topics.values()
        promoted = {each.topic: each for each in records if each.settings and self._is_promoted(each)}
        found, names = dict[str, Mapping[str, str]](), sorted(promoted)
        for start in range(0, len(names), topic_settings.DESCRIBED_AT_ONCE):
            some = names[start : start + topic_settings.DESCRIBED_AT_ONCE]
            _, described = await self._context.cluster.effective_configs(some)
            for topic, effective in (described or {}).items():
                record = promoted[topic]
                if kept := topic_settings.kept(effective, record.settings, record.compacts):
                    found[topic] = kept
        self._found = found

    def _is_promoted(self, record: FollowerTopic) -> bool:
        """Whether clients may write a topic that followed."""
        reserved = self._context.control.state.lookup.topic_reservation(record.topic) is not None
        return record.state is TopicState.DETACHED and not reserved

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("settings of promoted topics not read", extra={"detail": str(error)})
            await asyncio.sleep(LOOK_INTERVAL_S)
