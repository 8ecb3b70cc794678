"""The commands of the control log, and their form as records.

A record is one JSON object: ``{"v":1,"id":...,"kind":...,"at_ms":...,"by":...,"seen":...,"body":{...}}``. ``v`` is the
version of that kind's body, raised where what was there before means something else. What is added has the feature
level that brings it (:mod:`isthmus_control.levels`): a kind as ``SINCE``, a field as ``since``. What a reader does with
a record (:func:`decode`):

| the record | the reader |
|---|---|
| a known kind and version, of the right shape | applies it, which may reject it |
| no envelope, or the wrong shape for its version | rejects it, as every version does (:class:`BadRecord`) |
| an unknown kind, a higher version, an unknown field | must not guess (:class:`NewerRecord`): what becomes of it      |
|                                                     | says its envelope (:mod:`isthmus_control.concerns`)      |
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from isthmus_control.acls import AclBinding
from isthmus_control.codec import MalformedValue, UnknownField, canonical_json, from_json, parse, since, to_json
from isthmus_control.concerns import concerns_of, said_in
from isthmus_control.demands import NONE as NO_DEMANDS
from isthmus_control.demands import Confirm, Consistency, Demands, Visibility
from isthmus_control.levels import (
    CLIENT_MOVES,
    CONCERNS,
    CONSENT,
    DRILLS,
    FROM_FIRST,
    INFORMATIONAL,
    ORIGINS,
    PREFIXES,
    PROOFS,
    REVERSALS,
    SECRET_ROTATION,
    SIGNING,
    SOURCE_DELETIONS,
    SOURCE_LOSSES,
    STALE_READS,
    TREES,
)
from isthmus_control.model import (
    PLAIN_TERMS,
    AckTerms,
    AgreedCut,
    AttachRequest,
    BrokerClaim,
    Drill,
    Grant,
    HeldAt,
    LinkMode,
    LinkSettings,
    NamespaceKey,
    NamespaceMapping,
    OffsetsCopy,
    OnSourceDelete,
    OnSourceLoss,
    Reason,
    ResourceType,
    Role,
    SyncState,
    TopicEnd,
    TopicState,
)
from isthmus_control.origins import Ended, OriginEpoch, OriginRange
from isthmus_control.proofs import Proof
from isthmus_control.sealing import Sealed
from isthmus_control.signing import MAC, Signer
from isthmus_control.source_losses import LossState, LostCommit
from isthmus_control.truncations import (
    MovedOffset,
    PartitionCut,
    PartitionView,
    SalvageFile,
    Succession,
    TopicLayout,
    TruncationPhase,
)


class BadRecord(ValueError):
    """The record is not a command. Every proxy rejects it alike."""


class UnsignedRecord(BadRecord):
    """A MAC is demanded of the record, and it has none, or a wrong one. ``seen``: what its writer had applied, as it
    says itself."""

    def __init__(self, seen: int, message: str) -> None:
        super().__init__(message)
        self.seen = seen


class NewerRecord(Exception):
    """The record was written by a newer version. ``kind`` and ``version`` say what this one lacks.

    ``ignorable``: it may be passed over. ``concerns``: what it is about; None: everything. ``id``: the command's.
    """

    def __init__(self, kind: str, version: int, raw: Mapping[str, Any], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.version = version
        self.id = str(raw.get("id"))
        self.ignorable = raw.get("ignorable") is True
        self.concerns = said_in(raw)


class Body:
    """What a command asks for. Subclasses are frozen dataclasses."""

    __slots__ = ()
    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    SINCE: ClassVar[int] = 0
    """The feature level that brings the kind."""
    REMEMBERED: ClassVar[bool] = True
    """Whether its id is remembered against late retries. Not for what may be repeated without harm."""
    IGNORABLE: ClassVar[bool] = False
    """Whether versions that do not know the kind may pass over it: it changes no state, and is not remembered."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Of what log a command's proposer had applied ``seen`` records (:mod:`isthmus_control.prefixes`).

    ``generation``: of the last one that an operator accepted. ``digest``: as an anchor's at ``seen``, the first
    characters; empty where the proposer does not know it.
    """

    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its envelope.

    ``id`` (a UUID as text) names the intent: a retry carries the same, and counts once. ``at_ms`` is the proposer's
    wall clock, for people and for the hybrid logical clock. ``by`` is the proposing proxy. ``seen`` is the offset up
    to which the proposer had applied the log when it made the command; it stays the same in retries. ``prefix`` says of
    which log that was, from feature level 2 on.
    """

    id: str
    at_ms: int
    by: str
    seen: int
    body: Body
    prefix: Prefix | None = None


# --- namespaces


@dataclass(frozen=True, slots=True)
class CreateNamespace(Body):
    KIND: ClassVar[str] = "create-namespace"
    VERSION: ClassVar[int] = 4
    type: ResourceType
    prefix: str
    reserved: bool = False
    reason: str | None = None
    informational: bool = False
    demands: Demands = NO_DEMANDS
    stale_reads: bool = field(default=True, metadata=since(STALE_READS))


@dataclass(frozen=True, slots=True)
class AlterNamespace(Body):
    """Sets or clears the reservation. A namespace that follows stays reserved."""

    KIND: ClassVar[str] = "alter-namespace"
    type: ResourceType
    prefix: str
    reserved: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class AlterDemands(Body):
    """Changes what a namespace asks of synchronous links, and whether it may be part of one, where it is not None."""

    KIND: ClassVar[str] = "alter-demands"
    VERSION: ClassVar[int] = 3
    type: ResourceType
    prefix: str
    consistency: Consistency | None = None
    visibility: Visibility | None = None
    degrade_after_ms: int | None = None
    confirm: Confirm | None = None
    informational: bool | None = field(default=None, metadata=since(INFORMATIONAL))
    stale_reads: bool | None = field(default=None, metadata=since(STALE_READS))


@dataclass(frozen=True, slots=True)
class EnablePlugin(Body):
    """Enables a plugin for a namespace, at this ``position`` of its plugins (None: behind all others).

    ``settings``: canonical JSON for version ``version`` of the plugin's schema, checked by the proxy that was asked.
    """

    KIND: ClassVar[str] = "enable-plugin"
    type: ResourceType
    prefix: str
    plugin: str
    settings: str
    version: int
    position: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigurePlugin(Body):
    """Gives an enabled plugin other settings, or another place in the order."""

    KIND: ClassVar[str] = "configure-plugin"
    type: ResourceType
    prefix: str
    plugin: str
    settings: str
    version: int
    position: int | None = None


@dataclass(frozen=True, slots=True)
class DisablePlugin(Body):
    KIND: ClassVar[str] = "disable-plugin"
    type: ResourceType
    prefix: str
    plugin: str


@dataclass(frozen=True, slots=True)
class DeleteNamespace(Body):
    KIND: ClassVar[str] = "delete-namespace"
    type: ResourceType
    prefix: str


# --- links


@dataclass(frozen=True, slots=True)
class CreateLink(Body):
    """This side's end of a link. The other side's log gets its own with the same ``link_id`` (a UUID).

    ``token``: the id of this cluster's token that the other side has shown. It is used up, and what it grants is
    granted; without one, ``grants`` are. ``drill``: there is no other side.
    """

    KIND: ClassVar[str] = "create-link"
    VERSION: ClassVar[int] = 3
    name: str
    link_id: str
    remote_cluster_id: str
    dials: bool
    remote_addresses: tuple[str, ...] = ()
    local_addresses: tuple[str, ...] = ()
    secret: Sealed | None = None
    mode: LinkMode = LinkMode.ASYNCHRONOUS
    config: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default="", metadata=since(CONSENT))
    grants: tuple[Grant, ...] = field(default=(), metadata=since(CONSENT))
    drill: Drill | None = field(default=None, metadata=since(DRILLS))


@dataclass(frozen=True, slots=True)
class AlterLink(Body):
    """Changes what is not None. A ``config`` value of None removes that setting."""

    KIND: ClassVar[str] = "alter-link"
    VERSION: ClassVar[int] = 2
    name: str
    mode: LinkMode | None = None
    dials: bool | None = None
    remote_addresses: tuple[str, ...] | None = None
    local_addresses: tuple[str, ...] | None = None
    secret: Sealed | None = None
    config: Mapping[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class BeginSecretRotation(Body):
    """From here on a second secret counts beside the link's own, ``current`` (its id).

    Both sides record it, the one that is asked first. ``asked``: this is that side, and the new secret may take the
    place of one whose rotation the other side has given up. The other side has no second one then.
    """

    KIND: ClassVar[str] = "begin-secret-rotation"
    SINCE: ClassVar[int] = SECRET_ROTATION
    link: str
    link_id: str
    secret_id: str
    current: str
    secret: Sealed
    asked: bool


@dataclass(frozen=True, slots=True)
class FinishSecretRotation(Body):
    """Both sides have the second secret: it alone counts from here on. Rejected where it was never begun here."""

    KIND: ClassVar[str] = "finish-secret-rotation"
    SINCE: ClassVar[int] = SECRET_ROTATION
    link: str
    link_id: str
    secret_id: str


@dataclass(frozen=True, slots=True)
class AbandonSecretRotation(Body):
    """The other side has recorded that it has no such secret, and never will: the one from before goes on alone."""

    KIND: ClassVar[str] = "abandon-secret-rotation"
    SINCE: ClassVar[int] = SECRET_ROTATION
    link: str
    link_id: str
    secret_id: str


@dataclass(frozen=True, slots=True)
class SealSecret(Body):
    """The same secret, sealed with another key, or at all."""

    KIND: ClassVar[str] = "seal-secret"
    SINCE: ClassVar[int] = SECRET_ROTATION
    link: str
    link_id: str
    secret_id: str
    secret: Sealed


@dataclass(frozen=True, slots=True)
class MergeLink(Body):
    """The other side's settings, merged into ours."""

    KIND: ClassVar[str] = "merge-link"
    VERSION: ClassVar[int] = 2
    name: str
    link_id: str
    settings: LinkSettings


@dataclass(frozen=True, slots=True)
class DeleteLink(Body):
    """Detaches everything. Reserved namespaces stay reserved."""

    KIND: ClassVar[str] = "delete-link"
    name: str


@dataclass(frozen=True, slots=True)
class CreateToken(Body):
    """A token with which another cluster may make one link with this one."""

    KIND: ClassVar[str] = "create-token"
    SINCE: ClassVar[int] = CONSENT
    token_id: str
    public_key: str
    acceptor_key: Sealed
    grants: tuple[Grant, ...]
    expires_ms: int


@dataclass(frozen=True, slots=True)
class SealToken(Body):
    """The acceptor's key of a token as it is sealed with another control key."""

    KIND: ClassVar[str] = "seal-token"
    SINCE: ClassVar[int] = CONSENT
    token_id: str
    acceptor_key: Sealed


@dataclass(frozen=True, slots=True)
class DeleteToken(Body):
    KIND: ClassVar[str] = "delete-token"
    SINCE: ClassVar[int] = CONSENT
    token_id: str


@dataclass(frozen=True, slots=True)
class ChangeGrants(Body):
    """What the other cluster of a link may have done here from now on; what is attached stays attached."""

    KIND: ClassVar[str] = "change-grants"
    SINCE: ClassVar[int] = CONSENT
    link: str
    given: tuple[Grant, ...] = ()
    taken: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestAttach(Body):
    """A pair of namespaces is to be attached once that is granted."""

    KIND: ClassVar[str] = "request-attach"
    SINCE: ClassVar[int] = CONSENT
    link: str
    request: AttachRequest


@dataclass(frozen=True, slots=True)
class WithdrawAttach(Body):
    """It is not to be attached any more."""

    KIND: ClassVar[str] = "withdraw-attach"
    SINCE: ClassVar[int] = CONSENT
    link: str
    type: ResourceType
    local_prefix: str
    for_peer: bool = False


@dataclass(frozen=True, slots=True)
class AttachNamespace(Body):
    """Attaches a pair of namespaces; a follower becomes reserved.

    ``create_missing`` makes the local namespace where there is none (the other side of an attach asks for that).
    The consents: see :class:`~isthmus_control.model.NamespaceMapping`. ``on_source_loss``, ``on_source_delete`` None:
    as it is. ``for_peer``, of this and other commands: the other cluster asked, which may have what it was granted.
    ``recovers``: a pair that this cluster led, until the other one was failed over, follows instead.
    """

    KIND: ClassVar[str] = "attach-namespace"
    VERSION: ClassVar[int] = 3
    link: str
    type: ResourceType
    local_prefix: str
    remote_prefix: str
    role: Role
    truncate_topic_ids: tuple[str, ...] = ()
    create_missing: bool = False
    disable_transaction_verification: bool = False
    on_source_loss: OnSourceLoss | None = field(default=None, metadata=since(SOURCE_LOSSES))
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=since(SOURCE_DELETIONS))
    for_peer: bool = field(default=False, metadata=since(CONSENT))
    cuts: tuple[AgreedCut, ...] = field(default=(), metadata=since(ORIGINS))
    recovers: bool = field(default=False, metadata=since(ORIGINS))

    def mapping(self, attached_ms: int = 0, at_offset: int = 0) -> NamespaceMapping:
        """What is attached, once the command stands at ``at_offset``."""
        return NamespaceMapping(
            self.type,
            self.local_prefix,
            self.remote_prefix,
            self.role,
            attached_ms,
            at_offset,
            self.truncate_topic_ids,
            self.disable_transaction_verification,
            on_source_loss=self.on_source_loss,
            on_source_delete=self.on_source_delete,
            cuts=self.cuts,
        )


@dataclass(frozen=True, slots=True)
class AlterMapping(Body):
    """Changes what is set of a pair of namespaces that is attached; what the operator agreed to stays as it is.

    What is None stays, too.
    """

    KIND: ClassVar[str] = "alter-mapping"
    SINCE: ClassVar[int] = SOURCE_LOSSES
    link: str
    type: ResourceType
    local_prefix: str
    on_source_loss: OnSourceLoss | None
    on_source_delete: OnSourceDelete | None = field(default=None, metadata=since(SOURCE_DELETIONS))
    for_peer: bool = field(default=False, metadata=since(CONSENT))


@dataclass(frozen=True, slots=True)
class DetachNamespace(Body):
    KIND: ClassVar[str] = "detach-namespace"
    link: str
    type: ResourceType
    local_prefix: str
    for_peer: bool = field(default=False, metadata=since(CONSENT))


@dataclass(frozen=True, slots=True)
class HoldBrokerConfig(Body):
    """A cluster-wide broker setting is about to be set to ``value``; ``former`` is what to restore."""

    KIND: ClassVar[str] = "hold-broker-config"
    name: str
    value: str
    former: str | None


@dataclass(frozen=True, slots=True)
class ReleaseBrokerConfig(Body):
    """The setting has its former value again."""

    KIND: ClassVar[str] = "release-broker-config"
    name: str


@dataclass(frozen=True, slots=True)
class BeginPromotion(Body):
    """A follower namespace, and ``more`` with it, is to be written by clients; or, begun, this proxy goes on.

    ``without_source``: a failover, also of what was to be promoted with the source's help. Of a topic namespace that
    followed over the link and was detached it ends what the link left open. ``reversal``: the source has handed them
    over in the reversal of this id, which this cluster is drained for; it leads them in the end. ``move_clients_ms``:
    for how long the source's clients are to be told to look for this cluster, when it has ended; 0: they are not.
    """

    KIND: ClassVar[str] = "begin-promotion"
    VERSION: ClassVar[int] = 3
    link: str
    type: ResourceType
    prefix: str
    settings: Mapping[str, Mapping[str, str]]
    owner: str
    more: tuple[NamespaceKey, ...] = ()
    without_source: bool = False
    reversal: str = field(default="", metadata=since(REVERSALS))
    move_clients_ms: int = field(default=0, metadata=since(CLIENT_MOVES))


@dataclass(frozen=True, slots=True)
class DecidePromotion(Body):
    """The follower has all that the source has, which is detached: the promotion can only go on; else only back."""

    KIND: ClassVar[str] = "decide-promotion"
    type: ResourceType
    prefix: str
    owner: str
    goes_on: bool


@dataclass(frozen=True, slots=True)
class EndPromotion(Body):
    """All else is done: the reservations of all that are promoted together are cleared."""

    KIND: ClassVar[str] = "end-promotion"
    type: ResourceType
    prefix: str
    owner: str


@dataclass(frozen=True, slots=True)
class AbandonPromotion(Body):
    """The source had more than the follower after all: what was to be promoted together follows on."""

    KIND: ClassVar[str] = "abandon-promotion"
    type: ResourceType
    prefix: str
    owner: str


@dataclass(frozen=True, slots=True)
class AnnounceReversal(Body):
    """A namespace that this cluster leads, and ``more`` with it, are to be led by the other cluster of the link.

    See :class:`~isthmus_control.model.Reversal`.
    """

    KIND: ClassVar[str] = "announce-reversal"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    type: ResourceType
    prefix: str
    more: tuple[NamespaceKey, ...]
    reversal_id: str
    owner: str
    transactions_wait_ms: int
    hold_ms: int
    disable_transaction_verification: bool = False
    move_clients_ms: int = field(default=0, metadata=since(CLIENT_MOVES))


@dataclass(frozen=True, slots=True)
class HoldReversal(Body):
    """From here on clients' writes to them wait, and what they write nowhere is refused."""

    KIND: ClassVar[str] = "hold-reversal"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    reversal_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class HandOver(Body):
    """The other cluster has all, and may lead from here on: this one follows. ``ends``: of the topics' logs.

    The first of this one and :class:`TakeBack` counts, and the other one is rejected.
    """

    KIND: ClassVar[str] = "hand-over"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    reversal_id: str
    owner: str
    ends: tuple[TopicEnd, ...]


@dataclass(frozen=True, slots=True)
class TakeBack(Body):
    """They were not handed over, and never will be by this reversal: this cluster leads on, and clients write."""

    KIND: ClassVar[str] = "take-back"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    reversal_id: str


@dataclass(frozen=True, slots=True)
class EndReversal(Body):
    """The other cluster leads what was handed over."""

    KIND: ClassVar[str] = "end-reversal"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    reversal_id: str


@dataclass(frozen=True, slots=True)
class AbandonReversal(Body):
    """At the cluster that handed over: the other one does not lead, nor ever will by this reversal; this one leads
    again. At the other one: it does not lead by it, whatever it hears later."""

    KIND: ClassVar[str] = "abandon-reversal"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    reversal_id: str


@dataclass(frozen=True, slots=True)
class AcceptReversal(Body):
    """At the follower: it has all that the leader has, whose clients wait, and is to lead.

    The other cluster asks for it, and has what it was granted. ``settings``: as of :class:`BeginPromotion`.
    ``held_at``: as of a :class:`~isthmus_control.model.Reversal`.
    """

    KIND: ClassVar[str] = "accept-reversal"
    SINCE: ClassVar[int] = REVERSALS
    link: str
    type: ResourceType
    prefix: str
    more: tuple[NamespaceKey, ...]
    reversal_id: str
    settings: Mapping[str, Mapping[str, str]]
    held_at: HeldAt | None = field(default=None, metadata=since(REVERSALS))


@dataclass(frozen=True, slots=True)
class MoveClients(Body):
    """Clients of a topic namespace are told to look for the link's other cluster, which leads it and asks for that.

    See :class:`~isthmus_control.model.ClientMove`.
    """

    KIND: ClassVar[str] = "move-clients"
    SINCE: ClassVar[int] = CLIENT_MOVES
    link: str
    type: ResourceType
    prefix: str
    remote_prefix: str
    for_ms: int


@dataclass(frozen=True, slots=True)
class EndClientMove(Body):
    """Its time is over; or the other cluster tells its clients by now. ``begun_offset``: which one it is."""

    KIND: ClassVar[str] = "end-client-move"
    SINCE: ClassVar[int] = CLIENT_MOVES
    link: str
    type: ResourceType
    prefix: str
    begun_offset: int


@dataclass(frozen=True, slots=True)
class ApplyTree(Body):
    """This cluster is a leaf of this version of a tree (:class:`~isthmus_control.model.DistributionTree`).

    The version follows the one that the cluster has, if it has one. Topics of a tree are attached to no link.
    """

    KIND: ClassVar[str] = "apply-tree"
    SINCE: ClassVar[int] = TREES
    version: int
    leaf: str
    prefixes: tuple[str, ...]
    levels: tuple[int, ...]
    document: str


@dataclass(frozen=True, slots=True)
class LeaveTree(Body):
    """Nothing is distributed from here any more. ``version``: that the cluster has."""

    KIND: ClassVar[str] = "leave-tree"
    SINCE: ClassVar[int] = TREES
    version: int


@dataclass(frozen=True, slots=True)
class ChooseTarget(Body):
    """The distributor of a level is to write to this leaf (None: as the document says).

    ``give_up``: without what the leaf before it could say, if that does not answer.
    """

    KIND: ClassVar[str] = "choose-target"
    SINCE: ClassVar[int] = TREES
    version: int
    level: int
    leaf: str | None
    give_up: bool = False


@dataclass(frozen=True, slots=True)
class ClaimDistributor(Body):
    """This process distributes for a level of the tree, as long as its lease stands in the log."""

    KIND: ClassVar[str] = "claim-distributor"
    SINCE: ClassVar[int] = TREES
    level: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class SetOffsetsTopic(Body):
    """How the offsets topic of this side (LEADER) or of the other one (FOLLOWER) is copied over a link; None: not."""

    KIND: ClassVar[str] = "set-offsets-topic"
    link: str
    role: Role
    copy: OffsetsCopy | None
    for_peer: bool = field(default=False, metadata=since(CONSENT))


# --- follower topics and provenance


@dataclass(frozen=True, slots=True)
class SetFollowerTopic(Body):
    """Records what is the case with a follower topic: intent, creation or adoption, refusal.

    ``state`` CREATING is the intent, written before the topic is made, and FOLLOWING names its ``topic_id``.
    """

    KIND: ClassVar[str] = "set-follower-topic"
    VERSION: ClassVar[int] = 2
    link: str
    topic: str
    source_topic: str
    source_topic_id: str
    state: TopicState
    topic_id: str | None = None
    reason: Reason | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompactFollowerTopic(Body):
    """From now on this cluster's own cleaner compacts a topic that follows, or does not any more.

    ``since_offset`` is the ``compacts_since_offset`` of the record that this was decided for: of two who decide at
    once, the second one looks again.
    """

    KIND: ClassVar[str] = "compact-follower-topic"
    topic: str
    topic_id: str
    compacts: bool
    since_offset: int


@dataclass(frozen=True, slots=True)
class ForgetFollowerTopic(Body):
    """Drops the record of a topic that is gone here. Its history stays with its topic id."""

    KIND: ClassVar[str] = "forget-follower-topic"
    link: str
    topic: str


@dataclass(frozen=True, slots=True)
class RecreateFollowerTopic(Body):
    """The operator agreed to lose the local topic with this id (None: there is none) for a new one that follows."""

    KIND: ClassVar[str] = "recreate-follower-topic"
    link: str
    topic: str
    topic_id: str | None


@dataclass(frozen=True, slots=True)
class DeleteFollowerTopic(Body):
    """The source's topic with this id was deleted for certain, and the one that follows it is to go as well.

    From here on it follows no more, and is deleted by its id: by the ``owner`` (an incarnation), or by another one that
    writes this again when that one's lease is over.
    """

    KIND: ClassVar[str] = "delete-follower-topic"
    SINCE: ClassVar[int] = SOURCE_DELETIONS
    link: str
    topic: str
    topic_id: str
    source_topic_id: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class KeepFollowerTopic(Body):
    """A topic that was to go stays, and follows what is there no more: the brokers refuse, or the operator keeps it."""

    KIND: ClassVar[str] = "keep-follower-topic"
    SINCE: ClassVar[int] = SOURCE_DELETIONS
    link: str
    topic: str
    topic_id: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class FollowerTopicDeleted(Body):
    """A topic that was to go is gone, and what was recorded of it goes."""

    KIND: ClassVar[str] = "follower-topic-deleted"
    SINCE: ClassVar[int] = SOURCE_DELETIONS
    link: str
    topic: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class FollowedTopic:
    """A follower topic, and which topic of the source it follows."""

    topic: str
    source_topic_id: str


@dataclass(frozen=True, slots=True)
class NoteSourceLog(Body):
    """The source has the topics that these follow, and its control log is this one (``Anchor.log``)."""

    KIND: ClassVar[str] = "note-source-log"
    SINCE: ClassVar[int] = SOURCE_DELETIONS
    link: str
    log: str
    topics: tuple[FollowedTopic, ...]


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """An offset of a partition of a local topic."""

    topic: str
    topic_id: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class OpenProvenance(Body):
    """From these offsets on, the partitions follow the link's source."""

    KIND: ClassVar[str] = "open-provenance"
    link: str
    partitions: tuple[PartitionOffset, ...]


@dataclass(frozen=True, slots=True)
class CloseProvenance(Body):
    """These partitions received nothing more from the source that they followed; the offsets are their log ends.

    Or nobody writes any more to what this cluster wrote, as read at the leader after the fence. ``ended``: what was
    done.
    """

    KIND: ClassVar[str] = "close-provenance"
    partitions: tuple[PartitionOffset, ...]
    ended: Ended = field(default=Ended.DETACHED, metadata=since(ORIGINS))


@dataclass(frozen=True, slots=True)
class TruncateProvenance(Body):
    """The partitions' logs were cut: they end at these offsets now."""

    KIND: ClassVar[str] = "truncate-provenance"
    partitions: tuple[PartitionOffset, ...]


@dataclass(frozen=True, slots=True)
class PartitionEpoch:
    """A leader epoch of the source and the first offset that it wrote."""

    topic: str
    topic_id: str
    partition: int
    epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class RecordSourceEpochs(Body):
    """Leader epochs of the source, recorded before the first append of each.

    ``topics``: the same in a third of the bytes.
    """

    KIND: ClassVar[str] = "record-source-epochs"
    epochs: tuple[PartitionEpoch, ...]
    topics: tuple[TopicEpochs, ...] = field(default=(), metadata=since(ORIGINS))

    @classmethod
    def by_topic(cls, entries: Iterable[PartitionEpoch]) -> RecordSourceEpochs:
        """In few bytes, which takes feature level 5."""
        topics: dict[tuple[str, str], list[LogEpochs]] = {}
        for each in entries:
            epochs = (OriginEpoch(each.epoch, each.start_offset),)
            topics.setdefault((each.topic, each.topic_id), []).append(LogEpochs(each.partition, epochs))
        return cls((), tuple(TopicEpochs(*topic, tuple(found)) for topic, found in topics.items()))

    @property
    def entries(self) -> list[PartitionEpoch]:
        """All, however they are written."""
        return [
            *self.epochs,
            *(
                PartitionEpoch(topic.topic, topic.topic_id, each.partition, *epoch)
                for topic in self.topics
                for each in topic.partitions
                for epoch in each.epochs
            ),
        ]


class TermStart(NamedTuple):
    """Where a partition's log ends when a term begins, and its leader epoch here then, as its leader says both."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TopicTerms:
    """By partition, where terms begin."""

    topic: str
    topic_id: str
    starts: Mapping[int, TermStart]


@dataclass(frozen=True, slots=True)
class BeginTerm(Body):
    """From there on this cluster writes in the partitions, in the term that has this command's id.

    What is followed there ends at them, ``ended`` like that. Where this cluster writes already, its term goes on.
    """

    KIND: ClassVar[str] = "begin-term"
    SINCE: ClassVar[int] = ORIGINS
    topics: tuple[TopicTerms, ...]
    ended: Ended = Ended.PROMOTED


@dataclass(frozen=True, slots=True)
class LogEpochs:
    """Leader epochs in which this cluster wrote to a partition, with the offsets of their first batches."""

    partition: int
    epochs: tuple[OriginEpoch, ...]


@dataclass(frozen=True, slots=True)
class TopicEpochs:
    topic: str
    topic_id: str
    partitions: tuple[LogEpochs, ...]


@dataclass(frozen=True, slots=True)
class RecordLogEpochs(Body):
    """Leader epochs of what this cluster writes itself, recorded before the first batch of each is pushed."""

    KIND: ClassVar[str] = "record-log-epochs"
    SINCE: ClassVar[int] = ORIGINS
    topics: tuple[TopicEpochs, ...]


@dataclass(frozen=True, slots=True)
class ToldPartition:
    """What the source says of its own partition, from ``offset`` on: there it takes the place of what was recorded.

    ``ranges`` follow each other, the first from ``offset`` on; without ``via``, which is the link's source.
    """

    partition: int
    offset: int
    ranges: tuple[OriginRange, ...]


@dataclass(frozen=True, slots=True)
class ToldTopic:
    topic: str
    topic_id: str
    partitions: tuple[ToldPartition, ...]


@dataclass(frozen=True, slots=True)
class RecordOrigins(Body):
    """Where the records come from that partitions are about to receive over a link, recorded before their appends."""

    KIND: ClassVar[str] = "record-origins"
    SINCE: ClassVar[int] = ORIGINS
    link: str
    topics: tuple[ToldTopic, ...]


@dataclass(frozen=True, slots=True)
class RecordOriginEpochs(Body):
    """Later leader epochs of the origins that partitions go on to receive over a link, recorded before their appends.

    The same as :class:`RecordOrigins` in a sixth of its bytes, where nothing else is new: at a rolling restart of the
    source's brokers that is so of all its partitions.
    """

    KIND: ClassVar[str] = "record-origin-epochs"
    SINCE: ClassVar[int] = ORIGINS
    link: str
    topics: tuple[TopicEpochs, ...]


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """Offsets of a local topic, by partition."""

    topic: str
    topic_id: str
    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class DropEpochs(Body):
    """All that is compared with these partitions starts at these offsets or behind: epochs that end before go."""

    KIND: ClassVar[str] = "drop-epochs"
    SINCE: ClassVar[int] = ORIGINS
    REMEMBERED: ClassVar[bool] = False
    topics: tuple[TopicOffsets, ...]


@dataclass(frozen=True, slots=True)
class GoneTopic:
    topic: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class ForgetHistories(Body):
    """These topics are gone from this cluster, and what is recorded of where their records came from goes."""

    KIND: ClassVar[str] = "forget-histories"
    SINCE: ClassVar[int] = ORIGINS
    topics: tuple[GoneTopic, ...]


@dataclass(frozen=True, slots=True)
class DoubtDeletions(Body):
    """Before these offsets the source may have deleted keys without the link's knowing.

    Recorded before what the source has behind the tombstones that are gone is appended.
    """

    KIND: ClassVar[str] = "doubt-deletions"
    partitions: tuple[PartitionOffset, ...]


@dataclass(frozen=True, slots=True)
class SettleDeletions(Body):
    """Up to these offsets both sides have the same latest records: no deletion was missed."""

    KIND: ClassVar[str] = "settle-deletions"
    partitions: tuple[PartitionOffset, ...]


@dataclass(frozen=True, slots=True)
class PartitionProof:
    topic: str
    topic_id: str
    partition: int
    proof: Proof


@dataclass(frozen=True, slots=True)
class RecordProofs(Body):
    """How far partitions that follow were found to be their sources'. What does not follow any more is left out."""

    KIND: ClassVar[str] = "record-proofs"
    SINCE: ClassVar[int] = PROOFS
    REMEMBERED: ClassVar[bool] = False
    partitions: tuple[PartitionProof, ...]


@dataclass(frozen=True, slots=True)
class AcknowledgeDifferences(Body):
    """An operator knows that these partitions differ at these offsets from their sources': it is told no more."""

    KIND: ClassVar[str] = "acknowledge-differences"
    SINCE: ClassVar[int] = PROOFS
    partitions: tuple[PartitionOffset, ...]


@dataclass(frozen=True, slots=True)
class BeginTruncation(Body):
    """The topic's log is not the source's any more, and will be cut (:mod:`isthmus_control.truncations`)."""

    KIND: ClassVar[str] = "begin-truncation"
    VERSION: ClassVar[int] = 2
    link: str
    topic: str
    topic_id: str
    reason: Reason
    partitions: tuple[PartitionView, ...]
    message_bytes_max: str | None
    proxy: str
    owner: str
    source: Succession | None = None


@dataclass(frozen=True, slots=True)
class TakeOverTruncation(Body):
    """The owner's lease is gone; this proxy goes on with its truncation."""

    KIND: ClassVar[str] = "take-over-truncation"
    topic: str
    topic_id: str
    proxy: str
    owner: str


@dataclass(frozen=True, slots=True)
class AdvanceTruncation(Body):
    """The owner has done what the phase names. What the next one needs to know comes with it."""

    KIND: ClassVar[str] = "advance-truncation"
    VERSION: ClassVar[int] = 3
    topic: str
    topic_id: str
    owner: str
    phase: TruncationPhase
    cuts: tuple[PartitionCut, ...] | None = None
    salvaged: tuple[SalvageFile, ...] | None = None
    new_topic_id: str | None = None
    moved: tuple[MovedOffset, ...] | None = None
    moved_count: int | None = None
    attempt: str | None = None
    layout: TopicLayout | None = None
    positions_lost: bool = False
    compared_at: tuple[PartitionView, ...] | None = None
    refill_failure: str | None = None


@dataclass(frozen=True, slots=True)
class GiveUpTruncation(Body):
    """The operator agreed to lose what a topic lacks that catches up with a source which may be gone."""

    KIND: ClassVar[str] = "give-up-truncation"
    topic: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class StopCatchingUp(Body):
    """A topic that catches up with its source cannot: found by the proxy that follows a partition, the owner or not."""

    KIND: ClassVar[str] = "stop-catching-up"
    topic: str
    topic_id: str
    new_topic_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class HoldUpTruncation(Body):
    """Why a truncation's phase does not end, None if nothing keeps it any more."""

    KIND: ClassVar[str] = "hold-up-truncation"
    topic: str
    topic_id: str
    owner: str
    trouble: Reason | None


@dataclass(frozen=True, slots=True)
class FoundLoss:
    """See :class:`~isthmus_control.source_losses.SourceLoss`."""

    type: ResourceType
    namespace: str
    topic: str
    topic_id: str
    partition: int
    from_offset: int
    to_offset: int
    count: int
    state: LossState
    groups: int = 0
    commits: tuple[LostCommit, ...] = ()
    salvaged: SalvageFile | None = None


@dataclass(frozen=True, slots=True)
class RecordSourceLosses(Body):
    """The source has lost what it had acked In-Sync: recorded before anything is cut for it."""

    KIND: ClassVar[str] = "record-source-losses"
    SINCE: ClassVar[int] = SOURCE_LOSSES
    link: str
    link_id: str
    losses: tuple[FoundLoss, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSourceLosses(Body):
    """The operator has a topic that is held cut to its source's log."""

    KIND: ClassVar[str] = "release-source-losses"
    SINCE: ClassVar[int] = SOURCE_LOSSES
    topic: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class AcknowledgeSourceLosses(Body):
    """The operator knows of the losses of a link up to this ``number``."""

    KIND: ClassVar[str] = "acknowledge-source-losses"
    SINCE: ClassVar[int] = SOURCE_LOSSES
    link: str
    number: int


@dataclass(frozen=True, slots=True)
class RecordAcls(Body):
    """Access control bindings that a link is about to make in a principal namespace, or has deleted.

    See :mod:`isthmus_control.rules.acls`.
    """

    KIND: ClassVar[str] = "record-acls"
    link: str
    local_prefix: str
    made: tuple[AclBinding, ...] = ()
    deleted: tuple[AclBinding, ...] = ()


# --- synchronous links


@dataclass(frozen=True, slots=True)
class PartitionSync:
    """A partition of a local topic, and from which of its offsets on the state counts."""

    topic: str
    topic_id: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class RecordSync(Body):
    """Partitions of a synchronous link are In-Sync or Out-Of-Sync from these offsets on: from now on, for acks.

    ``reached``: they are In-Sync already, and the other side has been seen to have all. ``from_first``: they are so new
    that acks were held from their first record on. OUT_OF_SYNC makes those Syncing again that neither is true of.
    """

    KIND: ClassVar[str] = "record-sync"
    VERSION: ClassVar[int] = 2
    link: str
    link_id: str
    state: SyncState
    partitions: tuple[PartitionSync, ...]
    reason: Reason | None = None
    reached: bool = False
    from_first: bool = field(default=False, metadata=since(FROM_FIRST))


@dataclass(frozen=True, slots=True)
class DegradeSync(Body):
    """Partitions were Out-Of-Sync for ``after_ms``: acks that wait for that no longer go without the other side.

    Each has the offset below which both sides have all.
    """

    KIND: ClassVar[str] = "degrade-sync"
    VERSION: ClassVar[int] = 2
    link: str
    link_id: str
    partitions: tuple[PartitionSync, ...]
    after_ms: int


@dataclass(frozen=True, slots=True)
class PartitionClaim:
    """See :class:`~isthmus_control.model.Claim`."""

    topic: str
    topic_id: str
    partition: int
    until_ms: int
    end: int
    terms: AckTerms = PLAIN_TERMS


@dataclass(frozen=True, slots=True)
class OffsetsClaim:
    """See :class:`~isthmus_control.model.GroupClaim`; ``partition`` of the source's offsets topic."""

    partition: int
    partitions: int
    until_ms: int
    terms: Mapping[str, AckTerms] = field(default_factory=dict)
    epoch: int = field(default=-1, metadata=since(SOURCE_LOSSES))
    upto: int = field(default=-1, metadata=since(SOURCE_LOSSES))


@dataclass(frozen=True, slots=True)
class RecordClaims(Body):
    """Leases of partitions that follow, and of groups, have run out: until then they were In-Sync."""

    KIND: ClassVar[str] = "record-claims"
    VERSION: ClassVar[int] = 3
    link: str
    link_id: str
    partitions: tuple[PartitionClaim, ...]
    groups: tuple[OffsetsClaim, ...] = ()


@dataclass(frozen=True, slots=True)
class RegisterProducerIds(Body):
    """Gives a source cluster its range of translated producer ids.

    ``index`` None takes the lowest free one. Clusters that are linked must agree on indexes, because ids that are
    translated already stay as they are when they travel on: then the proposer names the index that its peer uses.
    """

    KIND: ClassVar[str] = "register-producer-ids"
    cluster_id: str
    index: int | None = None


# --- proxies


@dataclass(frozen=True, slots=True)
class ClaimBrokers(Body):
    """A proxy's lease: the brokers that it fronts, or all of the cluster.

    Sent again by the same incarnation when what it serves changes, or after it lost its lease. ``enforced_offset`` is
    up to where it enforces the log already, with no conflicting write unanswered. ``version`` says the highest feature
    level that it knows, too (:func:`~isthmus_control.levels.with_known_level`).
    """

    KIND: ClassVar[str] = "claim-brokers"
    name: str
    incarnation: str
    brokers: tuple[BrokerClaim, ...]
    all_brokers: bool
    link_address: str | None
    lease_ms: int
    version: str
    enforced_offset: int


@dataclass(frozen=True, slots=True)
class RenewLease(Body):
    KIND: ClassVar[str] = "renew-lease"
    REMEMBERED: ClassVar[bool] = False  # a second one moves nothing, and they are most of the log
    name: str
    incarnation: str
    enforced_offset: int


@dataclass(frozen=True, slots=True)
class ReleaseLease(Body):
    """The proxy has stopped and has no write without an answer."""

    KIND: ClassVar[str] = "release-lease"
    REMEMBERED: ClassVar[bool] = False
    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ExpireLease(Body):
    """Another proxy waited the lease plus margin and saw no renewal after ``renewed_at_offset``.

    Compared in the log: a renewal that got there first keeps the lease. So expiry needs no common clock.
    """

    KIND: ClassVar[str] = "expire-lease"
    REMEMBERED: ClassVar[bool] = False
    name: str
    incarnation: str
    renewed_at_offset: int


# --- the log itself


@dataclass(frozen=True, slots=True)
class RaiseLevel(Body):
    """From here on the log may hold what this feature level brings. Versions that do not know it stop.

    Those that do not know the command stop at it whatever comes of it, so it is judged before it is written, too.
    ``key_id``: from here on records are signed with the control key of this id (:mod:`isthmus_control.signing`); empty:
    as before.
    """

    KIND: ClassVar[str] = "raise-level"
    level: int
    key_id: str = field(default="", metadata=since(SIGNING))


@dataclass(frozen=True, slots=True)
class Snapshot(Body):
    """The state after the record at ``as_of``, for readers that start near the end.

    ``state``: canonical JSON, deflated, base64 (:mod:`isthmus_control.replica`). ``digest``: SHA-256 of that JSON.
    """

    KIND: ClassVar[str] = "snapshot"
    REMEMBERED: ClassVar[bool] = False
    as_of: int
    digest: str
    state: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AcceptLog(Body):
    """An operator accepts the log as it stands here, whatever was known of it before (:mod:`isthmus_control.anchors`).

    ``generation`` is more than any before, also than those that only anchors know of.
    """

    KIND: ClassVar[str] = "accept-log"
    generation: int


KINDS: Mapping[str, type[Body]] = MappingProxyType(
    {
        body.KIND: body
        for body in (
            CreateNamespace,
            AlterNamespace,
            AlterDemands,
            EnablePlugin,
            ConfigurePlugin,
            DisablePlugin,
            DeleteNamespace,
            CreateLink,
            AlterLink,
            BeginSecretRotation,
            FinishSecretRotation,
            AbandonSecretRotation,
            SealSecret,
            MergeLink,
            DeleteLink,
            CreateToken,
            DeleteToken,
            SealToken,
            ChangeGrants,
            RequestAttach,
            WithdrawAttach,
            AttachNamespace,
            AlterMapping,
            DetachNamespace,
            HoldBrokerConfig,
            ReleaseBrokerConfig,
            BeginPromotion,
            DecidePromotion,
            EndPromotion,
            AbandonPromotion,
            AnnounceReversal,
            HoldReversal,
            HandOver,
            TakeBack,
            EndReversal,
            AbandonReversal,
            AcceptReversal,
            MoveClients,
            EndClientMove,
            ApplyTree,
            LeaveTree,
            ChooseTarget,
            ClaimDistributor,
            SetOffsetsTopic,
            SetFollowerTopic,
            CompactFollowerTopic,
            ForgetFollowerTopic,
            RecreateFollowerTopic,
            DeleteFollowerTopic,
            KeepFollowerTopic,
            FollowerTopicDeleted,
            NoteSourceLog,
            OpenProvenance,
            CloseProvenance,
            TruncateProvenance,
            RecordSourceEpochs,
            BeginTerm,
            RecordLogEpochs,
            RecordOrigins,
            RecordOriginEpochs,
            DropEpochs,
            ForgetHistories,
            DoubtDeletions,
            SettleDeletions,
            RecordProofs,
            AcknowledgeDifferences,
            BeginTruncation,
            TakeOverTruncation,
            AdvanceTruncation,
            GiveUpTruncation,
            StopCatchingUp,
            HoldUpTruncation,
            RecordSourceLosses,
            ReleaseSourceLosses,
            AcknowledgeSourceLosses,
            RecordAcls,
            RecordSync,
            DegradeSync,
            RecordClaims,
            RegisterProducerIds,
            ClaimBrokers,
            RenewLease,
            ReleaseLease,
            ExpireLease,
            RaiseLevel,
            Snapshot,
            AcceptLog,
        )
    }
)


def encode(command: Command, level: int = 0, signer: Signer | None = None) -> bytes:
    """The record's value, as a log of this feature level may hold it; with a MAC, where there is a ``signer``."""
    body = command.body
    envelope = {
        "v": body.VERSION,
        "id": command.id,
        "kind": body.KIND,
        "at_ms": command.at_ms,
        "by": command.by,
        "seen": command.seen,
        "body": to_json(body),
    }
    if level >= CONCERNS:
        concerns = concerns_of(body)
        if concerns is not None:
            envelope["concerns"] = to_json(concerns)
        if body.IGNORABLE:
            envelope["ignorable"] = True
    if level >= PREFIXES and command.prefix is not None:
        envelope["prefix"] = to_json(command.prefix)
    if signer is not None:
        envelope[MAC] = signer.mac(envelope)
    return canonical_json(envelope)


def decode(value: bytes | bytearray | memoryview, signer: Signer | None = None) -> Command:
    """The command in a record's value; with a ``signer`` of one that has its MAC.

    Raises :class:`BadRecord` and :class:`NewerRecord`.
    """
    try:
        raw = parse(value)
    except MalformedValue as error:
        raise BadRecord(f"not a command: {error}") from None
    if type(raw) is not dict:
        raise BadRecord("not a command: not an object")
    if signer is not None and not signer.signed(raw):
        seen = raw.get("seen")
        raise UnsignedRecord(
            seen if type(seen) is int else -1,
            f"it has no MAC of the control key {signer.key_id}: whoever wrote it (it says {raw.get('by')!r}) does not "
            f"have the key",
        )
    version, kind = _envelope(raw, "v", int), _envelope(raw, "kind", str)
    by = _envelope(raw, "by", str)
    # Kind and version first: a newer envelope or body may look wrong in every other way.
    shape = KINDS.get(kind)
    if shape is None:
        raise NewerRecord(
            kind, version, raw, f"proxy {by!r} wrote a command {kind!r}, which this version does not know"
        )
    if version > shape.VERSION:
        raise NewerRecord(
            kind, version, raw, f"proxy {by!r} wrote {kind!r} in version {version}, this one knows {shape.VERSION}"
        )
    if version < 1:
        raise BadRecord(f"{kind} has version {version}")
    if extra := sorted(raw.keys() - _ENVELOPE):
        raise NewerRecord(kind, version, raw, f"proxy {by!r} wrote {kind!r} with {extra[0]!r}, unknown to this version")
    command_id = _envelope(raw, "id", str)
    if not is_uuid(command_id):
        raise BadRecord(f"{kind} has no UUID as id")
    try:
        body = from_json(shape, raw.get("body"), kind)
        prefix = from_json(Prefix, raw["prefix"], "prefix") if "prefix" in raw else None
    except MalformedValue as error:
        raise BadRecord(str(error)) from None
    except UnknownField as error:
        raise NewerRecord(kind, version, raw, f"proxy {by!r} wrote {kind!r}: {error}") from None
    return Command(command_id, _envelope(raw, "at_ms", int), by, _envelope(raw, "seen", int), body, prefix)


_ENVELOPE: Final = frozenset(("v", "id", "kind", "at_ms", "by", "seen", "body", "concerns", "ignorable", "prefix", MAC))


def _envelope(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    if type(value) is not kind:
        raise BadRecord(f"not a command: {name!r} is missing or wrong")
    return value


def is_uuid(text: str) -> bool:
    """Whether ``text`` is a UUID in its canonical form (so that equal ids are equal text)."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
