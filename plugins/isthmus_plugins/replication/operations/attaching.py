"""Attaching and detaching pairs of namespaces, at both ends of a link: planned, refused, done, or done at neither."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any, Final

from isthmus_control.commands import AlterMapping, AlterNamespace, AttachNamespace, DetachNamespace
from isthmus_control.grants import not_granted, parse_grant
from isthmus_control.levels import FROM_FIRST
from isthmus_control.model import (
    INTERNAL_TOPIC_PREFIXES,
    KAFKA_INTERNAL_TOPICS,
    TRANSACTION_VERIFICATION,
    AgreedCut,
    FollowerTopic,
    Link,
    LinkMode,
    NamespaceKey,
    NamespaceMapping,
    OnSourceDelete,
    OnSourceLoss,
    ResourceType,
    Role,
    contains,
)
from isthmus_control.origins import Ended
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import (
    AttachResult,
    GroupPlan,
    LeftOutName,
    OperationError,
    TopicPlan,
    TransactionVerificationPlan,
)
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import check_access
from isthmus_plugins.replication.comparison.digests import UNKNOWN_TOPIC
from isthmus_plugins.replication.comparison.shared_logs import SharedLogs
from isthmus_plugins.replication.follower import replica_plans
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions, Scope
from isthmus_plugins.replication.follower.setting_plans import note_refused
from isthmus_plugins.replication.follower.topic_plans import Refusal
from isthmus_plugins.replication.follower.topics import CommittedByAll, FollowerTopics
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.leader.target_topics import predecessors
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import COUNTERPARTS, SOURCE_DELETIONS, SOURCE_LOSSES
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.consents import Consents
from isthmus_plugins.replication.operations.rings import Rings
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.replication.sync.new_partitions import NewPartitions
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

TAKEN_UP_S: Final = 5.0
"""A second is usual; proxies that were killed, and whose leases are waited for, are not waited for longer."""
CUT_CHARS: Final = 12
"""Of what an operator types to have topics cut."""
OPEN_S: Final = 3.0
"""How long transactions whose clients are refused are waited for to end by themselves."""


class Attaching:
    """Carries out what operators ask for, and the other side's half of it."""

    def __init__(
        self,
        context: PluginContext,
        commands: LinkCommands,
        leader_end: LeaderEnd,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        transaction_verification: TransactionVerification,
        group_follower: GroupFollower,
        left_out: LeftOutNames,
        consents: Consents,
        own_transactions: OwnTransactions,
        rings: Rings,
        new_partitions: NewPartitions,
    ) -> None:
        self._context = context
        self._commands = commands
        self._leader_end = leader_end
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._transaction_verification = transaction_verification
        self._group_follower = group_follower
        self._left_out = left_out
        self._consents = consents
        self._own_transactions = own_transactions
        self._rings = rings
        self._new_partitions = new_partitions
        self._shared_logs = SharedLogs(context)
        self._offered = Counter[tuple[str, str]]()
        """Namespaces of topics that are being attached to be led here, with their links."""

    async def attach(
        self, link_name: str, request: links.Attach, *, recovers: bool = False, holds: bool = False
    ) -> AttachResult:
        """Attach a pair of namespaces at both ends; the follower decides first. What is not granted waits.

        ``recovers``: the follower's end led it until the other one was failed over. ``holds``: that end takes no more
        writes, before anything is looked at.
        """
        offered = link_name, request.local
        leads = ResourceType(request.type) is ResourceType.TOPIC and Role(request.role) is Role.LEADER
        self._offered[offered] += leads
        try:
            return await self._attach(link_name, request, recovers, holds)
        finally:
            self._offered[offered] -= leads
            self._offered = +self._offered

    async def _attach(self, link_name: str, request: links.Attach, recovers: bool, holds: bool) -> AttachResult:
        link = self._commands.link(link_name)
        kind, role = ResourceType(request.type), Role(request.role)
        lacking = await self._consents.ask(link_name, request.model_copy(update={"dry_run": True}))
        if lacking and recovers:
            raise OperationError(ReasonCode.NOT_GRANTED, not_granted(link_name, map(parse_grant, lacking)), 409)
        if lacking:
            self._commands.would_append(
                AttachNamespace(link_name, kind, request.local, request.remote, role, create_missing=True)
            )
            return await self._consents.wait(link, request, lacking)
        if kind is ResourceType.PRINCIPAL:
            return await self._attach_principals(link, request, role)
        if request.loss is not None and role is Role.LEADER:
            self._commands.knows(link_name, SOURCE_LOSSES)
        if request.deletion is not None:  # the source has to say what it deleted, the target to do it
            self._commands.knows(link_name, SOURCE_DELETIONS)
        said = [(each.topic, each.partition, each.offset) for each in request.shared_until]
        there = calls.Attach(
            kind,
            request.remote,
            request.local,
            role.other,
            truncate_target=request.truncate_target,
            # The follower's end is what consents are about, and the leader's takes none.
            disable_transaction_verification=role is Role.LEADER and request.disable_transaction_verification,
            on_source_loss=request.loss if role is Role.LEADER else None,
            on_source_delete=request.deletion if role is Role.LEADER else None,
            recovers=(role is Role.LEADER and recovers) or None,
        )
        here = replace(request.command(link_name), recovers=role is Role.FOLLOWER and recovers)
        if role is Role.LEADER:
            self._commands.would_append(here)
            led = kind is ResourceType.TOPIC
            topics = await self.led_topics(request.local, request.dry_run) if led else ()
            question = calls.PlanAttach(
                kind,
                request.remote,
                request.local,
                role.other,
                request.truncate_target,
                request.disable_transaction_verification,
                recovers or None,
                tuple(calls.SharedUntil(*each) for each in said) or None,
                holds or None,
                topics=topics,
            )
            answer = await self._commands.call(link_name, question)
            plans = [TopicPlan.model_validate(asdict(plan)) for plan in answer.topics]
            groups = [GroupPlan.model_validate(asdict(plan)) for plan in answer.groups]
            verification = TransactionVerificationPlan.model_validate(asdict(answer.transaction_verification))
        else:
            if holds:
                await self._hold(here)
            led = kind is ResourceType.TOPIC
            asked = calls.LedTopics(request.remote, request.dry_run or None)
            topics = (await self._commands.call(link_name, asked)).topics if led else ()
            peer = self._commands.connection(link_name)
            plans, verification = await self._plan(here, topics, request.truncate_target, peer, said)
            groups = await self._plan_groups(link_name, kind, request.local, request.remote)
        cut = cut_token(plans)
        cuts = _agreed(plans, cut, request.cut, said)
        result = AttachResult(
            link_name=link_name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
            topics=plans,
            transaction_verification=verification,
            groups=groups,
            left_out=await self._left_out_of(link, kind, request, role),
            cut=cut,
        )
        if request.dry_run:
            return result
        refused = [plan for plan in plans if plan.action == "refuse"]
        if refused:
            raise OperationError(
                ReasonCode.TARGET_TOPIC_NOT_EMPTY, "; ".join(plan.reason or plan.topic for plan in refused), 409
            )
        if verification.action == "refuse":
            raise OperationError(ReasonCode.TRANSACTION_VERIFICATION_ENABLED, verification.message or "", 409)
        # The consent is to lose the topics that were there when it was given, and no others that come by their names.
        ids = (plan.topic_id for plan in plans if plan.action == "truncate")
        truncate = tuple(topic_id for topic_id in ids if topic_id is not None)
        if role is Role.FOLLOWER:
            here = replace(here, truncate_topic_ids=truncate, cuts=cuts)
        else:
            there = replace(there, cuts=cuts or None)
        await self._attach_both(link, here, replace(there, truncate_topic_ids=truncate if role is Role.LEADER else ()))
        return result

    async def _left_out_of(
        self, link: Link, kind: ResourceType, request: links.Attach, role: Role
    ) -> list[LeftOutName]:
        """What would be left out. Raises OperationError."""
        try:
            return await self._left_out.attached(link, kind, request.local, request.remote, role)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("UNAVAILABLE", f"what would be left out is not known: {error}", 503) from error

    async def _attach_principals(self, link: Link, request: links.Attach, role: Role) -> AttachResult:
        """Attach principals, whose bindings both clusters must let their proxies see, and the follower's change."""
        if request.on_source_loss is not None or request.on_source_delete is not None:
            raise OperationError(
                "INVALID", "principals are no part of what a source may lose or delete: leave it out", 422
            )
        here = request.command(link.name)
        there = ResourceType.PRINCIPAL, request.remote, request.local, role.other
        await self._checked(here)
        await self._commands.call(link.name, calls.CheckAcls(*there))
        if not request.dry_run:
            await self._attach_both(link, here, calls.Attach(*there))
        return AttachResult(
            link_name=link.name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
        )

    async def on_check_acls(self, connection: LinkConnection, question: calls.CheckAcls) -> calls.Done:
        """The other side is about to attach principals."""
        self._consents.check(connection.link_name, question)
        await self._commands.for_peer(self._checked(_asked(connection, question)))
        return calls.Done()

    async def _checked(self, body: AttachNamespace) -> None:
        await self._check(body)
        await check_access(self._context, body.role)

    async def _check(self, body: AttachNamespace) -> None:
        """Raise OperationError for what this end cannot attach."""
        after = self._commands.would_append(body)
        await self._rings.check(after.links[body.link], body.mapping())

    async def _attach_both(self, link: Link, here: AttachNamespace, there: calls.Attach) -> None:
        """Attach at the follower's end, then at the leader's; if that fails, at neither.

        What is recovered stays at the follower's end: taken back it would not be known to be recovered any more.
        """
        if here.role is Role.LEADER:
            await self._commands.call(link.name, there)
            try:
                await self._attach_here(here)
            except OperationError:
                if not there.recovers:
                    await self._commands.call(link.name, calls.Detach(here.type, here.remote_prefix))
                raise
            return
        await self._attach_here(here)
        try:
            await self._commands.call(link.name, there)
        except OperationError:
            mapping = self._commands.link(link.name).mapping(here.type, here.local_prefix)
            if mapping is not None and not here.recovers:
                await self.detach_here(link, mapping)
            raise

    async def _attach_here(self, body: AttachNamespace) -> None:
        if body.role is Role.LEADER and body.type is ResourceType.TOPIC:
            with self._new_partitions.attaching(body.link, body.local_prefix):
                await self._commands.append(body)
                self._leader_end.wake()
                await self._taken_up(body.link, body.local_prefix)
            return
        await self._commands.append(body)
        if body.role is Role.FOLLOWER:  # no client writes it any more, on any proxy, before the first record comes
            await self._commands.enforced()
            await self.verification_as_agreed("attached")
        self._leader_end.wake()

    async def _taken_up(self, link_name: str, prefix: str) -> None:
        """Wait until this end knows what it leads now, as long as that takes when all is well.

        Else the link would look Following for a moment, or In-Sync although acks of topics that come wait for nobody.
        """
        state = self._context.control.state
        link = state.links.get(link_name)
        holds = link is not None and link.mode is LinkMode.SYNCHRONOUS and state.level >= FROM_FIRST
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_UP_S):
                await self._leader_end.discovery.look_again()
                while holds and not self._new_partitions.is_ready(link_name, prefix):
                    await self._leader_end.discovery.look_again()

    async def verification_as_agreed(self, done: str) -> None:
        """Switch the brokers' check of transactions off, or on again, as the mappings ask for now."""
        try:
            await self._transaction_verification.reconcile()
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError(
                "BROKER_UNAVAILABLE" if isinstance(error, BrokerUnavailable) else "BROKER_REFUSED",
                f"{done}, but {TRANSACTION_VERIFICATION} is not set as agreed: {error}. It is tried again by itself",
                503,
            ) from error

    async def on_attach(self, connection: LinkConnection, question: calls.Attach) -> calls.Done:
        asked = replace(_asked(connection, question), for_peer=self._consents.for_peer)
        await self._commands.for_peer(self._attach_here(asked))
        return calls.Done()

    async def on_plan_attach(self, connection: LinkConnection, question: calls.PlanAttach) -> calls.PlanAttachAnswer:
        self._consents.check(connection.link_name, question)
        asked = _asked(connection, question)
        if question.hold and asked.recovers:
            await self._commands.for_peer(self._hold(asked))
        plans, verification = await self._commands.for_peer(
            self._plan(asked, question.topics, question.truncate_target, connection, question.shared_until or ())
        )
        groups = await self._commands.for_peer(
            self._plan_groups(asked.link, asked.type, asked.local_prefix, asked.remote_prefix)
        )
        return calls.PlanAttachAnswer(
            tuple(_as_answered(plan) for plan in plans),
            tuple(calls.PlannedGroup(**plan.model_dump()) for plan in groups),
            calls.PlannedVerification(**verification.model_dump()),
        )

    async def _hold(self, body: AttachNamespace) -> None:
        """Reserve topics that were led here and are to follow: what clients write meanwhile would be cut unseen."""
        self._commands.would_append(body)
        state = self._context.control.state
        key = NamespaceKey(body.type, body.local_prefix)
        namespace, link = state.namespaces.get(key), state.links[body.link]
        mapping = link.mapping(*key)
        if key.type is not ResourceType.TOPIC or mapping is None or namespace is None or namespace.reserved:
            return
        reason = f"is being recovered over link {body.link!r}: cluster {link.remote_cluster_id} leads it"
        await self._commands.append(AlterNamespace(*key, reserved=True, reason=reason))
        await self._commands.enforced()
        scope = Scope.of(body.link, mapping)
        await self._commands.asked(self._own_transactions.end_by_themselves([scope], OPEN_S))

    async def _plan(
        self,
        body: AttachNamespace,
        led: Sequence[calls.LedTopic],
        truncate: bool,
        peer: LinkConnection,
        shared: Sequence[tuple[str, int, int]],
    ) -> tuple[list[TopicPlan], TransactionVerificationPlan]:
        """What following these topics of the source would do with this cluster's, and with its brokers' settings.

        ``peer``: a proxy of the source. ``shared``: what an operator says is, by topic and partition.
        """
        await self._check(body)
        return await self._planned(body.link, body.mapping(), led, truncate, peer, shared)

    async def plan_to_follow(
        self, link_name: str, mapping: NamespaceMapping, disable_transaction_verification: bool
    ) -> tuple[list[TopicPlan], TransactionVerificationPlan]:
        """What it would do with the topics of a pair that this cluster leads, were it to follow; nothing is done."""
        wanted = replace(mapping, role=Role.FOLLOWER, disable_transaction_verification=disable_transaction_verification)
        asked = calls.LedTopics(mapping.remote_prefix, True)
        topics = mapping.type is ResourceType.TOPIC
        led = (await self._commands.call(link_name, asked)).topics if topics else ()
        return await self._planned(link_name, wanted, led, False, self._commands.connection(link_name), ())

    async def _planned(
        self,
        link_name: str,
        mapping: NamespaceMapping,
        led: Sequence[calls.LedTopic],
        truncate: bool,
        peer: LinkConnection,
        shared: Sequence[tuple[str, int, int]],
    ) -> tuple[list[TopicPlan], TransactionVerificationPlan]:
        by_topic = {topic: {p: offset for name, p, offset in shared if name == topic} for topic, _, _ in shared}
        disable = mapping.disable_transaction_verification
        try:
            verification = await self._transaction_verification.plan(mapping.type, disable)
            topics = await self._context.cluster.topics()
            committed = CommittedByAll(self._context)
            # Who agrees to lose what topics hold agrees to lose these, too: they would be refused once it is there.
            open_topics = await self._own_transactions.open_topics() if truncate else ()
            planned = await asyncio.gather(
                *(
                    self._follower_topics.plan(
                        mapping,
                        wanted,
                        name,
                        topics.get(name),
                        truncate,
                        peer=peer,
                        said=by_topic.get(name, {}),
                        committed=committed,
                        awaits_markers=name in open_topics,
                    )
                    for wanted in led
                    if (name := mapping.local_name(wanted.topic)) is not None
                )
            )
            plans = [plan for plan, _ in planned]
            link = self._context.control.state.links.get(link_name)
            brokers = len(replica_plans.known_brokers(await self._context.cluster.broker_racks(), topics))
            said = {
                name: replica_plans.as_wished(link, each, brokers)
                for each in led
                if each.configs and (name := mapping.local_name(each.topic)) is not None
            }
            if said:
                await note_refused(self._context, plans, said, topics)
        except KafkaRefused as error:
            raise OperationError(
                "BROKER_REFUSED", f"the follower's brokers refuse what this proxy needs of them: {error}", 409
            ) from error
        except BrokerUnavailable as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        return plans, verification

    async def _plan_groups(self, link_name: str, kind: ResourceType, local: str, remote: str) -> list[GroupPlan]:
        """This cluster's groups that would follow, with what they have committed in the link's topics."""
        if kind is not ResourceType.CONSUMER_GROUP:
            return []
        mapping = NamespaceMapping(kind, local, remote, Role.FOLLOWER, 0, 0)
        sources = {
            name: source
            for name in await self._commands.asked(self._context.cluster.groups())
            if (source := mapping.remote_name(name)) is not None
        }
        committed = await self._commands.asked(self._context.cluster.committed_offsets(sorted(sources)))
        lookup = self._context.control.state.lookup
        plans = []
        for name, offsets in sorted(committed.items()):
            followed = [lookup.following(ResourceType.TOPIC, topic) for topic, _ in offsets]
            replaced = sum(each is not None and each.link.name == link_name for each in followed)
            plans.append(GroupPlan(group=name, source_group=sources[name], positions_replaced=replaced))
        return plans

    async def led_topics(self, prefix: str, settings: bool = False) -> tuple[calls.LedTopic, ...]:
        """This cluster's topics of a namespace, as the follower's end plans with them."""
        mapping = NamespaceMapping(ResourceType.TOPIC, prefix, prefix, Role.LEADER, 0, 0)
        topics = await self._commands.asked(self._context.cluster.topics())
        led = [
            topic
            for topic in topics.values()
            if (not topic.internal and mapping.remote_name(topic.name) is not None)
            or topic.name == prefix == OFFSETS_TOPIC  # which no namespace holds
        ]
        configs = await self._commands.asked(self._settings(led)) if settings else {}
        return tuple(
            calls.LedTopic(
                topic.name,
                topic.id_text,
                len(topic.partitions),
                predecessors(self._context, topic),
                topic.replication_factor,
                configs.get(topic.name),
            )
            for topic in led
        )

    async def _settings(self, topics: Sequence[TopicInfo]) -> dict[str, dict[str, str]]:
        """What topics have as their settings. Raises BrokerUnavailable, KafkaRefused."""
        found: dict[str, dict[str, str]] = {}
        for start in range(0, len(topics), topic_settings.DESCRIBED_AT_ONCE):
            some = [topic.name for topic in topics[start : start + topic_settings.DESCRIBED_AT_ONCE]]
            _, described = await self._context.cluster.effective_configs(some)
            found |= {name: topic_settings.copied(effective) for name, effective in (described or {}).items()}
        return found

    async def on_led_topics(self, connection: LinkConnection, question: calls.LedTopics) -> calls.LedTopicsAnswer:
        self._consents.check_led(connection.link_name, question.prefix)
        topics = await self._commands.for_peer(self.led_topics(question.prefix, bool(question.settings)))
        truncating = self._context.control.state.truncations
        of_these = [name for name in truncating if contains(ResourceType.TOPIC, question.prefix, name)]
        return calls.LedTopicsAnswer(topics, tuple(sorted(of_these)))

    async def on_log_origins(self, connection: LinkConnection, question: calls.LogOrigins) -> calls.LogOriginsAnswer:
        """Where a topic's records come from, for who may follow it."""
        self._check_followable(connection.link_name, question.topic)
        return await self._shared_logs.origins_of(question.topic)

    async def on_log_tails(self, connection: LinkConnection, question: calls.LogTails) -> calls.LogTailsAnswer:
        """What stands around some offsets of it."""
        self._check_followable(connection.link_name, question.topic)
        return await self._shared_logs.tails_of(question)

    def _check_followable(self, link_name: str, topic: str) -> None:
        """Raise LinkRejected where the other side asks for a topic that it may not follow.

        What is being attached here to be led is offered by that.
        """
        if topic in KAFKA_INTERNAL_TOPICS or topic.startswith(INTERNAL_TOPIC_PREFIXES):
            raise LinkRejected(UNKNOWN_TOPIC, f"{topic} is no topic of a namespace")
        offered = (prefix for link, prefix in self._offered if link == link_name)
        if not any(contains(ResourceType.TOPIC, prefix, topic) for prefix in offered):
            self._consents.check_led(link_name, topic)

    async def alter_mapping(self, link_name: str, request: links.AlterMapping) -> None:
        """Change what is set of a pair of namespaces: at the follower's end, wherever that is."""
        link, kind = self._commands.link(link_name), ResourceType(request.type)
        loss = None if request.on_source_loss is None else OnSourceLoss(request.on_source_loss)
        delete = None if request.on_source_delete is None else OnSourceDelete(request.on_source_delete)
        if delete is OnSourceDelete.DELETE:
            self._commands.knows(link_name, SOURCE_DELETIONS)
        mapping = link.mapping(kind, request.local)
        if mapping is None or mapping.role is Role.FOLLOWER:  # the control log says what is wrong, if anything is
            await self._commands.append(AlterMapping(link_name, kind, request.local, loss, delete))
            return
        self._commands.knows(link_name, SOURCE_LOSSES if delete is None else SOURCE_DELETIONS)
        await self._commands.call(link_name, calls.AlterMapping(kind, mapping.remote_prefix, loss, delete))

    async def on_alter_mapping(self, connection: LinkConnection, question: calls.AlterMapping) -> calls.Done:
        wanted = question.on_source_loss, question.on_source_delete
        body = AlterMapping(
            connection.link_name, question.type, question.local, *wanted, for_peer=self._consents.for_peer
        )
        await self._commands.append_for_peer(body)
        return calls.Done()

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        """Detach the mapping at both ends: the leader first, so that the follower has all that was sent."""
        link = self._commands.link(link_name)
        kind = ResourceType(type_)
        mapping = link.mapping(kind, local_prefix)
        waits = link.waits(kind, local_prefix)
        if mapping is None and waits is not None:
            await self._consents.withdraw(link, waits, local_only)
            return
        if mapping is None:
            if not local_only and await self._counterpart_detached(link_name, kind, local_prefix):
                return
            raise OperationError(
                "NOT_FOUND", f"{type_} namespace {local_prefix!r} is not attached to {link_name!r}", 404
            )
        there = calls.Detach(kind, mapping.remote_prefix)
        if mapping.role is Role.LEADER:
            await self.detach_here(link, mapping)
            if not local_only:
                await self._commands.call(link_name, there)
        else:
            if not local_only:
                await self._commands.call(link_name, there)
            await self.detach_here(link, mapping)

    async def _counterpart_detached(self, link_name: str, kind: ResourceType, local_prefix: str) -> bool:
        """Have the other end of a pair detached that this end has no more: whoever detached it here came no farther.
        Whether there was one."""
        if not self._commands.all_know(link_name, COUNTERPARTS):
            return False
        answer = await self._commands.call(link_name, calls.DetachCounterpart(kind, local_prefix))
        return answer.detached

    async def detach_here(
        self, link: Link, mapping: NamespaceMapping, for_peer: bool = False, ended: Ended = Ended.DETACHED
    ) -> None:
        """Detach a mapping at this end. ``for_peer``: the other side may attach it again. ``ended``: what it is for."""
        topics_follow = mapping.role is Role.FOLLOWER and mapping.type is ResourceType.TOPIC
        detached = DetachNamespace(link.name, mapping.type, mapping.local_prefix, for_peer)
        if topics_follow:
            async with self._follower_end.mapping_ended(link.name, mapping):
                await self._commands.append(detached)
        else:
            await self._commands.append(detached)
        if mapping.role is Role.FOLLOWER:
            await self._commands.enforced()
            await self._group_follower.left()
        if topics_follow:
            await self._ends_recorded(self._follower_topics.detached(link.name, mapping, ended))
        if mapping.role is Role.FOLLOWER:
            await self.verification_as_agreed("detached")
        self._leader_end.wake()

    async def _ends_recorded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (BrokerUnavailable, KafkaRefused, Refusal) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"detached, but log ends not recorded: {error}", 503) from error

    async def stopped_to_follow(self, topics: Sequence[tuple[FollowerTopic, TopicInfo]], ended: Ended) -> None:
        """Record where topics stopped to follow, and how that ended, as far as that is not recorded."""
        await self._ends_recorded(self._follower_topics.close_provenance(topics, ended))

    async def on_detach(self, connection: LinkConnection, question: calls.Detach) -> calls.Done:
        link = self._context.control.state.links.get(connection.link_name)
        mapping = link.mapping(question.type, question.local) if link is not None else None
        if link is not None and mapping is not None:
            await self._commands.for_peer(self.detach_here(link, mapping, self._consents.for_peer))
        elif link is not None:
            await self._consents.on_detach(link, question)
        return calls.Done()

    async def on_detach_counterpart(
        self, connection: LinkConnection, question: calls.DetachCounterpart
    ) -> calls.DetachCounterpartAnswer:
        link = self._context.control.state.links.get(connection.link_name)
        for mapping in () if link is None else link.mappings:
            if link is not None and (mapping.type, mapping.remote_prefix) == (question.type, question.remote):
                await self._commands.for_peer(self.detach_here(link, mapping, self._consents.for_peer))
                return calls.DetachCounterpartAnswer(True)
        return calls.DetachCounterpartAnswer(False)


def _asked(connection: LinkConnection, question: calls.Attach | calls.PlanAttach | calls.CheckAcls) -> AttachNamespace:
    """What a peer asks to attach at this end."""
    body = AttachNamespace(
        connection.link_name, question.type, question.local, question.remote, question.role, create_missing=True
    )
    if isinstance(question, calls.CheckAcls):
        return body
    return replace(
        body,
        truncate_topic_ids=(question.truncate_topic_ids or ()) if isinstance(question, calls.Attach) else (),
        disable_transaction_verification=bool(question.disable_transaction_verification),
        on_source_loss=question.on_source_loss if isinstance(question, calls.Attach) else None,
        on_source_delete=question.on_source_delete if isinstance(question, calls.Attach) else None,
        cuts=(question.cuts or ()) if isinstance(question, calls.Attach) else (),
        recovers=bool(question.recovers),
    )


def cut_token(plans: Sequence[TopicPlan]) -> str | None:
    """What an operator agrees to who has all topics cut that hold what their sources have not; None: none is."""
    tokens = sorted(plan.cut for plan in plans if plan.cut is not None and plan.action in ("cut", "refuse"))
    return sha256(",".join(tokens).encode()).hexdigest()[:CUT_CHARS] if tokens else None


def _agreed(
    plans: Sequence[TopicPlan], token: str | None, agreed: str | None, said: Sequence[tuple[str, int, int]]
) -> tuple[AgreedCut, ...]:
    """The topics that are cut as the operator agreed; their plans say so then. Raises OperationError.

    ``said``: what the operator says is shared, also of topics of which nothing is cut.
    """
    shared = {plan.topic: tuple((p, offset) for name, p, offset in said if name == plan.topic) for plan in plans}
    followed = [plan for plan in plans if plan.action == "follow" and plan.topic_id is not None and shared[plan.topic]]
    by_word = tuple(AgreedCut(plan.topic_id or "", "", shared[plan.topic]) for plan in followed)
    if agreed is None:
        return by_word
    if token is None and all(plan.action != "refuse" for plan in plans):
        return by_word  # nothing is to be cut: it was, and the command is given again
    if agreed != token:
        raise OperationError(
            ReasonCode.ENDS_CHANGED,
            "the logs are not as they were when that was printed"
            if token is not None
            else "none of the topics that hold what their sources have not can be cut",
            409,
        )
    cuts = []
    for plan in plans:
        if plan.cut is not None and plan.topic_id is not None and plan.action in ("cut", "refuse"):
            plan.action, plan.reason = "cut", None
            cuts.append(AgreedCut(plan.topic_id, plan.cut, shared[plan.topic]))
    return (*by_word, *cuts)


def _as_answered(plan: TopicPlan) -> calls.PlannedTopic:
    more: dict[str, Any] = plan.model_dump()
    partitions, moved = more.pop("partitions"), more.pop("groups_moved")
    return calls.PlannedTopic(
        **more,
        partitions=None if partitions is None else tuple(calls.PlannedPartition(**each) for each in partitions),
        groups_moved=None if moved is None else tuple(moved),
    )
