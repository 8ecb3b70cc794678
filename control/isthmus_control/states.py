"""The states of a link and of a replicated partition (KIP-986, "Network Partition Behavior").

Asynchronous mode, a link:

    Disconnected --connected--> Catching Up <==caught up / fell behind==> Following
         ^------------------------lost---------------------------------------'

Synchronous mode, entered from Following and left by the operator alone:

    Following --mode synchronous--> Syncing --in sync--> In-Sync <==in sync / out of sync, lost==> Out-Of-Sync

A partition has the same states and three in which it waits for somebody: *Diverged* (both sides hold different records;
ends with a truncation), *Refused* (it may not follow), *Stopped* (it could, but not past this point, or was told to
stop). A lost connection does not end those: they are about the data.

The tables below are the whole machine: what is not in them cannot happen, and raises :class:`ImpossibleTransition`.
Every state comes with a reason where it needs one and with the time of the last word from the other side, so that a
state can never look fresher than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from isthmus_control.model import LinkMode, Reason


class ImpossibleTransition(Exception):
    """The event cannot happen in this state: whoever drives the machine is wrong about the state."""


class ReasonCode(StrEnum):
    """Why a link or partition is in its state. The names that operators know from cluster linking, then ours."""

    AUTHENTICATION_ERROR = "AUTHENTICATION_ERROR"
    UNRESOLVABLE_BOOTSTRAP_ERROR = "UNRESOLVABLE_BOOTSTRAP_ERROR"
    BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR = "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"
    TIMEOUT_ERROR = "TIMEOUT_ERROR"
    SOURCE_TOPIC_MAY_BE_DELETED = "SOURCE_TOPIC_MAY_BE_DELETED"
    SOURCE_TOPIC_ID_CHANGED = "SOURCE_TOPIC_ID_CHANGED"
    SOURCE_PARTITIONS_DECREASED = "SOURCE_PARTITIONS_DECREASED"
    SOURCE_TRUNCATING = "SOURCE_TRUNCATING"
    SOURCE_TRUNCATED = "SOURCE_TRUNCATED"
    UNEXPECTED_TRUNCATION = "UNEXPECTED_TRUNCATION"
    UNSUPPORTED_MESSAGE_FORMAT = "UNSUPPORTED_MESSAGE_FORMAT"

    NOT_CONNECTED_YET = "NOT_CONNECTED_YET"
    CONNECTION_LOST = "CONNECTION_LOST"
    PEER_SILENT = "PEER_SILENT"
    PEER_VERSION_UNSUPPORTED = "PEER_VERSION_UNSUPPORTED"
    PEER_IS_ANOTHER_CLUSTER = "PEER_IS_ANOTHER_CLUSTER"
    PEER_HAS_NO_SUCH_LINK = "PEER_HAS_NO_SUCH_LINK"
    PRODUCER_IDS_DISAGREE = "PRODUCER_IDS_DISAGREE"
    NO_LOCAL_LEADER = "NO_LOCAL_LEADER"
    TARGET_TOPIC_NOT_EMPTY = "TARGET_TOPIC_NOT_EMPTY"
    TARGET_TOPIC_MAY_BE_DELETED = "TARGET_TOPIC_MAY_BE_DELETED"
    TARGET_TOPIC_ID_CHANGED = "TARGET_TOPIC_ID_CHANGED"
    TARGET_TOPIC_NOT_CREATED = "TARGET_TOPIC_NOT_CREATED"
    TARGET_WRITTEN_BY_OTHERS = "TARGET_WRITTEN_BY_OTHERS"
    TARGET_REFUSES_RECORDS = "TARGET_REFUSES_RECORDS"
    TARGET_REFUSES_SETTINGS = "TARGET_REFUSES_SETTINGS"
    NOT_COMPACTED_YET = "NOT_COMPACTED_YET"
    NOT_LEVEL_YET = "NOT_LEVEL_YET"
    DELETIONS_DOUBTED = "DELETIONS_DOUBTED"
    DELETIONS_MISSED = "DELETIONS_MISSED"
    TRUNCATING = "TRUNCATING"
    SALVAGE_FAILED = "SALVAGE_FAILED"
    SPOOL_LOST = "SPOOL_LOST"
    POSITIONS_NOT_RESTORED = "POSITIONS_NOT_RESTORED"
    TRANSACTION_VERIFICATION_ENABLED = "TRANSACTION_VERIFICATION_ENABLED"
    KEYRING_UNUSABLE = "KEYRING_UNUSABLE"
    LEASE_RAN_OUT = "LEASE_RAN_OUT"
    STOPPED_BY_OPERATOR = "STOPPED_BY_OPERATOR"
    NO_AUTHORIZER = "NO_AUTHORIZER"
    ACLS_REFUSED = "ACLS_REFUSED"
    INTERNAL_ERROR = "INTERNAL_ERROR"


class LinkState(StrEnum):
    DISCONNECTED = "Disconnected"
    CATCHING_UP = "Catching Up"
    FOLLOWING = "Following"
    SYNCING = "Syncing"
    IN_SYNC = "In-Sync"
    OUT_OF_SYNC = "Out-Of-Sync"


class LinkEvent(StrEnum):
    CONNECTED = "connected"
    LOST = "lost"
    CAUGHT_UP = "caught up"
    FELL_BEHIND = "fell behind"
    MODE_SYNCHRONOUS = "mode synchronous"
    MODE_ASYNCHRONOUS = "mode asynchronous"
    SYNCED = "in sync"
    UNSYNCED = "out of sync"


_L, _E = LinkState, LinkEvent

LINK_TRANSITIONS: Mapping[tuple[LinkState, LinkEvent], LinkState] = MappingProxyType(
    {
        (_L.DISCONNECTED, _E.CONNECTED): _L.CATCHING_UP,
        (_L.DISCONNECTED, _E.LOST): _L.DISCONNECTED,  # another attempt failed: the reason may be a new one
        (_L.CATCHING_UP, _E.CAUGHT_UP): _L.FOLLOWING,
        (_L.CATCHING_UP, _E.FELL_BEHIND): _L.CATCHING_UP,
        (_L.CATCHING_UP, _E.LOST): _L.DISCONNECTED,
        (_L.FOLLOWING, _E.CAUGHT_UP): _L.FOLLOWING,
        (_L.FOLLOWING, _E.FELL_BEHIND): _L.CATCHING_UP,
        (_L.FOLLOWING, _E.LOST): _L.DISCONNECTED,
        # "Once the replication link has caught up completely, it can be changed to synchronous mode."
        (_L.FOLLOWING, _E.MODE_SYNCHRONOUS): _L.SYNCING,
        # Lost while syncing, nothing was promised yet: source transactions go on, target consumers still wait.
        (_L.SYNCING, _E.LOST): _L.SYNCING,
        (_L.SYNCING, _E.CONNECTED): _L.SYNCING,
        (_L.SYNCING, _E.SYNCED): _L.IN_SYNC,
        (_L.SYNCING, _E.MODE_ASYNCHRONOUS): _L.CATCHING_UP,
        (_L.IN_SYNC, _E.UNSYNCED): _L.OUT_OF_SYNC,
        (_L.IN_SYNC, _E.LOST): _L.OUT_OF_SYNC,
        (_L.IN_SYNC, _E.MODE_ASYNCHRONOUS): _L.FOLLOWING,
        (_L.OUT_OF_SYNC, _E.CONNECTED): _L.OUT_OF_SYNC,
        (_L.OUT_OF_SYNC, _E.LOST): _L.OUT_OF_SYNC,
        (_L.OUT_OF_SYNC, _E.SYNCED): _L.IN_SYNC,
        # Followed by LOST where there is no connection.
        (_L.OUT_OF_SYNC, _E.MODE_ASYNCHRONOUS): _L.CATCHING_UP,
    }
)


class PartitionState(StrEnum):
    DISCONNECTED = "Disconnected"
    CATCHING_UP = "Catching Up"
    FOLLOWING = "Following"
    SYNCING = "Syncing"
    IN_SYNC = "In-Sync"
    OUT_OF_SYNC = "Out-Of-Sync"
    DIVERGED = "Diverged"
    REFUSED = "Refused"
    STOPPED = "Stopped"


class PartitionEvent(StrEnum):
    CONNECTED = "connected"
    LOST = "lost"
    CAUGHT_UP = "caught up"
    FELL_BEHIND = "fell behind"
    MODE_SYNCHRONOUS = "mode synchronous"
    MODE_ASYNCHRONOUS = "mode asynchronous"
    SYNCED = "in sync"
    UNSYNCED = "out of sync"
    DIVERGED = "diverged"
    REFUSED = "refused"
    STOPPED = "stopped"
    RESUMED = "resumed"
    """What it waited for has happened: cut, permitted, supported now. It starts over as when a link comes up."""


_P, _V = PartitionState, PartitionEvent

_MOVING = (_P.DISCONNECTED, _P.CATCHING_UP, _P.FOLLOWING, _P.SYNCING, _P.IN_SYNC, _P.OUT_OF_SYNC)
WAITING = frozenset((_P.DIVERGED, _P.REFUSED, _P.STOPPED))
"""Those in which a partition waits for somebody."""

PARTITION_TRANSITIONS: Mapping[tuple[PartitionState, PartitionEvent], PartitionState] = MappingProxyType(
    {
        # As the link's.
        **{(_P(state), _V(event)): _P(target) for (state, event), target in LINK_TRANSITIONS.items()},
        **{(state, _V.DIVERGED): _P.DIVERGED for state in (*_MOVING, *WAITING)},
        **{(state, _V.REFUSED): _P.REFUSED for state in (*_MOVING, *WAITING)},
        **{(state, _V.STOPPED): _P.STOPPED for state in (*_MOVING, _P.STOPPED)},
        # What the partition waits for does not come from the connection or the mode.
        **{
            (state, event): state
            for state in WAITING
            for event in (_V.CONNECTED, _V.LOST, _V.MODE_SYNCHRONOUS, _V.MODE_ASYNCHRONOUS)
        },
        **{(state, _V.RESUMED): _P.DISCONNECTED for state in WAITING},
    }
)

_REASON_NEEDED = frozenset((*WAITING, _P.DISCONNECTED, _P.OUT_OF_SYNC))


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A link's state with why, since when, and when the other side was last heard (wall clock ms, None: never)."""

    state: LinkState
    since_ms: int
    reason: Reason | None
    heard_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """As :class:`LinkStatus`, for one partition."""

    state: PartitionState
    since_ms: int
    reason: Reason | None
    heard_ms: int | None = None


def new_link(now_ms: int) -> LinkStatus:
    return LinkStatus(LinkState.DISCONNECTED, now_ms, _not_connected())


def new_partition(now_ms: int) -> PartitionStatus:
    return PartitionStatus(PartitionState.DISCONNECTED, now_ms, _not_connected())


def _not_connected() -> Reason:
    return Reason(ReasonCode.NOT_CONNECTED_YET, "the link has not connected yet")


def advance_link(status: LinkStatus, event: LinkEvent, now_ms: int, reason: Reason | None = None) -> LinkStatus:
    """The link's status after ``event``. Losing the other side needs a reason. Raises ImpossibleTransition."""
    target = LINK_TRANSITIONS.get((status.state, event))
    if target is None:
        raise ImpossibleTransition(f"a link that is {status.state} cannot see {event!s}")
    if event in (LinkEvent.LOST, LinkEvent.UNSYNCED):
        if reason is None:
            raise ValueError(f"{event!s} needs a reason")
    elif _P(target) in _REASON_NEEDED:
        reason = reason or status.reason  # connected, and still out of sync for what it was before
    since_ms = status.since_ms if target is status.state else now_ms
    return replace(status, state=target, since_ms=since_ms, reason=reason)


def advance_partition(
    status: PartitionStatus, event: PartitionEvent, now_ms: int, reason: Reason | None = None
) -> PartitionStatus:
    """The partition's status after ``event``. Raises ImpossibleTransition; ValueError where a reason is missing."""
    target = PARTITION_TRANSITIONS.get((status.state, event))
    if target is None:
        raise ImpossibleTransition(f"a partition that is {status.state} cannot see {event!s}")
    if event is PartitionEvent.RESUMED:
        reason = reason or Reason(ReasonCode.NOT_CONNECTED_YET, "resumed, not connected yet")
    elif status.state in WAITING and target is status.state and event in (_V.CONNECTED, _V.LOST):
        reason = status.reason
    elif event in (_V.LOST, _V.UNSYNCED, _V.DIVERGED, _V.REFUSED, _V.STOPPED):
        if reason is None:
            raise ValueError(f"{event!s} needs a reason")
    elif target in _REASON_NEEDED:
        reason = reason or status.reason
    since_ms = status.since_ms if target is status.state else now_ms
    return replace(status, state=target, since_ms=since_ms, reason=reason)


def combine(mode: LinkMode, connected: bool, partitions: Iterable[PartitionState]) -> LinkState:
    """The state of a link from those of its partitions: as good as the worst that moves.

    Partitions that wait for somebody (Diverged, Refused, Stopped) keep an asynchronous link from neither state: they
    show on their own. A synchronous link with one of them promises too much, so it is Out-Of-Sync; one of which no
    partition is known is Syncing.
    """
    states = frozenset(partitions)
    if mode is LinkMode.ASYNCHRONOUS:
        if not connected:
            return LinkState.DISCONNECTED
        behind = states & {_P.DISCONNECTED, _P.CATCHING_UP}
        return LinkState.CATCHING_UP if behind else LinkState.FOLLOWING
    if _P.SYNCING in states or not states:
        return LinkState.SYNCING
    return LinkState.IN_SYNC if connected and states <= {_P.IN_SYNC} else LinkState.OUT_OF_SYNC
