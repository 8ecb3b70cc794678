"""What operators can do with links, and what they are told: :class:`~isthmus_plugins.links.LinkOperations`.

Both ends of a link have a control log of their own. An operation is decided first where it can be refused for reasons
that only that side knows (the follower's topics, the other cluster's names), then recorded here; if the second step
fails, the first is undone, and what cannot be undone is visible as a state with its reason.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any, Final, TypeVar

from isthmus_control.apply import apply
from isthmus_control.commands import (
    AttachNamespace,
    Body,
    Command,
    CreateLink,
    DeleteLink,
    DetachNamespace,
    RegisterProducerIds,
    SetOffsetsTopic,
)
from isthmus_control.control_state import ControlState
from isthmus_control.model import (
    TRANSACTION_VERIFICATION,
    FollowerTopic,
    Link,
    NamespaceKey,
    NamespaceMapping,
    OffsetsCopy,
    ResourceType,
    Role,
    TopicState,
)
from isthmus_control.outcome import Outcome, Rejected, Rejection
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins import links
from isthmus_plugins.api import BrokerUnavailable, KafkaRefused, PluginContext, TopicInfo
from isthmus_plugins.links import (
    AttachResult,
    GroupPlan,
    LinkStatus,
    MappingStatus,
    OperationError,
    PartitionStatus,
    TopicDecision,
    TopicPlan,
    TransactionVerificationPlan,
)
from isthmus_plugins.replication import reasons
from isthmus_plugins.replication.acls import AclEnds, check_access
from isthmus_plugins.replication.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.failover import Failovers
from isthmus_plugins.replication.follower import FollowerEnd
from isthmus_plugins.replication.follower_log import LogState, StopReason
from isthmus_plugins.replication.follower_stream import FollowerStream
from isthmus_plugins.replication.follower_topics import FollowerTopics, Refusal
from isthmus_plugins.replication.group_follower import GroupFollower
from isthmus_plugins.replication.group_status import GroupStatuses
from isthmus_plugins.replication.leader import LeaderEnd
from isthmus_plugins.replication.link_mirror import LinkMirror
from isthmus_plugins.replication.link_mode import LinkModes
from isthmus_plugins.replication.offsets_keyring import KeyringFile
from isthmus_plugins.replication.offsets_service import (
    OffsetsTopics,
    choice,
    chosen_copy,
    status_of,
    wanted_copy,
)
from isthmus_plugins.replication.peers import PURPOSE_CREATE, LinkPeers
from isthmus_plugins.replication.promotion import Promotions
from isthmus_plugins.replication.sync_leader import SyncLeader
from isthmus_plugins.replication.sync_lease import SyncLeases
from isthmus_plugins.replication.sync_status import link_state, note_followed, note_led
from isthmus_plugins.replication.topic_decisions import TopicDecisions
from isthmus_plugins.replication.transaction_ends import TransactionEnds
from isthmus_plugins.replication.transaction_store import TransactionStore
from isthmus_plugins.replication.transaction_verification import TransactionVerification
from isthmus_plugins.replication.truncation_status import note_truncations, truncation_statuses
from isthmus_plugins.replication.verify import Verification
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.producer_ids import CLUSTERS_MAX

T = TypeVar("T")

CREATE_TIMEOUT_S: Final = 75.0
"""Three commands of the other side's control log, which may be slow, and more than it takes to give up on them."""
_HTTP_STATUS: Final = {
    Rejection.NOT_FOUND: 404,
    Rejection.INVALID: 422,
    Rejection.NOT_SUPPORTED: 422,
    Rejection.LEASE_LOST: 503,
}


class LinkService:
    """Carries out operators' requests, and the other side's half of them."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        leader_end: LeaderEnd,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        verification: Verification,
        transaction_verification: TransactionVerification,
        group_follower: GroupFollower,
        group_statuses: GroupStatuses,
        acls: AclEnds,
        sync_leader: SyncLeader,
        sync_leases: SyncLeases,
        store: TransactionStore,
        mirror: LinkMirror,
    ) -> None:
        self._context = context
        self._peers = peers
        self._leader_end = leader_end
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._verification = verification
        self._transaction_verification = transaction_verification
        self._group_follower = group_follower
        self._group_statuses = group_statuses
        self._acls = acls
        self._sync_leader = sync_leader
        self._sync_leases = sync_leases
        self._mirror = mirror
        self._decisions = TopicDecisions(context, follower_topics, self._call, self._append)
        self._modes = LinkModes(
            self._status, leader_end.stream, peers.connections, self._append, self._would_append, mirror
        )
        self._promotions = Promotions(
            context,
            self._call,
            self._append,
            self._detach_here,
            self._enforced,
            self._compare_groups,
            TransactionEnds(context, store),
            self._stopped_to_follow,
            self._promoted,
        )
        self._failovers = Failovers(context, self._promotions, sync_leases, peers.state)
        self.offsets_topics = OffsetsTopics(
            context,
            follower_end,
            follower_topics,
            KeyringFile(context.offsets_keyring_file),
            self._call,
            self._append,
            self._would_append,
        )

    def start(self) -> None:
        self._promotions.start()

    async def stop(self) -> None:
        await self._promotions.stop()

    # ---- create and delete ----

    async def create(self, request: links.CreateLink) -> LinkStatus:
        """Set up both ends of a link."""
        name = request.link_name
        if name in self._context.control.state.links:
            raise OperationError("ALREADY_EXISTS", f"there is a link {name!r} already", 409)
        host, _, port = request.remote.rpartition(":")
        if not host or not port.isdigit():
            raise OperationError("INVALID_REQUEST", f"--remote takes host:port, not {request.remote!r}", 422)
        copy = wanted_copy(request.offsets_topic, request.offsets_groups)
        self.offsets_topics.check(copy)
        link_id = str(uuid.uuid4())
        try:
            connection = await LinkConnection.dial(
                host.strip("[]"),
                int(port),
                hello={"purpose": PURPOSE_CREATE, "link_id": link_id},
                secret=(request.token or "").encode(),
                identity={"cluster_id": self._context.cluster_id, "proxy": self._context.proxy_name},
                tls=self._context.link_client_tls,
            )
        except (OSError, TimeoutError, LinkLost) as error:
            raise OperationError(
                "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR",
                f"{request.remote} does not answer as a link listener ({error or type(error).__name__}): --remote is "
                "the [link_listener] address of a proxy of the other cluster",
                503,
            ) from error
        except LinkRejected as error:
            raise OperationError(error.code, f"{request.remote} refused: {error.message}", 409) from error
        try:
            return await self._create_over(connection, name, link_id, request.remote, copy)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error
        finally:
            await connection.stopped()

    async def alter(self, link_name: str, request: links.AlterLink) -> LinkStatus:
        """Change how this cluster's offsets topic is copied, at both ends."""
        self._link(link_name)
        await self.offsets_topics.choose(link_name, wanted_copy(request.offsets_topic, request.offsets_groups))
        return self.status(link_name)

    async def set_mode(self, link_name: str, request: links.SetMode) -> links.ModeResult:
        """Let acks of this cluster's clients wait for the other one, once the link follows; or not any more."""
        return await self._modes.set(self._link(link_name), request)

    async def offsets(self, link_name: str, group: str | None) -> links.OffsetsView:
        """What the copy of the other cluster's offsets topic says, as far as keys are here."""
        return await self.offsets_topics.view(self._link(link_name), group)

    async def _create_over(
        self, connection: LinkConnection, name: str, link_id: str, remote: str, copy: OffsetsCopy | None
    ) -> LinkStatus:
        context = self._context
        remote_cluster = str(connection.peer.get("cluster_id"))
        if remote_cluster == context.cluster_id:
            raise OperationError("INVALID_REQUEST", f"{remote} is this cluster itself ({remote_cluster})", 422)
        address = context.link_address
        answer = await connection.call(
            "create_link",
            {
                "link_name": name,
                "link_id": link_id,
                "addresses": [] if address is None else [address],
                "producer_id_ranges": dict(context.control.state.producer_id_ranges),
                "offsets_topic": choice(copy),
            },
            CREATE_TIMEOUT_S,
        )
        secret = context.seal(connection.agreed_secret(link_id), link_id)
        try:
            await self._register_ranges(answer["producer_id_ranges"])
            await self._append(
                CreateLink(
                    name,
                    link_id,
                    remote_cluster,
                    dials=True,
                    remote_addresses=tuple(dict.fromkeys([remote, *answer.get("addresses", [])])),
                    local_addresses=() if address is None else (address,),
                    secret=secret,
                )
            )
        except OperationError:
            try:
                await connection.call("undo_create_link", {"link_name": name, "link_id": link_id})
            except (LinkRejected, LinkLost, TimeoutError):
                pass  # the other half stays behind; the next attempt replaces it
            raise
        if copy is not None:
            await self._append(SetOffsetsTopic(name, Role.LEADER, copy))
        return self.status(name)

    async def on_create_link(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """The other side creates a link with this cluster."""
        context = self._context
        name, link_id = str(params["link_name"]), str(params["link_id"])
        remote_cluster = str(connection.peer.get("cluster_id"))
        known = context.control.state.links.get(name)
        if known is not None:
            # An earlier attempt whose other half was never recorded holds no namespace and never connected.
            if known.remote_cluster_id != remote_cluster or known.mappings or self._peers.connections(name):
                raise LinkRejected("ALREADY_EXISTS", f"it has a link {name!r} with cluster {known.remote_cluster_id}")
            await self._append_for_peer(DeleteLink(name))
        ranges = {str(cluster): int(index) for cluster, index in params["producer_id_ranges"].items()}
        await self._register_ranges_for_peer(ranges)
        for cluster in (remote_cluster, context.cluster_id):
            await self._register_ranges_for_peer({cluster: self._free_range(cluster)})
        address = context.link_address
        await self._append_for_peer(
            CreateLink(
                name,
                link_id,
                remote_cluster,
                dials=False,
                remote_addresses=tuple(str(each) for each in params.get("addresses", [])),
                local_addresses=() if address is None else (address,),
                secret=context.seal(connection.agreed_secret(link_id), link_id),
            )
        )
        copy = chosen_copy(params.get("offsets_topic"))
        if copy is not None:
            await self._append_for_peer(SetOffsetsTopic(name, Role.FOLLOWER, copy))
        return {
            "addresses": [] if address is None else [address],
            "producer_id_ranges": dict(context.control.state.producer_id_ranges),
        }

    async def on_undo_create_link(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """The other side could not record its half."""
        known = self._context.control.state.links.get(str(params["link_name"]))
        if known is not None and known.link_id == params["link_id"]:
            await self._append_for_peer(DeleteLink(known.name))
        return {}

    def _free_range(self, cluster_id: str) -> int:
        """The producer id range of a cluster, or a free one.

        The search begins at a place of the cluster's own, so that clusters which meet later seldom chose the same.
        """
        taken = self._context.control.state.producer_id_ranges
        if cluster_id in taken:
            return taken[cluster_id]
        index = zlib.crc32(cluster_id.encode()) % CLUSTERS_MAX
        while index in taken.values():
            index = (index + 1) % CLUSTERS_MAX
        return index

    async def _register_ranges(self, ranges: Mapping[str, int]) -> None:
        for cluster_id, index in ranges.items():
            await self._append(RegisterProducerIds(cluster_id, index))

    async def _register_ranges_for_peer(self, ranges: Mapping[str, int]) -> None:
        for cluster_id, index in ranges.items():
            await self._append_for_peer(RegisterProducerIds(cluster_id, index))

    async def delete(self, link_name: str, local_only: bool = False) -> None:
        """Delete both ends."""
        link = self._link(link_name)
        if not local_only:
            await self._call(link_name, "delete_link", {})
        await self._delete_here(link)

    async def _delete_here(self, link: Link) -> None:
        for mapping in link.mappings:
            await self._detach_here(link, mapping)
        await self.offsets_topics.end(link)
        await self._append(DeleteLink(link.name))

    async def on_delete_link(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        link = self._context.control.state.links.get(connection.link_name)
        if link is not None:
            await self._for_peer(self._delete_here(link))
        return {}

    # ---- attach and detach ----

    async def attach(self, link_name: str, request: links.Attach) -> AttachResult:
        """Attach a pair of namespaces at both ends; the follower decides first."""
        link = self._link(link_name)
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
            self._would_append(here)
            topics = await self._led_topics(request.local) if kind is ResourceType.TOPIC else []
            answer = await self._call(link_name, "plan_attach", {**there, "topics": topics})
            plans = [TopicPlan(**plan) for plan in answer["topics"]]
            groups = [GroupPlan(**plan) for plan in answer["groups"]]
            verification = TransactionVerificationPlan(**answer["transaction_verification"])
        else:
            here = replace(here, disable_transaction_verification=request.disable_transaction_verification)
            led = kind is ResourceType.TOPIC
            topics = (await self._call(link_name, "led_topics", {"prefix": request.remote}))["topics"] if led else []
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
        self._would_append(here)
        await check_access(self._context, role)
        await self._call(link.name, "check_acls", there)
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
        await self._for_peer(self._checked(_asked(connection, params)))
        return {}

    async def _checked(self, body: AttachNamespace) -> None:
        self._would_append(body)
        await check_access(self._context, body.role)

    async def _attach_both(self, link: Link, here: AttachNamespace, there: Mapping[str, Any]) -> None:
        """Attach at the follower's end, then at the leader's; if that fails, at neither."""
        if here.role is Role.LEADER:
            await self._call(link.name, "attach", there)
            try:
                await self._attach_here(here)
            except OperationError:
                await self._call(link.name, "detach", {"type": here.type.value, "local": here.remote_prefix})
                raise
            return
        await self._attach_here(here)
        try:
            await self._call(link.name, "attach", there)
        except OperationError:
            mapping = self._link(link.name).mapping(here.type, here.local_prefix)
            if mapping is not None:
                await self._detach_here(link, mapping)
            raise

    async def _attach_here(self, body: AttachNamespace) -> None:
        await self._append(body)
        if body.role is Role.FOLLOWER:  # no client writes it any more, on any proxy, before the first record comes
            await self._enforced()
            await self._verification_as_agreed("attached")
        self._leader_end.wake()

    async def _verification_as_agreed(self, done: str) -> None:
        """Switch the brokers' check of transactions off, or on again, as the mappings ask for now."""
        try:
            await self._transaction_verification.reconcile()
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError(
                "BROKER_UNAVAILABLE" if isinstance(error, BrokerUnavailable) else "BROKER_REFUSED",
                f"{done}, but {TRANSACTION_VERIFICATION} is not set as agreed: {error}. It is tried again by itself",
                503,
            ) from error

    async def _enforced(self) -> None:
        """Return when every proxy of this cluster does what the control log says now."""
        try:
            await self._context.control.enforced(self._context.control.state.applied_offset)
        except BrokerUnavailable as error:
            raise OperationError("CONTROL_LOG_UNAVAILABLE", str(error), 503) from error

    async def on_attach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        await self._for_peer(self._attach_here(_asked(connection, params)))
        return {}

    async def on_plan_attach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        truncate = bool(params.get("truncate_target"))
        asked = _asked(connection, params)
        plans, verification = await self._for_peer(self._plan(asked, params["topics"], truncate))
        groups = await self._for_peer(
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
        self._would_append(body)
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
            for name in await self._asked(self._context.cluster.groups())
            if (source := mapping.remote_name(name)) is not None
        }
        committed = await self._asked(self._context.cluster.committed_offsets(sorted(sources)))
        lookup = self._context.control.state.lookup
        plans = []
        for name, positions in sorted(committed.items()):
            followed = [lookup.following(ResourceType.TOPIC, topic) for topic, _ in positions]
            replaced = sum(each is not None and each.link.name == link_name for each in followed)
            plans.append(GroupPlan(group=name, source_group=sources[name], positions_replaced=replaced))
        return plans

    async def _asked(self, answer: Awaitable[T]) -> T:
        """What this cluster's brokers answer. Raises OperationError."""
        try:
            return await answer
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error

    async def _led_topics(self, prefix: str) -> list[dict[str, Any]]:
        mapping = NamespaceMapping(ResourceType.TOPIC, prefix, prefix, Role.LEADER, 0, 0)
        try:
            topics = await self._context.cluster.topics()
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        return [
            {
                "topic": topic.name,
                "topic_id": _text(topic),
                "partitions": len(topic.partitions),
                "predecessors": self._leader_end.predecessors(topic),
            }
            for topic in topics.values()
            if (not topic.internal and mapping.remote_name(topic.name) is not None)
            or topic.name == prefix == OFFSETS_TOPIC  # which no namespace holds
        ]

    async def on_choose_offsets_topic(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = await self._for_peer(self.offsets_topics.on_choose(connection, params))
        return chosen

    async def on_led_topics(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        topics = await self._for_peer(self._led_topics(str(params["prefix"])))
        return {"topics": topics, "truncating": sorted(self._context.control.state.truncations)}

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        """Detach the mapping at both ends: the leader first, so that the follower has all that was sent."""
        link = self._link(link_name)
        kind = ResourceType(type_)
        mapping = link.mapping(kind, local_prefix)
        if mapping is None:
            raise OperationError(
                "NOT_FOUND", f"{type_} namespace {local_prefix!r} is not attached to {link_name!r}", 404
            )
        there = {"type": kind.value, "local": mapping.remote_prefix}
        if mapping.role is Role.LEADER:
            await self._detach_here(link, mapping)
            if not local_only:
                await self._call(link_name, "detach", there)
        else:
            if not local_only:
                await self._call(link_name, "detach", there)
            await self._detach_here(link, mapping)

    async def _detach_here(self, link: Link, mapping: NamespaceMapping) -> None:
        topics_follow = mapping.role is Role.FOLLOWER and mapping.type is ResourceType.TOPIC
        if topics_follow:
            await self._follower_end.end_mapping(link.name, mapping)
        await self._append(DetachNamespace(link.name, mapping.type, mapping.local_prefix))
        if mapping.role is Role.FOLLOWER:
            await self._enforced()
            await self._group_follower.left()
        if topics_follow:
            await self._ends_recorded(self._follower_topics.detached(link.name, mapping))
        if mapping.role is Role.FOLLOWER:
            await self._verification_as_agreed("detached")
        self._leader_end.wake()

    async def _ends_recorded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (BrokerUnavailable, KafkaRefused, Refusal) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"detached, but log ends not recorded: {error}", 503) from error

    async def _stopped_to_follow(self, topics: Sequence[tuple[FollowerTopic, TopicInfo]]) -> None:
        """Record where topics stopped to follow, as far as that is not recorded."""
        await self._ends_recorded(self._follower_topics.close_provenance(topics))

    async def on_detach(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        link = self._context.control.state.links.get(connection.link_name)
        mapping = link.mapping(ResourceType(params["type"]), str(params["local"])) if link is not None else None
        if link is not None and mapping is not None:
            await self._for_peer(self._detach_here(link, mapping))
        return {}

    # ---- status ----

    def statuses(self) -> list[LinkStatus]:
        """Every link with its partitions."""
        return [self._status(link) for _, link in sorted(self._context.control.state.links.items())]

    def status(self, link_name: str) -> LinkStatus:
        """One link with its partitions."""
        return self._status(self._link(link_name))

    def truncations(self, link_name: str) -> list[links.TruncationStatus]:
        """The truncations of a link's topics."""
        self._link(link_name)
        return truncation_statuses(self._context.control.state, link_name)

    def _status(self, link: Link) -> LinkStatus:
        peer = self._peers.state(link.name)
        connected = bool(peer.connections)
        partitions = self._leader_partitions(link, connected) + self._follower_partitions(link, connected)
        note_truncations(self._context.control.state, link.name, partitions)
        note_led(link, self._sync_leader.sync_of, partitions)
        note_followed(self._context.control.state, link, self._sync_leases, partitions)
        return LinkStatus(
            link_name=link.name,
            link_id=link.link_id,
            local_cluster_id=link.local_cluster_id,
            remote_cluster_id=link.remote_cluster_id,
            remote=list(link.remote_addresses),
            dials=link.dials,
            mode=link.mode.value,
            sync_confirm_timeout_ms=link.sync_confirm_timeout_ms,
            state=link_state(link, connected, partitions),
            reason=peer.reason,
            message=peer.message or self._mirror.refused.get(link.name) or self._promotions.trouble,
            last_heard_seconds=None if peer.last_heard is None else round(monotonic() - peer.last_heard, 3),
            mappings=[
                MappingStatus(
                    type=mapping.type.value,
                    local=mapping.local_prefix,
                    remote=mapping.remote_prefix,
                    role=mapping.role.value,
                    disable_transaction_verification=mapping.disable_transaction_verification,
                )
                for mapping in link.mappings
            ],
            transaction_verification=self._transaction_verification.status()
            if any(mapping.role is Role.FOLLOWER for mapping in link.mappings)
            else None,
            promoting=sorted(
                promotion.prefix
                for promotion in self._context.control.state.promotions.values()
                if promotion.link == link.name
            ),
            acls=self._acls.statuses(link),
            offsets_topics=[status_of(mapping) for mapping in link.offsets_topics],
            partitions=partitions,
            groups=self._group_statuses.of(link, connected),
            group_warnings=self._group_statuses.warnings(link),
        )

    def _leader_partitions(self, link: Link, connected: bool) -> list[PartitionStatus]:
        found = []
        now = monotonic()
        for key, prepared in sorted(self._leader_end.led.items()):
            if key.link != link.name:
                continue
            stream = self._leader_end.stream(key)
            stopped = self._leader_end.stopped.get(key)
            waiting = reasons.waiting_state(stopped.code) if stopped is not None else None
            status = PartitionStatus(
                topic=key.topic,
                remote_topic=prepared.remote_topic if prepared is not None else "",
                partition=key.partition,
                role="leader",
                state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
            )
            if stopped is not None:
                status.reason, status.message, status.follower_end = stopped.code, stopped.message, stopped.end_offset
                status.source_end = stopped.source_end
                if stopped.source_end is not None and stopped.end_offset is not None:
                    status.partition_mirror_lag = max(0, stopped.source_end - stopped.end_offset)
            closed = stopped is None or stopped.code == reasons.CLOSED  # why, the other end says when it is asked again
            if closed and prepared is not None and (stopped is None or prepared.code is not None):
                status.reason, status.message = prepared.code, prepared.message
                waiting = reasons.waiting_state(prepared.code or "")
            if stream is not None:
                status.source_end, status.follower_end = stream.source_end, stream.acked
                status.partition_mirror_lag = stream.lag
                status.lag_seconds = stream.age_ms(now) / 1000
                if stream.lag == 0 and stream.at_end:
                    status.state = PartitionState.FOLLOWING
            if waiting is not None:
                status.state = waiting
            found.append(status)
        return found

    def _follower_partitions(self, link: Link, connected: bool) -> list[PartitionStatus]:
        streams = {stream.place: stream for stream in self._follower_end.streams() if stream.link_name == link.name}
        found = [self._follower_status(stream, connected) for _, stream in sorted(streams.items())]
        state = self._context.control.state
        for _, record in sorted(state.follower_topics.items()):
            if record.link != link.name:
                continue
            if record.state is TopicState.REFUSED and record.reason is not None:
                found.append(
                    PartitionStatus(
                        topic=record.topic,
                        remote_topic=record.source_topic,
                        partition=-1,
                        role="follower",
                        state=PartitionState.REFUSED,
                        reason=record.reason.code,
                        message=record.reason.message,
                    )
                )
            elif record.state is TopicState.FOLLOWING and self._context.fronted_brokers is None:
                # No stream of it was opened since this process started.
                history = state.histories.get(record.topic)
                for partition in sorted(history.partitions) if history is not None else ():
                    if (record.topic, partition) not in streams:
                        found.append(self._without_stream(record, partition, connected))
        return found

    def _without_stream(self, record: FollowerTopic, partition: int, connected: bool) -> PartitionStatus:
        status = PartitionStatus(
            topic=record.topic,
            remote_topic=record.source_topic,
            partition=partition,
            role="follower",
            state=PartitionState.CATCHING_UP if connected else PartitionState.DISCONNECTED,
        )
        refused = self._follower_topics.refused.get(record.topic)
        if self._follower_topics.source_is_gone(record):
            status.state, status.reason = PartitionState.STOPPED, ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED
            status.message = reasons.deleted(record.source_topic, record.topic)
        elif refused is not None:
            status.state = reasons.waiting_state(refused.code) or status.state
            status.reason, status.message = refused.code, refused.message
        elif not connected:
            status.reason = ReasonCode.NOT_CONNECTED_YET
        return status

    def _follower_status(self, stream: FollowerStream, connected: bool) -> PartitionStatus:
        follower_log, reason = stream.follower_log, stream.reason
        status = PartitionStatus(
            topic=stream.topic,
            remote_topic=stream.source_topic,
            partition=stream.partition,
            role="follower",
            state=PartitionState.CATCHING_UP,
            source_end=follower_log.source_end,
            follower_end=follower_log.end,
            partition_mirror_lag=stream.lag,
            lag_seconds=round(stream.lag_seconds, 3),
        )
        refused = self._follower_topics.refused.get(stream.topic)
        topics = self._follower_topics
        record = self._context.control.state.follower_topics.get(stream.topic)
        settings = topics.settings_refused.get(stream.topic) or topics.settings_waiting.get(stream.topic)
        settings = settings or reasons.doubted(record, stream.partition)
        if refused is not None:
            reason = StopReason(refused.code, refused.message)
        if reason is not None:
            status.reason, status.message = reason
        elif settings is not None:
            status.reason, status.message = settings.code, settings.message
        waiting = reasons.waiting_state(reason.code) if reason is not None else None
        if follower_log.state is LogState.DIVERGED:
            waiting = PartitionState.DIVERGED
        if waiting is not None:
            status.state = waiting
        elif not connected:
            status.state = PartitionState.DISCONNECTED
        elif not stream.closed and stream.told_end and not stream.lag and reason is None:
            status.state = PartitionState.FOLLOWING
        return status

    # ---- promotion ----

    async def _promoted(self) -> None:
        """A promotion has ended: positions could be committed until then."""
        await self._enforced()
        await self._verification_as_agreed("promoted")

    async def _compare_groups(self, link: Link) -> list[links.GroupVerdict]:
        try:
            return await self._verification.groups.verify(link, self._connection(link.name))
        except (LinkRejected, LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"groups not compared: {error}", 503) from error

    async def promote(
        self, link_name: str, request: links.Promote, progress: Callable[[int, int], None]
    ) -> links.PromoteReport:
        """Make drained follower namespaces writable."""
        return await self._promotions.promote(self._link(link_name), request.namespaces, request.dry_run, progress)

    async def fail_over(
        self, link_name: str, request: links.Failover, progress: Callable[[int, int], None]
    ) -> links.FailoverReport:
        """Make follower namespaces writable without their source."""
        return await self._failovers.fail_over(self._link(link_name), request, progress)

    async def release(self, kind: ResourceType, prefix: str) -> bool:
        """Clear the reservation of a namespace that follows no more, once what links left open in it has ended."""
        return await self._failovers.release(NamespaceKey(kind, prefix))

    async def on_topic_settings(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """What topics of a led namespace have for the settings that a follower overrides."""
        led = await self._for_peer(self._led_topics(str(params["prefix"])))
        try:
            return {"topics": await self._promotions.settings_of([str(each["topic"]) for each in led])}
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    async def on_completing_transactions(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Transactions of this cluster that were decided, and whose markers may still be missing."""
        try:
            return {"transactional_ids": list(await self._context.cluster.completing_transactions())}
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    async def on_log_ends(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Where the logs of a namespace end that was led and is detached, for the follower's end that is promoted.

        The high watermark may lag behind; what is beyond it may be shown later, so the log ends count.
        """
        prefix = str(params["prefix"])
        mapping = NamespaceMapping(ResourceType.TOPIC, prefix, prefix, Role.LEADER, 0, 0)
        for name, truncation in self._context.control.state.truncations.items():
            if mapping.remote_name(name) is not None:  # its log is not whole
                raise LinkRejected(ReasonCode.SOURCE_TRUNCATING, truncation.describe())
        try:
            topics = (await self._context.cluster.topics()).values()
            led = [topic for topic in topics if not topic.internal and mapping.remote_name(topic.name) is not None]
            return {"topics": await self._promotions.ends_of(led)}
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    # ---- topics ----

    async def forget_topic(self, topic: str, delete: bool = False, dry_run: bool = False) -> TopicDecision:
        """Stop following a topic whose source is gone; keep its records here, or ``delete`` them."""
        return await self._decisions.forget(topic, delete, dry_run)

    async def recreate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """Lose a topic that cannot go on as it is, and follow its source's present one from the start."""
        return await self._decisions.recreate(topic, dry_run)

    async def give_up_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """End the truncation of a topic that lost its local copy, and whose source does not refill it."""
        return await self._decisions.give_up(topic, dry_run)

    def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """The settings that a local topic has instead of its source's because it follows."""
        return self._follower_topics.overrides(topic)

    # ---- verify ----

    async def verify(self, link_name: str, progress: Callable[[int, int], None]) -> links.VerifyReport:
        """Compare both sides."""
        link = self._link(link_name)
        try:
            return await self._verification.verify(link, self._connection(link_name), progress)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("UNAVAILABLE", f"not verified: {error}", 503) from error

    # ---- helpers of all of them ----

    def _link(self, name: str) -> Link:
        link = self._context.control.state.links.get(name)
        if link is None:
            known = ", ".join(sorted(self._context.control.state.links)) or "none"
            raise OperationError("NOT_FOUND", f"there is no link {name!r} (links here: {known})", 404)
        return link

    def _connection(self, link_name: str) -> LinkConnection:
        connections = self._peers.connections(link_name)
        if not connections:
            peer = self._peers.state(link_name)
            raise OperationError(
                "UNAVAILABLE",
                f"link {link_name!r} is not connected ({peer.message or 'the peer was never heard'}); --local-only "
                "deletes or detaches this end alone",
                503,
            )
        return connections[0]

    async def _call(self, link_name: str, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._connection(link_name).call(method, params, timeout_s=60)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error

    async def _append(self, body: Body) -> None:
        try:
            outcome = await self._context.control.append(body)
        except BrokerUnavailable as error:
            raise OperationError("CONTROL_LOG_UNAVAILABLE", str(error), 503) from error
        self._check(outcome)

    def _would_append(self, body: Body) -> ControlState:
        """The state after a command, as things stand; raises what the control log would say. Changes nothing."""
        state = self._context.control.state
        command = Command(str(uuid.uuid4()), int(time() * 1000), self._context.proxy_name, state.applied_offset, body)
        after, outcome = apply(state, state.applied_offset + 1, command)
        self._check(outcome)
        return after

    def _check(self, outcome: Outcome) -> None:
        if isinstance(outcome, Rejected):
            raise OperationError(
                outcome.code.value.upper().replace("-", "_"), outcome.message, _HTTP_STATUS.get(outcome.code, 409)
            )

    async def _append_for_peer(self, body: Body) -> None:
        await self._for_peer(self._append(body))

    async def _for_peer(self, work: Any) -> Any:
        """Await ``work``; an operator's error becomes the answer of a call."""
        try:
            return await work
        except OperationError as error:
            raise LinkRejected(error.code, error.message) from error


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
