"""The steps of a truncation: a follower topic whose log is not the source's any more is cut to correspond.

Each does what the truncation's phase asks for, and records what comes next. Until the old topic is deleted everything
can be taken back, and nothing is deleted before it is safe twice: what is cut in a file, what stays in the spool topic.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from isthmus_control.levels import CAUGHT_UP_CUTS
from isthmus_control.model import TOPIC_NAME_CHARS_MAX, FollowerTopic, Reason, ResourceType
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import (
    MOVED_OFFSETS_MAX,
    PartitionCut,
    PartitionView,
    SalvageFile,
    TopicLayout,
    Truncation,
    TruncationPhase,
)
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, NewTopic, TopicInfo, TopicPartition, id_as_text
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.digests import MARKED, Verification
from isthmus_plugins.replication.comparison.shared_logs import SharedLogs
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY, FROZEN, MESSAGE_BYTES_MAX, Described
from isthmus_plugins.replication.truncation.common_log import CommonLog, SourceReplaced
from isthmus_plugins.replication.truncation.group_offsets import GroupOffsets
from isthmus_plugins.replication.truncation.ownership import HeldUp, Ownership
from isthmus_plugins.replication.truncation.refill import RefillFailed, refill
from isthmus_plugins.replication.truncation.salvage import SalvageFailed, write_salvage
from isthmus_plugins.replication.truncation.source_losses import SourceLosses
from isthmus_plugins.replication.truncation.spool import Spool
from isthmus_protocol.salvage import SalvageHead
from isthmus_protocol.spool import Manifest

log = logging.getLogger("isthmus_plugins.replication")

REFILLED_AT_ONCE: Final = 8
"""Partitions."""
REFILL_PAUSE_MAX_S: Final = 30.0
"""Between two refills in vain: the first pause is a second, and each one twice as long as that before it."""
IDLE_TRIES_MAX: Final = 30
ENFORCE_TIMEOUT_S: Final = 60.0
"""How long the other proxies may take to keep clients waiting, before the step fails."""
POLL_S: Final = 0.1
CATCH_UP_POLL_S: Final = 0.5
FREEZING: Final = {MESSAGE_BYTES_MAX: FROZEN, CLEANUP_POLICY: "delete"}
"""Nothing is appended, and no cleaner takes anything out."""
_P = TruncationPhase


def views_of(info: TopicInfo) -> tuple[PartitionView, ...]:
    """Who leads each partition, in their order."""
    return tuple(PartitionView(partition.leader, partition.leader_epoch) for partition in info.partitions)


def _kept(cut: PartitionCut, ends: Mapping[int, int]) -> PartitionCut:
    """A cut where the log that was made anew ends before it."""
    end = min(cut.offset, ends[cut.partition])
    return replace(cut, log_start=min(cut.log_start, end), offset=end)


class TruncationSteps:
    """One for each phase. Each can be done again from its beginning, by whatever proxy."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        follower_end: FollowerEnd,
        verification: Verification,
        common_log: CommonLog,
        follower_topics: FollowerTopics,
        own_transactions: OwnTransactions,
    ) -> None:
        self._context = context
        self._own_transactions = own_transactions
        self._clock = context.clock
        self._ownership = Ownership(context)
        self._group_offsets = GroupOffsets(context, self._ownership)
        self._peers = peers
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._verification = verification
        self._common_log = common_log
        self._source_losses = SourceLosses(context, common_log)
        self._shared_logs = SharedLogs(context)
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

    async def carry_out(self, truncation: Truncation) -> None:
        """Do what its phase asks for, and record which one comes next.

        Raises HeldUp, NotOwner, SpoolDamaged, and what brokers and peers raise.
        """
        await self._steps[truncation.phase](truncation)

    async def _old_topic(self, truncation: Truncation) -> TopicInfo:
        """The topic, to be read from its present leaders alone."""
        info = (await self._context.cluster.topics()).get(truncation.topic)
        if info is None or info.id_text != truncation.topic_id:
            raise HeldUp(
                ReasonCode.TARGET_TOPIC_MAY_BE_DELETED,
                f"{truncation.topic} was deleted here behind the link's back: detach the namespace and attach it again",
            )
        return info._replace(pinned=True)

    async def _compare(self, truncation: Truncation) -> None:
        """Find up to where each partition's log is the source's, when nobody writes any more."""
        connection = self._connection(truncation)
        record = self._context.control.state.follower_topics[truncation.topic]
        info = await self._old_topic(truncation)
        ends = await self._freeze(truncation, info)
        if len(ends) != len(truncation.partitions):
            log.info("topic got partitions since, begun anew", extra={"topic": truncation.topic})
            await self._ownership.advance(truncation, _P.CANCELLING)
            return
        if truncation.reason.code == ReasonCode.CUT_AGREED:
            await self._cut_as_agreed(truncation, info, record, connection, ends)
            return
        starts = await self._log_starts(truncation.topic, ends)
        cuts = []
        source_id = record.source_topic_id if truncation.source is None else truncation.source.successor
        walked = await self._shared_logs.walked(connection, record.source_topic, source_id, info) or []
        bounds = {partition: found.offset for partition, found in enumerate(walked) if found.unknown is None}
        try:
            for partition, log_end in ends.items():
                limits = partition, starts[partition], log_end, bounds.get(partition)
                common = await self._common_log.end(connection, info, record, truncation.source, *limits)
                cuts.append(PartitionCut(partition, starts[partition], max(starts[partition], common), log_end))
            held = await self._source_losses.are_held(connection, info, truncation, cuts)
        except SourceReplaced as error:
            log.warning("truncation not gone on with", extra={"topic": truncation.topic, "detail": str(error)})
            self._follower_topics.succeeded.pop(truncation.topic, None)  # until the source says what it is by now
            await self._ownership.advance(truncation, _P.CANCELLING)
            return
        if held:
            log.warning("nothing is cut, the operator decides", extra={"topic": truncation.topic})
            await self._ownership.advance(truncation, _P.CANCELLING)
        elif any(cut.records for cut in cuts):
            await self._ownership.advance(truncation, _P.SALVAGING, cuts=tuple(cuts), compared_at=views_of(info))
        else:
            log.info("nothing to truncate", extra={"topic": truncation.topic})
            await self._ownership.advance(truncation, _P.CANCELLING, cuts=tuple(cuts))

    async def _cut_as_agreed(
        self,
        truncation: Truncation,
        info: TopicInfo,
        record: FollowerTopic,
        connection: LinkConnection,
        ends: Mapping[int, int],
    ) -> None:
        """Cut a topic that has not followed yet to what it shares with its source's, if it is what was agreed to.

        Raises HeldUp where it is not, and what brokers and peers raise.
        """
        following = self._context.control.state.lookup.following(ResourceType.TOPIC, truncation.topic)
        agreed = None if following is None else following.mapping.agreed_cut(truncation.topic_id)
        said = {} if following is None else following.mapping.said_shared(truncation.topic_id)
        source = record.source_topic, record.source_topic_id
        compared = await self._shared_logs.compare(connection, *source, info, said)
        if compared is None:
            raise LinkLost(f"the source does not say where the records of {record.source_topic} come from")
        differing = next((each for each in compared.partitions if each.differs), None)
        if differing is not None:
            raise HeldUp(
                ReasonCode.PROVENANCE_WRONG,
                f"partition {differing.partition} is recorded to be the source's before offset {differing.shared}, and "
                "its records there are others: nothing is cut. Detach the namespace",
            )
        here = {each.partition: each.here[1] for each in compared.partitions}
        # A source that has got the rest meanwhile leaves nothing to lose, which nobody has to agree to.
        caught_up = not compared.records_cut and self._context.control.state.level >= CAUGHT_UP_CUTS
        if agreed is None or not (compared.token == agreed or caught_up) or here != dict(ends):
            raise HeldUp(
                ReasonCode.ENDS_CHANGED,
                "its logs are not as they were when it was agreed to have it cut: attach the namespace again, with "
                "what --dry-run prints now, or detach it",
            )
        cuts = []
        for each in compared.partitions:
            cut_at = await self._common_log.whole(info, each.partition, each.shared) if each.cut else each.shared
            cuts.append(PartitionCut(each.partition, each.here[0], max(each.here[0], cut_at), each.here[1]))
        if caught_up:
            log.info("nothing to cut any more", extra={"topic": truncation.topic})
            await self._ownership.advance(truncation, _P.CANCELLING, cuts=tuple(cuts))
            return
        await self._ownership.advance(truncation, _P.SALVAGING, cuts=tuple(cuts), compared_at=views_of(info))

    def _connection(self, truncation: Truncation) -> LinkConnection:
        connections = self._peers.connections(truncation.link)
        if not connections:
            raise LinkLost(f"link {truncation.link} is not connected")
        return connections[0]

    async def _freeze(self, truncation: Truncation, info: TopicInfo) -> Mapping[int, int]:
        """Keep everybody from changing the topic; its log ends when nothing can land any more.

        By partition, in their order, whichever broker answered first. Raises HeldUp while this cluster's coordinators
        have transactions there: a topic that refuses their markers keeps other transactions from ending, too.
        """
        waits = await self._own_transactions.keeps_from_cutting(truncation.topic)
        if waits is not None:
            raise HeldUp(waits.code, waits.message)
        cluster = self._context.cluster
        await self._ownership.confirm(truncation)
        await cluster.alter_topic_configs(truncation.topic, FREEZING)
        places = [(truncation.topic, partition) for partition in range(len(info.partitions))]
        before: Mapping[TopicPartition, int] = {}
        idle_since = self._clock.monotonic()
        for _ in range(IDLE_TRIES_MAX):
            ends = await cluster.log_ends(places)
            if ends != before or len(ends) < len(places):
                idle_since, before = self._clock.monotonic(), ends
            elif self._clock.monotonic() - idle_since >= LOST_REQUEST_MARGIN_S:
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
        same_leaders = views_of(info) == truncation.compared_at
        if same_leaders and same_ends and await self._log_starts(truncation.topic, starts) == starts:
            return info
        log.info("logs compared again", extra={"topic": truncation.topic, "new_leaders": not same_leaders})
        await self._ownership.advance(truncation, _P.COMPARING)
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
        await self._ownership.advance(truncation, _P.SPOOLING, salvaged=tuple(files))

    async def _spool(self, truncation: Truncation) -> None:
        """Put what stays into the spool, and the groups' committed offsets, which nobody changes from now on."""
        context = self._context
        if truncation.trouble is not None:  # clients went on meanwhile
            await self._ownership.hold_up(truncation, None)
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
        offsets = await self._group_offsets.read(truncation.topic)
        # What cannot be restored shows before anything is deleted: commit it as it is.
        await self._group_offsets.commit(truncation, offsets)
        await self._delete_spools(truncation)
        attempt = uuid.uuid4().hex
        spool = Spool(context, truncation, attempt)
        await spool.create(info.replication_factor)
        digests = []
        for cut in truncation.cuts:
            digests.append(await spool.check(cut, await spool.fill(info, cut)))
            if digests[-1] != await self._digest(info, cut):  # what is refilled could not become that
                log.warning("log changed while it was spooled", extra={"topic": truncation.topic})
                await self._ownership.advance(truncation, _P.COMPARING)
                return
        configs = await context.cluster.topic_configs(truncation.topic)
        own = {
            name: value
            for name, (value, inherited) in configs.items()
            if value is not None and value != inherited and name != MESSAGE_BYTES_MAX
        }
        # Said in any case: brokers that start anew give a topic what a deleted one of its name had, and that is frozen.
        if (limit := truncation.message_bytes_max or configs[MESSAGE_BYTES_MAX][1]) is not None:
            own[MESSAGE_BYTES_MAX] = limit
        own = await self._creatable(truncation, info, own, configs, spool.largest)
        await spool.put_manifest(Manifest(len(truncation.cuts), info.replication_factor, own, tuple(digests), offsets))
        if await self._unchanged(truncation) is not None:
            layout = TopicLayout(info.replication_factor, own, len(offsets))
            await self._ownership.advance(truncation, _P.RECREATING, attempt=attempt, layout=layout)

    async def _creatable(
        self, truncation: Truncation, info: TopicInfo, own: dict[str, str], configs: Described, largest: int
    ) -> dict[str, str]:
        """The settings with which the topic is made anew, once the brokers say that it can be. Raises HeldUp else.

        ``own``: those that it has, ``configs``: and what it would have without. ``largest``: bytes of the largest batch
        that it is refilled with, which may be more than its limits are by now.
        """
        effective = {name: own.get(name, inherited) for name, (_, inherited) in configs.items()}
        raised = topic_settings.lower_than(effective, largest)
        needed = {*topic_settings.OVERRIDES, *raised}
        # Under another name: this one is taken still.
        name = f"{truncation.topic[: TOPIC_NAME_CHARS_MAX - 10]}-{truncation.topic_id[:8]}"
        topic = NewTopic(name, len(truncation.partitions), info.replication_factor, own | raised)
        try:
            taken, refused = await setting_changes.creatable(self._context.cluster, topic, needed)
        except KafkaRefused as error:
            if error.error_code not in setting_changes.OF_SETTINGS:
                return own | raised  # of the other name, which nobody may be allowed to create
            raise HeldUp(
                ReasonCode.TARGET_REFUSES_SETTINGS,
                f"the brokers would not make {truncation.topic} again as it is, so it is not deleted: {error}",
            ) from error
        if refused:
            log.warning("made anew without settings", extra={"topic": truncation.topic, "settings": sorted(refused)})
        return dict(taken)

    async def _delete_spools(self, truncation: Truncation) -> None:
        """Delete the spools of all attempts, and return when they are gone."""
        cluster = self._context.cluster
        while spools := [info for name, info in (await cluster.topics()).items() if truncation.is_spool(name)]:
            # Whoever took over since would have made a spool of another id than those just seen.
            await self._ownership.confirm(truncation)
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
            if info.id_text == truncation.topic_id:
                await self._whole_spool(truncation).check_there()  # what is deleted now
            elif await self._is_blank(info, len(truncation.partitions), layout):
                break
            else:
                await self._whole_spool(truncation).check_there()  # nobody else may have what came from the source
            # Whoever took over since would have made a topic of another id than the one just seen.
            await self._ownership.confirm(truncation)
            await cluster.delete_topic_id(info.topic_id)
            await asyncio.sleep(POLL_S)
        if info is None:
            await self._ownership.confirm(truncation)
            topic_id = await cluster.create_topic(
                truncation.topic, len(truncation.partitions), layout.replication_factor, layout.configs
            )
            self._made_now.add(id_as_text(topic_id))
        else:
            topic_id = info.topic_id
        effective, inherited = (await cluster.topic_configs(truncation.topic, {MESSAGE_BYTES_MAX}))[MESSAGE_BYTES_MAX]
        if truncation.message_bytes_max is None and effective == inherited:  # it had none of its own
            await self._ownership.confirm(truncation)
            await cluster.alter_topic_configs(truncation.topic, {MESSAGE_BYTES_MAX: None})
        await self._ownership.advance(truncation, _P.REFILLING, new_topic_id=id_as_text(topic_id))

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
            if info is None or info.id_text != topic_id:
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
            # It may fail for ever.
            await asyncio.sleep(min(2.0 ** min(truncation.refills_failed, 10), REFILL_PAUSE_MAX_S))
            await self._ownership.advance(truncation, _P.RECREATING, refill_failure=str(error))
            return
        await self._ownership.advance(truncation, _P.RESTORING)

    # ---- without the spool ----

    async def spool_lost(self, truncation: Truncation) -> None:
        """Go on without what the spool held: the old topic has it, if that is still there, or else the source."""
        why = {"topic": truncation.topic, "phase": truncation.phase.value}
        info = (await self._context.cluster.topics()).get(truncation.topic)
        if truncation.phase is _P.RECREATING and info is not None and info.id_text == truncation.topic_id:
            log.error("spool lost, filled again", extra=why)
            await self._ownership.advance(truncation, _P.COMPARING)
        elif truncation.phase is _P.RECREATING and info is not None and info.id_text == truncation.new_topic_id:
            log.error("spool lost, the new topic is kept", extra=why)
            await self._ownership.advance(truncation, _P.REFILLING)
        elif truncation.phase is _P.REFILLING:
            log.error("spool lost, the source is followed from its start", extra=why)
            await self._drain(truncation)
            await self._ownership.advance(truncation, _P.CATCHING_UP)
        elif truncation.phase is _P.RESTORING:
            groups = "some" if truncation.layout is None else truncation.layout.groups
            log.error("group positions lost with the spool", extra={**why, "groups": groups})
            await self._ownership.advance(truncation, _P.CLEANING, positions_lost=True)

    async def _drain(self, truncation: Truncation) -> None:
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
        if info is None or info.id_text != truncation.new_topic_id:
            await self._ownership.advance(truncation, _P.RECREATING)
            return
        enough = truncation.given_up or truncation.stuck is not None
        places = {cut.partition: (truncation.topic, cut.partition) for cut in truncation.cuts}
        found = await self._context.cluster.log_ends(list(places.values()))
        ends = {partition: found[place] for partition, place in places.items() if place in found}
        lacking = sum(max(0, cut.offset - ends.get(cut.partition, 0)) for cut in truncation.cuts)
        if len(ends) == len(places) and (enough or not lacking):
            await self._ownership.advance(
                truncation, _P.RESTORING, cuts=tuple(_kept(cut, ends) for cut in truncation.cuts)
            )
            return
        message = (
            f"the local copy of what both logs share was lost: it comes from the source again, {lacking} offsets are "
            f"left; if the source is gone, `isthmus topic give-up {truncation.topic}` goes on without them"
        )
        trouble = Reason(ReasonCode.SPOOL_LOST, message)
        now = self._ownership.now(truncation.topic, truncation.topic_id)
        if now is not None and now.trouble != trouble:
            await self._ownership.hold_up(truncation, trouble)
        await asyncio.sleep(CATCH_UP_POLL_S)

    # ---- the end ----

    async def _restore(self, truncation: Truncation) -> None:
        """Give groups what they had committed, where the new topic has it."""
        manifest = await self._whole_spool(truncation).manifest()
        moved = await self._group_offsets.restore(truncation, manifest.positions)
        await self._ownership.advance(
            truncation, _P.CLEANING, moved=tuple(moved[:MOVED_OFFSETS_MAX]), moved_count=len(moved)
        )

    async def _clean(self, truncation: Truncation) -> None:
        await self._delete_spools(truncation)
        await self._ownership.advance(truncation, _P.DONE)

    async def _cancel(self, truncation: Truncation) -> None:
        """Let the topic be written again, as it is."""
        cluster = self._context.cluster
        info = (await cluster.topics()).get(truncation.topic)
        if info is not None and info.id_text == truncation.topic_id:
            await self._ownership.confirm(truncation)
            await cluster.alter_topic_configs(truncation.topic, {MESSAGE_BYTES_MAX: truncation.message_bytes_max})
        await self._delete_spools(truncation)
        await self._ownership.advance(truncation, _P.DONE)
