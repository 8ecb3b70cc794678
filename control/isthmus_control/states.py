"""The states of a link and of a replicated partition (KIP-986, "Network Partition Behavior").

Asynchronous mode, a link:

    Disconnected --connected--> Catching Up <==caught up / fell behind==> Following
         ^------------------------lost---------------------------------------'

Synchronous mode, entered from Following and left by the operator alone:

    Following --mode synchronous--> Syncing --in sync--> In-Sync <==in sync / out of sync, lost==> Out-Of-Sync

A partition has the same states and three in which it waits for somebody: *Diverged* (both sides hold different records;
ends with a truncation), *Refused* (it may not follow), *Stopped* (it could, but not past this point, or an operator
stopped it). A lost connection does not end those: they are about the data.

Nobody keeps these states: they are made of what ends know whenever somebody asks (``replication/status``), with a
reason where they need one and with the time of the last word from the other side, so that a state can never look
fresher than it is. What is kept, and decides about acks, is the record of each partition
(:class:`isthmus_control.model.SyncRecord`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from isthmus_control.model import LinkMode


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
    NOT_ENCRYPTED = "NOT_ENCRYPTED"
    PRODUCER_IDS_DISAGREE = "PRODUCER_IDS_DISAGREE"
    NO_LOCAL_LEADER = "NO_LOCAL_LEADER"
    TARGET_TOPIC_NOT_EMPTY = "TARGET_TOPIC_NOT_EMPTY"
    TARGET_TOPIC_MAY_BE_DELETED = "TARGET_TOPIC_MAY_BE_DELETED"
    TARGET_TOPIC_ID_CHANGED = "TARGET_TOPIC_ID_CHANGED"
    TARGET_TOPIC_NOT_CREATED = "TARGET_TOPIC_NOT_CREATED"
    TARGET_WRITTEN_BY_OTHERS = "TARGET_WRITTEN_BY_OTHERS"
    TARGET_REFUSES_RECORDS = "TARGET_REFUSES_RECORDS"
    TARGET_REFUSES_SETTINGS = "TARGET_REFUSES_SETTINGS"
    TARGET_LACKS_REPLICAS = "TARGET_LACKS_REPLICAS"
    NOT_COMPACTED_YET = "NOT_COMPACTED_YET"
    NOT_LEVEL_YET = "NOT_LEVEL_YET"
    DELETIONS_DOUBTED = "DELETIONS_DOUBTED"
    DELETIONS_MISSED = "DELETIONS_MISSED"
    TRANSACTIONS_ENDING = "TRANSACTIONS_ENDING"
    TRUNCATING = "TRUNCATING"
    CUT_AGREED = "CUT_AGREED"
    ENDS_CHANGED = "ENDS_CHANGED"
    PROVENANCE_WRONG = "PROVENANCE_WRONG"
    SALVAGE_FAILED = "SALVAGE_FAILED"
    SPOOL_LOST = "SPOOL_LOST"
    POSITIONS_NOT_RESTORED = "POSITIONS_NOT_RESTORED"
    TRANSACTION_VERIFICATION_ENABLED = "TRANSACTION_VERIFICATION_ENABLED"
    KEYRING_UNUSABLE = "KEYRING_UNUSABLE"
    LEASE_RAN_OUT = "LEASE_RAN_OUT"
    SOURCE_END_UNKNOWN = "SOURCE_END_UNKNOWN"
    TARGET_LOST_RECORDS = "TARGET_LOST_RECORDS"
    SOURCE_LOST_RECORDS = "SOURCE_LOST_RECORDS"
    SOURCE_LOST_COMMITS = "SOURCE_LOST_COMMITS"
    LOGS_DIFFER = "LOGS_DIFFER"
    FOLLOWS_ITSELF = "FOLLOWS_ITSELF"
    DECISION_NOT_STORED = "DECISION_NOT_STORED"
    STOPPED_BY_OPERATOR = "STOPPED_BY_OPERATOR"
    NO_AUTHORIZER = "NO_AUTHORIZER"
    ACLS_REFUSED = "ACLS_REFUSED"
    THROTTLED = "THROTTLED"
    NOT_GRANTED = "NOT_GRANTED"
    CONTROL_RECORD_UNKNOWN = "CONTROL_RECORD_UNKNOWN"
    INTERNAL_ERROR = "INTERNAL_ERROR"


class LinkState(StrEnum):
    DISCONNECTED = "Disconnected"
    CATCHING_UP = "Catching Up"
    FOLLOWING = "Following"
    SYNCING = "Syncing"
    IN_SYNC = "In-Sync"
    OUT_OF_SYNC = "Out-Of-Sync"


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


WAITING = frozenset((PartitionState.DIVERGED, PartitionState.REFUSED, PartitionState.STOPPED))
"""Those in which a partition waits for somebody."""


def combine(
    mode: LinkMode, connected: bool, partitions: Iterable[PartitionState], all_else_is_in_sync: bool = True
) -> LinkState:
    """The state of a link from those of its partitions, all that a proxy has of it: as good as the worst.

    With one that waits for somebody (Diverged, Refused, Stopped) an asynchronous link is Catching Up: not all is
    copied. A synchronous one promises too much then, so it is Out-Of-Sync. One without partitions has all there is;
    a synchronous one is In-Sync if those that others have were, and acks of those to come wait for the other side.
    """
    states = frozenset(partitions)
    if mode is LinkMode.ASYNCHRONOUS:
        if not connected:
            return LinkState.DISCONNECTED
        return LinkState.FOLLOWING if states <= {PartitionState.FOLLOWING} else LinkState.CATCHING_UP
    in_sync = connected and states <= {PartitionState.IN_SYNC}
    if PartitionState.SYNCING in states or (in_sync and not all_else_is_in_sync):
        return LinkState.SYNCING
    return LinkState.IN_SYNC if in_sync else LinkState.OUT_OF_SYNC
