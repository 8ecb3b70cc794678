"""What proxies ask each other over a link, and what they answer: every call, with all that stands on the wire.

After the handshake either end may ask. Each question says who asks whom, and in which version of the link protocol it
came (``SINCE``). What is an object in JSON is a dataclass, what is a list by position a named tuple. The order of
fields is that on the wire; names may not change, and no field may be added that an older peer needs to understand.
Tests have the bytes of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isthmus_control.acls import AclBinding
from isthmus_control.commands import ToldPartition
from isthmus_control.model import (
    AckTerms,
    AgreedCut,
    HeldAt,
    LinkSettings,
    NamespaceMapping,
    OffsetsForm,
    OnSourceDelete,
    OnSourceLoss,
    ResourceType,
    Role,
    TopicEnd,
)
from isthmus_plugins.replication.link.call_codec import LEFT_OUT, MERGED, Question, named


@dataclass(frozen=True, slots=True)
class Done:
    """The answer that says no more than that it was done."""


# ---- clusters and links ----


@dataclass(frozen=True, slots=True)
class Proxy:
    """One of the proxies of a cluster."""

    proxy: str
    link_address: str | None = None
    brokers: str | tuple[int, ...] = ()
    """``all``, or the ids of those that it fronts."""


@dataclass(frozen=True, slots=True)
class TopologyAnswer:
    proxies: tuple[Proxy, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology(Question[TopologyAnswer]):
    """Who dialled asks for the other cluster's proxies, which it dials, too."""

    METHOD = "topology"


@dataclass(frozen=True, slots=True)
class BeginSecretRotation(Question[Done]):
    """A cluster asks the other one to record a second secret of the link, agreed on over this connection."""

    METHOD = "begin_secret_rotation"

    secret_id: str
    current: str
    """The id of the secret that the asker has."""


@dataclass(frozen=True, slots=True)
class FinishSecretRotation(Question[Done]):
    """The asker has recorded the second secret. Refused with NOT_FOUND by who has it not, and will never."""

    METHOD = "finish_secret_rotation"

    secret_id: str


@dataclass(frozen=True, slots=True)
class MergeSettingsAnswer:
    settings: LinkSettings
    """What the other cluster has now."""


@dataclass(frozen=True, slots=True)
class MergeSettings(Question[MergeSettingsAnswer]):
    """A cluster says what it has set of the link, and asks what the other one has when it has taken that."""

    METHOD = "merge_settings"

    settings: LinkSettings


@dataclass(frozen=True, slots=True)
class TryMergeSettings(Question[Done]):
    """A cluster asks whether the other one would take these settings of the link. Nothing changes."""

    METHOD = "merge_settings"
    WITH = "dry_run"

    settings: LinkSettings
    dry_run: bool = True


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """In which form an offsets topic is copied."""

    form: OffsetsForm
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreateLinkAnswer:
    addresses: tuple[str, ...] = ()
    producer_id_ranges: Mapping[str, int] = field(kw_only=True)
    anchor: str | None = field(default=None, kw_only=True, metadata=LEFT_OUT)
    """How far the control log of the asked cluster is."""


@dataclass(frozen=True, slots=True)
class CreateLink(Question[CreateLinkAnswer]):
    """Who creates a link asks the other cluster to record its half, over a connection made for that."""

    METHOD = "create_link"

    link_name: str
    link_id: str
    addresses: tuple[str, ...] = field(default=(), kw_only=True)
    """Where the asking cluster's link listeners are."""
    producer_id_ranges: Mapping[str, int] = field(kw_only=True)
    """By cluster id: all that the asking cluster knows."""
    offsets_topic: CopyChoice | None = field(default=None, kw_only=True)
    """How the asking cluster's offsets topic is copied."""
    anchor: str | None = field(default=None, kw_only=True, metadata=LEFT_OUT)
    """How far the control log of the asking cluster is."""


@dataclass(frozen=True, slots=True)
class UndoCreateLink(Question[Done]):
    """Who creates a link could not record its own half."""

    METHOD = "undo_create_link"

    link_name: str
    link_id: str


@dataclass(frozen=True, slots=True)
class TellAnchors(Question[Done]):
    """How far the asking cluster's control log is, and how far the other one's was when it said that last.

    Anchors as :mod:`isthmus_control.anchors` writes them. Only where the peer knows the feature ``control-anchors``.
    """

    METHOD = "tell_anchors"

    own: str | None = None
    heard: str | None = None
    proof: str | None = field(default=None, metadata=LEFT_OUT)
    """Of ``own``, for the asking cluster alone: it is told again when that knows no link any more."""


@dataclass(frozen=True, slots=True)
class DeleteLink(Question[Done]):
    """Who deletes the link has the other cluster delete its half first."""

    METHOD = "delete_link"


# ---- namespaces ----


class Predecessor(NamedTuple):
    """A topic that another one succeeded: both hold the same up to these offsets."""

    former: str
    successor: str
    offsets: tuple[int, ...]
    """By partition."""


@dataclass(frozen=True, slots=True)
class LedTopic:
    """A topic of the source."""

    topic: str
    topic_id: str
    partitions: int
    predecessors: tuple[Predecessor, ...] = ()
    """Which topics it succeeded, oldest first."""
    replication_factor: int | None = field(default=None, metadata=LEFT_OUT)
    configs: Mapping[str, str] | None = field(default=None, metadata=LEFT_OUT)
    """Its settings, where the follower's brokers are asked whether they would take them."""


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """See :class:`~isthmus_plugins.links.PartitionPlan`."""

    partition: int
    shared: int
    end: int
    source_end: int
    unknown: str | None = field(default=None, metadata=LEFT_OUT)
    first_ms: int | None = field(default=None, metadata=LEFT_OUT)
    last_ms: int | None = field(default=None, metadata=LEFT_OUT)
    source_first_ms: int | None = field(default=None, metadata=LEFT_OUT)
    source_last_ms: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class PlannedTopic:
    """See :class:`~isthmus_plugins.links.TopicPlan`."""

    topic: str
    source_topic: str
    action: str
    topic_id: str | None = None
    records_lost: int = 0
    reason: str | None = None
    settings_refused: str | None = field(default=None, metadata=LEFT_OUT)
    partitions: tuple[PlannedPartition, ...] | None = field(default=None, metadata=LEFT_OUT)
    groups_moved: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    cut: str | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """See :class:`~isthmus_plugins.links.GroupPlan`."""

    group: str
    source_group: str
    positions_replaced: int


@dataclass(frozen=True, slots=True)
class PlannedVerification:
    """See :class:`~isthmus_plugins.links.TransactionVerificationPlan`."""

    setting: str
    enabled: bool
    action: str
    message: str | None = None


class SharedUntil(NamedTuple):
    """See :class:`~isthmus_plugins.links.SharedUntil`."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlanAttachAnswer:
    topics: tuple[PlannedTopic, ...]
    groups: tuple[PlannedGroup, ...]
    transaction_verification: PlannedVerification


@dataclass(frozen=True, slots=True)
class PlanAttach(Question[PlanAttachAnswer]):
    """The source asks what attaching a pair of namespaces would do at the follower.

    Nothing changes, but with ``hold``.
    """

    METHOD = "plan_attach"

    type: ResourceType
    local: str
    """As the asked end calls it; ``remote`` is the asking end's name, and ``role`` the asked end's."""
    remote: str
    role: Role
    truncate_target: bool = False
    disable_transaction_verification: bool = False
    recovers: bool | None = field(default=None, metadata=LEFT_OUT)
    """See :class:`Attach`."""
    shared_until: tuple[SharedUntil, ...] | None = field(default=None, metadata=LEFT_OUT)
    hold: bool | None = field(default=None, metadata=LEFT_OUT)
    """Have clients write no more to what is recovered, before its logs are looked at."""
    topics: tuple[LedTopic, ...] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Attach(Question[Done]):
    """Have the other end of a pair of namespaces attached; names and role are those of the asked end."""

    METHOD = "attach"

    type: ResourceType
    local: str
    remote: str
    role: Role
    truncate_target: bool | None = field(default=None, metadata=LEFT_OUT)
    disable_transaction_verification: bool | None = field(default=None, metadata=LEFT_OUT)
    truncate_topic_ids: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    """The topics that the operator agreed to lose."""
    on_source_loss: OnSourceLoss | None = field(default=None, metadata=LEFT_OUT)
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=LEFT_OUT)
    cuts: tuple[AgreedCut, ...] | None = field(default=None, metadata=LEFT_OUT)
    """The topics that the operator agreed to have cut, as they were then."""
    recovers: bool | None = field(default=None, metadata=LEFT_OUT)
    """The asked end led the pair until the other one was failed over, and follows instead."""

    @classmethod
    def other_end(cls, mapping: NamespaceMapping) -> Attach:
        """Has the other end of a pair attached that is attached here, without consents."""
        return cls(mapping.type, mapping.remote_prefix, mapping.local_prefix, mapping.role.other)


class AttachedPair(NamedTuple):
    """A pair of namespaces, as the cluster calls them at which it is attached."""

    type: ResourceType
    local: str
    remote: str
    role: Role


@dataclass(frozen=True, slots=True)
class AttachedPairsAnswer:
    pairs: tuple[AttachedPair, ...]
    reserved: tuple[NamespaceName, ...]
    """Namespaces that no client writes, attached to whatever link, or to none."""


@dataclass(frozen=True, slots=True)
class AttachedPairs(Question[AttachedPairsAnswer]):
    """A cluster asks what the link has attached at the other one."""

    METHOD = "attached_pairs"


class NamespaceAt(NamedTuple):
    """A namespace of a cluster, as that one calls it."""

    cluster_id: str
    prefix: str


@dataclass(frozen=True, slots=True)
class ComesFromAnswer:
    path: tuple[NamespaceAt, ...]
    """What is followed there, and what that follows, up to the origin; empty where it does not come from there."""


@dataclass(frozen=True, slots=True)
class ComesFrom(Question[ComesFromAnswer]):
    """A follower asks whether what the other cluster leads comes from a namespace, its own most likely."""

    METHOD = "comes_from"

    type: ResourceType
    prefix: str
    """As the asked cluster has it."""
    origin: NamespaceAt
    hops: int
    """So many clusters are asked at most, this one included."""


@dataclass(frozen=True, slots=True)
class AskAttachAnswer:
    missing: tuple[str, ...] = ()
    """What the asking cluster was not granted for that, as :mod:`isthmus_control.grants` writes it."""


@dataclass(frozen=True, slots=True)
class AskAttach(Question[AskAttachAnswer]):
    """Ask whether a pair may be attached; where not, it is shown to the operator there (but in a ``dry_run``).

    Only where the peer knows the feature ``consents``; the fields are those of :class:`Attach`.
    """

    METHOD = "ask_attach"

    type: ResourceType
    local: str
    remote: str
    role: Role
    truncate_target: bool = False
    disable_transaction_verification: bool = False
    dry_run: bool = False
    on_source_loss: OnSourceLoss | None = field(default=None, metadata=LEFT_OUT)
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class AlterMapping(Question[Done]):
    """Have what is set of a pair of namespaces changed at the asked end, which follows; by its name there."""

    METHOD = "alter_mapping"

    type: ResourceType
    local: str
    on_source_loss: OnSourceLoss | None = field(default=None, metadata=LEFT_OUT)
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=LEFT_OUT)
    """None: as it is."""


@dataclass(frozen=True, slots=True)
class CheckAcls(Question[Done]):
    """Ask whether principals could be attached: what :class:`Attach` says of them, and nothing changes."""

    METHOD = "check_acls"

    type: ResourceType
    local: str
    remote: str
    role: Role


@dataclass(frozen=True, slots=True)
class Detach(Question[Done]):
    """Have the other end of a pair of namespaces detached. One that is not attached is no error."""

    METHOD = "detach"

    type: ResourceType
    local: str


@dataclass(frozen=True, slots=True)
class DetachCounterpartAnswer:
    detached: bool
    """Whether there was one."""


@dataclass(frozen=True, slots=True)
class DetachCounterpart(Question[DetachCounterpartAnswer]):
    """Have the asked end of a pair of namespaces detached whose other end, with the prefix ``remote``, is already."""

    METHOD = "detach_counterpart"

    type: ResourceType
    remote: str


@dataclass(frozen=True, slots=True)
class LedTopicsAnswer:
    topics: tuple[LedTopic, ...]
    truncating: tuple[str, ...] = ()
    """Topics of that cluster that are being truncated."""


@dataclass(frozen=True, slots=True)
class LedTopics(Question[LedTopicsAnswer]):
    """The follower asks for the source's topics of a namespace, attached or not."""

    METHOD = "led_topics"

    prefix: str
    settings: bool | None = field(default=None, metadata=LEFT_OUT)
    """With their settings."""


@dataclass(frozen=True, slots=True)
class TopicSettingsAnswer:
    topics: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class TopicSettings(Question[TopicSettingsAnswer]):
    """The follower asks what topics have at the source for the settings that it overrides."""

    METHOD = "topic_settings"

    prefix: str


@dataclass(frozen=True, slots=True)
class TopicEnds:
    """Where the logs of a topic end, by partition."""

    topic_id: str
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogEndsAnswer:
    topics: Mapping[str, TopicEnds]


@dataclass(frozen=True, slots=True)
class LogEnds(Question[LogEndsAnswer]):
    """The follower that is promoted asks where the source's logs end: attached or not, and beyond what is shown."""

    METHOD = "log_ends"

    prefix: str


@dataclass(frozen=True, slots=True)
class CompletingTransactionsAnswer:
    transactional_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompletingTransactions(Question[CompletingTransactionsAnswer]):
    """The follower that is promoted asks for transactions that were decided, and whose markers may be missing."""

    METHOD = "completing_transactions"


class UnconfirmedPartition(NamedTuple):
    """What a proxy of the source knows of a partition that it pushes."""

    topic: str
    partition: int
    source_end: int | None
    """Where its log ends, read after ``confirmed`` was looked at; None: it cannot be read now."""
    confirmed: int | None
    """Before this the follower has confirmed all; None: this process has not heard that."""
    age_ms: int | None = None
    """How long ago the oldest that is not confirmed was first seen."""
    in_sync: bool = False
    """Acks wait for the follower."""
    message: str | None = None
    """Why it is not pushed, or what else is to be said of it."""


class UnconfirmedGroup(NamedTuple):
    """A group of which the follower's coordinators lack something."""

    group: str
    positions: int | None
    """Committed offsets and deletions; None: nothing of its partition was pushed over the connection that there is."""
    age_ms: int | None
    """Of the oldest of them."""
    message: str | None = None


@dataclass(frozen=True, slots=True)
class UnconfirmedAnswer:
    topics: Mapping[str, int]
    """All that are led over the link, whoever pushes them: how many partitions they have."""
    partitions: tuple[UnconfirmedPartition, ...]
    """Those that the answering proxy is to push."""
    groups: tuple[UnconfirmedGroup, ...]


@dataclass(frozen=True, slots=True)
class Unconfirmed(Question[UnconfirmedAnswer]):
    """The follower asks each proxy of the source what the follower has not confirmed: what a failover would lose."""

    METHOD = "unconfirmed"


# ---- reversals ----


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    missing: tuple[str, ...]
    """What the follower lacks; nothing: it has all, and has recorded that it is to lead."""
    not_followed: tuple[str, ...]
    """Of that, what no time brings."""


@dataclass(frozen=True, slots=True)
class Drain(Question[DrainAnswer]):
    """The leader, whose clients wait, asks whether the follower has all that it has, and may lead.

    ``pairs``: as the follower has them. ``ends`` and ``settings``: by the leader's topics. It answers when nothing is
    missing, or after ``wait_ms``. ``dry_run``: nothing is held yet, and nothing recorded. ``held_at``: tells
    one that comes late, about a reversal that was taken back, from one about a later reversal; older versions do not
    say it.
    """

    METHOD = "drain"

    reversal_id: str
    pairs: tuple[AttachedPair, ...]
    ends: Mapping[str, TopicEnds]
    settings: Mapping[str, Mapping[str, str]]
    wait_ms: int
    dry_run: bool
    held_at: HeldAt | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class AskReverseAnswer:
    """What keeps it from that, what the asking cluster lacked, what was open. ``reversed``: that cluster leads."""

    refused: tuple[str, ...]
    missing: tuple[str, ...]
    transactions_open: tuple[str, ...]
    reversed: bool


@dataclass(frozen=True, slots=True)
class AskReverse(Question[AskReverseAnswer]):
    """The follower asks the leader to hand over. It answers when that is done, refused, or taken back."""

    METHOD = "ask_reverse"

    pairs: tuple[AttachedPair, ...]
    """As the asked cluster has them."""
    transactions_wait_ms: int
    hold_ms: int
    disable_transaction_verification: bool
    move_clients_ms: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TakeLead(Question[Done]):
    """Who led has handed over: the other cluster is to lead. It asks back before it does; done: it leads."""

    METHOD = "take_lead"

    reversal_id: str
    pairs: tuple[AttachedPair, ...]
    """As the asked cluster has them."""


@dataclass(frozen=True, slots=True)
class HandedOverAnswer:
    ends: tuple[TopicEnd, ...]
    """Of the logs, by the topics of who led."""


@dataclass(frozen=True, slots=True)
class HandedOver(Question[HandedOverAnswer]):
    """The cluster that is to lead asks whether it was handed over, as the other one's control log says now."""

    METHOD = "handed_over"

    reversal_id: str


@dataclass(frozen=True, slots=True)
class AbandonReversal(Question[Done]):
    """Who led asks the other cluster to record that it will not lead by a reversal. Refused: it does."""

    METHOD = "abandon_reversal"

    reversal_id: str
    pairs: tuple[AttachedPair, ...]
    """As the asked cluster has them."""


@dataclass(frozen=True, slots=True)
class MoveClients(Question[Done]):
    """Who leads a namespace asks the other cluster to tell its clients to look for it, for so long from now on."""

    METHOD = "move_clients"

    prefix: str
    """Of topics, as the asked cluster has it."""
    to: str
    """What it is called at the one that asks."""
    for_ms: int


@dataclass(frozen=True, slots=True)
class ChooseOffsetsTopic(Question[Done]):
    """The source says in which form its offsets topic is copied; None: it is not."""

    METHOD = "choose_offsets_topic"

    copy: CopyChoice | None


class NamespaceName(NamedTuple):
    """A namespace, by its name at the follower; of a type that it may not know."""

    type: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Acls(Question[Done]):
    """The source says which bindings the target is to have, in the target's names."""

    METHOD = "acls"

    namespaces: tuple[NamespaceName, ...]
    """Those that are attached at the source."""
    bindings: tuple[AclBinding, ...]


# ---- topics and streams ----


@dataclass(frozen=True, slots=True)
class ToFill:
    """Up to where a compacted topic is filled before the target compacts it."""

    since: int
    """What the target gave for the time since when it does not compact it."""
    ends: tuple[int, ...]
    """By partition."""


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic of the source that the target is to have."""

    topic: str
    topic_id: str
    remote_topic: str | None
    partitions: int
    replication_factor: int
    predecessors: tuple[Predecessor, ...] | None = field(default=None, metadata=LEFT_OUT)
    configs: Mapping[str, str] | None = field(default=None, metadata=LEFT_OUT)
    """Where they changed, or the target may have to make the topic."""
    to_fill: ToFill | None = field(default=None, metadata=LEFT_OUT)
    from_first: bool | None = field(default=None, metadata=LEFT_OUT)
    """The link is synchronous, and acks of new partitions of it wait from their first record on."""
    in_sync_min: int | None = field(default=None, metadata=LEFT_OUT)
    """Its ``min.insync.replicas``; None: not read yet."""
    empty: tuple[int, ...] | None = field(default=None, metadata=LEFT_OUT)
    """Partitions that have nothing, of a topic that the target may not have, or not all of; None: none has nothing."""


@dataclass(frozen=True, slots=True)
class DeletedTopicsAnswer:
    """Those of the topics that were deleted for certain, by id, as far as the source's control log tells."""

    topic_ids: tuple[str, ...]
    log: str = ""
    """Which control log that is (``Anchor.log``); empty: not known yet."""


@dataclass(frozen=True, slots=True)
class DeletedTopics(Question[DeletedTopicsAnswer]):
    """Ask the source which of these topics of it (by id) were deleted: not made anew, and not just out of sight.

    All of them are of one namespace that it has attached: what is detached there is not followed any more.
    """

    METHOD = "deleted_topics"

    topic_ids: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class ReadyTopic:
    """The target's topic."""

    remote_topic: str
    filling: int | None = None
    """What stands for the time since when the target does not compact it; None: it does, or never will."""


@dataclass(frozen=True, slots=True)
class PreparedTopic:
    """What became of a topic at the target."""

    ready: bool
    made: ReadyTopic | None = field(default=None, metadata=MERGED)
    """None: it is not ready."""
    code: str | None = field(default=None, metadata=LEFT_OUT)
    """Why it is not ready, or what is amiss all the same."""
    message: str | None = field(default=None, metadata=LEFT_OUT)
    leaders: tuple[int, ...] | None = field(default=None, metadata=LEFT_OUT)
    """By partition: the broker that leads it, -1 where there is none."""


@dataclass(frozen=True, slots=True)
class PrepareTopicsAnswer:
    topics: Mapping[str, PreparedTopic] = field(default_factory=dict)
    """By the source's names."""


@dataclass(frozen=True, slots=True)
class PrepareTopics(Question[PrepareTopicsAnswer]):
    """The source has the target make the topics that it lacks, and asks who leads their partitions there."""

    METHOD = "prepare_topics"

    topics: tuple[WantedTopic, ...]
    all: tuple[str, ...]
    """Every led topic of the link, also those that other proxies push."""
    truncating: tuple[str, ...] = ()
    """Those of the source that are being truncated."""
    holds_new: bool | None = field(default=None, metadata=LEFT_OUT)
    """The link is synchronous, and acks of topics to come wait from their first record on."""
    log: str | None = field(default=None, metadata=LEFT_OUT)
    """Which control log the source has (``Anchor.log``)."""


class LastBatch(NamedTuple):
    """The batch before a log's end."""

    base_offset: int
    next_offset: int
    digest: str
    """Equal for batches that are equal as whole batches (:func:`isthmus_protocol.record_equality.batch_digest`)."""
    control: bool
    """Whether it is a transaction marker."""
    holes: bool = False
    """Whether the cleaner has taken something out of it."""


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the source's records come from, as it has recorded it, and where its log starts and ends."""

    said: ToldPartition
    log_start: int
    log_end: int


@dataclass(frozen=True, slots=True)
class LogOriginsAnswer:
    topic_id: str
    partitions: tuple[Origins, ...]
    """In their order."""
    compacts: bool


@dataclass(frozen=True, slots=True)
class LogOrigins(Question[LogOriginsAnswer]):
    """The follower asks where the records of a topic come from, attached or not: it may have some of them already."""

    METHOD = "log_origins"

    topic: str


class Times(NamedTuple):
    """Timestamps of the first and the last batch of a range (Unix ms)."""

    first_ms: int
    last_ms: int


class LogTail(NamedTuple):
    """Where two logs part, and from where on what comes before is compared."""

    partition: int
    begin: int
    shared: int


@dataclass(frozen=True, slots=True)
class LogTailFound:
    digest: str
    """Of the records of ``[begin, shared)``, whatever became of them."""
    times: Times | None = field(default=None, metadata=LEFT_OUT)
    """Of what comes behind; None: nothing."""


@dataclass(frozen=True, slots=True)
class LogTailsAnswer:
    tails: tuple[LogTailFound, ...]


@dataclass(frozen=True, slots=True)
class LogTails(Question[LogTailsAnswer]):
    """The follower asks what stands around the end of what both logs share, to check what is recorded."""

    METHOD = "log_tails"

    topic: str
    topic_id: str
    tails: tuple[LogTail, ...]


@dataclass(frozen=True, slots=True)
class OpenStreamAnswer:
    """The follower's log."""

    start_offset: int | None = None
    end_offset: int = field(kw_only=True)
    last: LastBatch | None = None
    epoch: int = field(kw_only=True)
    """The source's leader epoch of its last records."""


@dataclass(frozen=True, slots=True)
class OpenStream(Question[OpenStreamAnswer]):
    """The leader end opens a stream of one partition, and asks where the follower's log ends."""

    METHOD = "open_stream"

    stream: int
    topic: str
    source_topic_id: str
    partition: int
    origins: Origins | None = field(default=None, metadata=LEFT_OUT)
    """None: the source has recorded none, or the follower is not told."""


@dataclass(frozen=True, slots=True)
class StreamOrigins(Question[Done]):
    """The leader end says where the records come from that it sends next, and sends them when that is recorded."""

    METHOD = "stream_origins"

    stream: int
    origins: Origins


@dataclass(frozen=True, slots=True)
class CloseStreamAnswer:
    end_offset: int | None = field(default=None, metadata=LEFT_OUT)
    """None: there was no such stream."""


@dataclass(frozen=True, slots=True)
class CloseStream(Question[CloseStreamAnswer]):
    """The leader end closes a stream, and says why."""

    METHOD = "close_stream"

    stream: int
    code: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class DoubtDeletions(Question[Done]):
    """The leader end has recorded that deletions before an offset may be missing, before it sends what comes after."""

    METHOD = "doubt_deletions"

    stream: int
    offset: int


class SourceEnd(NamedTuple):
    """Where the source's log ends, of a stream whose pushes do not say it: nothing of it was read for a while."""

    stream: int
    end: int
    age_ms: int
    """Of the oldest record that the follower lacks."""


@dataclass(frozen=True, slots=True)
class EndsSeen(Question[Done]):
    """How long ago the leader end has seen where its logs end, of all streams over this connection but some."""

    METHOD = "ends_seen"

    age_ms: int
    """Of the one that was seen longest ago."""
    ends: tuple[SourceEnd, ...] = ()
    unknown: tuple[int, ...] = ()
    """Streams of which it is not known: what was said of them before may not be so any more."""


class Began(NamedTuple):
    """An open transaction of the follower's log: where its first record stands."""

    producer_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class EndedTransactionsAnswer:
    ended: tuple[int, ...]
    """Producer ids."""


@dataclass(frozen=True, slots=True)
class EndedTransactions(Question[EndedTransactionsAnswer]):
    """The follower end asks which of its open transactions have no records left in the source's log before a gap."""

    METHOD = "ended_transactions"

    stream: int
    began: tuple[Began, ...]
    before: int


# ---- comparing ----


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    digest: str
    records: int
    to: int
    """Where the reading ended."""


@dataclass(frozen=True, slots=True)
class Digest(Question[DigestAnswer]):
    """Who compares asks what stands for the records of a range of one partition."""

    METHOD = "digest"

    topic: str
    partition: int
    offset: int = field(metadata=named("from"))
    to: int
    level: str
    """See :mod:`isthmus_plugins.replication.comparison.digests`."""
    until: int | None = field(default=None, metadata=LEFT_OUT)
    """Of the latest records: those before it are looked at."""
    bytes: int | None = field(default=None, metadata=LEFT_OUT)
    """So many the range has at the asking end."""


@dataclass(frozen=True, slots=True)
class DigestsAtAnswer:
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DigestsAt(Question[DigestsAtAnswer]):
    """Who compares asks what stands for the latest records of all keys before each of some rising offsets."""

    METHOD = "digest"
    WITH = "at"

    topic: str
    partition: int
    offset: int = field(metadata=named("from"))
    to: int
    level: str
    at: tuple[int, ...]


class Ends(NamedTuple):
    """A log's limits."""

    log_start: int
    high_watermark: int
    last_stable_offset: int


@dataclass(frozen=True, slots=True)
class TopicLimitsAnswer:
    partitions: tuple[Ends, ...]
    compacts: bool
    """Whether the cleaner compacts the topic, or did."""


@dataclass(frozen=True, slots=True)
class TopicLimits(Question[TopicLimitsAnswer]):
    """Who compares asks for the limits of the logs of a topic."""

    METHOD = "ends"

    topic: str


@dataclass(frozen=True, slots=True)
class LimitsAnswer:
    """The log of one partition of the source, and the topic that it is of."""

    log_start: int
    high_watermark: int
    last_stable_offset: int
    log_end: int
    compacts: bool
    topic_id: str | None = None
    strict: bool = False
    """Whether a namespace that holds the topic is strict."""


@dataclass(frozen=True, slots=True)
class Limits(Question[LimitsAnswer]):
    """The follower that is truncated asks where the log of a partition of the source starts and ends."""

    METHOD = "limits"

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class EpochEndAnswer(LimitsAnswer):
    epoch: int = field(kw_only=True)
    """The largest up to the one that was asked for, -1 for none."""
    epoch_end: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class EpochEnd(Question[EpochEndAnswer]):
    """As :class:`Limits`, and where a leader epoch ends."""

    METHOD = "limits"
    WITH = "epoch"

    topic: str
    partition: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CountOffsetsAnswer:
    records: int


@dataclass(frozen=True, slots=True)
class CountOffsets(Question[CountOffsetsAnswer]):
    """Who compares an offsets topic with its copy asks how many latest records before an offset leave, or are there."""

    METHOD = "count_offsets"

    topic: str
    partition: int
    until: int


@dataclass(frozen=True, slots=True)
class LinkedTopicsAnswer:
    topics: Mapping[str, int]
    """Their numbers of partitions."""


@dataclass(frozen=True, slots=True)
class LinkedTopics(Question[LinkedTopicsAnswer]):
    """Who compares asks for the other cluster's topics in the link's namespaces."""

    METHOD = "linked_topics"


@dataclass(frozen=True, slots=True)
class LinkedGroupsAnswer:
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkedGroups(Question[LinkedGroupsAnswer]):
    """Who compares asks for the other cluster's groups in the link's namespaces."""

    METHOD = "linked_groups"


class CommittedAt(NamedTuple):
    """What a group has committed for one partition."""

    topic: str
    partition: int
    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class CommittedAnswer:
    groups: Mapping[str, tuple[CommittedAt, ...]]
    """Without those whose coordinators do not answer."""


@dataclass(frozen=True, slots=True)
class Committed(Question[CommittedAnswer]):
    """Who compares asks what groups have committed."""

    METHOD = "committed"

    groups: tuple[str, ...]


class PartitionName(NamedTuple):
    """A partition of the asked end."""

    topic: str
    partition: int


class PartitionEnd(NamedTuple):
    """Where a partition of the asked end ends."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class HighWatermarksAnswer:
    partitions: tuple[PartitionEnd, ...]
    """Without those that cannot be read now."""


@dataclass(frozen=True, slots=True)
class PartitionEndsAnswer:
    partitions: tuple[PartitionEnd, ...]
    """Without those that cannot be read now."""


@dataclass(frozen=True, slots=True)
class PartitionEnds(Question[PartitionEndsAnswer]):
    """The follower end asks where logs of the source end, for committed offsets that are ahead of the data."""

    METHOD = "partition_ends"

    partitions: tuple[PartitionName, ...]


@dataclass(frozen=True, slots=True)
class HighWatermarks(Question[HighWatermarksAnswer]):
    """Who compares groups, or waits for what aborted transactions left, asks where logs end for consumers."""

    METHOD = "high_watermarks"

    partitions: tuple[PartitionName, ...]


class AtTime(NamedTuple):
    """A partition, and a time in ms (-3: the latest there is)."""

    partition: int
    timestamp: int


class FoundAtTime(NamedTuple):
    """The first offset of a partition with such a time; -1 for none."""

    partition: int
    offset: int
    timestamp: int


@dataclass(frozen=True, slots=True)
class OffsetsForTimesAnswer:
    partitions: tuple[FoundAtTime, ...]
    """Without those that cannot be read now."""


@dataclass(frozen=True, slots=True)
class OffsetsForTimes(Question[OffsetsForTimesAnswer]):
    """The follower asks for offsets by time in the source's logs, for clients of its own."""

    METHOD = "offsets_for_times"

    topic: str
    partitions: tuple[AtTime, ...]


# ---- groups ----


NOT_KNOWN: Final = -1
"""In the place of an offset: the newest commit cannot be read."""


def as_said(offset: int) -> int:
    """A committed offset as a call has it: brokers take negative ones, which clients reset groups with, and those are
    one less, below :data:`NOT_KNOWN`. To peers that know ``features.NEGATIVE_OFFSETS``."""
    return offset if offset >= 0 else offset - 1


def as_meant(offset: int) -> int:
    """What :func:`as_said` made of it."""
    return offset if offset >= 0 else offset + 1


class CommittedOffset(NamedTuple):
    """What a group has committed for one partition, in the names of the follower."""

    group: str
    topic: str
    partition: int
    offset: int | None
    """None: nothing any more. :data:`NOT_KNOWN`, too; below that see :func:`as_said`."""
    metadata: str
    age_ms: int
    """How long ago the leader end read it."""
    at: int = -1
    """Where it came to count in the offsets log, or was read later; -1: of a peer of before, which does not say."""


class Pending(NamedTuple):
    """What an open transaction has committed for a group, in the names of the follower."""

    producer_id: int
    epoch: int
    group: str
    topic: str
    partition: int
    offset: int | None
    """None: it was deleted."""
    metadata: str
    at: int
    """Where it stands in the offsets log."""


class OpenSince(NamedTuple):
    """A producer with commits of an open transaction, and where they begin."""

    producer_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class LostEnd:
    """A partition of the source's offsets topic has lost the end that the follower had confirmed."""

    from_offset: int
    to_offset: int
    """As far as it was confirmed."""
    epoch: int
    """The leader epoch that it was confirmed in."""
    strict: tuple[str, ...] = ()
    """Namespaces of groups, by the follower's names, that the source has as strict."""


@dataclass(frozen=True, slots=True)
class WholePart:
    """One of the calls that push a partition whole."""

    begin: bool
    end: bool = False
    held_back: tuple[str, ...] = ()
    """Topics whose committed offsets are not pushed for now."""
    confirm: bool = False
    """Whether the follower end is to confirm what its coordinators have."""
    lost: LostEnd | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Upto:
    """What goes beside committed offsets where the follower end confirms."""

    upto: int | None
    """Up to where in the log that is all; None: there is more up to there."""
    settled: int = -1
    """Where the first commit of an open transaction stands."""
    pending: tuple[Pending, ...] = ()
    open: tuple[OpenSince, ...] | None = None
    """All that are open, where some may have been aborted, or committed offsets have gone back."""


@dataclass(frozen=True, slots=True)
class OffsetsPart:
    """What is pushed of one partition of the source's offsets topic."""

    partition: int
    epoch: int
    """The source's leader epoch."""
    positions: tuple[CommittedOffset, ...]
    gone: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    """Groups that exist no more."""
    whole: WholePart | None = field(default=None, metadata=MERGED)
    upto: Upto | None = field(default=None, metadata=MERGED)


@dataclass(frozen=True, slots=True)
class GroupOffsetsAnswer:
    holds_back: bool = False
    """Whether the follower end knows :attr:`WholePart.held_back`."""


@dataclass(frozen=True, slots=True)
class GroupOffsets(Question[GroupOffsetsAnswer]):
    """The leader end pushes what groups have committed: first the whole of each partition, then what changed."""

    METHOD = "group_offsets"

    partitions: int
    """Of the source's offsets topic."""
    parts: tuple[OffsetsPart, ...]
    topics: tuple[str, ...] | None = None
    """The topic namespaces whose committed offsets it pushes, by the follower's names."""


@dataclass(frozen=True, slots=True)
class ConfirmedCommitsAnswer:
    epoch: int = -1
    """The source's leader epoch in which that was; -1: nothing is known."""
    upto: int = -1


@dataclass(frozen=True, slots=True)
class ConfirmedCommits(Question[ConfirmedCommitsAnswer]):
    """Before it pushes a partition of its offsets topic whole the leader end asks how far the follower confirmed it."""

    METHOD = "confirmed_commits"

    partition: int


class Applied(NamedTuple):
    """How far coordinators have what one partition of the source's offsets topic adds up to."""

    partition: int
    epoch: int
    upto: int


@dataclass(frozen=True, slots=True)
class GroupApplied(Question[Done]):
    """The follower end confirms what its coordinators have."""

    METHOD = "group_applied"

    parts: tuple[Applied, ...]


class Waiting(NamedTuple):
    """What a group's coordinator does not have yet, summed up."""

    positions: int
    """Committed offsets and deletions."""
    age_ms: int
    """Of the oldest of them."""
    code: str | None
    message: str | None


@dataclass(frozen=True, slots=True)
class GroupPendingAnswer:
    groups: Mapping[str, Waiting]


@dataclass(frozen=True, slots=True)
class GroupPending(Question[GroupPendingAnswer]):
    """The leader end asks what of all that it pushed is not there yet."""

    METHOD = "group_pending"


@dataclass(frozen=True, slots=True)
class EndGroupOffsets(Question[Done]):
    """The leader end pushes no more of these partitions of the offsets topic; None: of any."""

    METHOD = "end_group_offsets"

    partitions: tuple[int, ...] | None = None


# ---- synchronous links ----

OPEN_END: Final = (1 << 63) - 1
"""In place of a partition's end: above all offsets."""


class Earlier(NamedTuple):
    """A decision before another one, which is not known to be carried out."""

    epoch: int
    """Of its markers."""
    data_epoch: int
    """Of its records."""
    end: int


class DecidedPlace(NamedTuple):
    """A partition that a decision touches, by the follower's name."""

    topic: str
    partition: int
    end: int
    """Its transaction's records stand below; :data:`OPEN_END`: that is not known yet, and comes later."""
    earlier: tuple[Earlier, ...] = ()


class LogPlace(NamedTuple):
    """Where something stands in the source's transaction log."""

    partition: int
    offset: int
    epoch: int = -1
    """The leader epoch in which it was written; -1: of a peer of before, which does not say."""

    @property
    def identity(self) -> tuple[int, int, int]:
        """Of one transactional id, higher is later, also where the log lost its end and uses offsets again."""
        return self.partition, self.epoch, self.offset


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to commit a transaction."""

    transactional_id: str = field(metadata=named("id"))
    producer_id: int
    epoch: int
    """Of its markers."""
    data_epoch: int
    """Of its records."""
    at: LogPlace
    places: tuple[DecidedPlace, ...]
    again: bool = False
    """It must not replace what was sent of its partitions before."""


@dataclass(frozen=True, slots=True)
class DecideAnswer:
    """They are durable, but for some topics, in the names of the follower."""

    unfollowed: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    """They follow no more (a failover, say): of these nothing is decided here."""


@dataclass(frozen=True, slots=True)
class Decide(Question[DecideAnswer]):
    """The leader end sends decisions, before the markers that carry them out; the answer: they are durable."""

    METHOD = "decide"
    IN_ORDER = True

    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class SaidLoss:
    """See :class:`~isthmus_plugins.links.SourceLossStatus`; in the names of the source."""

    number: int
    type: str
    topic: str
    remote_topic: str
    partition: int
    from_offset: int
    to_offset: int
    count: int
    groups: int
    state: str
    found_ms: int
    found_by: str
    message: str
    salvage_proxy: str | None = field(default=None, metadata=LEFT_OUT)
    salvage_file: str | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SourceLosses(Question[Done]):
    """The follower says what the source lost although it had acked it In-Sync: all that nobody acknowledged."""

    METHOD = "source_losses"

    losses: tuple[SaidLoss, ...] = ()
    left_off: int = 0


@dataclass(frozen=True, slots=True)
class AcknowledgeSourceLosses(Question[Done]):
    """The source's operator knows of its losses up to this number: the follower tells them no more."""

    METHOD = "acknowledge_source_losses"

    number: int


@dataclass(frozen=True, slots=True)
class LeftOutName:
    """See :class:`isthmus_control.left_out.LeftOut`; in the names of the source."""

    type: ResourceType
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOutAnswer:
    names: tuple[LeftOutName, ...] = ()
    more: int = 0
    """So many more there are."""


@dataclass(frozen=True, slots=True)
class LeftOut(Question[LeftOutAnswer]):
    """The follower asks what the source's namespaces hold and the link leaves out.

    ``type``, ``local`` and ``remote``: also a pair of namespaces that is to be attached, by the names of who is asked.
    """

    METHOD = "left_out"

    type: ResourceType | None = None
    local: str | None = None
    remote: str | None = None


@dataclass(frozen=True, slots=True)
class AnyOfLinks:
    """See :class:`~isthmus_plugins.links.AnyOf`."""

    count: int
    links: Mapping[str, str]
    until_ms: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SyncSaid:
    """See :class:`~isthmus_plugins.links.SyncStatus`."""

    state: str
    since_offset: int | None = field(default=None, metadata=LEFT_OUT)
    since_ms: int | None = field(default=None, metadata=LEFT_OUT)
    until_ms: int | None = field(default=None, metadata=LEFT_OUT)
    any_of: AnyOfLinks | None = field(default=None, metadata=LEFT_OUT)
    degraded_since_ms: int | None = field(default=None, metadata=LEFT_OUT)
    reason: str | None = field(default=None, metadata=LEFT_OUT)
    message: str | None = field(default=None, metadata=LEFT_OUT)
    from_first: bool | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SyncLeaseAnswer:
    in_sync: tuple[int, ...]
    """Streams of which all that is acked is there."""
    in_sync_any: tuple[int, ...] = ()
    """Streams of which their terms say what is there."""
    terms: Mapping[int, AckTerms] = field(default_factory=dict)
    """By stream, where they say something."""
    groups_in_sync: tuple[int, ...] = ()
    """Partitions of the source's offsets topic."""
    groups_in_sync_any: tuple[int, ...] = ()
    group_terms: Mapping[int, Mapping[str, AckTerms]] = field(default_factory=dict)
    """By partition of the offsets topic, and prefix of groups at the follower."""
    groups_of: tuple[NamespaceName, ...] = ()
    """The namespaces whose committed offsets are pushed."""
    lease_ms: int = field(kw_only=True)
    """How long that counts, from when it was asked for."""
    states: Mapping[int, SyncSaid] = field(default_factory=dict)
    """By stream that got no lease."""


@dataclass(frozen=True, slots=True)
class SyncLease(Question[SyncLeaseAnswer]):
    """The follower asks for leases: what it may say is In-Sync without hearing from the source."""

    METHOD = "sync_lease"

    streams: tuple[int, ...]
    groups: tuple[int, ...] = ()
    """Partitions of the source's offsets topic."""
