"""Promotion: a drained follower namespace becomes one that clients write.

1. Nothing is missing: every partition has what the source has, every group its committed offsets, and no log is known
   to differ. Else it is refused, with what is missing, or differs.
2. All that was asked for is recorded at once, with the source's values of what is overridden here: the source may be
   gone before the end.
3. The source's ends of topic namespaces are detached. When nothing more is sent, it looks again, at topics and then at
   the committed offsets of groups: if the source has more by then, its ends are attached again, and all of it is
   abandoned.
4. It is decided, which is recorded: from here on it can only go on.
5. All that is attached still is detached, the source's ends first; topics that were about to be deleted, as the
   source's were, are gone before.
6. It is recorded where what was followed ends, and that this cluster writes from there on, in a term of its own.
   Transactions that are open in the follower's logs end (``in_doubt.resolution``): no coordinator of this cluster knows
   them.
7. Topics get the source's settings instead of the overrides; one that the brokers refuse keeps nothing from being
   promoted, and shows until somebody sets it (``kept_settings``).
8. The reservations are cleared, and the record with them.

A failover (``failover``) is recorded as decided, and goes on from step 5 without the source. So is what was handed over
(``taking_over``): the source's ends follow already, and in step 8 this cluster's ends lead.

Each step can be done again from its beginning. The proxy that was asked carries it out; when it dies, another proxy of
the cluster, or the next process of its name, goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

from isthmus_control import origins
from isthmus_control.commands import AbandonPromotion, BeginPromotion, Body, DecidePromotion, EndPromotion
from isthmus_control.model import (
    FollowerTopic,
    Link,
    NamespaceKey,
    NamespaceMapping,
    Promotion,
    ResourceType,
    Role,
    TopicState,
    contains,
)
from isthmus_control.states import ReasonCode
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    KafkaRefused,
    TopicInfo,
    TopicPartition,
    TransactionMarkers,
)
from isthmus_plugins.links import (
    Attach,
    GroupVerdict,
    NamespaceRef,
    OperationError,
    PromotedNamespace,
    PromoteReport,
)
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.in_doubt.pending_offsets import apply_committed, of_groups
from isthmus_plugins.replication.in_doubt.resolution import Ended, Resolution
from isthmus_plugins.replication.in_doubt.store import Stored
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.own_logs import begin_terms
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.replication.operations.commands import Call
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.tasks import Tasks, some_at_once

log = logging.getLogger("isthmus_plugins.replication")

RESUME_INTERVAL_S: Final = 2.0
"""How often a proxy looks for promotions that nobody carries out."""
LISTED: Final = 10
TOPICS_AT_ONCE: Final = 50
"""Topics that are looked at, or made this cluster's own, at the same time: each takes some requests, in turn."""
NAMESPACES_AT_ONCE: Final = 50
DETACHED_IN_ORDER: Final = (ResourceType.PRINCIPAL, ResourceType.CONSUMER_GROUP, ResourceType.TOPIC)
"""Groups before the topics that their committed offsets are in."""
ARRIVAL_S: Final = 10.0
"""How long what was sent before the leader's end was detached may take to be in the follower's logs."""
ARRIVAL_POLL_S: Final = 0.1
DELETIONS_S: Final = 10.0
"""How long topics that are about to be deleted are waited for, until it is tried again."""
NOT_DRAINED: Final = "NOT_DRAINED"
UNKNOWN_METHOD: Final = "UNKNOWN_METHOD"

Progress = Callable[[int, int], None]


class Promotions:
    """``call`` asks the other cluster, ``append`` records a command, the others are the service's.

    All of them raise OperationError.
    """

    def __init__(
        self,
        context: PluginContext,
        call: Call,
        append: Callable[[Body], Awaitable[None]],
        detach_here: Callable[[Link, NamespaceMapping, origins.Ended], Awaitable[None]],
        enforced: Callable[[], Awaitable[None]],
        compare_groups: Callable[[Link], Awaitable[Sequence[GroupVerdict]]],
        ends: Resolution,
        stopped: Callable[[Sequence[tuple[FollowerTopic, TopicInfo]], origins.Ended], Awaitable[None]],
        promoted: Callable[[], Awaitable[None]],
        left_out: LeftOutNames,
        replicas: FollowerReplicas,
        ask: Callable[[str, Attach], Awaitable[Sequence[str]]],
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._ends = ends
        self._stopped = stopped
        self._promoted = promoted
        self._left_out = left_out
        self._replicas = replicas
        self._ask = ask
        """For what the other cluster has not granted for an attach."""
        self._call = call
        self._append = append
        self._detach_here = detach_here
        self._enforced = enforced
        self._compare_groups = compare_groups
        self._tasks = Tasks("promotions", context.supervision)
        self._lock = asyncio.Lock()
        self._troubles: dict[NamespaceKey, str] = {}

    def start(self) -> None:
        self._tasks.keep("resume", self._resume_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    @property
    def trouble(self) -> str | None:
        """Why a promotion that was begun does not go on."""
        begun = self._context.control.state.promotions
        return next((why for key, why in self._troubles.items() if key in begun), None)

    # ---- the operator's request ----

    async def promote(
        self,
        link: Link,
        namespaces: Sequence[NamespaceRef],
        dry_run: bool,
        progress: Progress,
        move_clients_ms: int = 0,
    ) -> PromoteReport:
        """Promote these namespaces, or say what keeps them from it. Raises OperationError."""
        async with self._lock:
            reports = [await self._look(link, wanted) for wanted in namespaces]
            if dry_run:
                for wanted, report in zip(namespaces, reports, strict=True):
                    if not report.begun:
                        values = await self._source_settings(link, _key(wanted))
                        await self.try_settings(link.name, report, values)
            blocked = [reason for report in reports for reason in report.missing]
            result = PromoteReport(link_name=link.name, dry_run=dry_run, drained=not blocked, namespaces=reports)
            if dry_run:
                return result
            if blocked:
                raise _not_drained(blocked)
            if differ := [why for report in reports for why in report.logs_differ]:
                raise _differ(link.name, differ)
            if fresh := [_key(wanted) for wanted, report in zip(namespaces, reports, strict=True) if not report.begun]:
                await self._begin(link, fresh, move_clients_ms)
            asked = {_key(wanted): report for wanted, report in zip(namespaces, reports, strict=True)}
            for number, key in enumerate(asked):
                progress(number, len(asked))
                promotion = self._context.control.state.promotions.get(key)
                if promotion is not None:  # not together with one before
                    await self._take_over(promotion)
                    await self._carry_out(promotion, asked)
            progress(len(asked), len(asked))
            return result

    async def _look(self, link: Link, wanted: NamespaceRef) -> PromotedNamespace:
        """What a namespace lacks, and what promoting it will do."""
        kind = ResourceType(wanted.type)
        begun = self._context.control.state.promotions.get(_key(wanted))
        if begun is not None:
            return PromotedNamespace(type=wanted.type, local=wanted.local, remote=begun.remote_prefix, begun=True)
        mapping = link.mapping(kind, wanted.local)
        if mapping is None or mapping.role is not Role.FOLLOWER:
            raise OperationError(
                "NOT_FOUND", f"the {wanted.type} namespace {wanted.local!r} does not follow over {link.name!r}", 404
            )
        report = PromotedNamespace(type=wanted.type, local=wanted.local, remote=mapping.remote_prefix)
        report.left_out = self._left_out.of_follower(link.name, kind, mapping.remote_prefix)
        try:
            # First: a decision that is carried out by now has its markers in the logs that are looked at after.
            report.missing += await self._deciding(link.name)
            if kind is ResourceType.TOPIC:
                await self._look_at_topics(link.name, mapping, report)
            elif kind is ResourceType.CONSUMER_GROUP:
                report.missing += await self.behind(link, mapping)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        back = Attach(type=wanted.type, local=wanted.local, remote=mapping.remote_prefix, role="leader", dry_run=True)
        report.missing_grants = list(await self._ask(link.name, back))
        return report

    async def behind(self, link: Link, mapping: NamespaceMapping) -> list[str]:
        """What the groups of a namespace lack here."""
        kept = tuple(each for each in link.mappings if each.type is ResourceType.TOPIC or each is mapping)
        missing = []
        for verdict in await self._compare_groups(replace(link, mappings=kept)):
            if not verdict.equal:
                missing.append(f"group {verdict.group}: {verdict.difference}")
            elif verdict.waiting:
                missing.append(f"group {verdict.group}: {verdict.waiting} committed offsets wait for their records")
        return missing

    async def _look_at_topics(self, link_name: str, mapping: NamespaceMapping, report: PromotedNamespace) -> None:
        topics = await self._context.cluster.topics()
        led = await self._call(link_name, calls.LedTopics(mapping.remote_prefix))
        truncating = [name for name in led.truncating if mapping.local_name(name) is not None]
        report.missing += [f"{name} is being truncated at the source" for name in truncating]
        if not truncating:
            await self._source_ends(link_name, mapping)  # it will be asked once more when it is too late to refuse

        async def missing(source: calls.LedTopic) -> list[str]:
            name = mapping.local_name(source.topic)
            return [] if name is None else await self._missing_of(link_name, source, name, topics.get(name))

        report.missing += chain.from_iterable(await some_at_once(TOPICS_AT_ONCE, missing, led.topics))
        report.topics = sorted(name for name in topics if mapping.remote_name(name) is not None)
        report.logs_differ = self.logs_differ(report.topics)
        await self.look_at_replicas(report)
        await self.look_at_transactions(link_name, topics, report)

    async def _missing_of(self, link_name: str, source: calls.LedTopic, name: str, here: TopicInfo | None) -> list[str]:
        """What a topic lacks of its source's. Raises OperationError, BrokerUnavailable, KafkaRefused."""
        record = self._context.control.state.follower_topics.get(name)
        follows = record is not None and record.state is TopicState.FOLLOWING
        if here is None or record is None or not follows or record.source_topic_id != source.topic_id:
            return [f"{source.topic} is not followed"]
        if source.replication_factor is not None:
            self._replicas.said(name, source.replication_factor)
        there = (await self._call(link_name, calls.TopicLimits(source.topic))).partitions
        ends = await self._context.cluster.log_ends([(name, partition) for partition in range(len(here.partitions))])
        source_ends = {(name, partition): said.high_watermark for partition, said in enumerate(there)}
        return doubted(record) + other_ends(source_ends, ends)

    def logs_differ(self, topics: Sequence[str]) -> list[str]:
        """Of topics that follow, the partitions that are known to hold something else than their source's."""
        records = self._context.control.state.follower_topics
        follow = [records[name] for name in topics if name in records and records[name].state is TopicState.FOLLOWING]
        return [why for record in follow for why in differing(record)]

    async def look_at_replicas(self, report: PromotedNamespace) -> None:
        """Add which topics of a namespace, and of the proxies' own, have fewer replicas than they are to have.

        Raises BrokerUnavailable, KafkaRefused.
        """
        await self._replicas.look()
        found = (*map(self._replicas.reason, report.topics), self._replicas.of_own_topics())
        report.replicas_lacking = [reason.message for reason in found if reason is not None]

    async def look_at_transactions(
        self, link_name: str, topics: Mapping[str, TopicInfo], report: PromotedNamespace
    ) -> None:
        """Add what is open in the topics of a namespace, and what it was decided to come to. Raises OperationError."""
        stored = await self._ends.stored(link_name)
        found = (topics[name] for name in report.topics)
        for markers in await some_at_once(TOPICS_AT_ONCE, partial(self._markers, stored), found):
            report.transactions_open += len(markers)
            report.transactions_decided += sum(marker.committed for marker in markers)

    async def _begin(self, link: Link, keys: Sequence[NamespaceKey], move_clients_ms: int) -> None:
        """Record all at once, so that all of it ends promoted, or none, whoever dies from here on."""
        settings: dict[str, dict[str, str]] = {}
        for key in keys:
            settings |= await self._source_settings(link, key)
        ours = self._context.incarnation
        more = tuple(keys[1:])
        await self._append(BeginPromotion(link.name, *keys[0], settings, ours, more, move_clients_ms=move_clients_ms))
        log.info("promotion begun", extra={"link": link.name, "namespaces": [str(key) for key in keys]})

    async def _source_settings(self, link: Link, key: NamespaceKey) -> dict[str, dict[str, str]]:
        """By topic of a namespace: what its source has for what is overridden here. Raises OperationError."""
        mapping = link.mapping(*key)
        if mapping is None or mapping.type is not ResourceType.TOPIC:
            return {}
        said = await self._call(link.name, calls.TopicSettings(mapping.remote_prefix))
        names = {source: mapping.local_name(source) for source in said.topics}
        return {name: dict(said.topics[source]) for source, name in names.items() if name is not None}

    async def without_source(
        self,
        link_name: str,
        keys: Sequence[NamespaceKey],
        reports: Mapping[NamespaceKey, PromotedNamespace],
        move_clients_ms: int = 0,
    ) -> None:
        """Promote these, whatever they lack, and whatever the source would say. Raises OperationError."""
        async with self._lock:
            ours, more = self._context.incarnation, tuple(keys[1:])
            begin = BeginPromotion(link_name, *keys[0], {}, ours, more, True, move_clients_ms=move_clients_ms)
            await self._append(begin)
            log.warning("failover begun", extra={"link": link_name, "namespaces": [str(key) for key in keys]})
            for key in keys:
                promotion = self._context.control.state.promotions.get(key)
                if promotion is not None:  # not together with one before
                    await self._carry_out(promotion, reports)

    async def handed_over(self, link_name: str, reversal_id: str, keys: Sequence[NamespaceKey]) -> None:
        """Lead what the other cluster has handed over in a reversal that this one is drained for, or go on with that.

        Raises OperationError.
        """
        async with self._lock:
            link = self._context.control.state.links.get(link_name)
            attached = [None if link is None else link.mapping(*key) for key in keys]
            if all(each is not None and each.role is Role.LEADER for each in attached):
                return  # while it was waited for
            ours = self._context.incarnation
            await self._append(BeginPromotion(link_name, *keys[0], {}, ours, tuple(keys[1:]), reversal=reversal_id))
            log.warning("handed over to this cluster", extra={"link": link_name, "id": reversal_id})
            promotion = self._context.control.state.promotions.get(keys[0])
            if promotion is not None:
                await self._carry_out(promotion, {})

    async def settings_of(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """What this cluster's topics have for those settings that a follower overrides."""
        found: dict[str, dict[str, str]] = {}
        for start in range(0, len(topics), topic_settings.DESCRIBED_AT_ONCE):
            some = topics[start : start + topic_settings.DESCRIBED_AT_ONCE]
            _, described = await self._context.cluster.effective_configs(some)
            for name, effective in (described or {}).items():
                found[name] = topic_settings.overridden(topic_settings.copied(effective))
        return found

    # ---- carrying it out ----

    async def _resume_for_ever(self) -> None:
        """Go on with promotions whose proxy is gone."""
        while True:
            await asyncio.sleep(RESUME_INTERVAL_S)
            async with self._lock:
                if self._clock.monotonic() > self._context.lease_deadline:
                    continue
                for key in list(self._context.control.state.promotions):
                    promotion = self._context.control.state.promotions.get(key)
                    if promotion is not None and promotion.keys[0] == key:
                        await self._resume(promotion)

    async def _resume(self, promotion: Promotion) -> None:
        state, ours = self._context.control.state, self._context.incarnation
        if promotion.owner != ours and state.may_run(promotion.owner):
            return
        try:
            await self._take_over(promotion)
            await self._carry_out(promotion, {})
            self._troubles.pop(promotion.key, None)
        except OperationError as error:
            self._troubles[promotion.key] = f"the promotion of {promotion.prefix!r} does not go on: {error.message}"
            log.warning("promotion waits", extra={"namespace": promotion.prefix, "detail": error.message})

    async def _take_over(self, promotion: Promotion) -> None:
        """Be who carries it out. Raises OperationError: another proxy does, and its lease may still run."""
        ours = self._context.incarnation
        if promotion.owner != ours:
            await self._append(BeginPromotion(promotion.link, promotion.type, promotion.prefix, {}, ours))
            log.info("promotion taken over", extra={"link": promotion.link, "namespace": promotion.prefix})

    async def _carry_out(self, promotion: Promotion, reports: Mapping[NamespaceKey, PromotedNamespace]) -> None:
        """Everything after the beginning, for all that goes together. Raises OperationError; it can be done again."""
        link = self._context.control.state.links.get(promotion.link)
        pairs = [] if link is None else [link.mapping(*key) for key in promotion.keys]
        # What led over it again before its reservation was cleared goes on leading.
        attached = [each for each in pairs if each is not None and each.role is Role.FOLLOWER]
        ours = self._context.incarnation
        if link is not None and attached:
            refused: OperationError | None = None
            if promotion.decided is None:
                try:
                    missing = await self._look_again(link, attached)
                except OperationError as error:
                    if error.code != ReasonCode.PEER_VERSION_UNSUPPORTED:
                        raise
                    refused, missing = error, [error.message]  # it was another proxy before
                # By its owner alone, which the log knows: nobody takes back what another proxy goes on with.
                await self._append(DecidePromotion(promotion.type, promotion.prefix, ours, not missing))
            else:
                missing = [] if promotion.decided else ["as was seen by the proxy that began it"]
            if missing:
                await self._take_back(link, attached, promotion)
                raise refused or _not_drained(missing)
            await self._deletions_over(attached)
            for kind in DETACHED_IN_ORDER:
                some = [mapping for mapping in attached if mapping.type is kind]
                await some_at_once(NAMESPACES_AT_ONCE, partial(self._detach, link, promotion), some)
        if len(attached) < len(promotion.keys):  # all that is detached above is waited for there
            await self._enforced()  # whoever detached it may have been killed before it had waited for that
        made = {key: await self._make_own(self._context.control.state.promotions[key]) for key in promotion.keys}
        await self._append(EndPromotion(promotion.type, promotion.prefix, ours))
        await self._promoted()
        for key in promotion.keys:
            extra = {"link": promotion.link, "namespace": key.prefix, "failover": promotion.without_source}
            ended, settings_refused = made[key]
            log.info("namespace promoted", extra=extra | ended._asdict())
            if (report := reports.get(key)) is not None:
                report.promoted = True
                report.transactions_ended, report.transactions_committed = sum(ended), ended.committed
                report.settings_refused = settings_refused

    async def _detach(self, link: Link, promotion: Promotion, mapping: NamespaceMapping) -> None:
        """The source's end before this one. Raises OperationError."""
        if not (promotion.without_source or promotion.reversal):
            await self._call(promotion.link, _detached(mapping))
        await self._detach_here(link, mapping, _how(promotion))

    async def _deletions_over(self, attached: Sequence[NamespaceMapping]) -> None:
        """Wait a while until no topic is about to be deleted as the source's was; none begins to be any more."""
        deadline = self._clock.monotonic() + DELETIONS_S
        topics = [mapping for mapping in attached if mapping.type is ResourceType.TOPIC]
        while True:
            records = self._context.control.state.follower_topics.values()
            going = [record.topic for record in records if record.deleting]
            if not any(mapping.holds(name) for mapping in topics for name in going):
                return
            if self._clock.monotonic() > deadline:
                return  # detaching says which it waits for
            await asyncio.sleep(ARRIVAL_POLL_S)

    async def _make_own(self, promotion: Promotion) -> tuple[Ended, list[str]]:
        """End what is open in a namespace, and give its topics their settings.

        How many transactions that were, and which settings the brokers refuse. Groups come after topics: what decided
        transactions have committed in them has its records then.
        """
        ended, refused = Ended(), list[str]()
        try:
            stored = await self._ends.stored(promotion.link)
            if promotion.type is ResourceType.CONSUMER_GROUP:
                moved = await apply_committed(self._context, of_groups(stored, promotion.prefix))
                log.info("positions of transactions committed", extra={"groups": len(moved)})
            elif promotion.type is ResourceType.TOPIC:
                found = (await self._context.cluster.topics()).values()
                lookup = self._context.control.state.lookup
                # What follows in it belongs to a narrower namespace that was attached since this one was detached.
                topics = [
                    each
                    for each in found
                    if contains(*promotion.key, each.name) and lookup.following(ResourceType.TOPIC, each.name) is None
                ]
                records = self._context.control.state.follower_topics
                # What is the source's ends before the markers do, wherever it was killed before: they are this
                # cluster's, and its term begins with them.
                followed = [(records[each.name], each) for each in topics if each.name in records]
                await self._stopped(followed, _how(promotion))
                await begin_terms(self._context, topics, _how(promotion))
                lookup = self._context.control.state.lookup
                if any(lookup.leading(ResourceType.TOPIC, each.name) for each in topics):
                    # A proxy that has not read of the term would push the first of it on as the source's: markers, or
                    # what a client writes once the reservation is cleared.
                    await self._enforced()

                async def make_own(topic: TopicInfo) -> tuple[Ended, list[str]]:
                    made = await self._ends.end(await self._markers(stored, topic))
                    values = promotion.settings.get(topic.name)
                    values = self._after(topic.name, promotion.link, values, promotion.without_source)
                    return made, await self._restore(topic.name, values)

                for each, not_taken in await some_at_once(TOPICS_AT_ONCE, make_own, topics):
                    ended, refused = ended + each, refused + not_taken
                await self._prepare_transactions()
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"begun, and to be gone on with: {error}", 503) from error
        return ended, refused

    async def _prepare_transactions(self) -> None:
        """Have transactional producers that move here told by a coordinator that it does not know them."""
        try:
            await self._context.cluster.prepare_transactions()
        except (BrokerUnavailable, KafkaRefused) as error:  # a cluster that cannot have the topic has no transactions
            log.warning("no transaction coordinator", extra={"detail": str(error)})

    async def _markers(self, stored: Stored, topic: TopicInfo) -> list[TransactionMarkers]:
        record = self._context.control.state.follower_topics.get(topic.name)
        link = self._context.control.state.links.get(record.link) if record is not None else None
        return await self._ends.markers(topic, link.remote_cluster_id if link is not None else None, stored)

    async def _look_again(self, link: Link, attached: Sequence[NamespaceMapping]) -> list[str]:
        """What is missing when the source's topics have been detached. Raises OperationError.

        Groups come after topics: what they commit until then is theirs. Of what they commit later nothing is known.
        """
        topics = [mapping for mapping in attached if mapping.type is ResourceType.TOPIC]
        for mapping in topics:
            await self._call(link.name, _detached(mapping))
        missing = [each for mapping in topics for each in await self._missing_after(link, mapping)]
        groups = [mapping for mapping in attached if mapping.type is ResourceType.CONSUMER_GROUP and not missing]
        return missing + [each for mapping in groups for each in await self.behind(link, mapping)]

    async def _take_back(self, link: Link, attached: Sequence[NamespaceMapping], promotion: Promotion) -> None:
        """Attach the source's topics again, so that all follows on. Raises OperationError."""
        for mapping in attached:
            if mapping.type is ResourceType.TOPIC:
                await self._call(link.name, calls.Attach.other_end(mapping))
        await self._append(AbandonPromotion(promotion.type, promotion.prefix, self._context.incarnation))

    async def _missing_after(self, link: Link, mapping: NamespaceMapping) -> list[str]:
        """What the follower lacks although the leader end sends nothing more, once all that was sent is here."""
        try:
            missing = await self._deciding(link.name)
            there = await self._source_ends(link.name, mapping)
            deadline = self._clock.monotonic() + ARRIVAL_S
            while True:
                lacking = list(chain(*await self.lacking(mapping, there)))
                if not lacking or self._clock.monotonic() > deadline:
                    return missing + lacking
                await asyncio.sleep(ARRIVAL_POLL_S)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"begun, and to be gone on with: {error}", 503) from error

    async def _source_ends(self, link_name: str, mapping: NamespaceMapping) -> Mapping[str, calls.TopicEnds]:
        """Where the source's logs end. Raises OperationError."""
        try:
            return (await self._call(link_name, calls.LogEnds(mapping.remote_prefix))).topics
        except OperationError as error:
            if error.code != UNKNOWN_METHOD:
                raise
            raise OperationError(
                ReasonCode.PEER_VERSION_UNSUPPORTED,
                "the other cluster's proxies are of a version that does not say where detached logs end: upgrade them",
                409,
            ) from error

    async def _deciding(self, link_name: str) -> list[str]:
        deciding = await self._call(link_name, calls.CompletingTransactions())
        return [f"transaction {name!r} of the source is being completed" for name in deciding.transactional_ids]

    async def lacking(
        self, mapping: NamespaceMapping, there: Mapping[str, calls.TopicEnds]
    ) -> tuple[list[str], list[str]]:
        """What the follower lacks of the source's topics, whose logs end ``there``, or has otherwise, and which logs do
        not end there.

        Raises BrokerUnavailable.
        """
        lacking: list[str] = []
        ours: dict[TopicPartition, int] = {}
        for source, said in there.items():
            name = mapping.local_name(source)
            if name is None:
                continue
            record = self._context.control.state.follower_topics.get(name)
            follows = record is not None and record.state is TopicState.FOLLOWING
            if record is None or not follows or record.source_topic_id != said.topic_id:
                lacking.append(f"{source} is not followed")
            else:
                ours |= {(name, partition): end for partition, end in enumerate(said.ends)}
                differ = (f"{why} (isthmus link acknowledge there says that you know)" for why in differing(record))
                lacking += [*doubted(record), *differ]
        return lacking, other_ends(ours, await self._context.cluster.log_ends(list(ours)) if ours else {})

    async def ends_of(self, topics: Sequence[TopicInfo]) -> dict[str, calls.TopicEnds]:
        """Where this cluster's logs end, for the follower's end that is promoted. Raises BrokerUnavailable."""
        places = [(topic.name, partition) for topic in topics for partition in range(len(topic.partitions))]
        ends = await self._context.cluster.log_ends(places) if places else {}
        if lacking := [place for place in places if place not in ends]:
            raise BrokerUnavailable(f"the log end of {lacking[0][0]}-{lacking[0][1]} cannot be read")
        return {
            topic.name: calls.TopicEnds(
                topic.id_text,
                tuple(ends[topic.name, partition] for partition in range(len(topic.partitions))),
            )
            for topic in topics
        }

    async def try_settings(
        self,
        link_name: str,
        report: PromotedNamespace,
        settings: Mapping[str, Mapping[str, str]],
        without_source: bool = False,
    ) -> None:
        """Add what the brokers would refuse of what topics get. ``settings``: by topic, as the source said them.

        Raises OperationError.
        """

        async def refused(name: str) -> list[str]:
            values = self._after(name, link_name, settings.get(name), without_source)
            return await self._restore(name, values, validate_only=True)

        try:
            report.settings_refused += chain.from_iterable(await some_at_once(TOPICS_AT_ONCE, refused, report.topics))
        except BrokerUnavailable as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error

    def _after(
        self, topic: str, link_name: str, said: Mapping[str, str] | None, without_source: bool
    ) -> Mapping[str, str] | None:
        """What a topic gets for what was overridden in it, where that is not the default; None: all stays as it is.

        ``said``: what the source said, when it was asked last.
        """
        record = self._context.control.state.follower_topics.get(topic)
        followed = record is not None and record.link == link_name
        if said is not None:  # a source of before does not say all that is overridden here
            return {**record.settings, **said} if record is not None and followed else said
        if without_source and record is not None and followed:
            return record.settings or None  # what the source did not send stays: a default might delete what is here
        return {} if followed and not without_source else None  # None: it never followed

    async def _restore(self, topic: str, values: Mapping[str, str] | None, validate_only: bool = False) -> list[str]:
        """Give a topic that followed other values of what was overridden, or the defaults; what the brokers refuse.

        That is one line, or none. Raises BrokerUnavailable.
        """
        if values is None:
            return []
        try:
            own = await self._context.cluster.topic_configs(topic)
        except KafkaRefused as error:
            return [f"{topic}: {reasons.refused(error, 'DescribeConfigs', f'topic {topic}')}"]
        changes = topic_settings.given_back(values, own)
        refused = await setting_changes.change(self._context.cluster, topic, changes, validate_only)
        if not refused:
            return []
        settings = ", ".join(f"{name}={changes[name] or own[name][1]}" for name in sorted(refused))
        found = f"{topic}: {settings}: {reasons.why_refused(topic, refused)}"
        if not validate_only:
            log.warning("settings of a promoted topic refused", extra={"topic": topic, "detail": found})
        return [found]


def doubted(record: FollowerTopic) -> list[str]:
    """Why a topic may have keys that its source has deleted."""
    return [str(why.message) for partition in sorted(record.doubted) if (why := reasons.doubted(record, partition))]


def differing(record: FollowerTopic) -> list[str]:
    """Which partitions of a topic were found to hold something else than the source's, and where."""
    differences = ((partition, proof.difference) for partition, proof in sorted(record.proofs.items()))
    return [f"{record.topic}-{partition}: {found.message}" for partition, found in differences if found is not None]


def other_ends(source: Mapping[TopicPartition, int], here: Mapping[TopicPartition, int]) -> list[str]:
    """Which logs do not end where the source's do."""
    found = []
    for (topic, partition), source_end in source.items():
        end = here.get((topic, partition))
        if end is None:
            found.append(f"the log end of {topic}-{partition} cannot be read")
        elif end != source_end:
            found.append(f"{topic}-{partition} ends at {end}, the source's at {source_end}")
    return found


def _key(wanted: NamespaceRef) -> NamespaceKey:
    return NamespaceKey(ResourceType(wanted.type), wanted.local)


def _how(promotion: Promotion) -> origins.Ended:
    """How what was followed ends."""
    if promotion.released:
        return origins.Ended.DETACHED
    if promotion.reversal:
        return origins.Ended.REVERSED
    return origins.Ended.FAILED_OVER if promotion.without_source else origins.Ended.PROMOTED


def _detached(mapping: NamespaceMapping) -> calls.Detach:
    """Has a mapping detached at the source's end."""
    return calls.Detach(mapping.type, mapping.remote_prefix)


def _not_drained(missing: Sequence[str]) -> OperationError:
    return OperationError(
        NOT_DRAINED,
        f"the follower does not have all of the source yet: {listed(missing)}. Stop the "
        "writers, wait until the link is Following without lag, and try again",
        409,
    )


def _differ(link_name: str, partitions: Sequence[str]) -> OperationError:
    return OperationError(
        ReasonCode.LOGS_DIFFER,
        f"the follower does not hold what the source does: {listed(partitions)}. See which of them is right (isthmus "
        f"verify {link_name}). If it is this one, say that you know (isthmus link acknowledge {link_name}), and try "
        "again",
        409,
    )


def listed(what: Sequence[str], at_most: int = LISTED) -> str:
    """What something is refused or waits for, in a message."""
    more = f", and {len(what) - at_most} more" if len(what) > at_most else ""
    return "; ".join(what[:at_most]) + more
