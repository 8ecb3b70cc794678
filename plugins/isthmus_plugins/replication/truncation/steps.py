"""Carries out truncations: a follower topic whose log is not the source's any more is cut to correspond.

The control log says what is to be done next (:mod:`isthmus_control.truncations`); this does it, and records it. Each
step can be done again from its beginning, so whoever is killed in it is followed by a proxy that begins it once more.
Until the old topic is deleted everything can be taken back, and nothing is deleted before it is safe twice: what is cut
in a file, what stays in the spool topic.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from isthmus_control.commands import (
    AdvanceTruncation,
    BeginTruncation,
    Body,
    HoldUpTruncation,
    StopCatchingUp,
    TakeOverTruncation,
)
from isthmus_control.control_state import ControlState
from isthmus_control.model import Reason, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import (
    MOVED_POSITIONS_MAX,
    MovedPosition,
    PartitionCut,
    PartitionView,
    SalvageFile,
    Succession,
    TopicLayout,
    Truncation,
    TruncationPhase,
)
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, TopicInfo
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.digests import MARKED, Verification
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY
from isthmus_plugins.replication.truncation.common_log import CommonLog, SourceReplaced
from isthmus_plugins.replication.truncation.refill import RefillFailed, refill
from isthmus_plugins.replication.truncation.salvage import SalvageFailed, write_salvage
from isthmus_plugins.replication.truncation.spool import Spool, SpoolDamaged
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    ILLEGAL_GENERATION,
    NOT_COORDINATOR,
    UNKNOWN_MEMBER_ID,
)
from isthmus_protocol.offsets_copy import COPY_PREFIX
from isthmus_protocol.records import BatchError
from isthmus_protocol.salvage import SalvageHead
from isthmus_protocol.spool import Manifest

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 0.5
"""How often partitions that diverged, and truncations without an owner, are looked for."""
RETRY_S: Final = 1.0
REFILLED_AT_ONCE: Final = 8
"""Partitions."""
HELD_UP_RETRY_S: Final = 5.0
SHOWN_AFTER: Final = 3
"""Attempts of a step that fail before the control log is told what keeps it."""
SETTLE_TRIES_MAX: Final = 30
ENFORCE_TIMEOUT_S: Final = 60.0
"""How long the other proxies may take to keep clients waiting, before the control log is told."""
POSITIONS_SETTLE_S: Final = 1.0
"""A coordinator drops the positions of a deleted topic when it hears of that, maybe after the new one is there."""
POLL_S: Final = 0.1
CATCH_UP_POLL_S: Final = 0.5
MESSAGE_BYTES_MAX: Final = "max.message.bytes"
FROZEN: Final = "0"
"""As ``max.message.bytes``, it keeps everybody from appending to a topic: clients, transaction coordinators, us."""
FREEZING: Final = {MESSAGE_BYTES_MAX: FROZEN, CLEANUP_POLICY: "delete"}
"""Nothing is appended, and no cleaner takes anything out."""
NO_EXPIRY_OF_ITS_OWN: Final = -1
NOT_A_MEMBER: Final = frozenset({ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID})
"""The group has members."""
COORDINATOR_MOVES: Final = frozenset({COORDINATOR_LOAD_IN_PROGRESS, NOT_COORDINATOR})
DIVERGENCES: Final = frozenset({ReasonCode.TARGET_WRITTEN_BY_OTHERS, ReasonCode.UNEXPECTED_TRUNCATION})
WAITS: Final = frozenset({ReasonCode.SOURCE_TRUNCATING})
"""What a peer answers that is no failure, and passes."""
_P = TruncationPhase


def _id(info: TopicInfo) -> str:
    return str(uuid.UUID(bytes=info.topic_id))


def _views(info: TopicInfo) -> tuple[PartitionView, ...]:
    return tuple(PartitionView(partition.leader, partition.leader_epoch) for partition in info.partitions)


def _kept(cut: PartitionCut, ends: Mapping[int, int]) -> PartitionCut:
    """A cut where the log that was made anew ends before it."""
    end = min(cut.offset, ends[cut.partition])
    return replace(cut, log_start=min(cut.log_start, end), offset=end)


class HeldUp(Exception):
    """A step waits for something that somebody has to do. Shown at once."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotOwner(Exception):
    """Another proxy carries the truncation out now."""


class Truncations(Part):
    """The truncations of this cluster's follower topics that this proxy carries out."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        follower_end: FollowerEnd,
        verification: Verification,
        common_log: CommonLog,
        follower_topics: FollowerTopics,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._verification = verification
        self._common_log = common_log
        self._tasks = Tasks("truncations")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, asyncio.Task[None]] = {}
        self.ended: Counter[str] = Counter()
        """By link, the truncations that this process brought to their end."""
        self.records_cut: Counter[str] = Counter()
        self._made_now: set[str] = set()
        """Topics that this process made and that nobody has begun to refill."""
        self._steps = {
            _P.COMPARING: self._compare,
            _P.SALVAGING: self._salvage,
            _P.SPOOLING: self._spool,
            _P.RECREATING: self._recreate,
            _P.REFILLING: self._refill,
            _P.CATCHING_UP: self._catch_up,
            _P.RESTORING: self._restore,
            _P.CLEANING: self._clean,
            _P.CANCELLING: self._cancel,
        }

    def start(self) -> None:
        self._tasks.start("look", self._look_for_ever())

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
            if reason is None or reason.code not in DIVERGENCES:
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
        for topic in [topic for topic, task in self._begun.items() if task.done()]:
            del self._begun[topic]
        for topic, truncation in state.truncations.items():
            task = self._running.get(topic)
            if (task is None or task.done()) and self._may_run(state, truncation):
                self._running[topic] = self._tasks.start(f"truncate-{topic}", self._run(topic, truncation.topic_id))

    def begin(self, link_name: str, topic: str, topic_id: str, why: Reason, source: Succession | None = None) -> None:
        """Have a topic truncated, unless that is being begun. Does not wait."""
        if topic not in self._begun:
            work = self._begin(link_name, topic, topic_id, why, source)
            self._begun[topic] = self._tasks.start(f"begin-{topic}", work)

    def _stuck(self, truncation: Truncation, topic_id: str, why: Reason) -> None:
        """Tell whoever carries it out that a topic catches up no more, if that is what it does."""
        topic = truncation.topic
        if not truncation.follows or truncation.new_topic_id != topic_id or truncation.stuck is not None:
            return
        if topic not in self._begun:
            self._begun[topic] = self._tasks.start(f"stuck-{topic}", self._tell_stuck(truncation, topic_id, why))

    async def _tell_stuck(self, truncation: Truncation, topic_id: str, why: Reason) -> None:
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
            if info is None or _id(info) != topic_id or record is None:
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
                    _views(info),
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
        try:
            while (truncation := self._now(topic, topic_id)) is not None:
                try:
                    if truncation.owner != self._context.incarnation:
                        await self._append(
                            TakeOverTruncation(topic, topic_id, self._context.proxy_name, self._context.incarnation)
                        )
                        continue
                    if self._clock.monotonic() > self._context.lease_deadline:
                        return
                    await self._steps[truncation.phase](truncation)
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
                        await self._spool_lost(truncation)
                    await asyncio.sleep(HELD_UP_RETRY_S if isinstance(error, HeldUp) else RETRY_S)
        except NotOwner as error:
            log.info("truncation left to another proxy", extra={"topic": topic, "detail": str(error)})
        except BrokerUnavailable as error:
            log.warning("control log not written", extra={"topic": topic, "detail": str(error)})

    def _now(self, topic: str, topic_id: str) -> Truncation | None:
        found = self._context.control.state.truncations.get(topic)
        return found if found is not None and found.topic_id == topic_id else None

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
        await self._hold_up(truncation, trouble)

    async def _hold_up(self, truncation: Truncation, trouble: Reason | None) -> None:
        await self._append(HoldUpTruncation(truncation.topic, truncation.topic_id, self._context.incarnation, trouble))

    async def _append(self, body: Body) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            raise NotOwner(outcome.message)

    async def _advance(self, truncation: Truncation, phase: TruncationPhase, **found: Any) -> None:
        await self._append(
            AdvanceTruncation(truncation.topic, truncation.topic_id, self._context.incarnation, phase, **found)
        )
        log.info("truncation goes on", extra={"topic": truncation.topic, "phase": phase.value})

    async def _still_owner(self, truncation: Truncation) -> None:
        """Raise NotOwner unless the log itself says that nobody took over before now."""
        now = self._now(truncation.topic, truncation.topic_id)
        await self._hold_up(truncation, None if now is None else now.trouble)

    async def _old_topic(self, truncation: Truncation) -> TopicInfo:
        """The topic, to be read from its present leaders alone."""
        info = (await self._context.cluster.topics()).get(truncation.topic)
        if info is None or _id(info) != truncation.topic_id:
            raise HeldUp(
                ReasonCode.TARGET_TOPIC_MAY_BE_DELETED,
                f"{truncation.topic} was deleted here behind the link's back: detach the namespace and attach it again",
            )
        return info._replace(pinned=True)

    # ---- the steps ----

    async def _compare(self, truncation: Truncation) -> None:
        """Find up to where each partition's log is the source's, when nobody writes any more."""
        connection = self._connection(truncation)
        record = self._context.control.state.follower_topics[truncation.topic]
        info = await self._old_topic(truncation)
        ends = await self._freeze(truncation, info)
        if len(ends) != len(truncation.partitions):
            log.info("topic got partitions since, begun anew", extra={"topic": truncation.topic})
            await self._advance(truncation, _P.CANCELLING)
            return
        starts = await self._log_starts(truncation.topic, ends)
        cuts = []
        try:
            for partition, log_end in ends.items():
                limits = partition, starts[partition], log_end
                common = await self._common_log.end(connection, info, record, truncation.source, *limits)
                cuts.append(PartitionCut(partition, starts[partition], max(starts[partition], common), log_end))
        except SourceReplaced as error:
            log.warning("truncation not gone on with", extra={"topic": truncation.topic, "detail": str(error)})
            self._follower_topics.succeeded.pop(truncation.topic, None)  # until the source says what it is by now
            await self._advance(truncation, _P.CANCELLING)
            return
        if any(cut.records for cut in cuts):
            await self._advance(truncation, _P.SALVAGING, cuts=tuple(cuts), compared_at=_views(info))
        else:
            log.info("nothing to truncate", extra={"topic": truncation.topic})
            await self._advance(truncation, _P.CANCELLING, cuts=tuple(cuts))

    def _connection(self, truncation: Truncation) -> LinkConnection:
        connections = self._peers.connections(truncation.link)
        if not connections:
            raise LinkLost(f"link {truncation.link} is not connected")
        return connections[0]

    async def _freeze(self, truncation: Truncation, info: TopicInfo) -> Mapping[int, int]:
        """Keep everybody from changing the topic; its log ends when nothing can land any more.

        By partition, in their order, whichever broker answered first.
        """
        cluster = self._context.cluster
        await self._still_owner(truncation)
        await cluster.alter_topic_configs(truncation.topic, FREEZING)
        places = [(truncation.topic, partition) for partition in range(len(info.partitions))]
        before: Mapping[tuple[str, int], int] = {}
        settled_from = self._clock.monotonic()
        for _ in range(SETTLE_TRIES_MAX):
            ends = await cluster.log_ends(places)
            if ends != before or len(ends) < len(places):
                settled_from, before = self._clock.monotonic(), ends
            elif self._clock.monotonic() - settled_from >= LOST_REQUEST_MARGIN_S:
                behind = [place for place in places if await cluster.high_watermark(*place) < ends[place]]
                if not behind:
                    return {place[1]: ends[place] for place in places}
            await asyncio.sleep(LOST_REQUEST_MARGIN_S / 4)
        raise BrokerUnavailable(f"the log ends of {truncation.topic} cannot be read, or still move")

    async def _log_starts(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        return {partition: await self._context.cluster.log_start(topic, partition) for partition in partitions}

    async def _unchanged(self, truncation: Truncation) -> TopicInfo | None:
        """The old topic, if its logs are those that were compared, with the same limits; else it is compared again.

        Another leader's log holds the same, but for what either cleaner took, and it may have been for a record that is
        to be cut.
        """
        info = await self._old_topic(truncation)
        places = {(truncation.topic, cut.partition): cut.log_end for cut in truncation.cuts}
        starts = {cut.partition: cut.log_start for cut in truncation.cuts}
        same_ends = await self._context.cluster.log_ends(places) == places
        same_leaders = _views(info) == truncation.compared_at
        if same_leaders and same_ends and await self._log_starts(truncation.topic, starts) == starts:
            return info
        log.info("logs compared again", extra={"topic": truncation.topic, "new_leaders": not same_leaders})
        await self._advance(truncation, _P.COMPARING)
        return None

    async def _salvage(self, truncation: Truncation) -> None:
        info = await self._unchanged(truncation)
        if info is None:
            return
        record = self._context.control.state.follower_topics[truncation.topic]
        files = []
        for cut in truncation.cuts:
            if not cut.records:
                continue
            head = SalvageHead(
                cluster_id=self._context.cluster_id,
                link=truncation.link,
                topic=truncation.topic,
                topic_id=truncation.topic_id,
                source_topic=record.source_topic,
                partition=cut.partition,
                from_offset=cut.offset,
                to_offset=cut.log_end,
                code=truncation.reason.code,
                message=truncation.reason.message,
                at_ms=int(self._clock.time() * 1000),
                proxy=self._context.proxy_name,
            )
            try:
                path = await write_salvage(self._context, info, head)
            except SalvageFailed as error:
                raise HeldUp(ReasonCode.SALVAGE_FAILED, str(error)) from error
            files.append(SalvageFile(cut.partition, self._context.proxy_name, str(path), cut.records))
            log.warning(
                "records salvaged",
                extra={
                    "link": truncation.link,
                    "topic": truncation.topic,
                    "partition": cut.partition,
                    "offset": cut.offset,
                    "messages": cut.records,
                    "file": str(path),
                },
            )
        await self._advance(truncation, _P.SPOOLING, salvaged=tuple(files))

    async def _spool(self, truncation: Truncation) -> None:
        """Put what stays into the spool, and the groups' positions, which nobody changes from now on."""
        context = self._context
        if truncation.trouble is not None:  # clients went on meanwhile
            await self._hold_up(truncation, None)
        async with asyncio.timeout(ENFORCE_TIMEOUT_S):
            await context.control.enforced(context.control.state.applied_offset)
        old = await self._old_topic(truncation)
        configs = await context.cluster.topic_configs(truncation.topic)
        # A proxy that did not know yet may have given it the source's settings.
        if any(configs[name][0] != value for name, value in FREEZING.items()):
            await self._freeze(truncation, old)
        info = await self._unchanged(truncation)
        if info is None:
            return
        positions = await self._positions(truncation)
        # What cannot be restored shows before anything is deleted: commit it as it is.
        await self._commit(truncation, positions)
        await self._delete_spools(truncation)
        attempt = uuid.uuid4().hex
        spool = Spool(context, truncation, attempt)
        await spool.create(info.replication_factor)
        digests = []
        for cut in truncation.cuts:
            digests.append(await spool.check(cut, await spool.fill(info, cut)))
            if digests[-1] != await self._digest(info, cut):  # what is refilled could not become that
                log.warning("log changed while it was spooled", extra={"topic": truncation.topic})
                await self._advance(truncation, _P.COMPARING)
                return
        configs = await context.cluster.topic_configs(truncation.topic)
        own = {
            name: value
            for name, (value, inherited) in configs.items()
            if value is not None and value != inherited and name != MESSAGE_BYTES_MAX
        }
        if truncation.message_bytes_max is not None:
            own[MESSAGE_BYTES_MAX] = truncation.message_bytes_max
        await spool.put_manifest(
            Manifest(len(truncation.cuts), info.replication_factor, own, tuple(digests), positions)
        )
        if await self._unchanged(truncation) is not None:
            layout = TopicLayout(info.replication_factor, own, len(positions))
            await self._advance(truncation, _P.RECREATING, attempt=attempt, layout=layout)

    async def _delete_spools(self, truncation: Truncation) -> None:
        """Delete the spools of all attempts, and return when they are gone."""
        cluster = self._context.cluster
        while spools := [info for name, info in (await cluster.topics()).items() if truncation.is_spool(name)]:
            # Whoever took over since would have made a spool of another id than those just seen.
            await self._still_owner(truncation)
            for spool in spools:
                await cluster.delete_topic_id(spool.topic_id)
            await asyncio.sleep(POLL_S)

    def _whole_spool(self, truncation: Truncation) -> Spool:
        return Spool(self._context, truncation, truncation.attempt)

    async def _digest(self, info: TopicInfo, cut: PartitionCut) -> str:
        """What stands for the records and markers that stay, whether what ends a transaction is cut or not."""
        found = await self._verification.digest(info, cut.partition, cut.log_start, cut.offset, MARKED, None)
        return found.digest

    async def _recreate(self, truncation: Truncation) -> None:
        """Delete the topic, and make it anew."""
        cluster = self._context.cluster
        layout = truncation.layout
        if layout is None:  # of a version before: the manifest has it
            manifest = await self._whole_spool(truncation).manifest()
            layout = TopicLayout(manifest.replication_factor, manifest.configs, len(manifest.positions))
        while (info := (await cluster.topics()).get(truncation.topic)) is not None:
            if _id(info) == truncation.topic_id:
                await self._whole_spool(truncation).check_there()  # what is deleted now
            elif await self._is_blank(info, len(truncation.partitions), layout):
                break
            else:
                await self._whole_spool(truncation).check_there()  # nobody else may have what came from the source
            # Whoever took over since would have made a topic of another id than the one just seen.
            await self._still_owner(truncation)
            await cluster.delete_topic_id(info.topic_id)
            await asyncio.sleep(POLL_S)
        if info is None:
            await self._still_owner(truncation)
            topic_id = await cluster.create_topic(
                truncation.topic, len(truncation.partitions), layout.replication_factor, layout.configs
            )
            self._made_now.add(str(uuid.UUID(bytes=topic_id)))
        else:
            topic_id = info.topic_id
        await self._advance(truncation, _P.REFILLING, new_topic_id=str(uuid.UUID(bytes=topic_id)))

    async def _is_blank(self, info: TopicInfo, partitions: int, layout: TopicLayout) -> bool:
        """Whether a topic is what an attempt before has made, without the answer getting through."""
        if len(info.partitions) != partitions or info.replication_factor != layout.replication_factor:
            return False
        configs = await self._context.cluster.topic_configs(info.name)
        if any(configs.get(name, (None, None))[0] != value for name, value in layout.configs.items()):
            return False
        places = [(info.name, partition) for partition in range(len(info.partitions))]
        return await self._context.cluster.log_ends(places) == dict.fromkeys(places, 0)

    async def _refill(self, truncation: Truncation) -> None:
        """Put the spool's records into the new topic, and compare them with what was there before."""
        topic_id = truncation.new_topic_id or ""
        spool = self._whole_spool(truncation)
        manifest = await spool.manifest()
        try:
            uncertain = topic_id not in self._made_now
            self._made_now.discard(topic_id)
            limit = asyncio.Semaphore(REFILLED_AT_ONCE)
            where = (truncation.link, truncation.topic, topic_id)
            outcomes = await asyncio.gather(
                *(refill(self._follower_end, spool, *where, cut, uncertain, limit) for cut in truncation.cuts),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
            info = (await self._context.cluster.topics()).get(truncation.topic)
            if info is None or _id(info) != topic_id:
                raise RefillFailed(f"{truncation.topic} was deleted while it was refilled")
            for cut, digest in zip(truncation.cuts, manifest.digests, strict=True):
                place = (truncation.topic, cut.partition)
                start, end = await self._context.cluster.log_start(*place), await self._context.cluster.log_end(*place)
                if (start, end) != (cut.log_start, cut.offset) or await self._digest(info, cut) != digest:
                    raise RefillFailed(
                        f"partition {cut.partition} holds offsets {start} to {end} and not the records that were "
                        f"spooled from {cut.log_start} to {cut.offset}"
                    )
        except RefillFailed as error:
            log.error("topic not refilled", extra={"topic": truncation.topic, "detail": str(error)})
            await self._advance(truncation, _P.RECREATING, refill_failure=str(error))
            return
        await self._advance(truncation, _P.RESTORING)

    # ---- without the spool ----

    async def _spool_lost(self, truncation: Truncation) -> None:
        """Go on without what the spool held: the old topic has it, if that is still there, or else the source."""
        why = {"topic": truncation.topic, "phase": truncation.phase.value}
        info = (await self._context.cluster.topics()).get(truncation.topic)
        if truncation.phase is _P.RECREATING and info is not None and _id(info) == truncation.topic_id:
            log.error("spool lost, filled again", extra=why)
            await self._advance(truncation, _P.COMPARING)
        elif truncation.phase is _P.RECREATING and info is not None and _id(info) == truncation.new_topic_id:
            log.error("spool lost, the new topic is kept", extra=why)
            await self._advance(truncation, _P.REFILLING)
        elif truncation.phase is _P.REFILLING:
            log.error("spool lost, the source is followed from its start", extra=why)
            await self._settled(truncation)
            await self._advance(truncation, _P.CATCHING_UP)
        elif truncation.phase is _P.RESTORING:
            groups = "some" if truncation.layout is None else truncation.layout.groups
            log.error("group positions lost with the spool", extra={**why, "groups": groups})
            await self._advance(truncation, _P.CLEANING, positions_lost=True)

    async def _settled(self, truncation: Truncation) -> None:
        """Return when no append of whoever refilled can land any more."""
        for partition in range(len(truncation.partitions)):
            await self._context.cluster.log_end(truncation.topic, partition)
        await asyncio.sleep(LOST_REQUEST_MARGIN_S)

    async def _catch_up(self, truncation: Truncation) -> None:
        """Wait until the link has refilled what the spool held, or the operator gives that up.

        Or until it can refill no more, because the topic diverged, or the source's was truncated as well, which any
        proxy of the cluster may have found: what has come stays, nobody else may have it, and the next truncation deals
        with it.
        """
        info = (await self._context.cluster.topics()).get(truncation.topic)
        if info is None or _id(info) != truncation.new_topic_id:
            await self._advance(truncation, _P.RECREATING)
            return
        enough = truncation.given_up or truncation.stuck is not None
        places = {cut.partition: (truncation.topic, cut.partition) for cut in truncation.cuts}
        found = await self._context.cluster.log_ends(list(places.values()))
        ends = {partition: found[place] for partition, place in places.items() if place in found}
        lacking = sum(max(0, cut.offset - ends.get(cut.partition, 0)) for cut in truncation.cuts)
        if len(ends) == len(places) and (enough or not lacking):
            await self._advance(truncation, _P.RESTORING, cuts=tuple(_kept(cut, ends) for cut in truncation.cuts))
            return
        message = (
            f"the local copy of what both logs share was lost: it comes from the source again, {lacking} offsets are "
            f"left; if the source is gone, `isthmus topic give-up {truncation.topic}` goes on without them"
        )
        trouble = Reason(ReasonCode.SPOOL_LOST, message)
        now = self._now(truncation.topic, truncation.topic_id)
        if now is not None and now.trouble != trouble:
            await self._hold_up(truncation, trouble)
        await asyncio.sleep(CATCH_UP_POLL_S)

    # ---- positions of groups ----

    async def _positions(self, truncation: Truncation) -> dict[str, dict[int, tuple[int, str]]]:
        """What groups have committed for the topic, by group and partition. Raises BrokerUnavailable."""
        cluster = self._context.cluster
        groups = await cluster.groups()
        committed = await cluster.committed_offsets(groups)
        missing = sorted(set(groups) - committed.keys())
        if missing:
            raise BrokerUnavailable(f"the positions of {len(missing)} groups cannot be read now, of {missing[0]} first")
        return {
            group: found
            for group, offsets in committed.items()
            if (
                found := {
                    partition: (position.offset, position.metadata)
                    for (topic, partition), position in offsets.items()
                    if topic == truncation.topic
                }
            )
        }

    async def _commit(self, truncation: Truncation, positions: Mapping[str, Mapping[int, tuple[int, str]]]) -> None:
        """Commit positions in their groups' place. Raises HeldUp."""
        cluster = self._context.cluster
        if positions:
            await self._still_owner(truncation)
        for group, by_partition in sorted(positions.items()):
            wanted = {
                (truncation.topic, partition): CommittedOffset(offset, metadata)
                for partition, (offset, metadata) in by_partition.items()
            }
            refused = await cluster.commit_offsets(group, wanted, NO_EXPIRY_OF_ITS_OWN)
            if any(answer.error_code in NOT_A_MEMBER for answer in refused.values()):
                refused = await cluster.commit_offsets(group, wanted)
            for (_, partition), answer in refused.items():
                if answer.error_code in COORDINATOR_MOVES:
                    raise BrokerUnavailable(f"the coordinator of group {group} answers {answer.error_name}")
                raise HeldUp(
                    ReasonCode.POSITIONS_NOT_RESTORED,
                    f"the position of group {group} in partition {partition} cannot be kept ({answer.error_name}): a "
                    "group with members takes it only with transaction.partition.verification.enable=false (attach "
                    "with --disable-transaction-verification), or stop its members",
                )

    async def _restore(self, truncation: Truncation) -> None:
        """Give groups the positions that they had, where the new topic has them."""
        manifest = await self._whole_spool(truncation).manifest()
        moved: list[MovedPosition] = []
        wanted: dict[str, dict[int, tuple[int, str]]] = {}
        for group, positions in sorted(manifest.positions.items()):
            for partition, (offset, metadata) in sorted(positions.items()):
                cut = truncation.cut(partition)
                end = offset if cut is None else min(offset, cut.offset)
                wanted.setdefault(group, {})[partition] = (end, metadata)
                if end < offset:
                    moved.append(MovedPosition(group, partition, offset, end))
        while missing := await self._missing(truncation, wanted):
            await self._commit(truncation, missing)
            await asyncio.sleep(POSITIONS_SETTLE_S)
        for position in moved:
            log.warning(
                "group position moved to the cut",
                extra={
                    "topic": truncation.topic,
                    "partition": position.partition,
                    "group": position.group,
                    "offset": position.offset,
                    "moved_to": position.moved_to,
                },
            )
        await self._advance(truncation, _P.CLEANING, moved=tuple(moved[:MOVED_POSITIONS_MAX]), moved_count=len(moved))

    async def _missing(
        self, truncation: Truncation, wanted: Mapping[str, Mapping[int, tuple[int, str]]]
    ) -> dict[str, dict[int, tuple[int, str]]]:
        """The positions that groups do not have. One that is there is theirs, or was committed since.

        Nothing is committed meanwhile that is beyond the cut: clients wait, and so does what follows another cluster.
        """
        there = await self._positions(truncation)
        missing = {
            group: {p: position for p, position in positions.items() if p not in there.get(group, {})}
            for group, positions in wanted.items()
        }
        # A commit that was under way when the topic was deleted is one into another log: beyond the cut is nothing.
        for group, found in there.items():
            for partition, (offset, metadata) in found.items():
                cut = truncation.cut(partition)
                if cut is not None and offset > cut.offset:
                    moved = wanted.get(group, {}).get(partition, (cut.offset, metadata))
                    missing.setdefault(group, {})[partition] = moved
        return {group: positions for group, positions in missing.items() if positions}

    # ---- the end ----

    async def _clean(self, truncation: Truncation) -> None:
        await self._delete_spools(truncation)
        await self._advance(truncation, _P.DONE)
        self.ended[truncation.link] += 1
        self.records_cut[truncation.link] += truncation.records
        log.warning(
            "topic truncated",
            extra={"link": truncation.link, "topic": truncation.topic, "messages": truncation.records},
        )

    async def _cancel(self, truncation: Truncation) -> None:
        """Let the topic be written again, as it is."""
        cluster = self._context.cluster
        info = (await cluster.topics()).get(truncation.topic)
        if info is not None and _id(info) == truncation.topic_id:
            await self._still_owner(truncation)
            await cluster.alter_topic_configs(truncation.topic, {MESSAGE_BYTES_MAX: truncation.message_bytes_max})
        await self._delete_spools(truncation)
        await self._advance(truncation, _P.DONE)
