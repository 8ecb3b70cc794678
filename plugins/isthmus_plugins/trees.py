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
    give_up: bool = False
    """The clusters that it takes out are lost, with what they have passed on to nobody; what they were given and is not
    known to be on all clusters of their side is given again."""
    own_messages: bool = False
    """The cluster that is asked is new, and what its topics hold never came over a tree: distribute it as its own."""


class ChooseTargetRequest(_Model):
    """Where a distributor of this cluster is to write."""

    leaf: str | None = None
    """None: as the document says."""
    give_up: bool = False
    """If the leaf that it writes to does not answer, give again what is not known to be on all clusters of its side."""
    dry_run: bool = False
    """Say what it comes to, and change nothing."""


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
    names: dict[str, str] = {}
    """By cluster: what topics are called there; empty: the same everywhere."""
    exactly_once: bool
    leaf: str
    """What this cluster is called."""
    clusters: list[PlannedCluster]
    drawing: str
    """For people."""


class ComparedTopic(_Model):
    """A topic of the tree that this cluster lacks, or that other clusters have with another number of partitions."""

    topic: str
    partitions: int
    """Here, or that it is made with."""
    elsewhere: dict[str, int]
    """By cluster: another number of partitions. Messages go by their keys between it and this cluster."""
    like: str | None = None
    """It is made, or would be, as that cluster has it. None: it is here."""
    replication_factor: int | None = None
    settings: dict[str, str] = {}
    """Its own, that it is made with."""
    settings_refused: dict[str, str] = {}
    """Those that the brokers here refuse, and what they say: it is made without."""
    reason: str | None = None
    """Why it is not made."""


class AppliedTree(_Model):
    """What was applied, or would be."""

    before: int | None
    """The version that this cluster had."""
    dry_run: bool
    added: dict[str, str]
    """Clusters that are new, each with the one that fills it: with all that it has, from retention on."""
    removed: list[str]
    """Clusters that are taken out."""
    not_empty: dict[str, list[str]]
    """By cluster that is new: where it has messages already. It cannot apply the version then; see `own_messages`."""
    blocked: list[str]
    """Why it cannot be applied yet; only a dry run says so, else it is refused."""
    topics: list[ComparedTopic]
    names_unfit: list[str] = []
    """Topics that this cluster has and others have no name for, by `names`: they are not distributed."""
    not_compared: dict[str, str]
    """Clusters that do not say which topics they have, and why."""
    plan: TreePlan


class LeftTree(_Model):
    """What was left, or would be."""

    dry_run: bool
    lacking: list[str]
    """What of this cluster is not known to be on all others."""


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
    target_partitions: int | None = None
    """The topic has another number of partitions at the target, and messages go by their keys. None: it has as many."""
    fill_until: int | None = None
    """The target is new: it gets all before this offset, whatever its flags. None: it has it."""
    left_out: bool = False
    """It is not distributed, or stands still at a message that the target refuses, also while that is tried again."""
    reason_code: str | None = None
    reason: str | None = None
    """Why it is left out, or else what of it was not distributed."""


class DistributorStatus(PlannedDistributor):
    """The distributor of one level of this cluster."""

    proxy: str | None
    """Which one runs it; None: none has claimed it."""
    state: Literal["Distributing", "Filling", "Waiting", "Elsewhere", "Unclaimed"]
    """``Filling``: the target is new, and gets what is there; ``Elsewhere``: another proxy runs it, which knows the
    rest."""
    reason_code: str | None = None
    reason: str | None = None
    """What it waits for."""
    given: int = 0
    """Messages that were given to targets since this proxy runs it."""
    refused: int = 0
    """Messages that stay here, since their flags cannot be read, since this proxy runs it."""
    lost: int = 0
    """Offsets that retention took before they were given, since this proxy runs it."""
    fill_left: int = 0
    """Offsets that a target that is new is to get yet of what was there when it came."""
    fill_total: int = 0
    """Of so many, in partitions that are not filled."""
    partitions: list[DistributedPartition] = []


class WaitingOffset(_Model):
    """A group's partition of which other clusters are told nothing, or that is not set here yet."""

    group: str
    topic: str
    partition: int
    origin: str | None
    """The cluster that has said how far the group has read; None: this one has nothing to say to others."""
    time_ms: int | None
    """Everything before it was read there."""
    reason_code: str
    reason: str


class OffsetsStatus(_Model):
    """How groups' committed offsets are distributed."""

    groups: list[str]
    """Prefixes of groups."""
    margin_ms: int
    """What other clusters are told is so much earlier."""
    margins_ms: dict[str, int] = {}
    """By prefix, where that is another one."""
    proxy: str | None
    """Which one distributes them; None: none."""
    state: Literal["Distributing", "Waiting", "Elsewhere", "Unclaimed"]
    reason_code: str | None = None
    reason: str | None = None
    """What it waits for, or what is to be seen to though it does not wait."""
    lag_ms: int | None = None
    """How late messages of other clusters may come here; None: that is not known."""
    sent: int = 0
    """Times that other clusters were told since this proxy distributes."""
    set: int = 0
    """Offsets that were committed here since then."""
    waiting: list[WaitingOffset] = []


class TreeStatus(_Model):
    """The tree that this cluster is a leaf of."""

    plan: TreePlan
    distributors: list[DistributorStatus]
    offsets: OffsetsStatus | None = None
    """None: groups' committed offsets are not distributed."""


class TreeOperations(Protocol):
    """What a distribution plugin offers to operators. Methods raise :class:`~isthmus_plugins.links.OperationError`."""

    def status(self) -> TreeStatus:
        """The tree of this cluster, and its distributors as this proxy knows them."""

    async def apply(self, request: ApplyTreeRequest) -> AppliedTree:
        """Have this cluster be a leaf of the next version of a tree."""

    async def choose_target(self, cluster: str, level: int, request: ChooseTargetRequest) -> TreeStatus:
        """Have the distributor of a level write to another leaf. ``cluster``: what this one is called."""

    async def go_back(self, group: str) -> TreeStatus:
        """Have a group go on here where other clusters say, also where it went on by itself."""

    async def leave(self, dry_run: bool, give_up: bool) -> LeftTree:
        """Distribute nothing from here any more. ``give_up``: also if others lack what is here."""

    def document(self) -> dict[str, Any]:
        """The tree's document, with all that it was applied without."""


def plan_of(plan: dict[str, Any], **more: Any) -> TreePlan:
    """``plan``: of :func:`isthmus_plugins.distribution.plan.as_json`."""
    return TreePlan.model_validate({**plan, **more})
