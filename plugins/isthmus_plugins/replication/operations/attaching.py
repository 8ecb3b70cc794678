"""Attaching and detaching pairs of namespaces, at both ends of a link: planned, refused, done, or done at neither."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus_control.commands import AttachNamespace, DetachNamespace
from isthmus_control.model import (
    TRANSACTION_VERIFICATION,
    FollowerTopic,
    Link,
    NamespaceMapping,
    ResourceType,
    Role,
)
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import (
    AttachResult,
    GroupPlan,
    OperationError,
    TopicPlan,
    TransactionVerificationPlan,
)
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import check_access
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.topics import FollowerTopics, Refusal
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.leader.target_topics import predecessors
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_protocol.offsets_log import OFFSETS_TOPIC


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
    ) -> None:
        self._context = context
        self._commands = commands
        self._leader_end = leader_end
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._transaction_verification = transaction_verification
        self._group_follower = group_follower

    async def attach(self, link_name: str, request: links.Attach) -> AttachResult:
        """Attach a pair of namespaces at both ends; the follower decides first."""
        link = self._commands.link(link_name)
        kind, role = ResourceType(request.type), Role(request.role)
        if kind is ResourceType.PRINCIPAL:
            return await self._attach_principals(link, request, role)
        there: dict[str, Any] = {
            "type": kind.value,
            "local": request.remote,
            "remote": request.local,
            "role": role.other.value,
            "truncate_target": request.truncate_target,
            "disable_transaction_verification": request.disable_transaction_verification,
        }
        here = AttachNamespace(link_name, kind, request.local, request.remote, role, create_missing=True)
        if role is Role.LEADER:
            self._commands.would_append(here)
            topics = await self.led_topics(request.local) if kind is ResourceType.TOPIC else []
            answer = await self._commands.call(link_name, "plan_attach", {**there, "topics": topics})
            plans = [TopicPlan(**plan) for plan in answer["topics"]]
            groups = [GroupPlan(**plan) for plan in answer["groups"]]
            verification = TransactionVerificationPlan(**answer["transaction_verification"])
        else:
            here = replace(here, disable_transaction_verification=request.disable_transaction_verification)
            led = kind is ResourceType.TOPIC
            topics = (
                (await self._commands.call(link_name, "led_topics", {"prefix": request.remote}))["topics"]
                if led
                else []
            )
            plans, verification = await self._plan(here, topics, request.truncate_target)
            groups = await self._plan_groups(link_name, kind, request.local, request.remote)
        result = AttachResult(
            link_name=link_name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
            topics=plans,
            transaction_verification=verification,
            groups=groups,
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
        truncate = [plan.topic_id for plan in plans if plan.action == "truncate" and plan.topic_id is not None]
        there["truncate_topic_ids"] = truncate
        if role is Role.FOLLOWER:
            here = replace(here, truncate_topic_ids=tuple(truncate))
        await self._attach_both(link, here, there)
        return result

    async def _attach_principals(self, link: Link, request: links.Attach, role: Role) -> AttachResult:
        """Attach principals, whose bindings both clusters must let their proxies see, and the follower's change."""
        here = AttachNamespace(
            link.name, ResourceType.PRINCIPAL, request.local, request.remote, role, create_missing=True
        )
        there = {
            "type": request.type,
            "local": request.remote,
            "remote": request.local,
            "role": role.other.value,
        }
        self._commands.would_append(here)
        await check_access(self._context, role)
        await self._commands.call(link.name, "check_acls", there)
        if not request.dry_run:
            await self._attach_both(link, here, there)
        return AttachResult(
            link_name=link.name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
        )

    async def on_check_acls(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """The other side is about to attach principals."""
        await self._commands.for_peer(self._checked(_asked(connection, params)))
        return {}

    async def _checked(self, body: AttachNamespace) -> None:
        self._commands.would_append(body)
        await check_access(self._context, body.role)

    async def _attach_both(self, link: Link, here: AttachNamespace, there: Mapping[str, Any]) -> None:
        """Attach at the follower's end, then at the leader's; if that fails, at neither."""
        if here.role is Role.LEADER:
            await self._commands.call(link.name, "attach", there)
            try:
                await self._attach_here(here)
            except OperationError:
                await self._commands.call(link.name, "detach", {"type": here.type.value, "local": here.remote_prefix})
                raise
            return
        await self._attach_here(here)
        try:
            await self._commands.call(link.name, "attach", there)
        except OperationError:
            mapping = self._commands.link(link.name).mapping(here.type, here.local_prefix)
            if mapping is not None:
                await self.detach_here(link, mapping)
            raise

    async def _attach_here(self, body: AttachNamespace) -> None:
        await self._commands.append(body)
        if body.role is Role.FOLLOWER:  # no client writes it any more, on any proxy, before the first record comes
            await self._commands.enforced()
            await self.verification_as_agreed("attached")
        self._leader_end.wake()

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

    async def on_attach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        await self._commands.for_peer(self._attach_here(_asked(connection, params)))
        return {}

    async def on_plan_attach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        truncate = bool(params.get("truncate_target"))
        asked = _asked(connection, params)
        plans, verification = await self._commands.for_peer(self._plan(asked, params["topics"], truncate))
        groups = await self._commands.for_peer(
            self._plan_groups(asked.link, asked.type, asked.local_prefix, asked.remote_prefix)
        )
        return {
            "topics": [plan.model_dump() for plan in plans],
            "groups": [plan.model_dump() for plan in groups],
            "transaction_verification": verification.model_dump(),
        }

    async def _plan(
        self, body: AttachNamespace, led: list[dict[str, Any]], truncate: bool
    ) -> tuple[list[TopicPlan], TransactionVerificationPlan]:
        """What following these topics of the source would do with this cluster's, and with its brokers' settings."""
        self._commands.would_append(body)
        mapping = NamespaceMapping(body.type, body.local_prefix, body.remote_prefix, body.role, 0, 0)
        try:
            verification = await self._transaction_verification.plan(body.type, body.disable_transaction_verification)
            topics = await self._context.cluster.topics()
            plans = []
            for wanted in led:
                name = mapping.local_name(str(wanted["topic"]))
                if name is not None:
                    plan, _ = await self._follower_topics.plan(mapping, wanted, name, topics.get(name), truncate)
                    plans.append(plan)
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
        for name, positions in sorted(committed.items()):
            followed = [lookup.following(ResourceType.TOPIC, topic) for topic, _ in positions]
            replaced = sum(each is not None and each.link.name == link_name for each in followed)
            plans.append(GroupPlan(group=name, source_group=sources[name], positions_replaced=replaced))
        return plans

    async def led_topics(self, prefix: str) -> list[dict[str, Any]]:
        """This cluster's topics of a namespace, as the follower's end plans with them."""
        mapping = NamespaceMapping(ResourceType.TOPIC, prefix, prefix, Role.LEADER, 0, 0)
        topics = await self._commands.asked(self._context.cluster.topics())
        return [
            {
                "topic": topic.name,
                "topic_id": _text(topic),
                "partitions": len(topic.partitions),
                "predecessors": predecessors(self._context, topic),
            }
            for topic in topics.values()
            if (not topic.internal and mapping.remote_name(topic.name) is not None)
            or topic.name == prefix == OFFSETS_TOPIC  # which no namespace holds
        ]

    async def on_led_topics(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        topics = await self._commands.for_peer(self.led_topics(str(params["prefix"])))
        return {"topics": topics, "truncating": sorted(self._context.control.state.truncations)}

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        """Detach the mapping at both ends: the leader first, so that the follower has all that was sent."""
        link = self._commands.link(link_name)
        kind = ResourceType(type_)
        mapping = link.mapping(kind, local_prefix)
        if mapping is None:
            raise OperationError(
                "NOT_FOUND", f"{type_} namespace {local_prefix!r} is not attached to {link_name!r}", 404
            )
        there = {"type": kind.value, "local": mapping.remote_prefix}
        if mapping.role is Role.LEADER:
            await self.detach_here(link, mapping)
            if not local_only:
                await self._commands.call(link_name, "detach", there)
        else:
            if not local_only:
                await self._commands.call(link_name, "detach", there)
            await self.detach_here(link, mapping)

    async def detach_here(self, link: Link, mapping: NamespaceMapping) -> None:
        """Detach a mapping at this end."""
        topics_follow = mapping.role is Role.FOLLOWER and mapping.type is ResourceType.TOPIC
        if topics_follow:
            await self._follower_end.end_mapping(link.name, mapping)
        await self._commands.append(DetachNamespace(link.name, mapping.type, mapping.local_prefix))
        if mapping.role is Role.FOLLOWER:
            await self._commands.enforced()
            await self._group_follower.left()
        if topics_follow:
            await self._ends_recorded(self._follower_topics.detached(link.name, mapping))
        if mapping.role is Role.FOLLOWER:
            await self.verification_as_agreed("detached")
        self._leader_end.wake()

    async def _ends_recorded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (BrokerUnavailable, KafkaRefused, Refusal) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"detached, but log ends not recorded: {error}", 503) from error

    async def stopped_to_follow(self, topics: Sequence[tuple[FollowerTopic, TopicInfo]]) -> None:
        """Record where topics stopped to follow, as far as that is not recorded."""
        await self._ends_recorded(self._follower_topics.close_provenance(topics))

    async def on_detach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        link = self._context.control.state.links.get(connection.link_name)
        mapping = link.mapping(ResourceType(params["type"]), str(params["local"])) if link is not None else None
        if link is not None and mapping is not None:
            await self._commands.for_peer(self.detach_here(link, mapping))
        return {}


def _asked(connection: LinkConnection, params: Mapping[str, Any]) -> AttachNamespace:
    """What a peer asks to attach at this end."""
    return AttachNamespace(
        connection.link_name,
        ResourceType(params["type"]),
        str(params["local"]),
        str(params["remote"]),
        Role(params["role"]),
        truncate_topic_ids=tuple(str(topic_id) for topic_id in params.get("truncate_topic_ids", ())),
        create_missing=True,
        disable_transaction_verification=bool(params.get("disable_transaction_verification")),
    )


def _text(topic: TopicInfo) -> str:
    return str(uuid.UUID(bytes=topic.topic_id))
