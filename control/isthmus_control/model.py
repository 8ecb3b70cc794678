"""The nouns of the control state, as frozen values.

Together they make the :class:`~isthmus_control.control_state.ControlState` of one cluster. What both clusters of a
link know is mirrored by messages between them; each cluster has a log and a state of its own.

Times are wall clock milliseconds and for people only: no decision depends on them but the hybrid logical clock of
mirrored settings. ``*_offset`` without further words is an offset in the command log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from isthmus_control.bounds import SYNC_CONFIRM_TIMEOUT_MS, VERIFY_EVERY, VERIFY_EVERY_MS, VERIFY_OFF
from isthmus_control.clock import Hlc, Register, merge_registers
from isthmus_control.clock import latest as latest_register
from isthmus_control.codec import since
from isthmus_control.demands import NONE as NO_DEMANDS
from isthmus_control.demands import Demands
from isthmus_control.levels import (
    CLIENT_MOVES,
    CONSENT,
    DRILLS,
    FROM_FIRST,
    ORIGINS,
    PROOFS,
    REVERSALS,
    SECRET_ROTATION,
    SOURCE_DELETIONS,
    SOURCE_LOSSES,
    STALE_READS,
    key_id_of,
    known_level,
)
from isthmus_control.proofs import Proof
from isthmus_control.sealing import Sealed
from isthmus_protocol.offsets_copy import COPY_PREFIX, copy_name
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

INTERNAL_PREFIX = "__isthmus_"
"""Topics and consumer groups of the proxies themselves. No client writes them, no namespace holds them."""
CONTROL_TOPIC = INTERNAL_PREFIX + "control"
TRANSACTIONS_TOPIC = INTERNAL_PREFIX + "transactions"
AUDIT_TOPIC = INTERNAL_PREFIX + "audit"

DRILL_PREFIX = INTERNAL_PREFIX + "drill_"
"""Copies on which a failover is tried (:class:`Drill`): topics and groups of the proxies, in namespaces of theirs."""

TOPIC_NAME_CHARS_MAX = 249
"""Of a topic's name, all ASCII: brokers have no longer one, and clients may ask for any."""

KAFKA_INTERNAL_TOPICS = frozenset(
    ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata", "__remote_log_metadata")
)
"""Kafka's own topics, about its own partitions: never part of a namespace, whatever its prefix."""

INTERNAL_TOPIC_PREFIXES = (INTERNAL_PREFIX, COPY_PREFIX)
"""Also of copies of other clusters' offsets topics: links write those, and no client does."""


TRANSACTION_VERIFICATION = "transaction.partition.verification.enable"
"""The brokers' setting (KIP-890) with which they take transactional records of their own producers alone."""

SYNC_CONFIRM_TIMEOUT = "sync.confirm.timeout.ms"
"""The setting of a link: how long an ack may wait for the other side."""

FOLLOWER_REPLICATION_FACTOR = "follower.replication.factor"
"""The setting of a link: how many replicas its follower topics are to have; without it as many as at the source."""

FOLLOWER_IN_SYNC_MIN = "follower.min.insync.replicas"
"""The setting of a link: ``min.insync.replicas`` of its follower topics; without it what their source has."""


class ResourceType(StrEnum):
    """What a namespace holds (KIP-986)."""

    TOPIC = "topic"
    CONSUMER_GROUP = "consumer-group"
    PRINCIPAL = "principal"


class NamespaceKey(NamedTuple):
    """What names a namespace in its cluster."""

    type: ResourceType
    prefix: str

    def __str__(self) -> str:
        return f"{self.type} namespace {self.prefix!r}"


def contains(kind: ResourceType, prefix: str, name: str) -> bool:
    """Whether the namespace with ``prefix`` holds the resource ``name``.

    The empty prefix leaves out names that start with an underscore (KIP-986). Internal topics and groups are in none,
    but for those of a drill, which are in the drill's namespaces alone.
    """
    if not name.startswith(prefix) or not (prefix or not name.startswith("_")):
        return False
    return prefix.startswith(DRILL_PREFIX) or not is_internal(kind, name)


def is_internal(kind: ResourceType, name: str) -> bool:
    """Whether a resource is Kafka's own, or the proxies', and in no namespace."""
    if kind is ResourceType.TOPIC:
        return is_internal_topic(name)
    return kind is ResourceType.CONSUMER_GROUP and name.startswith(INTERNAL_PREFIX)


def is_internal_topic(name: str) -> bool:
    """Whether a topic is Kafka's own, or the proxies', whatever else begins with underscores."""
    return name in KAFKA_INTERNAL_TOPICS or name.startswith(INTERNAL_TOPIC_PREFIXES)


def overlap(left: str, right: str) -> bool:
    """Whether some name could be in both of these prefixes' namespaces (of one resource type)."""
    if left.startswith(DRILL_PREFIX) != right.startswith(DRILL_PREFIX):
        return False
    if not left or not right:
        return not (left or right).startswith("_")
    return left.startswith(right) or right.startswith(left)


def rename(kind: ResourceType, prefix: str, other_prefix: str, name: str) -> str | None:
    """The name that ``name`` of namespace ``prefix`` has in namespace ``other_prefix``.

    None where either namespace does not hold it: ``x-_a`` has no counterpart in the namespace with the empty prefix.
    """
    if not contains(kind, prefix, name):
        return None
    other = other_prefix + name[len(prefix) :]
    return other if contains(kind, other_prefix, other) else None


@dataclass(frozen=True, slots=True)
class EnabledPlugin:
    """A plugin that is enabled for a namespace."""

    name: str
    settings: str
    """A JSON object in its canonical form, for the plugin's own schema."""
    version: int
    """Of that schema."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A prefix of topics, groups or principals of one cluster.

    ``reserved_at_offset`` is where the current reservation stands in the log: it counts as made when every proxy
    enforces the log up to there. ``informational`` namespaces cannot be part of a synchronous link. ``demands``: what
    is asked of synchronous links that lead it. ``plugins``: those enabled for it, in the order in which they see a
    request; they count when every proxy enforces the log up to ``plugins_at_offset``, where they were changed last.
    ``stale_reads``: consumers of topics that follow over a synchronous link read them while it is not known that they
    are In-Sync.
    """

    type: ResourceType
    prefix: str
    created_ms: int
    reserved: bool = False
    reserved_reason: str | None = None
    reserved_at_offset: int | None = None
    informational: bool = False
    demands: Demands = NO_DEMANDS
    plugins: tuple[EnabledPlugin, ...] = ()
    plugins_at_offset: int | None = None
    stale_reads: bool = field(default=True, metadata=since(STALE_READS))

    @property
    def key(self) -> NamespaceKey:
        return NamespaceKey(self.type, self.prefix)

    def __contains__(self, name: str) -> bool:
        return contains(self.type, self.prefix, name)


class LinkMode(StrEnum):
    """When the source acknowledges (KIP-986): before or after the record is replicated."""

    ASYNCHRONOUS = "asynchronous"
    SYNCHRONOUS = "synchronous"


class SyncState(StrEnum):
    """What is recorded of a partition of a synchronous link, at the source. No record: it is Syncing."""

    IN_SYNC = "In-Sync"
    OUT_OF_SYNC = "Out-Of-Sync"


class Role(StrEnum):
    """The role of the local namespace of a mapping."""

    LEADER = "leader"
    FOLLOWER = "follower"

    @property
    def other(self) -> Role:
        return Role.FOLLOWER if self is Role.LEADER else Role.LEADER


class OffsetsForm(StrEnum):
    """In which form the leader's offsets topic is copied (KIP-986)."""

    WHOLE = "whole"
    REDACTED = "redacted"
    """The records of chosen groups."""
    ENCRYPTED = "encrypted"
    """The records of each group that has a key, encrypted with it."""


@dataclass(frozen=True, slots=True)
class OffsetsCopy:
    """How the leader's offsets topic is copied. ``groups``: patterns of those whose records are, where REDACTED."""

    form: OffsetsForm
    groups: tuple[str, ...] = ()


class OnSourceLoss(StrEnum):
    """What becomes of what the source lost although it had acked it In-Sync, and the target has."""

    CUT = "cut"
    """The target is cut to the source's log; what goes is salvaged (KIP-986)."""
    HOLD = "hold"
    """Nothing is cut: the partition stands still until an operator decides."""


class OnSourceDelete(StrEnum):
    """What becomes of a follower topic when its source's topic is deleted."""

    KEEP = "keep"
    """It keeps its records until an operator decides."""
    DELETE = "delete"
    """It is deleted as well."""


class AgreedCut(NamedTuple):
    """A topic that an operator agreed to have cut to what it shares with its source's.

    ``token`` stands for the ends of its logs and of what is shared: at others the topic is not cut. Empty: nothing of
    it is to be cut. ``shared``: what the operator says is shared where nobody has recorded it, as (partition, offset).
    """

    topic_id: str
    token: str
    shared: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class NamespaceMapping:
    """A pair of namespaces attached to a link, or (``offsets``) the pair of an offsets topic and its copy.

    ``truncate_topic_ids``: the operator agreed, after a dry run, that these topics of the follower namespace, which
    hold other records, are emptied to follow (ids: a topic that takes such a name later is another one).
    ``disable_transaction_verification``: the operator agreed that the follower's brokers go without
    :data:`TRANSACTION_VERIFICATION` while the mapping stands. ``on_source_loss``: of a follower; None: HOLD where the
    source's namespace is strict, else CUT. ``on_source_delete``: of a follower of topics; None: KEEP.
    ``cuts``: the operator agreed that these topics are cut to what they share with the source's, as they were then.
    """

    type: ResourceType
    local_prefix: str
    remote_prefix: str
    role: Role
    attached_ms: int
    attached_at_offset: int
    truncate_topic_ids: tuple[str, ...] = ()
    disable_transaction_verification: bool = False
    offsets: OffsetsCopy | None = None
    on_source_loss: OnSourceLoss | None = field(default=None, metadata=since(SOURCE_LOSSES))
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=since(SOURCE_DELETIONS))
    cuts: tuple[AgreedCut, ...] = field(default=(), metadata=since(ORIGINS))

    @property
    def local(self) -> NamespaceKey:
        return NamespaceKey(self.type, self.local_prefix)

    def agreed_cut(self, topic_id: str) -> str | None:
        """What the operator agreed to of a topic of that id (see :class:`AgreedCut`); None: not to have it cut."""
        return next((each.token for each in self.cuts if each.topic_id == topic_id and each.token), None)

    def said_shared(self, topic_id: str) -> Mapping[int, int]:
        """Up to where an operator says that partitions of a topic of that id are the source's."""
        return next((dict(each.shared) for each in self.cuts if each.topic_id == topic_id), {})

    def holds(self, local_name: str) -> bool:
        """Whether the local namespace holds a resource."""
        return contains(self.type, self.local_prefix, local_name)

    @property
    def leads_groups(self) -> bool:
        return self.type is ResourceType.CONSUMER_GROUP and self.role is Role.LEADER

    def remote_name(self, local_name: str) -> str | None:
        """The remote counterpart of a local resource, None where this mapping does not hold it."""
        if self.offsets is not None:
            return self.remote_prefix if local_name == self.local_prefix else None
        return rename(self.type, self.local_prefix, self.remote_prefix, local_name)

    def local_name(self, remote_name: str) -> str | None:
        """The local counterpart of a remote resource, None where this mapping does not hold it."""
        if self.offsets is not None:
            return self.local_prefix if remote_name == self.remote_prefix else None
        return rename(self.type, self.remote_prefix, self.local_prefix, remote_name)


class Right(StrEnum):
    """What the other cluster of a link may have done here without asking."""

    FOLLOW = "follow"
    """It may follow what a namespace here holds."""
    LEAD = "lead"
    """A namespace here follows it, and is reserved."""
    REPLACE = "replace"
    """What topics here hold may be cut, or deleted, so that they follow."""
    BROKER_SETTINGS = "broker-settings"
    """Settings of the brokers here may be changed so that they follow; of no namespace."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A right of the other cluster of a link, in all namespaces whose prefixes begin with ``prefix``.

    ``attached``: it came with a pair that this side attached, or had when grants began; :mod:`isthmus_control.grants`.
    """

    right: Right
    type: ResourceType = ResourceType.TOPIC
    prefix: str = ""
    attached: bool = False

    def __str__(self) -> str:
        if self.right is Right.BROKER_SETTINGS:
            return self.right.value
        kind = "" if self.type is ResourceType.TOPIC else f"{self.type}:"
        return f"{self.right}:{kind}{self.prefix}"


@dataclass(frozen=True, slots=True)
class LinkToken:
    """What one token of this cluster's is verified by (:mod:`isthmus_control.tokens`), and what it grants.

    ``public_key``: hexadecimal, of the holder's signatures. ``acceptor_key``: with it this cluster proves itself to the
    holder. ``expires_ms`` is compared with the wall clock of the proxy that is shown the token.
    """

    token_id: str
    public_key: str
    acceptor_key: Sealed
    grants: tuple[Grant, ...]
    created_ms: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A pair of namespaces that is to be attached once the operator of the asked cluster grants it.

    Names and role are those of the side whose state this is. ``asked_here``: this cluster's operator asked, so it
    carries that out; else the other one's did. ``cut``: the word by which the operator agreed to have topics cut,
    ``shared_until``: what the operator says is shared, as (topic, partition, offset); both are with the side that was
    asked. The rest: what was asked, see :class:`~isthmus_control.commands.AttachNamespace`.
    """

    type: ResourceType
    local_prefix: str
    remote_prefix: str
    role: Role
    asked_here: bool
    truncate_target: bool = False
    disable_transaction_verification: bool = False
    on_source_loss: OnSourceLoss | None = None
    on_source_delete: OnSourceDelete | None = None
    asked_ms: int = 0
    cut: str | None = field(default=None, metadata=since(ORIGINS))
    shared_until: tuple[tuple[str, int, int], ...] = field(default=(), metadata=since(ORIGINS))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What is set of a link, by either cluster.

    ``config``: by setting name; None is a setting that was removed. It and ``mode`` are mirrored: equal on both sides
    but for changes that have not met yet. ``addresses``: by cluster id, where that cluster's link listeners are
    (``host:port``), as this side reaches them.
    """

    mode: Register[LinkMode]
    addresses: Mapping[str, Register[tuple[str, ...]]]
    config: Mapping[str, Register[str | None]]

    def merge(self, other: LinkSettings) -> LinkSettings:
        """Field by field, the later write. Commutative, associative, idempotent."""
        return LinkSettings(
            mode=latest_register(self.mode, other.mode),
            addresses=merge_registers(self.addresses, other.addresses),
            config=merge_registers(self.config, other.config),
        )

    @property
    def newest(self) -> Hlc:
        """The time of the newest write in it."""
        registers: list[Register[Any]] = [self.mode, *self.addresses.values(), *self.config.values()]
        return max(register.written for register in registers)


@dataclass(frozen=True, slots=True)
class NextSecret:
    """The secret that a link is to have, which counts beside the one that it has. ``secret_id``: a UUID.

    ``asked``: the other side asked for it, and may have given it up.
    """

    secret_id: str
    secret: Sealed
    asked: bool


@dataclass(frozen=True, slots=True)
class Drill:
    """What makes a link one that leads nowhere: a copy of what follows over ``link`` follows it, to be failed over.

    ``owner``: the incarnation of the proxy that tries that; when it is gone any other one deletes the copy.
    """

    link: str
    owner: str


@dataclass(frozen=True, slots=True)
class Link:
    """One side's view of a pair of clusters.

    ``link_id`` (a UUID) is the same on both sides, so a link that was deleted and made again under its name is another
    one. ``number`` counts this cluster's links and is never given again: a link's own producer ids come from it
    (:mod:`isthmus_protocol.producer_ids`). ``dials``: this side opens the connections. The secret is this side's
    sealed copy and is never mirrored.
    """

    name: str
    link_id: str
    number: int
    local_cluster_id: str
    remote_cluster_id: str
    dials: bool
    settings: LinkSettings
    created_ms: int
    secret: Sealed | None = None
    mappings: tuple[NamespaceMapping, ...] = ()
    offsets_topics: tuple[NamespaceMapping, ...] = ()
    """At most one for each role: this side's offsets topic led, a copy of the other side's following."""
    synchronous_at_offset: int | None = None
    """Where the change to the synchronous mode stands in this side's log; None while the link is asynchronous."""
    secret_id: str = field(default="", metadata=since(SECRET_ROTATION))
    """Of the rotation that the secret is of, the same at both sides; empty: the one that the link was created with."""
    next_secret: NextSecret | None = field(default=None, metadata=since(SECRET_ROTATION))
    grants: tuple[Grant, ...] = field(default=(), metadata=since(CONSENT))
    """What the other cluster may have done here."""
    waiting: tuple[AttachRequest, ...] = field(default=(), metadata=since(CONSENT))
    """What is to be attached, and waits for an operator."""
    drill: Drill | None = field(default=None, metadata=since(DRILLS))
    """Nobody is at its other end."""

    @property
    def secrets(self) -> dict[str, Sealed]:
        """What may prove that a peer is of this link, by ids; the one to dial with comes first."""
        found = {} if self.secret is None else {self.secret_id: self.secret}
        return found if self.next_secret is None else {**found, self.next_secret.secret_id: self.next_secret.secret}

    @property
    def topic_mappings(self) -> tuple[NamespaceMapping, ...]:
        """Whatever pairs topics."""
        return (*(each for each in self.mappings if each.type is ResourceType.TOPIC), *self.offsets_topics)

    def pairs(self, role: Role, *kinds: ResourceType) -> tuple[NamespaceMapping, ...]:
        """The pairs of namespaces in which this side has the role: of some types, or of all."""
        return tuple(each for each in self.mappings if each.role is role and (not kinds or each.type in kinds))

    def offsets_topic(self, role: Role) -> NamespaceMapping | None:
        """The pair of an offsets topic and its copy in which this side has the role."""
        return next((mapping for mapping in self.offsets_topics if mapping.role is role), None)

    @property
    def leads_groups(self) -> bool:
        """Whether this side's groups are replicated over it."""
        return any(mapping.leads_groups for mapping in self.mappings)

    @property
    def mode(self) -> LinkMode:
        return self.settings.mode.value

    @property
    def remote_addresses(self) -> tuple[str, ...]:
        register = self.settings.addresses.get(self.remote_cluster_id)
        return register.value if register else ()

    @property
    def local_addresses(self) -> tuple[str, ...]:
        register = self.settings.addresses.get(self.local_cluster_id)
        return register.value if register else ()

    @property
    def config(self) -> dict[str, str]:
        """The settings that have a value."""
        return {name: register.value for name, register in self.settings.config.items() if register.value is not None}

    @property
    def sync_confirm_timeout_ms(self) -> int:
        """How long an ack may wait for the other side before its partition is recorded Out-Of-Sync."""
        return int(self.config.get(SYNC_CONFIRM_TIMEOUT, SYNC_CONFIRM_TIMEOUT_MS))

    @property
    def verify_every_ms(self) -> int | None:
        """In which time both whole logs of what follows are compared again; None: they are not."""
        value = self.config.get(VERIFY_EVERY, str(VERIFY_EVERY_MS))
        return None if value == VERIFY_OFF else int(value)

    @property
    def follower_replication_factor(self) -> int | None:
        """How many replicas follower topics are to have, if that is set."""
        value = self.config.get(FOLLOWER_REPLICATION_FACTOR)
        return None if value is None else int(value)

    @property
    def follower_in_sync_min(self) -> int | None:
        """How many replicas of a follower topic have to be in sync for a write, if that is set."""
        value = self.config.get(FOLLOWER_IN_SYNC_MIN)
        return None if value is None else int(value)

    def mapping(self, kind: ResourceType, local_prefix: str) -> NamespaceMapping | None:
        """The mapping whose local namespace this is."""
        for mapping in self.mappings:
            if mapping.type is kind and mapping.local_prefix == local_prefix:
                return mapping
        return None

    def waits(self, kind: ResourceType, local_prefix: str) -> AttachRequest | None:
        """What is to be attached with this local namespace."""
        return next((each for each in self.waiting if (each.type, each.local_prefix) == (kind, local_prefix)), None)


def offsets_mapping(
    link: Link, role: Role, copy: OffsetsCopy, attached_ms: int, at_offset: int, *, escaped: bool
) -> NamespaceMapping:
    """The pair of an offsets topic and its copy, as the side with this role sees it. ``escaped``: also where the
    source's id is none that a topic can have in its name."""
    source = link.local_cluster_id if role is Role.LEADER else link.remote_cluster_id
    names = OFFSETS_TOPIC, copy_name(source) if escaped else COPY_PREFIX + source
    local, remote = names if role is Role.LEADER else names[::-1]
    return NamespaceMapping(ResourceType.TOPIC, local, remote, role, attached_ms, at_offset, offsets=copy)


class TopicState(StrEnum):
    """What is the case with a follower topic."""

    CREATING = "creating"
    FOLLOWING = "following"
    REFUSED = "refused"
    DETACHED = "detached"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is in the state it is in. ``code`` as in :mod:`isthmus_control.states`, ``message`` for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Degraded:
    """Acks that would wait for no longer than ``after_ms`` go without a partition's other side, from here on.

    ``since_offset``: the other side has what is below it. ``by``: the proxy that recorded it, at ``at_offset`` of the
    command log.
    """

    after_ms: int
    since_offset: int
    since_ms: int
    by: str
    at_offset: int


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """From ``since_offset`` on, what an ack for a partition of a synchronous link means (``docs/adr/0006``).

    ``since_offset`` is an offset of the partition: both sides have what is below it. ``at_offset`` is the record's own
    in the command log. OUT_OF_SYNC alone has a reason. ``reached``: since the mode was set, the other side has been
    seen to have all; until then acks are held for a moment to try that, and the partition is Syncing. ``from_first``:
    it is In-Sync before that is reached, since acks were held from its first record on. ``degraded``: it has been
    Out-Of-Sync for long, and not In-Sync since; it says nothing while acks are held.
    """

    topic_id: str
    state: SyncState
    since_offset: int
    since_ms: int
    reason: Reason | None
    at_offset: int
    reached: bool = True
    degraded: Degraded | None = None
    from_first: bool = field(default=False, metadata=since(FROM_FIRST))


@dataclass(frozen=True, slots=True)
class AckTerms:
    """What acks meant while a partition that follows was In-Sync.

    With ``links`` (by name, at the source, the ids of their target clusters; this one is among them): ``count`` of
    these clusters had each record that was acked. Without: this cluster had all. ``degrade_after_ms``: so long after
    the partition gets Out-Of-Sync, acks that wait for it go without it (0: they do not), as it was set then.
    """

    count: int = 0
    links: Mapping[str, str] = field(default_factory=dict)
    degrade_after_ms: int = 0


PLAIN_TERMS: Final = AckTerms()


@dataclass(frozen=True, slots=True)
class Claim:
    """Until ``until_ms`` a partition that follows had all that the source had acked by then, or what ``terms`` say.

    ``end``: where its log ended at least, as of the last lease; a log that ends before has lost some of it since.
    """

    topic_id: str
    until_ms: int
    end: int
    terms: AckTerms = PLAIN_TERMS


@dataclass(frozen=True, slots=True)
class GroupClaim:
    """Until ``until_ms`` this cluster had the committed offsets that the source had acked by then.

    Of the groups of one partition of the source's offsets topic, which has so many ``partitions``, and of the
    namespaces that followed over the link then. ``terms``: by the prefix of the groups here, what acks meant in place
    of that; the longest prefix counts. ``upto``: as far as the partition was confirmed at least, in the source's leader
    ``epoch``; -1: that is not known.
    """

    link_id: str
    until_ms: int
    partitions: int
    terms: Mapping[str, AckTerms] = field(default_factory=dict)
    epoch: int = field(default=-1, metadata=since(SOURCE_LOSSES))
    upto: int = field(default=-1, metadata=since(SOURCE_LOSSES))

    def terms_of(self, group: str) -> AckTerms:
        """What acks meant to a group."""
        prefix = max((each for each in self.terms if group.startswith(each)), key=len, default=None)
        return PLAIN_TERMS if prefix is None else self.terms[prefix]


@dataclass(frozen=True, slots=True)
class FollowerTopic:
    """A local topic that follows, is about to, may not, or did. Topic ids are UUIDs as text; local names are unique.

    ``topic_id`` of one that is CREATING: the topic that the operator agreed to lose for it. ``deleting``: nobody has to
    agree, that topic goes as its source's did, and what comes in its place is another one; ``owner``: the process
    (its incarnation) that carries that out. ``source_log``: in which control log of the source
    (:attr:`~isthmus_control.anchors.Anchor.log`) it had the topic that is followed, as it said last. ``compacts``: this
    cluster's own cleaner compacts it while it follows, decided at ``compacts_since_offset``; ``cleaned``: it does, or
    did, so records may be missing here that the source still has. ``doubted``: by partition, before which offset the
    source may have deleted keys of which this topic still has a record; to be compared. ``settings``: what the source
    has for those settings that are overridden while it follows, as far as it has sent them. ``proofs``: by partition,
    how far it was found to be its source's.
    """

    link: str
    topic: str
    source_topic: str
    source_topic_id: str
    state: TopicState
    recorded_ms: int
    topic_id: str | None = None
    reason: Reason | None = None
    compacts: bool = False
    compacts_since_offset: int = -1
    cleaned: bool = False
    doubted: Mapping[int, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = field(default=False, metadata=since(SOURCE_DELETIONS))
    owner: str = field(default="", metadata=since(SOURCE_DELETIONS))
    source_log: str = field(default="", metadata=since(SOURCE_DELETIONS))
    proofs: Mapping[int, Proof] = field(default_factory=dict, metadata=since(PROOFS))

    def following(self, source_topic_id: str) -> FollowerTopic:
        """The same, following this topic of the source."""
        known = source_topic_id == self.source_topic_id
        return replace(
            self,
            source_topic_id=source_topic_id,
            source_log=self.source_log if known else "",
            proofs=self.proofs if known else {},
        )


@dataclass(frozen=True, slots=True)
class SourceEpoch:
    """From ``start_offset`` on, the source's records are of leader epoch ``epoch`` (until the next one)."""

    epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class ProvenanceRange:
    """Which cluster the records of ``[start_offset, end_offset)`` of a partition came from.

    An open range (``end_offset`` None) is being followed. ``epochs`` are the source's leader epochs within it, stored
    before the first append of each: the target's own log knows only its own epochs, and a source that lost records
    asks by its own. A range of the local cluster holds what was written here while nothing was followed.
    """

    source_cluster_id: str
    source_topic_id: str
    start_offset: int
    end_offset: int | None
    recorded_ms: int
    epochs: tuple[SourceEpoch, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """The provenance of one topic's partitions, contiguous ranges in offset order.

    Bound to the topic id: a topic that was deleted and created again has no history yet.
    """

    topic: str
    topic_id: str
    partitions: Mapping[int, tuple[ProvenanceRange, ...]]

    def open_range(self, partition: int) -> ProvenanceRange | None:
        """The range that is being followed."""
        ranges = self.partitions.get(partition, ())
        return ranges[-1] if ranges and ranges[-1].end_offset is None else None


@dataclass(frozen=True, slots=True)
class HeldConfig:
    """A cluster-wide dynamic setting of the brokers that links hold at ``value`` while a mapping needs it.

    ``former`` is what it was set to before, and will be again (None: it was not set).
    """

    name: str
    value: str
    former: str | None
    recorded_ms: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """A follower namespace on its way to be written by clients (:mod:`isthmus_control.rules.promotions`).

    ``settings``: by topic, what the source has for those settings that are overridden while a topic follows. ``owner``:
    the incarnation of the proxy that carries it out. ``together``: all that were asked for at once, in the order in
    which they are looked at; they are abandoned or end together. ``decided``: whether nothing was missing, so that it
    can only go on (True), or something was, so that it can only be taken back (False); None: not looked at yet.
    ``without_source``: a failover. What is missing is missing, and the source is not asked for anything. ``released``:
    it followed no more when this began, since an operator clears a reservation by hand.
    ``reversal``: the source has handed them over in the reversal of this id, and follows. ``move_clients_ms``: as of a
    :class:`ClientMove`, when it has ended; 0: nobody is told.
    """

    link: str
    type: ResourceType
    prefix: str
    remote_prefix: str
    settings: Mapping[str, Mapping[str, str]]
    owner: str
    begun_ms: int
    together: tuple[NamespaceKey, ...] = ()
    decided: bool | None = None
    without_source: bool = False
    released: bool = field(default=False, metadata=since(ORIGINS))
    reversal: str = field(default="", metadata=since(REVERSALS))
    move_clients_ms: int = field(default=0, metadata=since(CLIENT_MOVES))

    @property
    def key(self) -> NamespaceKey:
        return NamespaceKey(self.type, self.prefix)

    @property
    def keys(self) -> tuple[NamespaceKey, ...]:
        """All that are promoted together, this one among them."""
        return self.together or (self.key,)


class ReversalStep(StrEnum):
    """How far a reversal is, in the log that says so (:mod:`isthmus_control.rules.reversals`)."""

    ANNOUNCED = "announced"
    """At the leader: no client begins a transaction there any more."""
    HELD = "held"
    """At the leader: clients' writes wait."""
    HANDED_OVER = "handed-over"
    """At the one that led: it follows, and never leads again by itself."""
    DRAINED = "drained"
    """At the follower: it has all, and leads once it hears that they were handed over."""


class TopicEnd(NamedTuple):
    """Where the logs of a topic's partitions end, by partition."""

    topic: str
    ends: tuple[int, ...]


class HeldAt(NamedTuple):
    """Where the control log of the cluster that leads has clients' writes wait for a reversal. A later one has more.

    ``generation``: of that log, since one that was accepted after a loss may count offsets from less again.
    """

    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reversal:
    """Namespaces that change which cluster leads them, all together.

    ``reversal_id`` (a UUID) is the same in both clusters' logs. ``keys`` are local, in the order in which they are
    looked at. ``owner``: at the leader, the incarnation of the proxy that carries it out until it is handed over.
    ``transactions_wait_ms``: how long open transactions may take to end by themselves. ``hold_ms``: how long writes
    wait, and it is tried. ``step_offset``: of the command that brought it to its step. ``ends``: of the leader's logs
    as they were handed over, by their names there. ``settings``: at the follower, as of a :class:`Promotion`.
    ``move_clients_ms``: as of a :class:`ClientMove`, at the one that led, when it has ended; 0: nobody is told.
    ``held_at``: the same in both clusters' logs; None where nothing is held yet, or an older version did not say it.
    """

    reversal_id: str
    link: str
    keys: tuple[NamespaceKey, ...]
    step: ReversalStep
    owner: str
    begun_ms: int
    step_offset: int
    transactions_wait_ms: int = 0
    hold_ms: int = 0
    disable_transaction_verification: bool = False
    ends: tuple[TopicEnd, ...] = ()
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    move_clients_ms: int = field(default=0, metadata=since(CLIENT_MOVES))
    held_at: HeldAt | None = field(default=None, metadata=since(REVERSALS))

    @property
    def at_leader(self) -> bool:
        """Whether this cluster leads the namespaces still."""
        return self.step in (ReversalStep.ANNOUNCED, ReversalStep.HELD)

    @property
    def holds(self) -> bool:
        """Whether clients' writes wait for what becomes of it."""
        return self.step is ReversalStep.HELD


@dataclass(frozen=True, slots=True)
class ClientMove:
    """Clients of a topic namespace are to look for the cluster that leads it now, by asking their bootstrap servers.

    ``there``: this cluster leads it now, and the clients are those of the other one of the link, which has not been
    told yet. ``remote_prefix``: what the namespace is called at the other cluster. ``at_ms``: when it was recorded, by
    the clock of who did; from then on it is for ``for_ms``. ``offset``: of the command, which tells it from others.
    """

    link: str
    type: ResourceType
    prefix: str
    remote_prefix: str
    there: bool
    at_ms: int
    for_ms: int
    offset: int

    @property
    def key(self) -> NamespaceKey:
        return NamespaceKey(self.type, self.prefix)

    def left_ms(self, now_ms: int) -> int:
        """How long it is for still, by a wall clock: no longer than as a whole, however wrong that is."""
        return max(0, min(self.for_ms, self.ends_ms - now_ms))

    @property
    def ends_ms(self) -> int:
        """When it is over, by the clock of who recorded it."""
        return self.at_ms + self.for_ms


@dataclass(frozen=True, slots=True)
class DistributionTree:
    """The tree that this cluster is a leaf of, under the name ``leaf``.

    ``prefixes``: of the topics that are distributed. ``levels``: those above the leaf, the lowest first; it has a
    distributor for each. ``document``: all of the tree, as canonical JSON. ``chosen``: by level, the target that an
    operator has chosen since, in place of the document's. ``given_up``: the levels, rising, at which
    the target before the one that was chosen is given up if it does not answer: what it was given last is given again.
    """

    version: int
    leaf: str
    prefixes: tuple[str, ...]
    levels: tuple[int, ...]
    document: str
    chosen: Mapping[int, str] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()

    def __contains__(self, topic: str) -> bool:
        return any(contains(ResourceType.TOPIC, prefix, topic) for prefix in self.prefixes)


@dataclass(frozen=True, slots=True)
class BrokerClaim:
    """A broker and the address at which the proxy serves its clients."""

    broker_id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProxyLease:
    """A proxy's claim of brokers.

    ``incarnation`` (a UUID) is new for each process. ``enforced_offset``: the proxy enforces the log up to there and
    has no conflicting write from before without an answer. How long a lease still runs is judged by each proxy on its
    own monotonic clock (:mod:`isthmus_control.leases`); the log says only that it was renewed. ``version``: see
    :func:`~isthmus_control.levels.with_known_level`.
    """

    name: str
    incarnation: str
    brokers: tuple[BrokerClaim, ...]
    all_brokers: bool
    link_address: str | None
    lease_ms: int
    version: str
    claimed_at_offset: int
    renewed_at_offset: int
    enforced_offset: int

    @property
    def broker_ids(self) -> frozenset[int]:
        return frozenset(claim.broker_id for claim in self.brokers)

    @property
    def known_level(self) -> int:
        """The highest feature level of the log that the proxy knows."""
        return known_level(self.version)

    @property
    def key_id(self) -> str:
        """The id of the control key that the proxy has; empty: none."""
        return key_id_of(self.version)


def leads_commits(link: Link) -> bool:
    """Whether commits of this cluster's groups are to wait for a link: it is synchronous, and so are its topics."""
    return link.leads_groups and link.mode is LinkMode.SYNCHRONOUS and groups_with_topics(link)


def groups_with_topics(link: Link) -> bool:
    """Whether groups that this cluster leads go by the link's mode: it leads topics as well, which they read.

    Of groups that go the other way than all topics do nobody waits.
    """
    return bool(link.pairs(Role.LEADER, ResourceType.TOPIC))


def remote_name(mappings: Iterable[NamespaceMapping], kind: ResourceType, name: str) -> str | None:
    """What a resource that is led is called at the other end; None where no mapping holds it."""
    for mapping in mappings:
        if mapping.type is kind and mapping.role is Role.LEADER:
            remote = mapping.remote_name(name)
            if remote is not None:
                return remote
    return None


def local_name(mappings: Iterable[NamespaceMapping], remote_group: str) -> str | None:
    """What a group that is led is called here, by its name at the other end."""
    for mapping in mappings:
        if mapping.leads_groups:
            local = mapping.local_name(remote_group)
            if local is not None:
                return local
    return None
