"""Everything the proxies of one cluster agree on.

A state is a value: applying a command (:mod:`isthmus_control.apply`) makes a new one and shares what did not change, so
it may be kept, compared and handed to any reader without a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from isthmus_control.acls import AclBinding
from isthmus_control.clock import ZERO, Hlc
from isthmus_control.codec import DERIVED, LEFT_OUT, since
from isthmus_control.concerns import Beyond
from isthmus_control.levels import CLIENT_MOVES, CONSENT, ORIGINS, REVERSALS, SIGNING, SOURCE_LOSSES, TREES
from isthmus_control.lookup import Lookup
from isthmus_control.model import (
    BrokerClaim,
    Claim,
    ClientMove,
    DistributionTree,
    FollowerTopic,
    GroupClaim,
    HeldConfig,
    Link,
    LinkToken,
    Namespace,
    NamespaceKey,
    NamespaceMapping,
    Promotion,
    ProvenanceRange,
    ProxyLease,
    ResourceType,
    Reversal,
    Role,
    SourceEpoch,
    SyncRecord,
    TopicHistory,
    contains,
)
from isthmus_control.origins import PartitionOrigins, TopicOrigins, from_history
from isthmus_control.source_losses import SourceLoss, held_of_topics
from isthmus_control.truncations import EpochShift, Succession, Truncation

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state after the record at ``applied_offset`` (-1: none yet).

    ``level`` is the log's feature level; ``key_id`` is the id of the control key that its records are signed with
    (empty: they are not). ``reversals`` are those under way, by their ids; ``client_moves`` are those whose time nobody
    has seen to be over. ``tree`` is the one that this cluster is a leaf of; ``distributors``: by level of it, the
    process that distributes, as long as its lease is among ``proxies``.
    ``superseded`` holds leases of processes that a newer one of the same name replaced: they may still run, so a
    reservation waits for them until their time is out. ``producer_id_ranges`` gives each source cluster its range of
    translated producer ids, never given again. ``acls`` are the access control bindings that links made here, by the
    prefix of the principal namespace. ``histories`` say from which source topics received what, ``origins`` which
    clusters wrote it first (:mod:`isthmus_control.origins`). ``truncations`` are those under way, by topic;
    ``past_truncations`` are the last that ended, in that order; ``epoch_shifts`` are those of topics that were made
    anew, and ``successions`` say from which ones, oldest first. ``source_losses`` are those that nobody acknowledged,
    or that are open, oldest first; ``source_losses_left_off``: by link, how many more there were. ``sync_records``: by
    name of a synchronous link, then (topic, partition), what is recorded of those that are not Syncing. ``claims``: by
    (topic, partition), what is recorded of leases that ran out, of topics that follow or did. ``group_claims``: the
    same of groups, by link and partition of the source's offsets topic. ``link_tokens`` are those that nobody has used,
    by their ids. ``recent_ids`` and ``recent_offsets`` are the
    commands that a late retry is recognised by; anything made before ``forgotten_offset`` is refused, so nothing counts
    twice. ``generation`` is that of the last log that an operator accepted as it was (0: never), in rising order.
    ``beyond`` is what this proxy alone does not know (:mod:`isthmus_control.concerns`).
    """

    cluster_id: str
    applied_offset: int = -1
    clock: Hlc = ZERO
    namespaces: Mapping[NamespaceKey, Namespace] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    links_created: int = 0
    link_tokens: Mapping[str, LinkToken] = field(default_factory=dict, metadata=since(CONSENT))
    follower_topics: Mapping[str, FollowerTopic] = field(default_factory=dict)
    histories: Mapping[str, TopicHistory] = field(default_factory=dict)
    origins: Mapping[str, TopicOrigins] = field(default_factory=dict, metadata=since(ORIGINS))
    truncations: Mapping[str, Truncation] = field(default_factory=dict)
    past_truncations: tuple[Truncation, ...] = ()
    promotions: Mapping[NamespaceKey, Promotion] = field(default_factory=dict)
    reversals: Mapping[str, Reversal] = field(default_factory=dict, metadata=since(REVERSALS))
    client_moves: Mapping[NamespaceKey, ClientMove] = field(default_factory=dict, metadata=since(CLIENT_MOVES))
    tree: DistributionTree | None = field(default=None, metadata=since(TREES))
    distributors: Mapping[int, str] = field(default_factory=dict, metadata=since(TREES))
    held_configs: Mapping[str, HeldConfig] = field(default_factory=dict)
    epoch_shifts: Mapping[str, EpochShift] = field(default_factory=dict)
    successions: Mapping[str, tuple[Succession, ...]] = field(default_factory=dict)
    source_losses: tuple[SourceLoss, ...] = field(default=(), metadata=since(SOURCE_LOSSES))
    source_losses_left_off: Mapping[str, int] = field(default_factory=dict, metadata=since(SOURCE_LOSSES))
    sync_records: Mapping[str, Mapping[tuple[str, int], SyncRecord]] = field(default_factory=dict)
    claims: Mapping[tuple[str, int], Claim] = field(default_factory=dict)
    group_claims: Mapping[tuple[str, int], GroupClaim] = field(default_factory=dict)
    proxies: Mapping[str, ProxyLease] = field(default_factory=dict)
    superseded: Mapping[str, ProxyLease] = field(default_factory=dict)
    producer_id_ranges: Mapping[str, int] = field(default_factory=dict)
    acls: Mapping[str, tuple[AclBinding, ...]] = field(default_factory=dict)
    snapshot_offset: int = -1
    recent_ids: tuple[str, ...] = ()
    recent_offsets: tuple[int, ...] = ()
    forgotten_offset: int = -1
    generation: int = field(default=0, metadata=LEFT_OUT)
    level: int = field(default=0, metadata=since(1))
    key_id: str = field(default="", metadata=since(SIGNING))
    beyond: tuple[Beyond, ...] = field(default=(), metadata=DERIVED)
    lookup: Lookup = field(init=False, repr=False, compare=False, metadata=DERIVED)
    held_losses: Mapping[tuple[str, str], tuple[SourceLoss, ...]] = field(
        init=False, repr=False, compare=False, metadata=DERIVED
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", Lookup(self.namespaces, self.links, self.beyond, self.reversals.values()))
        object.__setattr__(self, "held_losses", held_of_topics(self.source_losses))

    def evolve(self, **changes: Any) -> ControlState:
        """A state with these fields replaced. What is compiled of others is kept where nothing it reads has changed."""
        if not changes.keys().isdisjoint(("namespaces", "links", "beyond", "reversals")):
            return dataclasses.replace(self, **changes)
        new = object.__new__(ControlState)
        for name in self.__slots__:
            object.__setattr__(new, name, changes[name] if name in changes else getattr(self, name))
        if "source_losses" in changes:
            object.__setattr__(new, "held_losses", held_of_topics(new.source_losses))
        return new

    @property
    def entries(self) -> int:
        """How many there are in those tables that grow with a cluster's topics: what a snapshot of it costs."""
        synced = sum(len(records) for records in self.sync_records.values())
        recorded = len(self.histories) + len(self.origins)
        return len(self.follower_topics) + recorded + len(self.claims) + synced

    def namespace(self, kind: ResourceType, prefix: str) -> Namespace | None:
        return self.namespaces.get(NamespaceKey(kind, prefix))

    def attachments(self, key: NamespaceKey) -> tuple[tuple[Link, NamespaceMapping], ...]:
        """The links a local namespace is attached to."""
        return tuple(
            (link, mapping)
            for link in self.links.values()
            for mapping in link.mappings
            if mapping.type is key.type and mapping.local_prefix == key.prefix
        )

    def reversal_of(self, key: NamespaceKey) -> Reversal | None:
        """The reversal that a namespace is in."""
        return next((each for each in self.reversals.values() if key in each.keys), None)

    @property
    def disables_transaction_verification(self) -> bool:
        """Whether some mapping stands with the operator's consent to that, or what stood with it is being promoted."""
        return bool(self.held_configs and self.promotions) or any(
            mapping.disable_transaction_verification and mapping.role is Role.FOLLOWER
            for link in self.links.values()
            for mapping in link.mappings
        )

    def is_promoted(self, topic: str) -> bool:
        """Whether a topic is in a namespace that is being promoted."""
        return any(key.type is ResourceType.TOPIC and contains(*key, topic) for key in self.promotions)

    def may_run(self, incarnation: str) -> bool:
        """Whether the lease of a process may still run, also of one that a newer process replaced."""
        return incarnation in self.superseded or any(
            lease.incarnation == incarnation for lease in self.proxies.values()
        )

    def provenance(self, topic: str, partition: int) -> tuple[ProvenanceRange, ...]:
        """Where the records of a partition came from; empty for one that never followed."""
        history = self.histories.get(topic)
        return history.partitions.get(partition, ()) if history else ()

    def source_epochs(self, topic: str, partition: int) -> tuple[SourceEpoch, ...]:
        """The source's leader epochs in the range that is being followed."""
        history = self.histories.get(topic)
        current = history.open_range(partition) if history else None
        return current.epochs if current else ()

    def origins_of(self, topic: str, topic_id: str, partition: int) -> PartitionOrigins:
        """Which clusters wrote a partition's records first; nothing of a topic that took its name.

        Where that was not recorded yet, its direct sources are assumed.
        """
        known = self.origins.get(topic)
        if known is not None and known.topic_id == topic_id and partition in known.partitions:
            return known.partitions[partition]
        history = self.histories.get(topic)
        if history is None or history.topic_id != topic_id:
            return PartitionOrigins()
        return from_history(history.partitions.get(partition, ()), self.cluster_id, whole=self.generation == 0)

    def predecessors(self, topic: str, topic_id: str) -> tuple[Succession, ...]:
        """How a local topic came to be, oldest first, if truncations made it; nothing of one that took its name."""
        known = self.successions.get(topic, ())
        return known if known and known[-1].successor == topic_id else ()

    def held(self, topic: str, topic_id: str | None, partition: int | None = None) -> SourceLoss | None:
        """What the source lost of a topic that follows, or of one partition of it, if that waits for the operator."""
        losses = self.held_losses.get((topic, topic_id), ()) if topic_id is not None else ()
        return next((loss for loss in losses if partition in (None, loss.partition)), None)

    def sync_record(self, link: str, topic: str, topic_id: str, partition: int) -> SyncRecord | None:
        """What is recorded of a partition of a synchronous link; None: it is Syncing (or it took another's name)."""
        record = self.sync_records.get(link, {}).get((topic, partition))
        return record if record is not None and record.topic_id == topic_id else None

    def claim(self, topic: str, topic_id: str | None, partition: int) -> Claim | None:
        """What is recorded of a partition's leases; None: nothing is known (or of another topic of that name)."""
        claim = self.claims.get((topic, partition))
        return claim if claim is not None and claim.topic_id == topic_id else None

    def group_claim(self, link: str, link_id: str, partition: int) -> GroupClaim | None:
        """What is recorded of leases of the groups of a partition of a source's offsets topic."""
        claim = self.group_claims.get((link, partition))
        return claim if claim is not None and claim.link_id == link_id else None

    def broker_addresses(self) -> dict[int, BrokerClaim]:
        """By broker id, where clients reach it. Brokers that no proxy fronts are missing."""
        return {claim.broker_id: claim for lease in self.proxies.values() for claim in lease.brokers}


def changed_keys(before: Mapping[K, V], after: Mapping[K, V]) -> list[K]:
    """Where two states' tables differ: what is in one alone, or has another value, which is another object."""
    if before is after:
        return []
    others = [key for key, value in after.items() if before.get(key) is not value]
    if len(before) + sum(key not in before for key in others) == len(after):
        return others  # nothing is gone: of thousands mostly one is another
    return others + [key for key in before if key not in after]
