"""What operators ask of the tree of clusters, and what they are answered (docs/adr/0033).

All models go over REST as they are, so they are also the schema of ``isthmus tree show -o json``.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ApplyTreeRequest(_Model):
    """The next version of a tree, as YAML."""

    document: str = Field(max_length=256 * 1024)
    dry_run: bool = False
    """Say what it comes to, and change nothing."""


class ChooseTargetRequest(_Model):
    """Where a distributor of this cluster is to write."""

    leaf: str | None = None
    """None: as the document says."""
    give_up: bool = False
    """If the leaf that it writes to does not answer, give again what is not known to be on all clusters of its side."""


class PlannedDistributor(_Model):
    level: int
    bit: int
    """Of the copy flags, which it sets."""
    mask: int
    """It passes on what has none of these bits."""
    target: str
    other_targets: list[str]
    """More leaves that could be the target."""


class PlannedCluster(_Model):
    name: str
    distributors: list[PlannedDistributor]


class TreePlan(_Model):
    """What a version of a tree comes to."""

    version: int
    header: str
    topics: list[str]
    """Prefixes of those that are distributed."""
    exactly_once: bool
    leaf: str
    """What this cluster is called."""
    clusters: list[PlannedCluster]
    drawing: str
    """For people."""


class AppliedTree(_Model):
    """What was applied, or would be."""

    before: int | None
    """The version that this cluster had."""
    dry_run: bool
    plan: TreePlan


class DistributedPartition(_Model):
    """A partition of this cluster, as one level of it is distributed."""

    topic: str
    partition: int
    position: int | None = None
    """The target was given everything before it, as this proxy knows."""
    settled: int | None = None
    """Everything before it is on all clusters of the target's side."""
    lag: int | None = None
    """Offsets of committed records that the target was not given yet."""
    reason_code: str | None = None
    reason: str | None = None
    """Why it is not distributed, or what of it is not."""


class DistributorStatus(PlannedDistributor):
    """The distributor of one level of this cluster."""

    proxy: str | None
    """Which one runs it; None: none has claimed it."""
    state: Literal["Distributing", "Waiting", "Elsewhere", "Unclaimed"]
    """``Elsewhere``: another proxy runs it, which knows the rest."""
    reason_code: str | None = None
    reason: str | None = None
    """What it waits for."""
    given: int = 0
    """Messages that were given to targets since this proxy runs it."""
    refused: int = 0
    """Messages that stay here, since their flags cannot be read, since this proxy runs it."""
    lost: int = 0
    """Offsets that retention took before they were given, since this proxy runs it."""
    partitions: list[DistributedPartition] = []


class TreeStatus(_Model):
    """The tree that this cluster is a leaf of."""

    plan: TreePlan
    distributors: list[DistributorStatus]


class TreeOperations(Protocol):
    """What a distribution plugin offers to operators. Methods raise :class:`~isthmus_plugins.links.OperationError`."""

    def status(self) -> TreeStatus:
        """The tree of this cluster, and its distributors as this proxy knows them."""

    async def apply(self, request: ApplyTreeRequest) -> AppliedTree:
        """Have this cluster be a leaf of the next version of a tree."""

    async def choose_target(self, cluster: str, level: int, request: ChooseTargetRequest) -> TreeStatus:
        """Have the distributor of a level write to another leaf. ``cluster``: what this one is called."""

    async def leave(self) -> None:
        """Distribute nothing from here any more."""


def plan_of(plan: dict[str, Any], **more: Any) -> TreePlan:
    """``plan``: of :func:`isthmus_plugins.distribution.plan.as_json`."""
    return TreePlan.model_validate({**plan, **more})
