"""What came of a command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from isthmus_control.model import (
    ClientMove,
    DistributionTree,
    FollowerTopic,
    HeldConfig,
    Link,
    Namespace,
    NamespaceMapping,
    Promotion,
    ProxyLease,
    Reversal,
    SyncRecord,
)
from isthmus_control.source_losses import SourceLoss
from isthmus_control.truncations import Truncation


class Rejection(StrEnum):
    """Why a command was rejected, for callers that act on it. The message is for people."""

    INVALID = "invalid"
    """Wrong in itself: it would be rejected in every state."""
    NOT_FOUND = "not-found"
    ALREADY_EXISTS = "already-exists"
    CONFLICT = "conflict"
    """Something else that stands in the state forbids it."""
    NOT_SUPPORTED = "not-supported"
    """Not in this version, or not at the log's feature level."""
    NOT_GRANTED = "not-granted"
    """The other cluster asks for what this one has not granted it."""
    LEASE_LOST = "lease-lost"
    """The proxy has no lease any more, or a newer process of its name took it."""
    STALE = "stale"
    """Made too long ago to know whether it counted already. It did not: make it again."""
    MALFORMED = "malformed"
    """The record is not a command."""
    UNSIGNED = "unsigned"
    """The record was not written with the control key that the log demands."""

    @property
    def told(self) -> str:
        """The code that operators and other clusters are told."""
        return self.value.upper().replace("-", "_")


class Refuse(Exception):
    """Raised where a rule forbids a command, becomes :class:`Rejected`."""

    def __init__(self, code: Rejection, message: str) -> None:
        super().__init__(message)
        self.code = code


def require(condition: object, code: Rejection, message: str) -> None:
    """Raise :class:`Refuse` unless ``condition`` holds."""
    if not condition:
        raise Refuse(code, message)


@dataclass(frozen=True, slots=True)
class NamespaceChanged:
    """Created (``before`` None), altered, or deleted (``after`` None)."""

    before: Namespace | None
    after: Namespace | None


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """Created, altered or deleted. Mappings are reported on their own."""

    before: Link | None
    after: Link | None


@dataclass(frozen=True, slots=True)
class NamespaceAttached:
    """Also reported when the operator's consent of an attached mapping changed, or what is set of it."""

    link: str
    mapping: NamespaceMapping


@dataclass(frozen=True, slots=True)
class NamespaceDetached:
    link: str
    mapping: NamespaceMapping


@dataclass(frozen=True, slots=True)
class HeldConfigChanged:
    """Held (``before`` None) or released (``after`` None)."""

    before: HeldConfig | None
    after: HeldConfig | None


@dataclass(frozen=True, slots=True)
class PromotionChanged:
    """Begun (``before`` None), taken over, or ended (``after`` None)."""

    before: Promotion | None
    after: Promotion | None


@dataclass(frozen=True, slots=True)
class ReversalChanged:
    """Begun (``before`` None), went on, or ended (``after`` None)."""

    before: Reversal | None
    after: Reversal | None


@dataclass(frozen=True, slots=True)
class ClientMoveChanged:
    """Clients are to be told to look for another cluster (``before`` None), or not any more (``after`` None)."""

    before: ClientMove | None
    after: ClientMove | None


@dataclass(frozen=True, slots=True)
class TreeChanged:
    """This cluster has another version of its tree, another target was chosen, or it has left the tree."""

    before: DistributionTree | None
    after: DistributionTree | None


@dataclass(frozen=True, slots=True)
class DistributorClaimed:
    """The process that distributes for a level from now on."""

    level: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class FollowerTopicChanged:
    before: FollowerTopic | None
    after: FollowerTopic | None


@dataclass(frozen=True, slots=True)
class ProvenanceChanged:
    """Ranges or source epochs of these partitions of a local topic changed."""

    topic: str
    topic_id: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TruncationChanged:
    """Begun (``before`` None), went on, or ended (``after`` is DONE)."""

    before: Truncation | None
    after: Truncation


@dataclass(frozen=True, slots=True)
class SourceLossChanged:
    """Found (``before`` None), went on, or is told no more (``after`` None)."""

    before: SourceLoss | None
    after: SourceLoss | None


@dataclass(frozen=True, slots=True)
class SyncChanged:
    """What is recorded of a partition of a synchronous link. None: it is Syncing, or the link synchronous no more."""

    link: str
    topic: str
    partition: int
    before: SyncRecord | None
    after: SyncRecord | None


@dataclass(frozen=True, slots=True)
class ClaimsRecorded:
    """Until when so many partitions that follow over a link were In-Sync."""

    link: str
    partitions: int


@dataclass(frozen=True, slots=True)
class AclsRecorded:
    """So many access control bindings of a principal namespace were made by links now."""

    prefix: str
    count: int


@dataclass(frozen=True, slots=True)
class ProducerIdsRegistered:
    cluster_id: str
    index: int


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    """Claimed (``before`` None), taken over or claimed anew, or ended (``after`` None)."""

    before: ProxyLease | None
    after: ProxyLease | None


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    lease: ProxyLease


@dataclass(frozen=True, slots=True)
class LevelRaised:
    """``key_id``: from now on records are signed with this control key (empty: none, as before)."""

    before: int
    after: int
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    as_of: int


Change = (
    NamespaceChanged
    | LinkChanged
    | NamespaceAttached
    | NamespaceDetached
    | HeldConfigChanged
    | PromotionChanged
    | ReversalChanged
    | ClientMoveChanged
    | TreeChanged
    | DistributorClaimed
    | FollowerTopicChanged
    | ProvenanceChanged
    | TruncationChanged
    | SourceLossChanged
    | SyncChanged
    | ClaimsRecorded
    | AclsRecorded
    | ProducerIdsRegistered
    | LeaseChanged
    | LeaseRenewed
    | LevelRaised
    | SnapshotTaken
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The command counts. No changes: the state was as asked already."""

    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The command counts for nothing."""

    code: Rejection
    message: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A late copy of a command. What came of it was reported at ``first_offset``."""

    first_offset: int


Outcome = Accepted | Rejected | Duplicate


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """A newer version wrote the record: it was passed over, or what it concerns is left alone from now on."""

    message: str
