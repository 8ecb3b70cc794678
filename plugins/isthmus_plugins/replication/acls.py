"""Both ends of principal namespaces: bindings of their principals are the same on the target, with names mapped.

The leader end reads the source's bindings twice a second (an answer that is the same bytes as the last one is not
decoded), maps them (:mod:`isthmus_control.acl_mapping`) and hands the whole set to the follower end: when it changes,
when a connection is new, and now and then, should somebody have changed the target's past the proxies. One proxy of the
source does this for the cluster: the one whose name comes first among those that hold a lease.

The follower end makes the target's bindings equal to that set, in an order that at no time lets in whom the source
keeps out: new DENYs, then ALLOWs that are gone, then new ALLOWs, then DENYs that are gone. It deletes only what a link
made: the control log says so before a binding is created and until it is deleted (:mod:`isthmus_control.rules.acls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus_control.acl_mapping import NotMapped, counterparts, held
from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.commands import RecordAcls
from isthmus_control.control_state import ControlState
from isthmus_control.directions import followed, pushed
from isthmus_control.model import INTERNAL_PREFIX, Link, NamespaceMapping, Reason, ResourceType, Role
from isthmus_control.outcome import Rejected
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import SECURITY_DISABLED

log = logging.getLogger("isthmus_plugins.replication")

POLL_INTERVAL_S: Final = 0.5
"""A change of the source's bindings is on the target within two seconds."""
PUSH_AGAIN_S: Final = 10.0
CALL_TIMEOUT_S: Final = 60.0
SEEN_POLL_S: Final = 0.02
SEEN_TRIES: Final = 250
"""A controller takes a change, and brokers learn of it a moment later."""
RECORDED_AT_ONCE: Final = 1_000
NOBODYS: Final = AclBinding(
    AclResource.TOPIC, INTERNAL_PREFIX, Pattern.LITERAL, "User:", "127.0.0.1", 3, Permission.DENY
)
"""A binding that there is not: who may delete it may delete others."""


class AclEnds(Part):
    """Both ends at this proxy, and what is shown of them."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self.leader = AclLeader(context, peers)
        self.follower = AclFollower(context)

    def answers(self) -> Sequence[Answering]:
        return (calls.Acls.by(self.follower.on_acls),)

    def start(self) -> None:
        self.leader.start()

    async def stop(self) -> None:
        await self.leader.stop()

    def wake(self) -> None:
        self.leader.wake()

    def control_changed(self, state: ControlState) -> None:
        self.follower.control_changed(state)
        self.wake()

    def statuses(self, link: Link) -> list[links.AclStatus]:
        """What this proxy knows of a link's bindings, at each end that it has."""
        connected = bool(self._peers.connections(link.name))
        found = []
        for role, status in ((Role.LEADER, self.leader.status(link)), (Role.FOLLOWER, self.follower.status(link))):
            if status is not None:
                found.append(_shown(role, status, connected))
        return found

    def metrics(self) -> Iterable[Metric]:
        """Bindings by what became of them."""
        bindings = GaugeMetricFamily(
            "isthmus_link_acl_bindings",
            "Access control bindings of a link's principal namespaces",
            labels=("link", "role", "state"),
        )
        for link in self._context.control.state.links.values():
            for status in self.statuses(link):
                bindings.add_metric((link.name, status.role, "mapped"), status.bindings)
                if status.role == Role.LEADER:
                    bindings.add_metric((link.name, status.role, "not_mapped"), len(status.not_mapped))
        return (bindings,)


def _shown(role: Role, status: AclStatus, connected: bool) -> links.AclStatus:
    if not connected:
        state = PartitionState.DISCONNECTED
    elif status.complete:
        state = PartitionState.FOLLOWING
    else:
        waits = status.reason is not None and status.reason.code in (ReasonCode.NO_AUTHORIZER, ReasonCode.ACLS_REFUSED)
        state = PartitionState.STOPPED if waits else PartitionState.CATCHING_UP
    return links.AclStatus(
        role=role.value,
        state=state,
        reason=status.reason.code if status.reason else None,
        message=status.reason.message if status.reason else None,
        bindings=status.bindings,
        not_mapped=[links.AclNotMapped(binding=str(each.binding), reason=each.reason) for each in status.not_mapped],
    )


async def check_access(context: PluginContext, role: Role) -> None:
    """Raise links.OperationError where this cluster's bindings cannot be read, or as a follower's not changed."""
    try:
        await context.cluster.acls()
        if role is Role.FOLLOWER:
            await context.cluster.delete_acls([NOBODYS])
    except KafkaRefused as error:
        reason = _refused(context, error)
        raise links.OperationError(reason.code, reason.message, 409) from error
    except BrokerUnavailable as error:
        raise links.OperationError(reasons.BROKER_UNAVAILABLE, str(error), 503) from error


def _refused(context: PluginContext, error: KafkaRefused) -> Reason:
    if error.error_code == SECURITY_DISABLED:
        return Reason(
            ReasonCode.NO_AUTHORIZER,
            f"cluster {context.cluster_id} has no authorizer (authorizer.class.name), so no access control bindings",
        )
    return Reason(
        ReasonCode.ACLS_REFUSED,
        f"cluster {context.cluster_id} refuses its proxy ({error.error_name}): reading access control bindings needs "
        "Describe on the cluster, and following them Alter",
    )


@dataclass(frozen=True, slots=True)
class AclStatus:
    """What a proxy knows of the bindings of a link's principal namespaces.

    ``complete``: the target had all of them when they were last pushed. ``bindings``: how many it should have.
    """

    complete: bool = False
    reason: Reason | None = None
    bindings: int = 0
    not_mapped: tuple[NotMapped, ...] = ()


class AclLeader:
    """Sends follower ends the bindings that they should have."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._tasks = Tasks("acl-leader", context.supervision)
        self._unreplicated = rare_lines(log, "bindings not replicated")
        self._changed = asyncio.Event()
        self._pushing: set[str] = set()
        self._pushed: dict[str, tuple[frozenset[AclBinding], Sequence[NamespaceMapping], LinkConnection, float]] = {}
        """By link: what was pushed over which connection, and when it is pushed again."""
        self._statuses: dict[str, AclStatus] = {}

    def start(self) -> None:
        self._tasks.keep("follow", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def wake(self) -> None:
        """Links or connections have changed."""
        self._changed.set()

    def status(self, link: Link) -> AclStatus | None:
        """None where another proxy of the cluster does this, or there is nothing to do."""
        return self._statuses.get(link.name)

    async def _look_for_ever(self) -> None:
        while True:
            self._changed.clear()
            await self._look()
            try:
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _leading(self) -> dict[str, Sequence[NamespaceMapping]]:
        """By link with a principal namespace that this proxy is to look after: its mappings that lead."""
        state = self._context.control.state
        if (
            self._clock.monotonic() > self._context.lease_deadline
            or min(state.proxies, default="") != self._context.proxy_name
        ):
            return {}
        leading = {link.name: pushed(link) for link in state.links.values()}
        return {
            name: mappings
            for name, mappings in leading.items()
            if any(mapping.type is ResourceType.PRINCIPAL for mapping in mappings)
        }

    async def _look(self) -> None:
        leading = self._leading()
        for name in self._statuses.keys() - leading.keys():
            del self._statuses[name]
            self._pushed.pop(name, None)
        if not leading:
            return
        try:
            bindings = await self._context.cluster.acls()
        except KafkaRefused as error:
            self._failed(leading, _refused(self._context, error))
            return
        except BrokerUnavailable as error:
            self._failed(leading, Reason(reasons.SOURCE_UNAVAILABLE, str(error)))
            return
        for name, mappings in leading.items():
            connections = self._peers.connections(name)
            if not connections:
                self._failed((name,), Reason(reasons.DISCONNECTED, "the link is not connected"))
            elif name not in self._pushing and not self._knows(name, bindings, mappings, connections[0]):
                self._pushing.add(name)
                self._tasks.start(f"push-{name}", self._push(name, bindings, mappings, connections[0]))

    def _knows(
        self,
        name: str,
        bindings: frozenset[AclBinding],
        mappings: Sequence[NamespaceMapping],
        connection: LinkConnection,
    ) -> bool:
        pushed = self._pushed.get(name)
        return (
            pushed is not None
            and pushed[0] is bindings
            and pushed[1] == mappings
            and pushed[2] is connection
            and self._clock.monotonic() < pushed[3]
        )

    def _failed(self, names: Collection[str], reason: Reason) -> None:
        for name in names:
            before = self._statuses.get(name, AclStatus())
            if before.reason != reason:
                self._unreplicated.one(name, {"link": name, "code": reason.code, "detail": reason.message})
            self._statuses[name] = AclStatus(False, reason, before.bindings, before.not_mapped)

    async def _push(
        self,
        name: str,
        bindings: frozenset[AclBinding],
        mappings: Sequence[NamespaceMapping],
        connection: LinkConnection,
    ) -> None:
        try:
            mapped = counterparts(bindings, mappings)
            wanted = calls.Acls(
                tuple(calls.NamespaceName(mapping.type.value, mapping.remote_prefix) for mapping in mappings),
                tuple(sorted(mapped.bindings)),
            )
            self._statuses[name] = AclStatus(
                False, self._statuses.get(name, AclStatus()).reason, len(mapped.bindings), mapped.not_mapped
            )
            try:
                await connection.call(wanted, CALL_TIMEOUT_S)
            except LinkRejected as error:
                self._failed((name,), Reason(error.code, f"the other cluster refused: {error.message}"))
            except (LinkLost, TimeoutError) as error:
                self._failed((name,), Reason(reasons.LINK_LOST, str(error) or "the other cluster did not answer"))
            else:
                self._pushed[name] = (bindings, mappings, connection, self._clock.monotonic() + PUSH_AGAIN_S)
                self._statuses[name] = AclStatus(True, None, len(mapped.bindings), mapped.not_mapped)
        finally:
            self._pushing.discard(name)


class AclFollower:
    """Makes this cluster's bindings what leader ends say."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reasons: dict[str, Reason | None] = {}
        """By link: what kept the last set from being taken."""

    def control_changed(self, state: ControlState) -> None:
        """Forget links that are gone."""
        for name in self._reasons.keys() - state.links.keys():
            del self._reasons[name]
            self._locks.pop(name, None)

    def status(self, link: Link) -> AclStatus | None:
        """None where no leader end has called this proxy since it started, or nothing follows."""
        mappings = followed(link)
        if link.name not in self._reasons or not any(mapping.type is ResourceType.PRINCIPAL for mapping in mappings):
            return None
        acls = self._context.control.state.acls
        made = sum(
            held(binding, mappings)
            for mapping in mappings
            if mapping.type is ResourceType.PRINCIPAL
            for binding in acls.get(mapping.local_prefix, ())
        )
        reason = self._reasons[link.name]
        return AclStatus(reason is None, reason, made)

    async def on_acls(self, connection: LinkConnection, question: calls.Acls) -> calls.Done:
        """The leader end says what bindings there should be, and for which of this cluster's namespaces."""
        link_name = connection.link_name
        async with self._locks[link_name]:
            try:
                await self._take(link_name, question)
            except LinkRejected as error:
                self._reasons[link_name] = Reason(error.code, error.message)
                raise
            except KafkaRefused as error:
                raise self._rejected(link_name, _refused(self._context, error)) from error
            except BrokerUnavailable as error:
                raise self._rejected(link_name, Reason(reasons.BROKER_UNAVAILABLE, str(error))) from error
        self._reasons[link_name] = None
        return calls.Done()

    def _rejected(self, link_name: str, reason: Reason) -> LinkRejected:
        self._reasons[link_name] = reason
        return LinkRejected(reason.code, reason.message)

    async def _take(self, link_name: str, question: calls.Acls) -> None:
        link = self._context.control.state.links.get(link_name)
        if link is None:
            raise LinkRejected(reasons.NOT_FOLLOWING, f"there is no link {link_name!r}")
        named = set(question.namespaces)
        # What only one end knows to be attached is left as it is.
        mappings = [mapping for mapping in followed(link) if (mapping.type, mapping.local_prefix) in named]
        wanted = {binding for binding in question.bindings if held(binding, mappings)}
        for mapping in mappings:
            if mapping.type is ResourceType.PRINCIPAL:
                own = {binding for binding in wanted if mapping.holds(binding.principal)}
                await self._make_equal(link_name, mapping, mappings, own)

    async def _make_equal(
        self, link_name: str, namespace: NamespaceMapping, mappings: Sequence[NamespaceMapping], wanted: set[AclBinding]
    ) -> None:
        cluster = self._context.cluster
        made = frozenset(self._context.control.state.acls.get(namespace.local_prefix, ()))
        there = await cluster.acls()
        missing = wanted - there
        gone = {binding for binding in made - wanted if held(binding, mappings)}
        await self._record(link_name, namespace, made=missing - made)
        await cluster.create_acls(_only(Permission.DENY, missing))
        await cluster.delete_acls(_only(Permission.ALLOW, gone))
        await cluster.create_acls(_only(Permission.ALLOW, missing))
        await cluster.delete_acls(_only(Permission.DENY, gone))
        await self._seen(missing, gone)
        await self._record(link_name, namespace, deleted=gone)
        if missing or gone:
            log.info(
                "bindings changed",
                extra={
                    "link": link_name,
                    "namespace": namespace.local_prefix,
                    "made": len(missing),
                    "deleted": len(gone),
                },
            )

    async def _seen(self, created: Collection[AclBinding], deleted: Collection[AclBinding]) -> None:
        """Return when brokers know of the changes, so that the next look at them does not miss any."""
        if not created and not deleted:
            return
        for _ in range(SEEN_TRIES):
            there = await self._context.cluster.acls()
            if there.issuperset(created) and there.isdisjoint(deleted):
                return
            await asyncio.sleep(SEEN_POLL_S)
        raise BrokerUnavailable("access control bindings were changed, and the brokers do not show it")

    async def _record(
        self,
        link_name: str,
        namespace: NamespaceMapping,
        made: Collection[AclBinding] = (),
        deleted: Collection[AclBinding] = (),
    ) -> None:
        for part in _parts(made):
            await self._append(RecordAcls(link_name, namespace.local_prefix, made=part))
        for part in _parts(deleted):
            await self._append(RecordAcls(link_name, namespace.local_prefix, deleted=part))

    async def _append(self, body: RecordAcls) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            raise LinkRejected(outcome.code.told, outcome.message)


def _only(permission: Permission, bindings: Collection[AclBinding]) -> list[AclBinding]:
    return [binding for binding in bindings if binding.permission == permission]


def _parts(bindings: Collection[AclBinding]) -> list[tuple[AclBinding, ...]]:
    """Bindings as commands of a bearable size take them."""
    ordered = sorted(bindings)
    return [tuple(ordered[start : start + RECORDED_AT_ONCE]) for start in range(0, len(ordered), RECORDED_AT_ONCE)]
