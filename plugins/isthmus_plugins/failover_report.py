"""What is asked of a failover, and what it says."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from isthmus_plugins.links import AnyOf, MoveClientsSeconds, NamespaceRef, PromotedNamespace


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Failover(_Model):
    """Namespaces of one link that are to be promoted together, without their source."""

    namespaces: list[NamespaceRef] = Field(default=[], description="none: all that follow over the link")
    although_reachable: bool = Field(
        default=False, description="go on although the other cluster is connected, so that it could be promoted"
    )
    move_clients_seconds: MoveClientsSeconds = 0
    dry_run: bool = Field(default=False, description="change nothing, say what an ack meant and what would be ended")


class PartitionClaim(_Model):
    """What an ack of the source meant for one partition."""

    topic: str
    partition: int
    end: int | None
    """Where its log ends here."""
    in_sync_until_ms: int | None = None
    """Whatever the source acked before this moment of this cluster's clock is here. None: nothing can be said."""
    in_sync_until_seconds_ago: float | None = None
    any_of: AnyOf | None = None
    """In place of that, where the source's namespaces ask for some of several links alone."""
    degrade_after_ms: int | None = None
    """So long after this side got Out-Of-Sync, transactional and strict producers were acked without it, if nobody
    changed that after it was reported last. None: never."""
    message: str


class GroupClaim(_Model):
    """What an ack of the source meant for the positions of one group."""

    group: str
    partition: int | None
    """Of the source's offsets topic. None: it is not known how many it has."""
    in_sync_until_ms: int | None = None
    """Whatever the source acked before this moment of this cluster's clock is here. None: nothing can be said."""
    in_sync_until_seconds_ago: float | None = None
    any_of: AnyOf | None = None
    """In place of that, where the source's namespaces ask for some of several links alone."""
    degrade_after_ms: int | None = None
    """So long after this side got Out-Of-Sync, commits in transactions, and all of strict namespaces, were acked
    without it, if nobody changed that after it was reported last. None: never."""
    message: str


class FailedOverNamespace(PromotedNamespace):
    claims: list[PartitionClaim] = Field(default=[])
    group_claims: list[GroupClaim] = Field(default=[])
    """Of the groups that are here."""
    all_groups_until_ms: int | None = None
    """Whatever the source acked before this moment to any group, also one that is not here, is here. None: it is not
    known."""
    settings_kept: list[str] = Field(default=[])
    """Topics whose source never sent its settings: they keep those of a follower."""


class FailoverReport(_Model):
    link_name: str
    dry_run: bool
    mode: str
    reachable: bool
    """The other cluster is connected, so `promote` may do."""
    last_heard_seconds: float | None
    """Time since the other cluster was heard by this proxy; None: never, since it started."""
    namespaces: list[FailedOverNamespace]
