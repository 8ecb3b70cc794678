"""What is asked of a drill of a failover, and what it says."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus_plugins.links import NamespaceRef


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class DrillFailover(_Model):
    """Which follower namespaces of one link would be failed over."""

    namespaces: list[NamespaceRef] = Field(default=[], description="none: all that follow over the link")


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


class DrillReport(_Model):
    link_name: str
    asked: Literal["follower", "leader"]
    """The role of the cluster that was asked."""
    namespaces: list[NamespaceRef]
    """Of the cluster that was asked."""
    lost: LostByFailover
