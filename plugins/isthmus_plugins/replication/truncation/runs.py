"""Which truncations this proxy begins, and which it carries out: its own, and those whose owner is gone.

The control log says what is to be done next (:mod:`isthmus_control.truncations`), :mod:`.steps` does it. Each step can
be done again from its beginning, so whoever is killed in it is followed by a proxy that begins it once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from isthmus_control.commands import BeginTruncation, StopCatchingUp
from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, Reason, ResourceType, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.source_losses import LossState
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession, Truncation, TruncationPhase
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower import topic_plans
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs.topic_settings import FROZEN, MESSAGE_BYTES_MAX
from isthmus_plugins.replication.truncation.ownership import HeldUp, NotOwner, Ownership
from isthmus_plugins.replication.truncation.salvage import remove_unfinished
from isthmus_plugins.replication.truncation.spool import SpoolDamaged
from isthmus_plugins.replication.truncation.steps import TruncationSteps, views_of
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_copy import COPY_PREFIX
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 0.5
"""How often partitions that diverged, and truncations without an owner, are looked for."""
RETRY_S: Final = 1.0
HELD_UP_RETRY_S: Final = 5.0
SHOWN_AFTER: Final = 3
"""Attempts of a step that fail before the control log gets what keeps it."""
WAITS: Final = frozenset({ReasonCode.SOURCE_TRUNCATING})
"""What a peer answers that is no failure, and passes."""


class Truncations(Part):
    """The truncations of this cluster's follower topics that this proxy carries out."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        steps: TruncationSteps,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._steps = steps
        self._ownership = Ownership(context)
        self._tasks = Tasks("truncations", context.supervision)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, asyncio.Task[None]] = {}
        self.ended: Counter[str] = Counter()
        """By link, the truncations that this process brought to their end."""
        self.records_cut: Counter[str] = Counter()

    def control_changed(self, state: ControlState) -> None:
        """Forget what was counted of links that are gone."""
        for counts in (self.ended, self.records_cut):
            for link in counts.keys() - state.links.keys():
                del counts[link]

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)
        if self._context.data_directory is not None:
            self._tasks.keep("tidy", partial(asyncio.to_thread, remove_unfinished, self._context.data_directory))

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- which ones ----

    async def _look_for_ever(self) -> None:
        while True:
            if self._clock.monotonic() < self._context.lease_deadline:
                self._look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _look(self) -> None:
        state = self._context.control.state
        for stream in self._follower_end.streams():
            reason = stream.follower_log.reason or stream.held
            if reason is None or reason.code not in reasons.DIFFER:
                continue
            if stream.topic in state.truncations:
                self._stuck(state.truncations[stream.topic], stream.topic_id, Reason(str(reason.code), reason.message))
                continue
            if stream.topic.startswith(COPY_PREFIX):
                continue  # it is not compared with the source's: the operator makes it anew
            if self._peers.connections(stream.link_name):
                why = Reason(str(reason.code), f"partition {stream.partition}: {reason.message}")
                self.begin(stream.link_name, stream.topic, stream.topic_id, why)
        for topic, succession in self._follower_topics.succeeded.items():
            record = state.follower_topics.get(topic)
            if record is None or record.topic_id is None or record.source_topic_id != succession.former:
                continue
            why = Reason(ReasonCode.SOURCE_TRUNCATED, reasons.source_truncated(record.source_topic, succession))
            if topic in state.truncations:
                self._stuck(state.truncations[topic], record.topic_id, why)
            else:
                self.begin(record.link, topic, record.topic_id, why, succession)
        for loss in state.source_losses:
            decided = loss.type is ResourceType.TOPIC and loss.state is LossState.CUTTING
            if decided and loss.topic not in state.truncations and self._peers.connections(loss.link):
                self.begin(loss.link, loss.topic, loss.topic_id, Reason(ReasonCode.UNEXPECTED_TRUNCATION, loss.what))
        for following in self._agreed_cuts(state):
            assert following.topic_id is not None
            why = Reason(ReasonCode.CUT_AGREED, "an operator has it cut to what it shares with its source's")
            self.begin(following.link, following.topic, following.topic_id, why)
        for topic in [topic for topic, task in self._begun.items() if task.done()]:
            del self._begun[topic]
        for topic, truncation in state.truncations.items():
            task = self._running.get(topic)
            if (task is None or task.done()) and self._may_run(state, truncation):
                self._running[topic] = self._tasks.keep(
                    f"truncate-{topic}", partial(self._run, topic, truncation.topic_id)
                )

    def _agreed_cuts(self, state: ControlState) -> Iterator[FollowerTopic]:
        """Topics that follow once they are cut as was agreed, which is not begun."""
        for link in state.links.values():
            for mapping in link.mappings:
                if not mapping.cuts or not self._peers.connections(link.name):
                    continue
                for record in state.follower_topics.values():
                    if (
                        record.link == link.name
                        and mapping.holds(record.topic)
                        and topic_plans.awaits_cut(record, mapping)
                        and record.topic not in state.truncations
                    ):
                        yield record

    def begin(self, link_name: str, topic: str, topic_id: str, why: Reason, source: Succession | None = None) -> None:
        """Have a topic truncated, unless that is being begun, or the operator is to decide. Does not wait."""
        held = self._context.control.state.held(topic, topic_id) is not None
        if topic not in self._begun and not held:
            work = self._begin(link_name, topic, topic_id, why, source)
            self._begun[topic] = self._tasks.start(f"begin-{topic}", work)

    def _stuck(self, truncation: Truncation, topic_id: str, why: Reason) -> None:
        """Have it recorded that a topic catches up no more, if that is what it does."""
        topic = truncation.topic
        if not truncation.follows or truncation.new_topic_id != topic_id or truncation.stuck is not None:
            return
        if topic not in self._begun:
            self._begun[topic] = self._tasks.start(f"stuck-{topic}", self._report_stuck(truncation, topic_id, why))

    async def _report_stuck(self, truncation: Truncation, topic_id: str, why: Reason) -> None:
        extra = {"topic": truncation.topic, "code": why.code, "detail": why.message}
        try:
            await self._context.control.append(StopCatchingUp(truncation.topic, truncation.topic_id, topic_id, why))
        except BrokerUnavailable as error:
            log.warning("control log not written", extra={"topic": truncation.topic, "detail": str(error)})
        else:
            log.warning("topic does not catch up", extra=extra)

    def _may_run(self, state: ControlState, truncation: Truncation) -> bool:
        """Whether it is this proxy's to carry out, or its owner is gone for sure."""
        return truncation.owner == self._context.incarnation or not state.may_run(truncation.owner)

    async def _begin(
        self, link_name: str, topic: str, topic_id: str, why: Reason, source: Succession | None = None
    ) -> None:
        """Record that a topic is to be truncated; from then on nothing follows into it."""
        cluster = self._context.cluster
        try:
            record = self._context.control.state.follower_topics.get(topic)
            info = (await cluster.topics()).get(topic)
            if info is None or info.id_text != topic_id or record is None:
                return
            if record.state is not TopicState.FOLLOWING or record.topic_id != topic_id:
                return
            effective, inherited = (await cluster.topic_configs(topic))[MESSAGE_BYTES_MAX]
            own = effective if effective not in (inherited, FROZEN) else None
            outcome = await self._context.control.append(
                BeginTruncation(
                    link_name,
                    topic,
                    topic_id,
                    why,
                    views_of(info),
                    own,
                    self._context.proxy_name,
                    self._context.incarnation,
                    source,
                )
            )
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("truncation not begun", extra={"topic": topic, "detail": str(error)})
            return
        if isinstance(outcome, Rejected):
            log.info("truncation not begun", extra={"topic": topic, "detail": outcome.message})
        else:
            log.warning(
                "truncation begun",
                extra={"link": link_name, "topic": topic, "code": why.code, "detail": why.message},
            )

    # ---- one of them ----

    async def _run(self, topic: str, topic_id: str) -> None:
        """Go on with a truncation until it is over or somebody else's."""
        failures = damaged = 0
        last: Truncation | None = None
        try:
            while (truncation := self._ownership.now(topic, topic_id)) is not None:
                last = truncation
                try:
                    if truncation.owner != self._context.incarnation:
                        await self._ownership.take_over(topic, topic_id)
                        continue
                    if self._clock.monotonic() > self._context.lease_deadline:
                        return
                    await self._steps.carry_out(truncation)
                    failures = damaged = 0
                except (
                    HeldUp,
                    BrokerUnavailable,
                    KafkaRefused,
                    LinkRejected,
                    LinkLost,
                    TimeoutError,
                    OperationError,
                    BatchError,
                    SpoolDamaged,
                ) as error:
                    failures += 1
                    # One broker that has just come back may not know of the spool yet: it is lost when it stays so.
                    damaged = damaged + 1 if isinstance(error, SpoolDamaged) else 0
                    await self._failed(truncation, error, failures)
                    if damaged >= SHOWN_AFTER:
                        await self._steps.spool_lost(truncation)
                    await asyncio.sleep(HELD_UP_RETRY_S if isinstance(error, HeldUp) else RETRY_S)
            # Its end may have been recorded without an answer.
            if last is not None and last.phase is TruncationPhase.CLEANING and last.owner == self._context.incarnation:
                self._has_ended(last)
        except NotOwner as error:
            log.info("truncation left to another proxy", extra={"topic": topic, "detail": str(error)})
        except BrokerUnavailable as error:
            log.warning("control log not written", extra={"topic": topic, "detail": str(error)})

    def _has_ended(self, truncation: Truncation) -> None:
        self.ended[truncation.link] += 1
        self.records_cut[truncation.link] += truncation.records
        log.warning(
            "topic truncated",
            extra={"link": truncation.link, "topic": truncation.topic, "messages": truncation.records},
        )

    async def _failed(self, truncation: Truncation, error: Exception, failures: int) -> None:
        """Say what keeps a step, at once where somebody must act, else when it has failed some times."""
        log.warning(
            "truncation held up",
            extra={"topic": truncation.topic, "phase": truncation.phase.value, "detail": str(error)},
        )
        if isinstance(error, HeldUp) or (isinstance(error, LinkRejected) and error.code in WAITS):
            trouble = Reason(error.code, str(error))
        elif failures >= SHOWN_AFTER:
            code = ReasonCode.SPOOL_LOST if isinstance(error, SpoolDamaged) else reasons.BROKER_UNAVAILABLE
            trouble = Reason(code, str(error) or type(error).__name__)
        else:
            return
        await self._ownership.hold_up(truncation, trouble)
