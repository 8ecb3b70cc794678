"""What status says of a synchronous link: at its source what is recorded, at its target what is leased."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from isthmus_control.control_state import ControlState
from isthmus_control.demands import Confirm, Demands
from isthmus_control.model import (
    PLAIN_TERMS,
    AckTerms,
    Claim,
    GroupClaim,
    Link,
    LinkMode,
    NamespaceMapping,
    ResourceType,
    Role,
    SyncState,
)
from isthmus_control.rules.claims import AHEAD_MS
from isthmus_control.states import WAITING, LinkState, PartitionState, ReasonCode, combine
from isthmus_plugins.cluster import TopicPartition, id_as_text
from isthmus_plugins.links import AnyOf, PartitionStatus, SyncStatus
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_S
from isthmus_plugins.replication.sync.quorums import is_degraded

if TYPE_CHECKING:
    from isthmus_plugins.replication.sync.leases import SyncLeases

CAUSES = frozenset(
    {
        reasons.NOT_FOLLOWING,
        reasons.BROKER_UNAVAILABLE,
        ReasonCode.DECISION_NOT_STORED,
        ReasonCode.TARGET_REFUSES_RECORDS,
    }
)
"""Why a partition stands still: shown before what came of it."""
REPORTED_S = 3.0
"""How long what the source reported of a partition is shown without another word from it."""


def note_led(link: Link, sync_of: Callable[[LinkPartition], SyncStatus], partitions: Iterable[PartitionStatus]) -> None:
    """Add what is recorded of partitions that a synchronous link leads. Those that wait for somebody still do."""
    for status in _of_namespaces(link, Role.LEADER, partitions):
        _note(status, sync_of(LinkPartition(link.name, status.topic, status.partition)))


def note_followed(
    state: ControlState,
    link: Link,
    leases: SyncLeases,
    clock: Clock,
    partitions: Iterable[PartitionStatus],
    is_new: Callable[[str], bool],
) -> None:
    """Add what is known of the acks of the source, for partitions that follow over a synchronous link.

    ``is_new``: whether the source says of a topic that acks of its new partitions wait from their first record on.
    """
    for status in _of_namespaces(link, Role.FOLLOWER, partitions):
        if status.partition >= 0:
            topic = state.follower_topics.get(status.topic)
            topic_id = topic.topic_id if topic else None
            sync = leased_sync(leases, clock, status.topic, topic_id, status.partition)
            lease = leases.lease(status.topic, topic_id, status.partition)
            if (
                sync.state == "Unknown"
                and (lease is None or (lease.reported is None and not lease.until_ms))
                and is_new(status.topic)
            ):
                sync = SyncStatus(state="In-Sync", from_first=True)
            _note(status, sync)


def _of_namespaces(link: Link, role: Role, partitions: Iterable[PartitionStatus]) -> list[PartitionStatus]:
    if link.mode is not LinkMode.SYNCHRONOUS:
        return []
    mappings = [each for each in link.mappings if each.type is ResourceType.TOPIC and each.role is role]
    return [
        each
        for each in partitions
        if each.role == role.value and any(mapping.holds(each.topic) for mapping in mappings)
    ]


def _note(status: PartitionStatus, sync: SyncStatus) -> None:
    status.sync = sync
    if PartitionState(status.state) not in WAITING:
        status.state = PartitionState.OUT_OF_SYNC if sync.state == "Unknown" else PartitionState(sync.state)
        if status.reason not in CAUSES:
            status.reason, status.message = sync.reason or status.reason, sync.message or status.message


def recorded_sync(
    state: ControlState,
    key: LinkPartition,
    topic_id: bytes | None,
    demands: Demands,
    in_sync: Callable[[LinkPartition], bool],
    why_not: Callable[[LinkPartition], str | None],
    is_new: Callable[[str, TopicPartition], bool],
    has_first_leader: Callable[[TopicPartition], bool],
) -> SyncStatus:
    """What an ack for a partition means, as the control log of the source has it.

    ``demands``: of its topic, or, in the offsets topic, of the group that is asked about. ``in_sync``: whether the
    follower has been seen to have all that was acked before acks were held. ``why_not``: why that failed when it was
    tried last. ``is_new``: whether one without a record is held from its first record on, by link and partition.
    ``has_first_leader``: whether nobody led it before: what the first leader recorded late, the next one did not know.
    """
    record = None
    if topic_id is not None:
        record = state.sync_record(key.link, key.topic, id_as_text(topic_id), key.partition)
    any_of = _chosen(state, key, demands.confirm)
    if record is None and is_new(key.link, key.place):
        return SyncStatus(state="In-Sync", since_offset=0, from_first=True, any_of=any_of)
    if record is None:
        return SyncStatus(state="Syncing", message=why_not(key), any_of=any_of)
    if record.state is SyncState.IN_SYNC and record.from_first and has_first_leader(key.place):
        return SyncStatus(state="In-Sync", since_offset=0, since_ms=record.since_ms, from_first=True, any_of=any_of)
    if record.state is SyncState.IN_SYNC and not in_sync(key):
        return SyncStatus(
            state="Out-Of-Sync" if record.reached or record.from_first else "Syncing",
            since_ms=record.since_ms,
            reason=ReasonCode.NOT_LEVEL_YET,
            message="acks are held until the follower is level",
            any_of=any_of,
        )
    why = record.reason.message if record.reason is not None else None
    degraded = record.degraded if is_degraded(demands, record) else None
    if degraded is not None:
        why = f"{why}; transactional and strict producers are acked without it since {_moment(degraded.since_ms)}"
    return SyncStatus(
        state=record.state.value,
        since_offset=record.since_offset,
        since_ms=record.since_ms,
        any_of=any_of,
        degraded_since_ms=degraded.since_ms if degraded is not None else None,
        reason=record.reason.code if record.reason is not None else None,
        message=why,
    )


def _chosen(state: ControlState, key: LinkPartition, confirm: Confirm) -> AnyOf | None:
    """The set of links that a partition's acks choose from, if this one is of it."""
    if key.link not in confirm.links:
        return None
    clusters = {name: state.links[name].remote_cluster_id for name in confirm.links if name in state.links}
    return AnyOf(count=confirm.count, links=clusters)


def leased_sync(leases: SyncLeases, clock: Clock, topic: str, topic_id: str | None, partition: int) -> SyncStatus:
    """What is known at the target of the acks of the source."""
    claim = leases.claim(topic, topic_id, partition)
    if leases.lacks(topic, partition):
        why = "the log here ends before what was confirmed of it, and is copied again: the source has what is missing"
        return SyncStatus(state="Unknown", reason=ReasonCode.TARGET_LOST_RECORDS, message=why)
    any_of = None if claim is None else some_of(claim, claim.terms, clock.time())
    until_ms = sayable(claim, clock.time()) if any_of is None else None
    lease = leases.lease(topic, topic_id, partition)
    now = clock.monotonic()
    if leases.in_sync(topic, partition) and lease is not None:
        return SyncStatus(state="In-Sync", until_ms=until_ms, any_of=any_of)
    reported = lease.reported if lease is not None and now - lease.reported_at < REPORTED_S else None
    if reported is not None and lease is not None and reported.from_first:
        reported = reported if now - lease.reported_at < LEASE_S else None  # it is a promise, as a lease is
    if reported is not None and (reported.state != "In-Sync" or reported.from_first):
        return reported.model_copy(update={"until_ms": until_ms, "any_of": any_of})
    why = ReasonCode.LEASE_RAN_OUT
    return SyncStatus(
        state="Unknown", until_ms=until_ms, any_of=any_of, reason=why, message=claimed(claim, clock.time())
    )


def some_of(claim: Claim | GroupClaim, terms: AckTerms, now_s: float) -> AnyOf | None:
    """What a claim says where not all that was acked needs to be here."""
    return AnyOf(count=terms.count, links=dict(terms.links), until_ms=sayable(claim, now_s)) if terms.links else None


def claimed(claim: Claim | None, now_s: float) -> str:
    """What may be said of a partition without the source, in words."""
    compare = "Compare the log ends of {} of them, and fail over to where they end last"
    return _claimed(claim, PLAIN_TERMS if claim is None else claim.terms, compare, now_s)


def claimed_of_group(claim: GroupClaim | None, group: str, now_s: float) -> str:
    """The same of a group's committed offsets."""
    compare = "Compare its committed offsets in {} of them, partition by partition: the furthest has what was acked"
    return _claimed(claim, PLAIN_TERMS if claim is None else claim.terms_of(group), compare, now_s)


def _claimed(claim: Claim | GroupClaim | None, terms: AckTerms, compare: str, now_s: float) -> str:
    if claim is None:
        return "what an ack meant is not known here: no lease was recorded"
    ago = now_s - claim.until_ms / 1000
    if sayable(claim, now_s) is None:
        until = _moment(claim.until_ms)
        return f"In-Sync until {until} of a clock that is {-ago:.0f} s ahead: when that was is not known here"
    ago = max(0.0, ago)
    said = f"In-Sync until {_moment(claim.until_ms)} ({ago:.0f} s ago): what acks mean since then is not known here"
    if terms.links:
        names = ", ".join(f"{name} (cluster {cluster_id})" for name, cluster_id in sorted(terms.links.items()))
        said += f"; what was acked by then is in {terms.count} of these, not in each: {names}. "
        said += compare.format(len(terms.links) - terms.count + 1)
    if terms.degrade_after_ms:
        earliest = _moment(claim.until_ms + terms.degrade_after_ms)
        said += f"; as it was set then, transactional and strict producers may be acked without it from {earliest} on"
    return said


def sayable(claim: Claim | GroupClaim | None, now_s: float) -> int | None:
    """Until when (ms) all that the source acked is here; None: nothing is known, or it is of a clock that was ahead.

    ``now_s``: what the wall clock here says.
    """
    return claim.until_ms if claim is not None and claim.until_ms <= now_s * 1000 + AHEAD_MS else None


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def link_state(
    link: Link,
    connected: bool,
    partitions: Iterable[PartitionStatus],
    all_else_is_in_sync: Callable[[NamespaceMapping, bool], bool],
) -> LinkState:
    """The state of a link. That of a synchronous one is what it promises, so copies of offsets topics have no part.

    ``all_else_is_in_sync``: whether what this proxy does not have of a pair of topics is, and what will come in it; it
    is told whether the proxy has some. A link without any such pair has no acks that it could promise something of.
    """
    counted, all_else = list(partitions), True
    if link.mode is LinkMode.SYNCHRONOUS:
        counted = [each for role in Role for each in _of_namespaces(link, role, counted)]
        pairs = [each for each in link.mappings if each.type is ResourceType.TOPIC]
        all_else = all(all_else_is_in_sync(each, bool(counted)) for each in pairs)
    return combine(link.mode, connected, (PartitionState(each.state) for each in counted), all_else)
