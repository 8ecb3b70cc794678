"""The follower's topics: made for a link, adopted, or refused; always with the intent recorded first.

What is to be done with each is decided in ``topic_plans``; those that follow get their ``settings``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from isthmus_control.commands import (
    Body,
    FollowedTopic,
    ForgetFollowerTopic,
    NoteSourceLog,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
    TermStart,
)
from isthmus_control.levels import ORIGINS, SOURCE_DELETIONS
from isthmus_control.model import (
    FollowerTopic,
    NamespaceMapping,
    OnSourceDelete,
    Reason,
    ResourceType,
    Role,
    TopicState,
)
from isthmus_control.origins import Ended
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    CommittedOffset,
    KafkaRefused,
    NewTopic,
    TopicInfo,
    TopicPartition,
    id_as_text,
)
from isthmus_plugins.links import TopicPlan
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.comparison.shared_logs import NOTHING_SAID, ComparedTopic, SharedLogs, log_limits
from isthmus_plugins.replication.follower import replica_plans, topic_plans
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.settings import FollowerSettings, Found
from isthmus_plugins.replication.follower.topic_plans import Existing, Refusal, SourceTopic, Step
from isthmus_plugins.replication.link import calls, histories, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.link.own_logs import Begun, OwnLogs
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.tasks import Tasks, some_at_once
from isthmus_protocol.error_codes import INVALID_REPLICATION_FACTOR

log = logging.getLogger("isthmus_plugins.replication")

LEADERS_WAIT_S: Final = 2.0
"""How long a new topic's leaders are waited for before the leader end is answered that there are none yet."""
NEW_SAID_S: Final = 8.0
"""The leader end says it again more often than that, as long as it is connected."""
EMPTY_SAID_S: Final = 3.0
"""By then the source pushes what it has, and says where it ends."""
IDLE_S: Final = 0.2
IDLE_TRIES: Final = 40
AT_SOURCES_END: Final = (Ended.PROMOTED, Ended.REVERSED)
"""How what is followed ends where its log was found to end as its source's does, so that nothing is on its way."""
AT_ONCE: Final = 200
"""Topics that are made, adopted or looked at at the same time."""
MADE_S: Final = 60.0
"""How long brokers may take to know a topic that they have made: they are busy where thousands are made."""
CLOSED_AT_ONCE: Final = 10_000
"""Partitions in one command: some 150 bytes each."""
NOTED_AT_ONCE: Final = 5_000


class _Prepared(NamedTuple):
    """What became of a topic that the source has the target make."""

    local: str | None
    """What it is called here; None: it is not ready."""
    changed: bool
    """Whether it was made just now, or has got more partitions, maybe for whoever has asked, too."""
    code: str | None
    message: str | None
    filling: int | None = None

    def answer(self, topics: Mapping[str, TopicInfo]) -> calls.PreparedTopic:
        """``topics``: what the cluster has now."""
        if self.local is None:
            return calls.PreparedTopic(False, None, self.code, self.message)
        info = topics.get(self.local)
        if info is None:
            message = f"brokers do not say who leads {self.local}"
            return calls.PreparedTopic(False, None, reasons.BROKER_UNAVAILABLE, message)
        leaders = tuple(partition.leader for partition in info.partitions)
        made = calls.ReadyTopic(self.local, self.filling)
        return calls.PreparedTopic(True, made, self.code, self.message, leaders)


class CommittedByAll:
    """What all groups of this cluster have committed: read once for all topics that are planned together."""

    def __init__(self, context: PluginContext) -> None:
        self._cluster = context.cluster
        self._turn = asyncio.Lock()
        self._found: Mapping[str, Mapping[TopicPartition, CommittedOffset]] | None = None

    async def beyond(self, topic: str, compared: ComparedTopic) -> tuple[str, ...]:
        """Groups that have committed offsets beyond what a topic shares with its source's. Raises BrokerUnavailable."""
        shared = {(topic, each.partition): each.shared for each in compared.partitions if each.cut}
        if not shared:
            return ()
        async with self._turn:
            if self._found is None:
                self._found = await self._cluster.committed_offsets(sorted(await self._cluster.groups()))
        return tuple(
            group
            for group, offsets in sorted(self._found.items())
            if any(each.offset > shared.get(place, each.offset) for place, each in offsets.items())
        )


class FollowerTopics(Part):
    """What this cluster's topics in follower namespaces are and become."""

    def __init__(self, context: PluginContext, replicas: FollowerReplicas, own_transactions: OwnTransactions) -> None:
        self._context = context
        self._replicas = replicas
        self._own_transactions = own_transactions
        self._tasks = Tasks("follower-topics", context.supervision)
        self._own_logs = OwnLogs(context, self._tasks)
        self._shared_logs = SharedLogs(context)
        self._preparing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By link and topic of the source."""
        self._led: dict[str, frozenset[str]] = {}
        """By link: the source's topics, as the leader end last said."""
        self.refused: dict[str, Reason] = {}
        """By topic: why it does not go on with the source's, as of the leader end's last call."""
        self.succeeded: dict[str, Succession] = {}
        """By topic: which topic of the source succeeded the one that it follows, as of the leader end's last call."""
        self._seen: dict[str, str] = {}
        """By topic: the id under which brokers have known it."""
        self._new: dict[tuple[LinkConnection, str], float] = {}
        """By topic: when a proxy of the source said last that acks of its new partitions wait (monotonic seconds)."""
        self._holds_new: dict[LinkConnection, float] = {}
        """The same of topics to come."""
        self._empty: dict[str, tuple[frozenset[int], float]] = {}
        """By topic: its partitions that had nothing at the source, and when that said so last (monotonic seconds)."""
        self.settings = FollowerSettings(context)
        self.may_land: Callable[[TopicPartition], bool] = not_joined
        """Whether something that was sent to a partition's log, by whichever proxy, may still land there."""

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- the leader end's call ----

    def answers(self) -> Sequence[Answering]:
        return (calls.PrepareTopics.by(self.prepare_topics),)

    async def prepare_topics(
        self, connection: LinkConnection, question: calls.PrepareTopics
    ) -> calls.PrepareTopicsAnswer:
        """Make or adopt a local topic for each of the source's; say which are ready, and who leads their partitions.

        Many at once: what they ask of brokers, and record, goes together.
        """
        self._note_new(connection, question)
        link_name = connection.link_name
        await self._sources_seen(link_name, frozenset(question.all))
        self._sources_truncating(link_name, question.truncating)
        topics = await self._context.cluster.topics_named(self._locals(link_name, question.topics))
        found = await self.settings.read(link_name, question.topics, topics)
        brokers = await self._replicas.brokers()

        async def prepared(said: calls.WantedTopic) -> tuple[str, _Prepared]:
            return said.topic, await self._prepared(connection, said, brokers, topics, found)

        answered = dict(await some_at_once(AT_ONCE, prepared, question.topics))
        ready = {topic: each.local for topic, each in answered.items() if each.local is not None}
        changed = {each.local for each in answered.values() if each.changed and each.local is not None}
        led, _ = await asyncio.gather(self._with_leaders(changed), self._note_source_log(link_name, question, ready))
        topics = {name: info for name, info in topics.items() if name not in changed} | led
        return calls.PrepareTopicsAnswer({topic: each.answer(topics) for topic, each in answered.items()})

    def _locals(self, link_name: str, wanted: Iterable[calls.WantedTopic]) -> set[str]:
        """What topics of the source are called here, of those that some namespace follows."""
        lookup = self._context.control.state.lookup
        found = (lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, each.topic) for each in wanted)
        return {counterpart.local_name for counterpart in found if counterpart is not None}

    async def _prepared(
        self,
        connection: LinkConnection,
        said: calls.WantedTopic,
        brokers: int,
        topics: Mapping[str, TopicInfo],
        found: Found,
    ) -> _Prepared:
        """What became of one topic. ``topics``, ``found``: what the cluster has, and of settings."""
        link_name = connection.link_name
        wanted = replica_plans.as_wished(self._context.control.state.links.get(link_name), said, brokers)
        turn = self._preparing.setdefault((link_name, wanted.topic), asyncio.Lock())
        waits, seen = turn.locked(), topics  # somebody has asked, too
        async with turn:
            try:
                if waits:
                    topics = await self._context.cluster.topics_named(self._locals(link_name, [wanted]))
                    found = await self.settings.read(link_name, [wanted], topics)
                local, changed = await self._prepare(connection, wanted, topics)
                self._replicas.said(local, said.replication_factor, said.in_sync_min)
                refused = self.settings.refused.get(local) if changed else None
                if wanted.configs is not None and local in topics:
                    existing = self._replicas.in_place(topics[local])
                    refused = await self.settings.follow(wanted.configs, existing, found)
            except Refusal as refusal:
                self._refused(link_name, wanted.topic, refusal)
                return _Prepared(None, False, refusal.code, str(refusal))
            except KafkaRefused as error:
                not_made = Refusal(ReasonCode.TARGET_TOPIC_NOT_CREATED, f"the target refuses the topic: {error}")
                self._refused(link_name, wanted.topic, not_made)
                return _Prepared(None, False, not_made.code, str(not_made))
            except BrokerUnavailable as error:
                return _Prepared(None, False, reasons.BROKER_UNAVAILABLE, str(error))
        self.refused.pop(local, None)
        code, amiss = (None, None) if refused is None else (refused.code, refused.message)
        changed = changed or topics.get(local) != seen.get(local)
        return _Prepared(local, changed, code, amiss, self.settings.filling(local))

    async def _note_source_log(self, link_name: str, question: calls.PrepareTopics, ready: Mapping[str, str]) -> None:
        """Record in which control log the source has what is followed, where that is not known yet or another one."""
        state = self._context.control.state
        if question.log is None or state.level < SOURCE_DELETIONS:
            return
        topics = [
            FollowedTopic(ready[said.topic], said.topic_id)
            for said in question.topics
            if said.topic in ready
            and (record := state.follower_topics.get(ready[said.topic])) is not None
            and record.source_topic_id == said.topic_id
            and record.source_log != question.log
        ]
        for first in range(0, len(topics), NOTED_AT_ONCE):
            noted = NoteSourceLog(link_name, question.log, tuple(topics[first : first + NOTED_AT_ONCE]))
            try:
                await self._append(noted)
            except (BrokerUnavailable, Refusal) as error:  # the next call says it again
                log.info("source's log not noted", extra={"link": link_name, "detail": str(error)})

    def _note_new(self, connection: LinkConnection, question: calls.PrepareTopics) -> None:
        now, lookup = self._context.clock.monotonic(), self._context.control.state.lookup
        self._holds_new[connection] = now if question.holds_new else float("-inf")
        for wanted in question.topics:
            counterpart = lookup.local(connection.link_name, ResourceType.TOPIC, Role.FOLLOWER, wanted.topic)
            key = connection, "" if counterpart is None else counterpart.local_name
            if wanted.from_first:
                self._new[key] = now
            else:
                self._new.pop(key, None)
            if counterpart is not None and wanted.empty is not None:
                self._empty[counterpart.local_name] = frozenset(wanted.empty), now
        self._empty = {topic: said for topic, said in self._empty.items() if now - said[1] < EMPTY_SAID_S}

    def connection_lost(self, connection: LinkConnection) -> None:
        """What the source said of acks is true no longer."""
        self._holds_new.pop(connection, None)
        self._new = {key: said for key, said in self._new.items() if key[0] is not connection}

    def is_new(self, topic: str) -> bool:
        """Whether the source said just now that acks of a topic's new partitions wait from their first record on."""
        since = self._context.clock.monotonic() - NEW_SAID_S
        return any(said > since for (_, name), said in self._new.items() if name == topic)

    def is_empty(self, topic: str, partition: int) -> bool:
        """Whether the source said just now that it has nothing in a partition that this cluster may not have had."""
        partitions, said = self._empty.get(topic, (frozenset(), float("-inf")))
        return partition in partitions and self._context.clock.monotonic() - said < EMPTY_SAID_S

    def holds_new(self, link_name: str) -> bool:
        """Whether all proxies of the source said just now that acks of topics to come wait for this cluster."""
        since = self._context.clock.monotonic() - NEW_SAID_S
        told = [said for connection, said in self._holds_new.items() if connection.link_name == link_name]
        return bool(told) and min(told) > since

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

    def source_is_gone(self, record: FollowerTopic) -> bool:
        """Whether the source has no such topic (any more), as far as it has reported."""
        return record.link in self._led and record.source_topic not in self._led[record.link]

    def source_may_be_deleted(self, record: FollowerTopic) -> bool:
        """Whether the source has no topic of that name any more, or another one, as far as it has reported."""
        refused = self.refused.get(record.topic)
        return self.source_is_gone(record) or (refused is not None and refused.code in reasons.MADE_AGAIN)

    async def _sources_seen(self, link_name: str, led: frozenset[str]) -> None:
        """Note what the source has, and forget topics that neither side has any more."""
        self._led[link_name] = led
        truncating = self._context.control.state.truncations
        gone = [
            record.topic
            for record in self._context.control.state.follower_topics.values()
            if record.source_topic not in led
            and record.link == link_name
            and record.state in (TopicState.FOLLOWING, TopicState.REFUSED)
            and record.topic not in truncating
        ]
        here = await self._context.cluster.topics_named(gone) if gone else {}
        for topic in gone:
            if topic not in here:
                log.info("follower topic forgotten", extra={"link": link_name, "topic": topic})
                await self._append(ForgetFollowerTopic(link_name, topic))

    async def _with_leaders(self, names: Collection[str]) -> dict[str, TopicInfo]:
        """Topics as they are recorded, once they have leaders: a new one takes a moment to have them everywhere.

        Those that cannot be read are left out, and those that brokers have as others still.
        """
        clock = self._context.clock
        deadline = clock.monotonic() + LEADERS_WAIT_S
        delay = 0.02
        found: dict[str, TopicInfo] = {}
        left = list(names)
        while left:
            try:
                read = await self._context.cluster.topics_named(left)
            except (BrokerUnavailable, KafkaRefused) as error:  # what was made is recorded, and is asked for again
                log.info("leaders not read", extra={"topics": len(left), "detail": str(error)})
                break
            recorded = self._context.control.state.follower_topics
            found |= {name: info for name, info in read.items() if topic_plans.is_recorded(recorded.get(name), info)}
            left = [name for name in left if name not in found or not _is_led(found[name])]
            if not left or clock.monotonic() > deadline:
                break
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.2)
        self._seen |= {name: info.id_text for name, info in found.items()}
        return found

    async def _prepare(
        self, connection: LinkConnection, wanted: calls.WantedTopic, topics: Mapping[str, TopicInfo]
    ) -> tuple[str, bool]:
        """One topic: (its local name, whether topics changed). Raises Refusal, KafkaRefused, BrokerUnavailable."""
        link_name = connection.link_name
        state = self._context.control.state
        source_topic = wanted.topic
        counterpart = state.lookup.local(link_name, ResourceType.TOPIC, Role.FOLLOWER, source_topic)
        if counterpart is None:
            raise Refusal(
                reasons.NOT_FOLLOWING, f"no namespace of this cluster follows {source_topic} over {link_name}"
            )
        local = counterpart.local_name
        record = state.follower_topics.get(local)
        existing = topics.get(local)
        if record is not None and record.deleting and record.source_topic_id == wanted.topic_id:
            raise Refusal(ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, f"{local} is being deleted, as {source_topic} was")
        step = topic_plans.next_step(record, link_name, existing)
        waited = step is not Step.GO_ON and await self._own_transactions_end(link_name, counterpart.mapping)
        if waited:
            existing = await self._context.cluster.topic(local)  # another proxy may have made it meanwhile
            record = self._context.control.state.follower_topics.get(local)
            step = topic_plans.next_step(record, link_name, existing)
        match step:
            case Step.GO_ON:
                assert record is not None
                goes = counterpart.mapping.on_source_delete is OnSourceDelete.DELETE
                if topic_plans.awaits_cut(record, counterpart.mapping):
                    raise _to_be_cut(local)
                self._check_source(record, wanted, existing, goes)
                return local, await self._go_on(record, wanted.partitions, existing) or waited
            case Step.CREATE:
                await self._create(link_name, wanted, local)
            case Step.REPLACE:
                assert existing is not None
                log.warning("follower topic recreated", extra={"link": link_name, "topic": local})
                await self._lose(existing)
                await self._create(link_name, wanted, local)
            case Step.ADOPT:
                assert existing is not None
                await self._adopt_or_refuse(connection, counterpart.mapping, record, wanted, local, existing)
        return local, True

    async def _own_transactions_end(self, link_name: str, mapping: NamespaceMapping) -> bool:
        """Return when this cluster has no transactions of its own in a namespace; whether that took time.

        Raises Refusal where it takes longer.
        """
        if self._own_transactions.are_over(link_name, mapping):
            return False
        waits = await self._own_transactions.keeps_from_following(link_name, mapping)
        if waits is not None:
            raise Refusal(waits.code, waits.message)
        return True

    def _check_source(
        self, record: FollowerTopic, wanted: calls.WantedTopic, existing: TopicInfo | None, goes: bool
    ) -> None:
        """Raise Refusal unless the source's topic is the one that is followed, and this one is whole.

        Where the source states that its present topic succeeded the one that is followed, that is noted: a truncation
        makes this topic follow the present one.
        """
        truncation = self._context.control.state.truncations.get(record.topic)
        if truncation is not None and not truncation.follows:
            raise Refusal(ReasonCode.TRUNCATING, truncation.describe())
        self.succeeded.pop(record.topic, None)
        found = topic_plans.successor(record, wanted, existing, goes)
        if found is not None:
            self.succeeded[record.topic] = found
            raise Refusal(ReasonCode.SOURCE_TRUNCATED, reasons.source_truncated(record.source_topic, found))

    async def _go_on(self, record: FollowerTopic, partitions: int, seen: TopicInfo | None) -> bool:
        """Give a topic that follows the partitions that its source has got; whether there were some, or all."""
        found = seen
        if not topic_plans.is_recorded(record, found):  # another proxy of this cluster may have made it since
            found = await self._context.cluster.topic(record.topic)
        if found is not None:
            self._seen[record.topic] = found.id_text
        elif self._seen.get(record.topic) != record.topic_id and self._is_recent(record):
            raise BrokerUnavailable(f"brokers do not know {record.topic} yet, which they have just made")
        existing = topic_plans.going_on(record, partitions, found)
        there = len(existing.partitions)
        if there < partitions:
            await self._context.cluster.create_partitions(record.topic, partitions)
        # A proxy that was killed in the middle may have left partitions whose provenance was never opened.
        history, cluster_id = self._context.control.state.histories.get(record.topic), self._source_of(record.link)
        if unopened := topic_plans.not_opened(record, history, cluster_id, partitions):
            ends = {p: await self._context.cluster.log_end(record.topic, p) if p < there else 0 for p in unopened}
            old = {partition: end for partition, end in ends.items() if partition < there}
            await self._close_before(record.link, record.source_topic_id, existing, old)
            await self._append(_opened(record.link, record.topic, existing.topic_id, ends))
        return there < partitions or found is not seen

    def _is_recent(self, record: FollowerTopic) -> bool:
        return self._context.clock.time() - record.recorded_ms / 1000 < MADE_S

    async def _create(self, link_name: str, wanted: calls.WantedTopic, local: str) -> None:
        await self._record(self._is(link_name, wanted, local, TopicState.CREATING))
        self.settings.made(local)
        try:
            topic_id = await self._create_replicated(wanted, local, wanted.replication_factor)
        except KafkaRefused as error:
            # Where the cluster has had more brokers than it has now; those that are away and known to it count.
            alive = len(await self._context.cluster.broker_racks())
            if error.error_code != INVALID_REPLICATION_FACTOR or alive >= wanted.replication_factor:
                raise
            topic_id = await self._create_replicated(wanted, local, alive)
        log.info("follower topic created", extra={"link": link_name, "topic": local, "partitions": wanted.partitions})
        await self._follows(link_name, wanted, local, topic_id, dict.fromkeys(range(wanted.partitions), 0))

    async def _create_replicated(self, wanted: calls.WantedTopic, local: str, factor: int) -> bytes:
        configs = await self.settings.wanted(local, wanted.configs or {}, factor)
        return await self._create_with(NewTopic(local, wanted.partitions, factor, configs))

    async def _create_with(self, topic: NewTopic) -> bytes:
        """Create a topic, without those of its settings that the brokers refuse; its id."""
        cluster = self._context.cluster
        try:
            return await cluster.create_topic(*topic)
        except KafkaRefused:
            taken, refused = await setting_changes.creatable(cluster, topic, topic_settings.OVERRIDES)
            if not refused:
                raise
            log.warning("follower topic created without", extra={"topic": topic.name, "settings": sorted(refused)})
            topic_id = await cluster.create_topic(*topic._replace(configs=taken))
            self.settings.has_without(topic.name, refused)
            return topic_id

    async def _lose(self, agreed: TopicInfo) -> None:
        """Delete the topic that the operator agreed to lose, and not one that has its name by now."""
        check_lease(self._context)
        await self._context.cluster.delete_topic_id(agreed.topic_id)

    async def _adopt_or_refuse(
        self,
        connection: LinkConnection,
        mapping: NamespaceMapping,
        record: FollowerTopic | None,
        wanted: calls.WantedTopic,
        local: str,
        existing: TopicInfo,
    ) -> None:
        link_name = connection.link_name
        said = mapping.said_shared(existing.id_text)
        plan, ends = await self.plan(mapping, wanted, local, existing, peer=connection, said=said)
        now = self._context.control.state.follower_topics.get(local)
        if now is not None and now.state is TopicState.FOLLOWING and now.link == link_name:
            return  # another proxy of this cluster was faster
        if plan.action == "refuse":
            reason = Reason(ReasonCode.TARGET_TOPIC_NOT_EMPTY, plan.reason or "")
            if record is None or record.state is not TopicState.REFUSED or record.reason != reason:
                await self._record(self._is(link_name, wanted, local, TopicState.REFUSED, existing.topic_id, reason))
            raise Refusal(reason.code, reason.message)
        cluster = self._context.cluster
        if plan.action == "cut":  # a truncation begins, and nothing comes into the topic before that is over
            log.warning(
                "follower topic to be cut", extra={"link": link_name, "topic": local, "records_lost": plan.records_lost}
            )
            await self._record(self._is(link_name, wanted, local, TopicState.FOLLOWING, existing.topic_id))
            raise _to_be_cut(local)
        if plan.action == "truncate":
            log.warning(
                "follower topic emptied", extra={"link": link_name, "topic": local, "records_lost": plan.records_lost}
            )
            await self._record(self._is(link_name, wanted, local, TopicState.CREATING))
            await self._lose(existing)
            await self._create(link_name, wanted, local)
            return
        partitions = wanted.partitions
        if len(existing.partitions) < partitions:
            await cluster.create_partitions(local, partitions)
            ends |= dict.fromkeys(range(len(existing.partitions), partitions), 0)
        configs = await self.settings.wanted(local, wanted.configs or {}, existing.replication_factor)
        changes = topic_settings.changes(await cluster.topic_configs(local), configs)
        refused = await setting_changes.change(cluster, local, changes)
        if without := next((error for name, error in refused.items() if name in topic_settings.OVERRIDES), None):
            raise without
        self.settings.has_without(local, refused)
        await self._close_before(link_name, wanted.topic_id, existing, ends)
        await self._follows(link_name, wanted, local, existing.topic_id, ends)

    async def plan(
        self,
        mapping: NamespaceMapping,
        source: SourceTopic,
        local: str,
        info: TopicInfo | None,
        truncate: bool = False,
        *,
        peer: LinkConnection,
        said: Mapping[int, int] = NOTHING_SAID,
        committed: CommittedByAll | None = None,
        awaits_markers: bool = False,
    ) -> tuple[TopicPlan, dict[int, int]]:
        """What attaching does with one topic (see :func:`topic_plans.plan`), and the log ends of its partitions.

        Changes nothing. ``peer``: a proxy of the source, which is asked. ``said``: see :meth:`SharedLogs.compare`.
        ``committed``: for the groups that would move; None: nobody is told of them. ``awaits_markers``: see
        :class:`Existing`. Raises BrokerUnavailable, KafkaRefused.
        """
        if info is None:
            return topic_plans.plan(mapping, source, local, None, truncate), {}
        logs = await log_limits(self._context, info)
        starts, ends = zip(*logs, strict=True)
        compared, moved = None, tuple[str, ...]()
        if any(ends) and mapping.offsets is None:
            compared = await self._shared_logs.compare(peer, source.topic, source.topic_id, info, said, logs)
        if compared is not None and committed is not None:
            moved = await committed.beyond(local, compared)
        history = self._context.control.state.histories.get(local)
        salvages = self._context.data_directory is not None
        existing = Existing(info, history, starts, ends, compared, moved, salvages, awaits_markers)
        return topic_plans.plan(mapping, source, local, existing, truncate), dict(enumerate(ends))

    # ---- detaching ----

    async def detached(self, link_name: str, mapping: NamespaceMapping, ended: Ended = Ended.DETACHED) -> None:
        """Record where the topics of a mapping that is detached stopped to follow. Their streams have ended.

        Raises BrokerUnavailable if that is not known of all of them.
        """
        topics = await self._context.cluster.topics()
        records = self._context.control.state.follower_topics.values()
        stopped = (
            (record, topics[record.topic])
            for record in records
            if record.link == link_name and mapping.remote_name(record.topic) is not None and record.topic in topics
        )
        await self.close_provenance(stopped, ended)

    async def close_provenance(
        self, stopped: Iterable[tuple[FollowerTopic, TopicInfo]], ended: Ended = Ended.DETACHED
    ) -> None:
        """Record where topics stopped to follow, and how that ended. Their streams have ended.

        Raises BrokerUnavailable if that is not known of all of them.
        """
        ids: dict[TopicPartition, str] = {}
        state = self._context.control.state
        for record, existing in stopped:
            topic_id = existing.id_text
            for partition in range(len(existing.partitions)):
                if histories.is_received(state, (record.topic, topic_id), partition):
                    ids[record.topic, partition] = topic_id
        places = ids.keys()
        if ended in AT_SOURCES_END:
            ends = await self._context.cluster.log_ends(places) if places else {}
        else:
            ends = await self._idle_ends(places)
        await self._close(
            [(topic, ids[topic, partition], partition, end) for (topic, partition), end in ends.items()], ended
        )
        if missing := places - ends.keys():
            topic, partition = min(missing)
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise BrokerUnavailable(f"the log ends of {topic}-{partition}{more} cannot be read, or still move")

    async def _close_before(
        self, link_name: str, source_topic_id: str, existing: TopicInfo, ends: Mapping[int, int]
    ) -> None:
        """Before a topic follows: end what this cluster wrote there itself, and what it received from elsewhere.

        ``ends``: of its partitions' logs, since nobody writes any more. Where what it received goes on in its list who
        appended it was killed, maybe just now: that end has to stay.

        Raises BrokerUnavailable, KafkaRefused, Refusal.
        """
        topic = existing.name, existing.id_text
        state, source = self._context.control.state, (self._source_of(link_name), source_topic_id)
        written = [each for each in ends if histories.is_written(state, topic, each)]
        await some_at_once(AT_ONCE, lambda each: self._epochs_recorded(existing, each, ends[each]), written)
        received = histories.received_from_others(state, topic, ends, source)
        stay = await self._idle_ends([(existing.name, each) for each in received])
        for each in received:
            if stay.get((existing.name, each)) != ends[each]:
                raise BrokerUnavailable(f"the log end of {existing.name}-{each} cannot be read, or still moves")
        for partitions, ended in ((received, Ended.DETACHED), (written, Ended.FOLLOWS)):
            await self._close([(*topic, each, ends[each]) for each in partitions], ended)

    def _source_of(self, link_name: str) -> str:
        """The other cluster of a link. Raises Refusal where there is no such link any more."""
        link = self._context.control.state.links.get(link_name)
        if link is None:
            raise Refusal(reasons.NOT_FOLLOWING, f"there is no link {link_name} any more")
        return link.remote_cluster_id

    async def _epochs_recorded(self, existing: TopicInfo, partition: int, end: int) -> None:
        """Have in the control log what this cluster wrote to a partition, up to its end."""
        start = TermStart(end, existing.partitions[partition].leader_epoch)
        begun = Begun(existing.name, existing.id_text, partition, start)
        await self._own_logs.record_written(begun, await self._context.cluster.log_start(existing.name, partition))

    async def _close(self, ends: Sequence[tuple[str, str, int, int]], ended: Ended) -> None:
        """Close what goes on in partitions at these ends of their logs: (topic, topic id, partition, end)."""
        if self._context.control.state.level < ORIGINS:
            ended = Ended.DETACHED
        for first in range(0, len(ends), CLOSED_AT_ONCE):
            some: dict[histories.Topic, dict[int, int]] = {}
            for topic, topic_id, partition, end in ends[first : first + CLOSED_AT_ONCE]:
                some.setdefault((topic, topic_id), {})[partition] = end
            for body in histories.to_close(self._context.control.state, some, ended):
                await self._append(body)

    async def _idle_ends(self, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Log ends, once nothing that was sent can land there any more: where that is not known, they stay for a while.

        Those that are not read, or still move after some seconds, are left out.
        """
        idle: dict[TopicPartition, int] = {}
        left = set(places)
        seen: dict[TopicPartition, tuple[int, float]] = {}
        """Ends, and since when they stay."""
        for _ in range(IDLE_TRIES):
            if not left:
                break
            ends = await self._context.cluster.log_ends(left)
            now = self._context.clock.monotonic()
            for place, end in ends.items():
                before, since = seen.get(place, (end, now))
                seen[place] = end, since if end == before else now
                if not self.may_land(place) or now - seen[place][1] >= LOST_REQUEST_MARGIN_S:
                    idle[place] = end
            left -= idle.keys()
            if left:
                await asyncio.sleep(IDLE_S)
        return idle

    # ---- records of the control log ----

    async def _record(self, topic: SetFollowerTopic) -> None:
        known = self._context.control.state.follower_topics.get(topic.topic)
        # What brokers refuse to make is tried again and again: what is meant is recorded once.
        if known is None or topic.state is not TopicState.CREATING or not topic_plans.is_intent(known, topic):
            await self._append(topic)

    async def _follows(
        self, link_name: str, wanted: calls.WantedTopic, local: str, topic_id: bytes, ends: Mapping[int, int]
    ) -> None:
        """Record that a topic follows, from the ends of its partitions' logs on."""
        follows = self._is(link_name, wanted, local, TopicState.FOLLOWING, topic_id)
        await self._append(follows, _opened(link_name, local, topic_id, ends))

    def _is(
        self,
        link_name: str,
        wanted: calls.WantedTopic,
        local: str,
        topic_state: TopicState,
        topic_id: bytes | None = None,
        reason: Reason | None = None,
    ) -> SetFollowerTopic:
        return SetFollowerTopic(
            link_name,
            local,
            wanted.topic,
            wanted.topic_id,
            topic_state,
            None if topic_id is None else id_as_text(topic_id),
            reason,
            self.settings.to_record(local, wanted.configs or {}),
        )

    async def _append(self, *bodies: Body) -> None:
        """Record these, in this order. Raises Refusal for the first that is refused."""
        for outcome in await self._context.control.append_all(bodies):
            if isinstance(outcome, Rejected):
                raise Refusal(outcome.code.told, outcome.message)


def _opened(link_name: str, local: str, topic_id: bytes, offsets: Mapping[int, int]) -> OpenProvenance:
    text = id_as_text(topic_id)
    return OpenProvenance(
        link_name, tuple(PartitionOffset(local, text, partition, offset) for partition, offset in offsets.items())
    )


def _is_led(topic: TopicInfo) -> bool:
    return all(partition.leader >= 0 for partition in topic.partitions)


def _to_be_cut(topic: str) -> Refusal:
    return Refusal(ReasonCode.TRUNCATING, f"{topic} is cut to what it shares with its source's first, as agreed")
