"""What is asked of a drill of a failover, and what it says."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus_plugins.links import NamespaceRef

PARTITIONS_MAX = 1_000
"""Of a copy, where nobody says otherwise: so many more the cluster has meanwhile."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class DrillFailover(_Model):
    """A failover of follower namespaces of one link that is tried on a copy of them."""

    namespaces: list[NamespaceRef] = Field(default=[], description="none: all that follow over the link")
    partitions_max: int = Field(
        default=PARTITIONS_MAX, ge=1, le=200_000, description="no copy is made that has more partitions than this"
    )
    dry_run: bool = Field(default=False, description="make no copy: say what would be lost, and how large it would be")


class PartitionLoss(_Model):
    """A partition of which the source has what the follower has not confirmed, or of which that is not known."""

    topic: str
    """The local name, of the cluster that is asked."""
    partition: int
    source_end: int | None
    """Where the source's log ends."""
    confirmed: int | None
    """Before which offset the follower has confirmed all."""
    records: int | None
    """Offsets between the two; None: not known."""
    acked_records: int | None
    """Of these, those that clients may have been acked: none where it is In-Sync."""
    seconds: float | None
    """How long ago the oldest of these was first seen."""
    message: str | None = None
    """Why it is not known, or what else the source says of the partition."""


class GroupLoss(_Model):
    """A consumer group of which the source has commits that the follower does not have yet."""

    group: str
    """The local name."""
    positions: int | None
    """None: not known."""
    seconds: float | None
    message: str | None = None


class LostByFailover(_Model):
    """What a failover now would lose (recovery point), as the source's proxies know it."""

    known: bool
    """False: the figures are not of all, or not of now; ``reason`` says why."""
    reason: str | None = None
    """SOURCE_AWAY: they are what this proxy was told last. SOURCE_PARTITIONS_UNKNOWN: nobody said them of some
    partitions, which are not in the sums. PEER_VERSION_UNSUPPORTED: the source's proxies do not say them."""
    message: str | None = None
    as_of_seconds: float | None = 0.0
    """Age of the figures; None: there are none."""
    records: int | None = None
    """Offsets that the source's logs have and the follower has not confirmed."""
    acked_records: int | None = None
    """Of these, those that clients may have been acked: without what is In-Sync, whose acks wait. None: not known."""
    seconds: float | None = None
    """How long ago the oldest of these was first seen: what a failover loses of time."""
    positions: int | None = None
    """Committed offsets of groups that the follower does not have yet; None: not known of all groups."""
    positions_seconds: float | None = None
    partitions_total: int = 0
    partitions: list[PartitionLoss] = []
    """Those that lose something, or of which that is not known."""
    groups: list[GroupLoss] = []
    """Those that lose something, or of which that is not known."""


class CopySize(_Model):
    """What a copy has, of what follows."""

    topics: int
    partitions: int
    groups: int
    not_copied: list[NamespaceRef] = []
    """Principals: of them a failover records alone that they are this cluster's."""


class MeasuredFailover(_Model):
    """How long a failover of the copy took (recovery time)."""

    seconds: float
    """From the moment the source was heard last until clients may write: leases, look, and carry out. That is where the
    command is given at once, and the source's connections broke; that it only fell silent is seen after 8 s."""
    leases_seconds: float
    """Not measured, and the longest: what the source was promised runs out so long after it was heard last."""
    look_seconds: float
    """What is there, what is open, what acks meant."""
    carry_out_seconds: float
    """Recorded, detached, transactions ended, settings given back, and every proxy lets clients write."""
    write_seconds: float
    """Beyond that: until each partition of the copy had taken a record."""
    positions: int
    """Committed offsets that the copies of groups had."""
    transactions_ended: int
    transactions_committed: int
    """Of these, as the source had decided."""
    settings_refused: list[str] = []
    """As of a failover."""
    copy_seconds: float
    """How long it took to make the copy, which is no part of a failover."""


class DrillReport(_Model):
    link_name: str
    dry_run: bool
    asked: Literal["follower", "leader"]
    """The role of the cluster that was asked."""
    namespaces: list[NamespaceRef]
    """Of the cluster that was asked."""
    lost: LostByFailover
    copy_size: CopySize | None = None
    """None: this cluster leads, and has no copy made."""
    measured: MeasuredFailover | None = None
    """None: nothing was tried."""
    copy_deleted: bool = True
    """False: it is being deleted; `isthmus link describe` shows it until it is gone."""
