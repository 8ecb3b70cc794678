"""An admin listener over services in memory: the control state is real, the log is a list, links are a small double."""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from isthmus import metrics
from isthmus.admin import AdminServer, AdminServices, BrokerAddress, ProcessDescription
from isthmus.admin.access import Access
from isthmus.admin.models import LeaseStatus
from isthmus.admin.unix_socket import UnixSocket
from isthmus.audit_topic import AuditTopic
from isthmus.config import AdminListenerSection
from isthmus.session.dispatch import compile_routes
from isthmus.session.listener import Gateway, Limits
from isthmus_control.apply import apply
from isthmus_control.commands import AlterNamespace, Body, ClaimBrokers, Command, DeleteNamespace, RenewLease
from isthmus_control.control_state import ControlState
from isthmus_control.leases import LeaseView
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim, Reason
from isthmus_control.outcome import Outcome
from isthmus_control.replica import Unsigned
from isthmus_control.rules.proxies import LEASE_MS_MAX
from isthmus_plugins.cluster import ClusterApi
from isthmus_plugins.drill_report import (
    CopySize,
    DrillFailover,
    DrillReport,
    GroupLoss,
    LostByFailover,
    MeasuredFailover,
    PartitionLoss,
)
from isthmus_plugins.failover_report import FailedOverNamespace, Failover, FailoverReport, GroupClaim, PartitionClaim
from isthmus_plugins.links import (
    AbandonReversal,
    Acknowledged,
    AclNotMapped,
    AclStatus,
    AlterLink,
    AlterMapping,
    Attach,
    AttachResult,
    BothOffsets,
    ChangeGrants,
    CommittedOffsets,
    CreateLink,
    CreateToken,
    GrantsStatus,
    GroupOffset,
    GroupOffsets,
    GroupOnBothSides,
    GroupStatus,
    GroupVerdict,
    LinkStatus,
    MappingStatus,
    ModeResult,
    NamespaceRef,
    NewToken,
    OffsetsTopicStatus,
    OffsetsView,
    OperationError,
    PartitionPlan,
    PartitionStatus,
    PartitionVerdict,
    Promote,
    PromotedNamespace,
    PromoteReport,
    Recover,
    RecoverReport,
    Reverse,
    ReverseReport,
    SecretRotated,
    SetMode,
    TokenStatus,
    TopicDecision,
    TopicPlan,
    TransactionVerificationPlan,
    VerifyReport,
    WaitingMapping,
)
from isthmus_plugins.tasks import Supervision
from support.fake_cluster import FakeCluster, FakeControl

T = TypeVar("T")

LEASE_MS: Final = LEASE_MS_MAX
"""None runs out while a test goes on, on a machine that is busy."""
PATIENCE_S: Final = 60.0
"""How long such a machine may take to start a listener, or to answer."""


class MemoryLog:
    """A control log that every proxy reads at once; what they enforce is said by :meth:`enforce`."""

    def __init__(self) -> None:
        self.state = ControlState("cluster-a")
        self.leases = LeaseView(incarnation="of no proxy")
        self.leases.applied(self.state, time.monotonic())
        self._incarnations: dict[str, str] = {}
        self.key_id = ""
        self.unsigned = Unsigned()
        self._moved = asyncio.Condition()
        self.fault: Exception | None = None
        """Raised by the next appends."""

    def apply(self, body: Body) -> Outcome:
        command = Command(str(uuid.uuid4()), 1_760_000_000_000, "test", self.state.applied_offset, body)
        state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        self.set_state(state)
        return outcome

    def set_state(self, state: ControlState) -> None:
        self.state = state
        self.leases.applied(state, time.monotonic())

    async def append(self, body: Body, /) -> Outcome:
        if self.fault is not None:
            raise self.fault
        return self.apply(body)

    def claim(self, name: str, broker_id: int, version: str = with_known_level("1.2.3")) -> None:
        """A proxy takes a lease."""
        incarnation = self._incarnations[name] = str(uuid.uuid4())
        brokers = (BrokerClaim(broker_id, "127.0.0.1", 19092 + broker_id),)
        offset = self.state.applied_offset
        self.apply(ClaimBrokers(name, incarnation, brokers, False, "127.0.0.1:19192", LEASE_MS, version, offset))

    async def enforce(self, *names: str) -> None:
        """These proxies enforce all that is in the log."""
        offset = self.state.applied_offset
        for name in names:
            self.apply(RenewLease(name, self._incarnations[name], offset))
        async with self._moved:
            self._moved.notify_all()

    async def enforced(self, offset: int, /) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.leases.enforced_by_all(offset, time.monotonic()))


class ModelLog:
    """A control log of the model clusters, as the listener wants it."""

    def __init__(self, control: FakeControl) -> None:
        self.leases = LeaseView("of no proxy")
        self.key_id = ""
        self.unsigned = Unsigned()
        self._control = control
        self._applied(control.state)
        control.subscribe(self._applied)

    def _applied(self, state: ControlState) -> None:
        self.leases.applied(state, time.monotonic())

    @property
    def state(self) -> ControlState:
        return self._control.state

    async def append(self, body: Body, /) -> Outcome:
        return await self._control.append(body)

    async def enforced(self, offset: int, /) -> None:
        await self._control.enforced(offset)


class MemoryLinks:
    """Links without a peer. ``a-to-b`` is there; verification compares 10 offsets when it is let go."""

    def __init__(self) -> None:
        self.links = {"a-to-b": _status("a-to-b")}
        self.created: list[CreateLink] = []
        self.altered: list[AlterLink] = []
        self.attached: list[Attach] = []
        self.granted: list[str] = []
        self.missing: list[str] = []
        """What the other cluster has not granted."""
        self.calls: list[tuple[Any, ...]] = []
        self.settings_reasons: dict[str, Reason] = {}
        self.equal = True
        self.verify_error: Exception | None = None
        self.release_error: Exception | None = None
        self.verification: TransactionVerificationPlan | None = None
        """What attaching says of the brokers' check of transactions."""
        self.proceed = asyncio.Event()
        self.proceed.set()

    async def create(self, request: CreateLink) -> LinkStatus:
        if request.link_name in self.links:
            raise OperationError("ALREADY_EXISTS", f"there is a link {request.link_name!r} already", 409)
        self.created.append(request)
        self.links[request.link_name] = _status(request.link_name, request.remote)
        return self.links[request.link_name]

    async def create_token(self, request: CreateToken) -> NewToken:
        self.granted += request.may
        return NewToken(
            token_id="ab" * 8, may=request.may, created_ms=0, expires_ms=request.expires_seconds * 1000, token="isthmus"
        )

    def tokens(self) -> list[TokenStatus]:
        return [TokenStatus(token_id="ab" * 8, may=self.granted, created_ms=0, expires_ms=60_000)]

    async def delete_token(self, token_id: str) -> None:
        if token_id != "ab" * 8:
            raise OperationError("NOT_FOUND", f"there is no token {token_id}", 404)
        self.calls.append(("delete token", token_id))

    def grants(self, link_name: str) -> GrantsStatus:
        self.status(link_name)
        waiting = WaitingMapping(
            type="topic",
            local="prod-",
            remote="prod-",
            role="follower",
            asked_by="the other cluster",
            asked_ms=1_760_000_000_000,
            missing=["lead:prod-"],
            message="it was not granted",
        )
        return GrantsStatus(
            link_name=link_name, enforced=True, may=self.granted, attached=["follow:out-"], waiting=[waiting]
        )

    async def grant(self, link_name: str, request: ChangeGrants) -> GrantsStatus:
        self.granted += request.may
        return self.grants(link_name)

    async def revoke(self, link_name: str, request: ChangeGrants) -> GrantsStatus:
        self.granted = [each for each in self.granted if each not in request.may]
        return self.grants(link_name)

    async def alter(self, link_name: str, request: AlterLink) -> LinkStatus:
        status = self.status(link_name).model_copy()
        self.altered.append(request)
        self.calls.append(("alter", link_name, request.offsets_topic, request.offsets_groups))
        if request.offsets_topic not in (None, "off"):
            status.offsets_topics = [
                OffsetsTopicStatus(
                    role="leader",
                    form=request.offsets_topic,
                    groups=request.offsets_groups,
                    topic="__consumer_offsets",
                    remote_topic="__consumer_offsets_A",
                )
            ]
        return status

    async def set_mode(self, link_name: str, request: SetMode) -> ModeResult:
        status = self.status(link_name)
        self.calls.append(("mode", link_name, request.mode, request.dry_run))
        former = "synchronous" if status.mode == "synchronous" else "asynchronous"
        waits_ms = request.confirm_timeout_ms or status.sync_confirm_timeout_ms
        if not request.dry_run:
            self.links[link_name] = status.model_copy(
                update={"mode": request.mode, "sync_confirm_timeout_ms": waits_ms}
            )
        return ModeResult(
            link_name=link_name,
            former_mode=former,
            mode=request.mode,
            sync_confirm_timeout_ms=waits_ms,
            dry_run=request.dry_run,
        )

    async def offsets(self, link_name: str, group: str | None) -> OffsetsView:
        self.status(link_name)
        position = GroupOffset(topic="orders-eu", partition=0, offset=7, metadata="", committed_ms=1)
        found = GroupOffsets(group=group or "app-1", kind="classic", offsets=[position])
        return OffsetsView(
            link_name=link_name,
            topic="__consumer_offsets_B",
            source_cluster_id="B",
            form="encrypted",
            groups=[found],
            unreadable_records=3,
            unreadable_key_ids=["1f0c"],
            damaged_records=0,
            unknown_records=0,
        )

    async def committed_offsets(self, link_name: str, group: str | None) -> CommittedOffsets:
        self.status(link_name)
        offsets = [
            BothOffsets(topic="orders-eu", partition=0, source_offset=7, follower_offset=7),
            BothOffsets(topic="orders-eu", partition=1, source_offset=4, follower_offset=None),
        ]
        lost = GroupOnBothSides(group="app-2", remote_group="app-2", message="the source's coordinator is not there")
        found = GroupOnBothSides(group=group or "app-1", remote_group="app-1", offsets=offsets)
        return CommittedOffsets(link_name=link_name, groups=[found, lost], groups_left_off=3)

    async def delete(self, link_name: str, local_only: bool = False) -> None:
        self.status(link_name)
        self.calls.append(("delete", link_name, local_only))
        del self.links[link_name]

    async def attach(self, link_name: str, request: Attach) -> AttachResult:
        self.status(link_name)
        self.attached.append(request)
        plan = TopicPlan(
            topic="orders-eu",
            source_topic="orders-eu",
            action="truncate",
            records_lost=7,
            settings_refused="the target refuses settings of orders-eu (segment.bytes)",
        )
        parted = TopicPlan(
            topic="orders-us",
            source_topic="orders-us",
            action="refuse",
            records_lost=3,
            partitions=[PartitionPlan(partition=0, shared=20, end=23, source_end=25, first_ms=0, last_ms=1000)],
            groups_moved=["app-1"],
            cut="2a32",
        )
        return AttachResult(
            link_name=link_name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
            topics=[plan, parted] if request.dry_run else [plan],
            cut="2a32" if request.dry_run else None,
            transaction_verification=self.verification,
            missing_grants=self.missing,
        )

    async def recover(self, link_name: str, request: Recover) -> RecoverReport:
        self.calls.append(("recover", link_name, [(each.type, each.local) for each in request.namespaces]))
        asked = Attach(local="orders-", remote="orders-", role="follower", dry_run=request.dry_run)
        report = [await self.attach(link_name, asked)]
        return RecoverReport(link_name=link_name, dry_run=request.dry_run, namespaces=report)

    async def reverse(self, link_name: str, request: Reverse) -> ReverseReport:
        self.status(link_name)
        named = [(each.type, each.local) for each in request.namespaces]
        times = request.transactions_wait_seconds, request.hold_seconds, request.move_clients_seconds
        self.calls.append(("reverse", link_name, named, *times))
        return ReverseReport(
            link_name=link_name,
            dry_run=request.dry_run,
            namespaces=request.namespaces,
            missing=["orders-eu-0 ends at 7, the source's at 9"],
            transactions_open=["the transaction of 'app'"],
            reversed=not request.dry_run,
            led_here=request.here,
        )

    async def abandon_reversal(self, link_name: str, request: AbandonReversal) -> LinkStatus:
        self.calls.append(("abandon reversal", link_name, request.although_unreachable))
        return self.status(link_name)

    async def alter_mapping(self, link_name: str, request: AlterMapping) -> LinkStatus:
        wanted = request.on_source_loss, request.on_source_delete
        self.calls.append(("alter mapping", link_name, request.type, request.local, *wanted))
        return self.status(link_name)

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        self.status(link_name)
        self.calls.append(("detach", link_name, local_prefix, type_, local_only))

    def statuses(self) -> list[LinkStatus]:
        return list(self.links.values())

    def status(self, link_name: str) -> LinkStatus:
        if link_name not in self.links:
            raise OperationError("NOT_FOUND", f"there is no link {link_name!r}", 404)
        return self.links[link_name]

    async def release(self, clearing: AlterNamespace | DeleteNamespace) -> None:
        if self.release_error is not None:
            raise self.release_error

    async def fail_over(
        self, link_name: str, request: Failover, progress: Callable[[int, int], None]
    ) -> FailoverReport:
        self.status(link_name)
        if not request.dry_run and not request.although_reachable:
            raise OperationError("SOURCE_REACHABLE", "the other cluster is connected: say --yes", 409)
        self.calls.append(("failover", link_name, request.move_clients_seconds))
        claim = PartitionClaim(
            topic="orders-eu",
            partition=0,
            end=7,
            in_sync_until_ms=1_760_000_000_123,
            in_sync_until_seconds_ago=12.0,
            message="In-Sync until",
        )
        positions = GroupClaim(
            group="orders-billing",
            partition=3,
            in_sync_until_ms=1_760_000_001_123,
            in_sync_until_seconds_ago=11.0,
            message="In-Sync until",
        )
        names = request.namespaces or [NamespaceRef(local="orders-")]
        namespaces = [
            FailedOverNamespace(
                type=each.type,
                local=each.local,
                remote=each.local,
                topics=["orders-eu"],
                logs_differ=["orders-eu-1: the record at offset 5 is another one"],
                transactions_open=2,
                transactions_decided=1,
                claims=[claim, PartitionClaim(topic="orders-eu", partition=1, end=3, message="not known")],
                group_claims=[positions] if each.type == "consumer-group" else [],
                all_groups_until_ms=1_760_000_000_123 if each.type == "consumer-group" else None,
                settings_kept=["orders-eu"],
                settings_refused=["orders-eu: retention.ms=5: POLICY_VIOLATION: too short"],
                replicas_lacking=["orders-eu has 2 of 3 replicas: 2 brokers of this cluster are there"],
                promoted=not request.dry_run,
            )
            for each in names
        ]
        return FailoverReport(
            link_name=link_name,
            dry_run=request.dry_run,
            mode="synchronous",
            reachable=True,
            last_heard_seconds=12.4,
            namespaces=namespaces,
        )

    async def drill_failover(
        self, link_name: str, request: DrillFailover, progress: Callable[[int, int], None]
    ) -> DrillReport:
        self.status(link_name)
        self.calls.append(("drill failover", link_name, len(request.namespaces), request.partitions_max))
        partition = PartitionLoss(
            topic="orders-eu", partition=0, source_end=9, confirmed=7, records=2, acked_records=0, seconds=1.5
        )
        unknown = PartitionLoss(
            topic="orders-eu",
            partition=1,
            source_end=None,
            confirmed=3,
            records=None,
            acked_records=None,
            seconds=None,
            message="no leader",
        )
        whole = bool(request.namespaces)
        lost = LostByFailover(
            known=whole,
            reason=None if whole else "SOURCE_PARTITIONS_UNKNOWN",
            message=None if whole else "not known of 1 partitions: orders-eu-1: no leader",
            records=2,
            acked_records=0,
            seconds=1.5,
            positions=4,
            positions_seconds=0.25,
            partitions_total=2,
            partitions=[partition] if whole else [partition, unknown],
            groups=[GroupLoss(group="orders-billing", positions=4, seconds=0.25)],
        )
        names = request.namespaces or [NamespaceRef(local="orders-")]
        measured = MeasuredFailover(
            seconds=5.25,
            leases_seconds=4.0,
            look_seconds=0.25,
            carry_out_seconds=1.0,
            write_seconds=0.125,
            positions=6,
            transactions_ended=3,
            transactions_committed=1,
            settings_refused=["orders-eu: retention.ms=5: POLICY_VIOLATION: too short"],
            copy_seconds=2.5,
        )
        return DrillReport(
            link_name=link_name,
            dry_run=request.dry_run,
            asked="follower",
            namespaces=names,
            lost=lost,
            copy_size=CopySize(
                topics=1, partitions=2, groups=1, not_copied=[NamespaceRef(type="principal", local="User:")]
            ),
            measured=None if request.dry_run else measured,
            copy_deleted=whole,
        )

    async def promote(self, link_name: str, request: Promote, progress: Callable[[int, int], None]) -> PromoteReport:
        wanted = [(each.type, each.local) for each in request.namespaces]
        self.calls.append(("promote", link_name, wanted, request.move_clients_seconds))
        progress(1, 1)
        promoted = [
            PromotedNamespace(
                type=each.type,
                local=each.local,
                remote=each.local,
                logs_differ=["orders-eu-1: the record at offset 5 is another one"] if request.dry_run else [],
                settings_refused=["orders-eu: retention.ms=5: POLICY_VIOLATION: too short"],
                replicas_lacking=["orders-eu has 2 of 3 replicas: 2 brokers of this cluster are there"],
                promoted=not request.dry_run,
            )
            for each in request.namespaces
        ]
        return PromoteReport(link_name=link_name, dry_run=request.dry_run, drained=True, namespaces=promoted)

    async def forget_topic(self, topic: str, delete: bool = False, dry_run: bool = False) -> TopicDecision:
        self.calls.append(("forget", topic, delete, dry_run))
        return _decision(topic, "delete" if delete else "forget", dry_run)

    async def recreate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        self.calls.append(("recreate", topic, dry_run))
        return _decision(topic, "recreate", dry_run)

    async def give_up_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        self.calls.append(("give up", topic, dry_run))
        return _decision(topic, "give up", dry_run)

    async def truncate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        self.calls.append(("truncate", topic, dry_run))
        return _decision(topic, "truncate", dry_run)

    async def acknowledge(self, link_name: str) -> Acknowledged:
        lost = self.status(link_name).source_losses
        self.calls.append(("acknowledge", link_name))
        self.links[link_name] = self.links[link_name].model_copy(
            update={"source_losses": [], "source_losses_left_off": 0}
        )
        return Acknowledged(link_name=link_name, acknowledged=len(lost))

    async def rotate_secret(self, link_name: str) -> SecretRotated:
        self.status(link_name)
        self.calls.append(("rotate-secret", link_name))
        return SecretRotated(link_name=link_name, secret_id="9b2e2c5e-0000-4000-8000-000000000001")

    def topic_overrides(self, topic: str) -> dict[str, str]:
        return {"retention.ms": "-1"}

    def topic_reason(self, topic: str) -> Reason | None:
        return self.settings_reasons.get(topic)

    async def verify(self, link_name: str, progress: Callable[[int, int], None]) -> VerifyReport:
        progress(4, 10)
        await self.proceed.wait()
        if self.verify_error is not None:
            raise self.verify_error
        progress(10, 10)
        verdict = PartitionVerdict(
            topic="orders-eu",
            remote_topic="orders-eu",
            partition=0,
            equal=self.equal,
            compared_from=0,
            compared_to=10 if self.equal else 6,
            records=10 if self.equal else 6,
            source_end=10,
            follower_end=10,
            difference=None if self.equal else "values differ",
        )
        return VerifyReport(
            link_name=link_name,
            equal=self.equal,
            records=verdict.records,
            seconds=0.5,
            partitions=[verdict],
            groups=[GroupVerdict(group="app-1", remote_group="far-app-1", equal=True, positions=3, waiting=1)],
        )


def _status(name: str, remote: str = "127.0.0.1:29292") -> LinkStatus:
    return LinkStatus(
        link_name=name,
        link_id="8f8f5a52-3f43-4f0c-9d0e-0c3f0a6a7c11",
        local_cluster_id="cluster-a",
        remote_cluster_id="cluster-b",
        remote=[remote],
        dials=True,
        mode="asynchronous",
        state="Following",
        last_heard_seconds=0.25,
        mappings=[MappingStatus(type="topic", local="orders-", remote="orders-", role="leader", state="Following")],
        acls=[
            AclStatus(
                role="leader",
                state="Following",
                bindings=2,
                not_mapped=[
                    AclNotMapped(binding="allow User:app-1 read topic 'x'", reason="no mapping of the link holds it")
                ],
            )
        ],
        groups=[
            GroupStatus(
                group="app-1",
                remote_group="far-app-1",
                role="leader",
                state="Catching Up",
                reason="BEYOND_FOLLOWER_END",
                message="orders-eu-0 ends at 5, the group's committed offset is 8",
                positions=3,
                pending=1,
                pending_seconds=1.5,
                unmapped_topics=["own"],
            )
        ],
        group_warnings=["records of type 99"],
        partitions=[
            PartitionStatus(
                topic="orders-eu",
                remote_topic="orders-eu",
                partition=0,
                role="leader",
                state="Following",
                source_end=10,
                follower_end=8,
                partition_mirror_lag=2,
                lag_seconds=0.125,
            )
        ],
    )


def make_gateway() -> Gateway:
    """The real counters, with a route for every API and no sessions."""
    return Gateway(compile_routes((), lambda broker_id, host, port: None), Limits(), Supervision())


def make_services(log: MemoryLog, links: MemoryLinks | None = None) -> AdminServices:
    """All of a sidecar's parts, up and ready; the proxy is ``proxy-1`` with broker 1."""
    log.claim("proxy-1", 1)
    gateway = make_gateway()
    source = metrics.MetricsSource(
        gateway.supervision, gateway, lambda: log.state, lambda: metrics.LeaseView(True, 12.5), lambda: ()
    )
    description = ProcessDescription(
        mode="sidecar",
        bootstrap="127.0.0.1:19093",
        link_address="127.0.0.1:19192",
        brokers=[BrokerAddress(broker_id=1, address="127.0.0.1:19093", broker="127.0.0.1:9092")],
        lease=LeaseStatus(vouching=True, remaining_seconds=12.5),
        plugins=["reservation", "replication"],
    )
    return AdminServices(
        name="proxy-1",
        describe=lambda: description,
        not_ready=list,
        registry=metrics.make_registry(source),
        supervision=gateway.supervision,
        version="1.2.3",
        audit=AuditTopic(gateway.supervision),
        control=log,
        cluster=cast(ClusterApi, FakeCluster(random.Random(1))),
        gateway=gateway,
        links=links,
    )


def access(*, loopback_without_authentication: bool = True, **settings: Any) -> Access:
    """Who may use a listener, by its settings; without one whoever is on this machine."""
    section = {"loopback_without_authentication": loopback_without_authentication and not settings, **settings}
    return Access(AdminListenerSection.model_validate(section))


class RunningAdmin:
    """An admin listener on a free port, in a thread with an event loop of its own; for callers that block."""

    def __init__(
        self, rules: Access | None = None, tls: ssl.SSLContext | None = None, unix_socket: UnixSocket | None = None
    ) -> None:
        """``rules``: who may use it; None: whoever is on this machine."""
        self._rules = rules or access()
        self._tls = tls
        self._unix_socket = unix_socket
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self.log: MemoryLog
        self.links: MemoryLinks
        self.services: AdminServices
        self.url = ""

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.log, self.links = MemoryLog(), MemoryLinks()
        self.services = make_services(self.log, self.links)
        await self.log.enforce("proxy-1")
        server = AdminServer(self.services, "127.0.0.1", 0, self._rules, tls=self._tls, unix_socket=self._unix_socket)
        await server.start()
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{server.port}"
        self._ready.set_result(None)
        await self._stop.wait()
        await server.stop()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function or coroutine function in the listener's loop and return its result."""

        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.result(PATIENCE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.call(self._stop.set)
        self._thread.join(PATIENCE_S)


def _decision(topic: str, action: Any, dry_run: bool) -> TopicDecision:
    return TopicDecision(
        topic=topic,
        link_name="a-to-b",
        source_topic=topic,
        source="deleted",
        action=action,
        dry_run=dry_run,
        records_lost=7,
        message="so it is",
    )
